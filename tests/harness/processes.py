"""Which processes are there, read from /proc where it exists and from ps elsewhere."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import NamedTuple

_PROC = Path("/proc")


class Process(NamedTuple):
    """One line of the process table."""

    pid: int
    parent: int
    state: str


def children(pid: int) -> list[int]:
    """Return the direct children of a process that still run."""
    return [process.pid for process in _table() if process.parent == pid and process.state != "Z"]


def is_alive(pid: int) -> bool:
    """Whether a process still runs; a zombie holds nothing and counts as gone."""
    return any(process.pid == pid and process.state != "Z" for process in _table())


def _table() -> list[Process]:
    if not (_PROC / "self" / "stat").exists():
        return [_from_ps(line) for line in _ps().splitlines()]
    found = []
    for folder in _PROC.iterdir():
        if folder.name.isdigit():
            try:
                line = (folder / "stat").read_text(errors="replace")
            except OSError:
                continue  # it ended between the listing and the look
            found.append(_from_stat(int(folder.name), line))
    return found


def _from_stat(pid: int, line: str) -> Process:
    # The second field is the program's name in parentheses and may hold spaces and parentheses itself.
    state, parent = line.rpartition(")")[2].split()[:2]
    return Process(pid, int(parent), state)


def _ps() -> str:
    return subprocess.run(["ps", "-A", "-o", "pid=,ppid=,stat="], capture_output=True, text=True, check=True).stdout


def _from_ps(line: str) -> Process:
    pid, parent, state = line.split()[:3]
    return Process(int(pid), int(parent), state[0])
