"""Places in a pool: how many there are for whom, and how long one waits for one."""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from collections.abc import Callable

from oncekey.drivers.postgres_errors import exhausted


def business_share(size: int) -> int:
    """How many connections handlers may hold at once: the rest is left to claims and heartbeats."""
    return max(1, size - max(1, size // 5))


class Slots:
    """So many at a time, for threads."""

    def __init__(self, count: int, patience: float) -> None:
        self._count, self._patience = count, patience
        self._free = threading.BoundedSemaphore(count)

    @property
    def full(self) -> bool:
        """Whether whoever comes now has to wait."""
        if not self._free.acquire(blocking=False):
            return True
        self._free.release()
        return False

    def acquire(self, deadline: float) -> None:
        """Take a place, but do not wait past the deadline for one."""
        if not self._free.acquire(timeout=max(0.0, deadline - time.monotonic())):
            raise exhausted(self._count, self._patience)

    def release(self) -> None:
        """Give the place back."""
        self._free.release()


class AsyncSlots:
    """So many at a time, for tasks. Whoever waits longest is handed the next place, and nobody overtakes."""

    __slots__ = ("_count", "_free", "_hoping", "_patience", "_waiting")

    def __init__(self, count: int, patience: float) -> None:
        self._count, self._patience = count, patience
        self._free = count
        self._waiting: deque[asyncio.Future[bool]] = deque()
        self._hoping: deque[asyncio.Future[bool]] = deque()

    @property
    def full(self) -> bool:
        """Whether whoever comes now has to wait; one who overtakes those that hope would send them away in vain."""
        return self._free == 0 or bool(self._hoping)

    def taken(self) -> bool:
        """Take a place if one is free: nothing is awaited, and no timer needed."""
        if self._free == 0:
            return False
        self._free -= 1
        return True

    async def acquire(self, deadline: float) -> None:
        """Take a place, but do not wait past the deadline for one."""
        if not self.taken() and not await self._told(self._waiting, deadline - time.monotonic(), lost=self.release):
            raise exhausted(self._count, self._patience)

    async def room(self, seconds: float) -> bool:
        """Wait a moment for a place to come free, and do not take it: whether there is one now.

        Somebody may take the place before the one who was told of it goes on; then that one waits on, as the first.
        """
        if not self.full:
            return True
        deadline = time.monotonic() + seconds
        told = await self._told(self._hoping, seconds, lost=self._pass_on)
        while told and self._free == 0:
            told = await self._told(self._hoping, deadline - time.monotonic(), lost=self._pass_on, first=True)
        return told

    def release(self) -> None:
        """Give the place back."""
        if self._waiting and _tell(self._waiting):
            return
        if self._free == self._count:
            raise ValueError("a place was given back twice")
        self._free += 1
        if self._hoping:
            _tell(self._hoping)

    def _pass_on(self) -> None:
        """Who was told of a free place will not use it: somebody else may."""
        if self._free > 0:
            _tell(self._hoping)

    @staticmethod
    async def _told(
        queue: deque[asyncio.Future[bool]], seconds: float, *, lost: Callable[[], None], first: bool = False
    ) -> bool:
        """Wait in a queue; False if that takes too long. `lost` is done for who is told and cancelled at once."""
        loop = asyncio.get_running_loop()
        waiter: asyncio.Future[bool] = loop.create_future()
        if first:
            queue.appendleft(waiter)
        else:
            queue.append(waiter)
        timer = loop.call_later(max(0.0, seconds), _give_up, waiter)
        try:
            return await waiter
        except asyncio.CancelledError:
            if waiter.done() and not waiter.cancelled() and waiter.result():
                lost()
            raise
        finally:
            timer.cancel()
            if waiter in queue:  # who is told has left it
                queue.remove(waiter)


def _tell(queue: deque[asyncio.Future[bool]]) -> bool:
    """Tell whoever waits longest; False if nobody does."""
    while queue:
        waiter = queue.popleft()
        if not waiter.done():
            waiter.set_result(True)
            return True
    return False


def _give_up(waiter: asyncio.Future[bool]) -> None:
    if not waiter.done():
        waiter.set_result(False)
