"""Parts of connection pools: slots for each use, the queues that wait for them, and the stack of idle connections."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any, Final, Generic, TypeVar

from oncekey.core.errors import StoreBusyError


def business_share(size: int) -> int:
    """How many connections handlers may hold at once: the rest is reserved for claims and heartbeats."""
    return max(1, size - max(1, size // 5))


C = TypeVar("C")

EXACTNESS: Final = 0.005
"""Seconds by which a wait may exceed its deadline, so that one timer can serve many waiting tasks."""


class Slots:
    """A limited number of slots, for threads."""

    def __init__(self, count: int, patience: float, server: str = "PostgreSQL") -> None:
        self._count, self._patience, self._server = count, patience, server
        self._free = threading.BoundedSemaphore(count)

    @property
    def full(self) -> bool:
        """Whether the next caller has to wait."""
        if not self.taken():
            return True
        self._free.release()
        return False

    def taken(self) -> bool:
        """Take a slot if one is free."""
        return self._free.acquire(blocking=False)

    def acquire(self, deadline: float) -> None:
        """Take a slot; waits for one until the deadline."""
        if not self._free.acquire(timeout=max(0.0, deadline - time.monotonic())):
            raise _exhausted(self._count, self._patience, self._server)

    def release(self) -> None:
        """Release the slot."""
        self._free.release()


class WaitingTasks:
    """Tasks that wait in order, each until its own deadline. One timer serves all: most are woken before."""

    __slots__ = ("_at", "_timer", "waiters")

    def __init__(self) -> None:
        self.waiters: deque[tuple[asyncio.Future[bool], float]] = deque()
        self._timer: asyncio.TimerHandle | None = None
        self._at = 0.0

    async def woken(self, seconds: float, *, lost: Callable[[], None], first: bool = False) -> bool:
        """Wait to be woken; False if that takes too long. `lost` is called if the task is cancelled after that."""
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

    def notify(self) -> bool:
        """Wake the task that waits longest; False if none waits."""
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
        """Wake the tasks whose time is over; the next check is a moment later, so that it serves several tasks."""
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
    """A limited number of slots, for tasks. The task that waits longest gets the next slot."""

    __slots__ = ("_count", "_free", "_patience", "_server", "_waiting", "_watching")

    def __init__(self, count: int, patience: float, server: str = "PostgreSQL") -> None:
        self._count, self._patience, self._server = count, patience, server
        self._free = count
        self._waiting = WaitingTasks()
        self._watching = WaitingTasks()

    @property
    def full(self) -> bool:
        """Whether the next caller has to wait; it must not overtake tasks that were woken for a free slot."""
        return self._free == 0 or bool(self._watching.waiters)

    def taken(self) -> bool:
        """Take a slot if one is free, without awaiting and without a timer."""
        if self._free == 0:
            return False
        self._free -= 1
        return True

    async def acquire(self, deadline: float) -> None:
        """Take a slot; waits for one until the deadline."""
        if not self.taken() and not await self._waiting.woken(deadline - time.monotonic(), lost=self.release):
            raise _exhausted(self._count, self._patience, self._server)

    async def wait_for_slot(self, seconds: float) -> bool:
        """Wait a moment for a free slot, without taking it; returns whether there is one now.

        Another task may take the slot before the woken one continues; then that one keeps waiting, as the first.
        """
        if not self.full:
            return True
        deadline = time.monotonic() + seconds
        woken = await self._watching.woken(seconds, lost=self._pass_on)
        while woken and self._free == 0:
            woken = await self._watching.woken(deadline - time.monotonic(), lost=self._pass_on, first=True)
        return woken

    def release(self) -> None:
        """Release the slot."""
        if self._waiting.waiters and self._waiting.notify():
            return
        if self._free == self._count:
            raise ValueError("a slot was released twice")
        self._free += 1
        if self._watching.waiters:
            self._watching.notify()

    def _pass_on(self) -> None:
        """Wake another task, because the one that was woken will not use the slot."""
        if self._free > 0:
            self._watching.notify()


def _exhausted(size: int, seconds: float, server: str) -> StoreBusyError:
    """The error of a pool whose connections are all in use."""
    return StoreBusyError(f"all {size} connections to {server} were in use for {seconds:g} s")


_parents: Final[list[Any]] = []


class IdleStack(Generic[C]):
    """The idle connections of a pool. The last one that was returned is the first one lent."""

    def __init__(self) -> None:
        self._idle: list[C] = []
        self._lock = threading.Lock()
        self._pid = os.getpid()
        self._closed = False

    def _forget_parents(self) -> None:
        """After a fork the sockets are the parent's: closing one here would end the parent's session."""
        if self._pid != os.getpid():
            _parents.extend(self._idle)
            self._idle.clear()
            self._pid = os.getpid()
