"""Commits that stopped waiting for their standby, and how a process finds out whether the standby has them.

A server with `synchronous_standby_names` answers a COMMIT when its standby has it. If the wait is cancelled, by an
operator or because the driver gave up, the server still answers COMMIT, with a warning: every session sees the rows,
and a fail-over may lose them. Reading them again then proves nothing. A later commit that was waited for does: the log
is one sequence, so a standby that has the later commit has the earlier one, too.

So a commit with that warning leaves its process in doubt, and so does one without a reply: the driver gave it up, or
its backend was ended, and then the server stopped waiting as well. The next request for a connection first writes an
empty message into the log and waits for the standby with it. Until that worked the process reads, claims and replays
nothing: no client gets what the doubtful commit wrote, and nothing is built upon it. One request asks at a time; others
wait for its result and use it.

Without a standby the question is answered at once, and also by a server that was promoted meanwhile: then what can be
read there is what is true.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable
from typing import Final
from weakref import WeakValueDictionary

from oncekey.core.errors import StoreUnavailableError

CONFIRM: Final = """
    SELECT pg_logical_emit_message(true, 'oncekey', '')
    FROM (SELECT CASE WHEN current_setting('synchronous_commit') IN ('on', 'remote_apply') THEN 'on'
                      ELSE set_config('synchronous_commit', 'on', true) END AS waits) AS setting
    WHERE setting.waits = 'on'
"""
"""Writes to the log and to no table. An empty transaction would not do: its commit does not wait for the standby."""

WHAT: Final = "the question whether the standby has the last commits"


class Doubt:
    """Whether a commit of this process may be on one server only. All pools of one address share it (`of`)."""

    __slots__ = ("__weakref__", "_dispelled", "_raised")

    def __init__(self) -> None:
        self._raised = self._dispelled = object()

    @classmethod
    def of(cls, address: str) -> Doubt:
        """The doubt about an address: one pool may read what another one has committed, as with `def` handlers."""
        return _doubts.setdefault(address, cls())

    def __bool__(self) -> bool:
        return self._raised is not self._dispelled

    def arise(self) -> None:
        """Note that a commit was not confirmed."""
        self._raised = object()

    def mark(self) -> object:
        """A mark of what a confirmation that is asked for now will confirm."""
        return self._raised

    def dispel(self, mark: object) -> None:
        """Note that everything up to the mark is confirmed; what came since is not."""
        self._dispelled = mark


_doubts: Final[WeakValueDictionary[str, Doubt]] = WeakValueDictionary()


class _Tries:
    """One asks at a time. Those who waited meanwhile use its result, and do not ask again."""

    def __init__(self, doubt: Doubt) -> None:
        self._doubt = doubt
        self._tries = 0

    def _begun(self, tries: int) -> object | None:
        """The mark of a new try; None if there is no doubt left."""
        if not self._doubt:
            return None
        if tries != self._tries:
            raise silent()
        self._tries += 1
        return self._doubt.mark()

    def _ended(self, mark: object, *, confirmed: bool) -> None:
        if not confirmed:
            raise silent()
        self._doubt.dispel(mark)


class Asking(_Tries):
    """Asks for the confirmation, for threads. `ask` returns whether it came, or raises its error."""

    def __init__(self, doubt: Doubt, ask: Callable[[], bool]) -> None:
        super().__init__(doubt)
        self._ask, self._turn = ask, threading.Lock()

    def settle(self) -> None:
        """Return when there is no doubt left."""
        tries = self._tries
        with self._turn:
            mark = self._begun(tries)
            if mark is not None:
                self._ended(mark, confirmed=self._ask())


class AsyncAsking(_Tries):
    """The same for asyncio."""

    def __init__(self, doubt: Doubt, ask: Callable[[], Awaitable[bool]]) -> None:
        super().__init__(doubt)
        self._ask, self._turn = ask, asyncio.Lock()

    async def settle(self) -> None:
        """Return when there is no doubt left."""
        tries = self._tries
        async with self._turn:
            mark = self._begun(tries)
            if mark is not None:
                self._ended(mark, confirmed=await self._ask())


def silent() -> StoreUnavailableError:
    """The meaning of a standby that does not confirm."""
    return StoreUnavailableError(
        "a commit stopped waiting for its standby, and nothing is read before the standby has confirmed it"
    )
