"""Places in a pool: how many there are for whom, and how long one waits for one."""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Final

from oncekey.drivers.postgres_errors import exhausted


def business_share(size: int) -> int:
    """How many connections handlers may hold at once: the rest is left to claims and heartbeats."""
    return max(1, size - max(1, size // 5))


EXACTNESS: Final = 0.005
"""Seconds that somebody may wait too long, so that a crowd is not looked through for each one's deadline."""


class Slots:
    """So many at a time, for threads."""

    def __init__(self, count: int, patience: float, server: str = "PostgreSQL") -> None:
        self._count, self._patience, self._server = count, patience, server
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
            raise exhausted(self._count, self._patience, self._server)

    def release(self) -> None:
        """Give the place back."""
        self._free.release()


class Line:
    """Tasks that wait in line, each until its own deadline. One timer is for all of them: most are told before."""

    __slots__ = ("_at", "_timer", "waiters")

    def __init__(self) -> None:
        self.waiters: deque[tuple[asyncio.Future[bool], float]] = deque()
        self._timer: asyncio.TimerHandle | None = None
        self._at = 0.0

    async def told(self, seconds: float, *, lost: Callable[[], None], first: bool = False) -> bool:
        """Wait to be told; False if that takes too long. `lost` is done for who is told and cancelled at once."""
        loop = asyncio.get_running_loop()
        waiter: asyncio.Future[bool] = loop.create_future()
        entry = (waiter, loop.time() + max(0.0, seconds))
        if first:
            self.waiters.appendleft(entry)
        else:
            self.waiters.append(entry)
        if self._timer is None or entry[1] < self._at:
            self._watch(loop, entry[1])
        try:
            return await waiter
        except asyncio.CancelledError:
            if waiter.done() and not waiter.cancelled() and waiter.result():
                lost()
            elif entry in self.waiters:
                self.waiters.remove(entry)
            raise

    def tell(self) -> bool:
        """Tell whoever waits longest; False if nobody does."""
        while self.waiters:
            waiter, _ = self.waiters.popleft()
            if not waiter.done():
                waiter.set_result(True)
                return True
        return False

    def _watch(self, loop: asyncio.AbstractEventLoop, at: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer, self._at = loop.call_at(at, self._expire, loop), at

    def _expire(self, loop: asyncio.AbstractEventLoop) -> None:
        """Send those away whose time is over; the next ones are looked for a moment later, and not one by one."""
        now = loop.time()
        self._timer = None
        waiting = [entry for entry in self.waiters if not entry[0].done()]
        self.waiters = deque(entry for entry in waiting if entry[1] > now)
        for waiter, deadline in waiting:
            if deadline <= now:
                waiter.set_result(False)
        if self.waiters:
            self._watch(loop, max(now + EXACTNESS, min(deadline for _, deadline in self.waiters)))


class AsyncSlots:
    """So many at a time, for tasks. Whoever waits longest is handed the next place, and nobody overtakes."""

    __slots__ = ("_count", "_free", "_hoping", "_patience", "_server", "_waiting")

    def __init__(self, count: int, patience: float, server: str = "PostgreSQL") -> None:
        self._count, self._patience, self._server = count, patience, server
        self._free = count
        self._waiting = Line()
        self._hoping = Line()

    @property
    def full(self) -> bool:
        """Whether whoever comes now has to wait; one who overtakes those that hope would send them away in vain."""
        return self._free == 0 or bool(self._hoping.waiters)

    def taken(self) -> bool:
        """Take a place if one is free: nothing is awaited, and no timer needed."""
        if self._free == 0:
            return False
        self._free -= 1
        return True

    async def acquire(self, deadline: float) -> None:
        """Take a place, but do not wait past the deadline for one."""
        if not self.taken() and not await self._waiting.told(deadline - time.monotonic(), lost=self.release):
            raise exhausted(self._count, self._patience, self._server)

    async def room(self, seconds: float) -> bool:
        """Wait a moment for a place to come free, and do not take it: whether there is one now.

        Somebody may take the place before the one who was told of it goes on; then that one waits on, as the first.
        """
        if not self.full:
            return True
        deadline = time.monotonic() + seconds
        told = await self._hoping.told(seconds, lost=self._pass_on)
        while told and self._free == 0:
            told = await self._hoping.told(deadline - time.monotonic(), lost=self._pass_on, first=True)
        return told

    def release(self) -> None:
        """Give the place back."""
        if self._waiting.waiters and self._waiting.tell():
            return
        if self._free == self._count:
            raise ValueError("a place was given back twice")
        self._free += 1
        if self._hoping.waiters:
            self._hoping.tell()

    def _pass_on(self) -> None:
        """Who was told of a free place will not use it: somebody else may."""
        if self._free > 0:
            self._hoping.tell()
