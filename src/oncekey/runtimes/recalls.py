"""Batched reads for repeats: one statement reads the answers for all repeats that waited while others were read.

A repeat is answered by one short read, and under load most of its cost is the round trip to the store. So only a few
reads run at a time. A repeat that comes meanwhile waits for one of them to end, and then one statement reads for all
that wait. Each statement is sent after the repeats that it reads for have asked, so no repeat gets a state from before
it came. A repeat that comes alone is read alone, at once.

The read for many is a task of its own: a repeat that is cancelled leaves, and the others still get their answers. An
error of the store goes to all of them, and each then asks in full.
"""

from __future__ import annotations

import asyncio
from contextvars import Context
from typing import TYPE_CHECKING, Any, Final

from oncekey.flow import adrive

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from oncekey.core.model import Glimpse, RecordId
    from oncekey.flow import Transaction
    from oncekey.ports import Recalls

AT_ONCE: Final = 2
"""How many reads run at a time: while the server answers one, the process works on the other's rows."""
MOST: Final = 32
"""How many keys one statement reads: their answers are in memory together, and each may be large."""


class Recaller:
    """Reads the answers of finished records, for all repeats of one event loop."""

    __slots__ = ("_reading", "_records", "_run", "_tasks", "_waiting")

    def __init__(self, records: Recalls, run: Callable[[Transaction[Any]], Awaitable[Any]]) -> None:
        self._records = records
        self._run = run
        self._reading = 0
        self._waiting: list[tuple[RecordId, asyncio.Future[Glimpse | None]]] = []
        self._tasks: set[asyncio.Task[None]] = set()

    async def recall(self, record_id: RecordId) -> Glimpse | None:
        """The answer of a key's record; None if the record is not completed, or cannot be read."""
        if self._reading >= AT_ONCE:
            answer: asyncio.Future[Glimpse | None] = asyncio.get_running_loop().create_future()
            self._waiting.append((record_id, answer))
            return await answer
        self._reading += 1
        try:
            return await adrive(self._records.recall(record_id), self._run)
        finally:
            self._read_on()

    def _read_on(self) -> None:
        """Begin a read for the repeats that wait, after another read has ended."""
        waiting, self._waiting = self._waiting[:MOST], self._waiting[MOST:]
        waiting = [(record_id, answer) for record_id, answer in waiting if not answer.done()]
        if not waiting:
            self._reading -= 1
            return
        # The task serves several requests, so it belongs to no request's context or trace.
        task = asyncio.get_running_loop().create_task(self._read(waiting), context=Context())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _read(self, waiting: list[tuple[RecordId, asyncio.Future[Glimpse | None]]]) -> None:
        error: Exception | None = None
        found: dict[RecordId, Glimpse] = {}
        try:
            found = await adrive(self._records.recall_all(tuple([one for one, _ in waiting])), self._run)
        except Exception as raised:  # noqa: BLE001  (raised in each waiting task)
            error = raised
        except BaseException:
            for _, answer in waiting:  # an event loop that ends cancels its tasks, and the waiting repeats with them
                answer.cancel()
            raise
        finally:
            self._read_on()
        for record_id, answer in waiting:
            if answer.done():
                continue  # the repeat was cancelled
            if error is None:
                answer.set_result(found.get(record_id))
            else:
                answer.set_exception(error)
