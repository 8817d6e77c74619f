"""Processor time of processes and of the machine, in fractions of a millisecond; available on Linux."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path

_PROC = Path("/proc")
_SCHEDULED = 2
_AUXILIARY = ("walwriter", "checkpointer", "background writer", "wal writer")


def seconds_of(pid: int) -> float | None:
    """The processor time of a process and its threads."""
    if not _PROC.exists():
        return None
    try:
        # clock_getcpuclockid(3), which Python lacks: exact, while /proc/PID/stat counts hundredths of a second.
        return time.clock_gettime((~pid << 3) | _SCHEDULED)
    except OSError:
        return None


def backends_of(postmaster: int, database: str) -> dict[int, float]:
    """The time of each process that works for a database, and of the writers that serve all databases.

    Backends of other databases are omitted, because some peers poll.
    """
    from harness.processes import children  # noqa: PLC0415  (in tests/, importable once the server was started)

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
    """The processor time of the current processes since `before`; for new processes, all of it."""
    return sum(spent - before.get(pid, 0.0) for pid, spent in after.items())


@dataclass(frozen=True, slots=True)
class Machine:
    """The busy time of all processors so far, in seconds."""

    busy: float
    stolen: float

    @classmethod
    def now(cls) -> Machine | None:
        """Read it; None if the system does not report it."""
        try:
            fields = (_PROC / "stat").read_text().split("\n", 1)[0].split()[1:]
        except OSError:
            return None
        tick = os.sysconf("SC_CLK_TCK")
        user, nice, system, _idle, _waiting, interrupts, soft, stolen = (int(field) / tick for field in fields[:8])
        return cls(user + nice + system + interrupts + soft, stolen)


def processor() -> str:
    """The name of the processor."""
    try:
        lines = (_PROC / "cpuinfo").read_text().splitlines()
    except OSError:
        return "unknown"
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "unknown")
