"""Repeats that come together are read together: one statement for all that waited while others were read.

A repeat is answered by one short read, and under load most of its price is the way to the store and back. So only a few
reads are under way at a time. Whoever comes meanwhile waits for the end of one, and then one statement reads for all of
them. Each statement is sent after those it reads for have asked, so nobody is told what was true before it came. Who
comes alone reads alone, at once.

The read of many is a task of its own: whoever is cancelled leaves, and the others are told all the same. What keeps the
store from answering is told to all of them, and each asks in full then.
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
"""Reads under way at a time: while the server answers one, the process works on the other's."""
MOST: Final = 32
"""Keys of one statement: their answers are in memory together, and each may be large."""


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
        """What the record of a key answers; None if it is not a completed one, or not to be read."""
        if self._reading >= AT_ONCE:
            told: asyncio.Future[Glimpse | None] = asyncio.get_running_loop().create_future()
            self._waiting.append((record_id, told))
            return await told
        self._reading += 1
        try:
            return await adrive(self._records.recall(record_id), self._run)
        finally:
            self._read_on()

    def _read_on(self) -> None:
        """One read has ended: begin one for those who wait."""
        waiting, self._waiting = self._waiting[:MOST], self._waiting[MOST:]
        waiting = [(record_id, told) for record_id, told in waiting if not told.done()]
        if not waiting:
            self._reading -= 1
            return
        # It is for all of them, so it belongs to nobody's request, nor to the trace of one.
        task = asyncio.get_running_loop().create_task(self._read(waiting), context=Context())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _read(self, waiting: list[tuple[RecordId, asyncio.Future[Glimpse | None]]]) -> None:
        error: Exception | None = None
        found: dict[RecordId, Glimpse] = {}
        try:
            found = await adrive(self._records.recall_all(tuple([one for one, _ in waiting])), self._run)
        except Exception as raised:  # noqa: BLE001  (whoever waits is told)
            error = raised
        except BaseException:
            for _, told in waiting:  # a loop that ends cancels its tasks, and those who wait with them
                told.cancel()
            raise
        finally:
            self._read_on()
        for record_id, told in waiting:
            if told.done():
                continue  # whoever waited was cancelled
            if error is None:
                told.set_result(found.get(record_id))
            else:
                told.set_exception(error)
