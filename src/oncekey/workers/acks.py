"""Acknowledgements in batches: one statement for all that was delivered meanwhile, one after the other."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Final, Generic, TypeVar

if TYPE_CHECKING:
    from oncekey.workers.calling import Sleep

T = TypeVar("T")

MOST: Final = 250
"""So many are written without waiting for more; while they are, the next ones gather."""
SOONEST: Final = 0.05
"""Seconds that a message waits for others to be acknowledged with."""


class Acks(Generic[T]):
    """Collects what was delivered, and writes it when there is enough, after a moment, or when it is told to.

    Only one statement is on its way at a time: what gathers meanwhile goes with the next. `write` tells whoever wants
    to know what became of it, also of an outage, and raises nothing.
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
        """How many are not on their way yet."""
        return len(self._waiting)

    @property
    def busy(self) -> bool:
        """Whether something is waiting, or on its way."""
        return bool(self._waiting) or self._writer is not None

    def add(self, delivered: T) -> None:
        """Acknowledge it soon."""
        self._waiting.append(delivered)
        if len(self._waiting) >= self._most:
            self.flush()
        elif self._timer is None and self._writer is None:
            self._timer = asyncio.create_task(self._later(), name="oncekey-acks-timer")

    def flush(self) -> None:
        """Write what is waiting now."""
        if self._waiting and self._writer is None:
            self._writer = asyncio.create_task(self._written(), name="oncekey-acks")

    async def drain(self) -> None:
        """Write everything, and wait for it."""
        self.flush()
        if self._writer is not None:
            await asyncio.wait({self._writer})

    def close(self) -> None:
        """Wait for nothing any more."""
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
