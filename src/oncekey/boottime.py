"""The clock for trust windows: it goes on while the machine sleeps, and cannot be set (A3)."""

from __future__ import annotations

import time


def boottime() -> float:
    """Seconds since some start; where the system has no such clock, the monotonic one."""
    if hasattr(time, "CLOCK_BOOTTIME"):
        return time.clock_gettime(time.CLOCK_BOOTTIME)
    return time.monotonic()
