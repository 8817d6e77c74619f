"""Processors' time, of processes and of the machine, in fractions of a millisecond; Linux says it, others may not."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path

_PROC = Path("/proc")
_SCHEDULED = 2
_AUXILIARY = ("walwriter", "checkpointer", "background writer", "wal writer")


def seconds_of(pid: int) -> float | None:
    """The time that a process and its threads were on a processor."""
    if not _PROC.exists():
        return None
    try:
        # clock_getcpuclockid(3), which Python does not have: exact, where /proc/PID/stat counts hundredths of a second.
        return time.clock_gettime((~pid << 3) | _SCHEDULED)
    except OSError:
        return None


def backends_of(postmaster: int, database: str) -> dict[int, float]:
    """The time of each process that works for a database, and of those that write for all of them.

    Those that wait on other databases do nothing for this one, and are left out: some peers poll.
    """
    from harness.processes import children  # noqa: PLC0415  (beside the tests, found once the server was started)

    found = {}
    for pid in children(postmaster):
        try:
            title = (_PROC / str(pid) / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue
        words = title.removeprefix("postgres: ")
        if f" {database} " in words or words.startswith(_AUXILIARY):
            spent = seconds_of(pid)
            if spent is not None:
                found[pid] = spent
    return found


def added(before: dict[int, float], after: dict[int, float]) -> float:
    """What the processes that are there now have spent since; new ones have spent all of theirs."""
    return sum(spent - before.get(pid, 0.0) for pid, spent in after.items())


@dataclass(frozen=True, slots=True)
class Machine:
    """What all processors have done so far, in seconds of one."""

    busy: float
    stolen: float

    @classmethod
    def now(cls) -> Machine | None:
        """Read it, where it can be read."""
        try:
            fields = (_PROC / "stat").read_text().split("\n", 1)[0].split()[1:]
        except OSError:
            return None
        tick = os.sysconf("SC_CLK_TCK")
        user, nice, system, _idle, _waiting, interrupts, soft, stolen = (int(field) / tick for field in fields[:8])
        return cls(user + nice + system + interrupts + soft, stolen)


def processor() -> str:
    """What the processor calls itself."""
    try:
        lines = (_PROC / "cpuinfo").read_text().splitlines()
    except OSError:
        return "unknown"
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "unknown")
