"""Places in a pool: how many there are for whom, and how long one waits for one."""

from __future__ import annotations

import asyncio
import threading
import time

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
    """So many at a time, for tasks."""

    def __init__(self, count: int, patience: float) -> None:
        self._count, self._patience = count, patience
        self._free = asyncio.BoundedSemaphore(count)

    @property
    def full(self) -> bool:
        """Whether whoever comes now has to wait."""
        return self._free.locked()

    async def acquire(self, deadline: float) -> None:
        """Take a place, but do not wait past the deadline for one."""
        if not self._free.locked():
            await self._free.acquire()  # which does not wait then, so no timer is needed
            return
        try:
            async with asyncio.timeout(deadline - time.monotonic()):
                await self._free.acquire()
        except TimeoutError:
            raise exhausted(self._count, self._patience) from None

    def release(self) -> None:
        """Give the place back."""
        self._free.release()
