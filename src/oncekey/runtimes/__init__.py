"""The runtimes that perform the flows: under asyncio and in threads. The proofs have their own runtimes."""

from __future__ import annotations

import time


def boottime() -> float:
    """Seconds since an arbitrary start, by a clock that continues while the machine sleeps and cannot be set (A3).

    If the system has no such clock, the monotonic clock is used.
    """
    if hasattr(time, "CLOCK_BOOTTIME"):
        return time.clock_gettime(time.CLOCK_BOOTTIME)
    return time.monotonic()
