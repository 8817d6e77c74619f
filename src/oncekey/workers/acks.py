"""Acknowledgements in batches: one statement for all parcels that were delivered meanwhile."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Final, Generic, TypeVar

if TYPE_CHECKING:
    from oncekey.workers.calling import Sleep

T = TypeVar("T")

MOST: Final = 250
"""A batch of this size is written without waiting for more; meanwhile the next one collects."""
SOONEST: Final = 0.05
"""Seconds that a delivered message waits for others to be acknowledged with."""


class Acks(Generic[T]):
    """Collects delivered parcels, and writes them when there are enough, after a moment, or on `flush`.

    Only one statement runs at a time; parcels that come meanwhile go with the next one. `write` reports the result of
    each batch itself, an outage included, and raises nothing.
    """

    def __init__(self, write: Callable[[list[T]], Awaitable[None]], sleep: Sleep, most: int = MOST) -> None:
        self._write = write
        self._sleep = sleep
        self._most = most
        self._waiting: list[T] = []
        self._writer: asyncio.Task[None] | None = None
        self._timer: asyncio.Task[None] | None = None

    @property
    def waiting(self) -> int:
        """How many are not being written yet."""
        return len(self._waiting)

    @property
    def busy(self) -> bool:
        """Whether some are waiting, or being written."""
        return bool(self._waiting) or self._writer is not None

    def add(self, delivered: T) -> None:
        """Acknowledge this parcel soon."""
        self._waiting.append(delivered)
        if len(self._waiting) >= self._most:
            self.flush()
        elif self._timer is None and self._writer is None:
            self._timer = asyncio.create_task(self._later(), name="oncekey-acks-timer")

    def flush(self) -> None:
        """Write those that wait now."""
        if self._waiting and self._writer is None:
            self._writer = asyncio.create_task(self._written(), name="oncekey-acks")

    async def shut_down(self) -> None:
        """Write all, and wait for that."""
        self.flush()
        if self._writer is not None:
            await asyncio.wait({self._writer})

    def close(self) -> None:
        """Stop the timer."""
        for task in (self._timer, self._writer):
            if task is not None:
                task.cancel()

    async def _written(self) -> None:
        try:
            while self._waiting:
                batch, self._waiting = self._waiting, []
                await self._write(batch)
        finally:
            self._writer = None

    async def _later(self) -> None:
        try:
            await self._sleep(SOONEST)
        finally:
            self._timer = None
        self.flush()
