"""Commits that stopped waiting for their standby, and how a process finds out what became of them.

A server with `synchronous_standby_names` answers a COMMIT when its standby has it. If the wait is cancelled, by an
operator or because we gave up, the server says COMMIT all the same, with a warning: the rows are there for all to see,
and a fail-over may lose them. To read them again proves nothing then. What proves something is a later commit that was
waited for: the log is one sequence, so a standby that has the later one has the earlier one, too.

So a commit with that warning leaves its process in doubt, and so does one of which nothing was heard: we gave it up, or
its backend was ended, and then the server stopped waiting as well. Whoever asks for a connection next first writes an
empty message into the log and waits with it for the standby. Until that worked nothing is read, claimed or replayed:
neither is what the doubtful commit wrote told to a client, nor is anything built upon it. One asks at a time; who comes
meanwhile waits for that answer and takes it.

Without a standby the question is answered at once, and by a server that was promoted meanwhile, too: then what can be
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
"""Writes to the log and to no table. An empty transaction would not do: nobody waits for what writes nothing."""

WHAT: Final = "the question whether the standby has the last commits"


class Doubt:
    """Whether a commit of this process may be on one server only. All that speak to one address share it (`of`)."""

    __slots__ = ("__weakref__", "_dispelled", "_raised")

    def __init__(self) -> None:
        self._raised = self._dispelled = object()

    @classmethod
    def of(cls, address: str) -> Doubt:
        """The doubt about an address: what one pool has committed, another one reads, as with `def` handlers."""
        return _doubts.setdefault(address, cls())

    def __bool__(self) -> bool:
        return self._raised is not self._dispelled

    def arise(self) -> None:
        """A commit was not confirmed."""
        self._raised = object()

    def mark(self) -> object:
        """What a confirmation that is asked for now is good for."""
        return self._raised

    def dispel(self, mark: object) -> None:
        """What had arisen by then is confirmed; what arose since is not."""
        self._dispelled = mark


_doubts: Final[WeakValueDictionary[str, Doubt]] = WeakValueDictionary()


class Asking:
    """Asks for the confirmation, one thread at a time. `ask` returns whether it came, or raises what kept it away."""

    def __init__(self, doubt: Doubt, ask: Callable[[], bool]) -> None:
        self._doubt, self._ask = doubt, ask
        self._tries = 0
        self._turn = threading.Lock()

    def settle(self) -> None:
        """Return when there is no doubt left."""
        tries = self._tries
        with self._turn:
            if not self._doubt:
                return
            if tries != self._tries:
                raise silent()
            self._tries += 1
            mark = self._doubt.mark()
            if not self._ask():
                raise silent()
            self._doubt.dispel(mark)


class AsyncAsking:
    """The same for asyncio."""

    def __init__(self, doubt: Doubt, ask: Callable[[], Awaitable[bool]]) -> None:
        self._doubt, self._ask = doubt, ask
        self._tries = 0
        self._turn = asyncio.Lock()

    async def settle(self) -> None:
        """Return when there is no doubt left."""
        tries = self._tries
        async with self._turn:
            if not self._doubt:
                return
            if tries != self._tries:
                raise silent()
            self._tries += 1
            mark = self._doubt.mark()
            if not await self._ask():
                raise silent()
            self._doubt.dispel(mark)


def silent() -> StoreUnavailableError:
    """The meaning of a standby that does not confirm."""
    return StoreUnavailableError(
        "a commit stopped waiting for its standby, and nothing is read before the standby has confirmed it"
    )
