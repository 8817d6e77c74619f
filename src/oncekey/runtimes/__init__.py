"""The runtimes that perform the flows: under asyncio and in threads. The proofs bring runtimes of their own."""

from __future__ import annotations

import time


def boottime() -> float:
    """Seconds since some start, by a clock that goes on while the machine sleeps, and cannot be set (A3).

    Where the system has no such clock, it is the monotonic one.
    """
    if hasattr(time, "CLOCK_BOOTTIME"):
        return time.clock_gettime(time.CLOCK_BOOTTIME)
    return time.monotonic()
