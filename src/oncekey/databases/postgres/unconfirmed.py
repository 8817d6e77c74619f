"""Commits that stopped waiting for their standby, and the check whether the standby has them.

A server with `synchronous_standby_names` replies to a COMMIT when its standby has it. If the wait is cancelled, by an
operator or because the driver gave up, the server still replies COMMIT, with a warning: every session sees the rows,
but a failover may lose them. Reading them again proves nothing. A later commit that was waited for does: the log is
one sequence, so a standby that has the later commit has the earlier one too.

So a commit with that warning is unconfirmed, and so is one without a reply: the driver gave it up, or its backend was
ended, and then the server stopped waiting as well. The next request for a connection first writes an empty message to
the log and waits for the standby to receive it. Until that succeeds the process reads, claims and replays nothing: no
client receives what the unconfirmed commit wrote, and nothing depends on it. One request queries at a time; others
wait for its result and use it.

Without a standby the query returns at once, also on a server that has been promoted since: then its data is
authoritative.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Final
from weakref import WeakValueDictionary

from oncekey.core.errors import StoreUnavailableError

CONFIRM: Final = """
    SELECT pg_logical_emit_message(true, 'oncekey', '')
    FROM (SELECT CASE WHEN current_setting('synchronous_commit') IN ('on', 'remote_apply') THEN 'on'
                      ELSE set_config('synchronous_commit', 'on', true) END AS waits) AS setting
    WHERE setting.waits = 'on'
"""
"""Writes to the log and to no table. The commit of an empty transaction would not wait for the standby."""

WHAT: Final = "the query whether the standby has the last commits"


class UnconfirmedCommits:
    """Whether a commit of this process may be on one server only. All pools of one address share it (`of`)."""

    __slots__ = ("__weakref__", "_confirmed", "_last")

    def __init__(self) -> None:
        self._last = self._confirmed = object()

    @classmethod
    def of(cls, address: str) -> UnconfirmedCommits:
        """The instance of an address: one pool may read what another one has committed, as with `def` handlers."""
        return _by_address.setdefault(address, cls())

    def __bool__(self) -> bool:
        return self._last is not self._confirmed

    def add(self) -> None:
        """Note that a commit was not confirmed."""
        self._last = object()

    def mark(self) -> object:
        """A mark for the commits that a query sent now will confirm."""
        return self._last

    def confirm(self, mark: object) -> None:
        """Note that everything up to the mark is confirmed; later commits are not."""
        self._confirmed = mark


_by_address: Final[WeakValueDictionary[str, UnconfirmedCommits]] = WeakValueDictionary()


class _Tries:
    """One request queries at a time. Those that waited while an attempt failed do not query again."""

    def __init__(self, unconfirmed: UnconfirmedCommits) -> None:
        self._unconfirmed = unconfirmed
        self._failures = 0

    @contextmanager
    def _trying(self, failures: int) -> Iterator[object | None]:
        """A new attempt, with the mark that it confirms; None if everything is confirmed."""
        if self._unconfirmed and failures != self._failures:
            raise not_confirmed()
        try:
            yield self._unconfirmed.mark() if self._unconfirmed else None
        except Exception:
            self._failures += 1
            raise

    def _ended(self, mark: object, *, confirmed: bool) -> None:
        if not confirmed:
            raise not_confirmed()
        self._unconfirmed.confirm(mark)


class Confirming(_Tries):
    """Queries for the confirmation, in threads. `ask` returns whether it succeeded, or raises its error."""

    def __init__(self, unconfirmed: UnconfirmedCommits, ask: Callable[[], bool]) -> None:
        super().__init__(unconfirmed)
        self._ask, self._turn = ask, threading.Lock()

    def confirm_all(self) -> None:
        """Return when every commit is confirmed."""
        failures = self._failures
        with self._turn, self._trying(failures) as mark:
            if mark is not None:
                self._ended(mark, confirmed=self._ask())


class AsyncConfirming(_Tries):
    """Queries for the confirmation under asyncio."""

    def __init__(self, unconfirmed: UnconfirmedCommits, ask: Callable[[], Awaitable[bool]]) -> None:
        super().__init__(unconfirmed)
        self._ask, self._turn = ask, asyncio.Lock()

    async def confirm_all(self) -> None:
        """Return when every commit is confirmed."""
        failures = self._failures
        async with self._turn:
            with self._trying(failures) as mark:
                if mark is not None:
                    self._ended(mark, confirmed=await self._ask())


def not_confirmed() -> StoreUnavailableError:
    """The meaning of a standby that does not confirm."""
    return StoreUnavailableError(
        "a commit stopped waiting for its standby, and nothing is read until the standby has confirmed it"
    )
