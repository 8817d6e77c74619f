"""Measure a command: `python -m tools.cputime make test` prints the processor time of every process it started.

`time` misses servers whose parent was killed. Here they become children of this process (Linux), which waits for them.
"""

from __future__ import annotations

import ctypes
import os
import resource
import subprocess
import sys
import time

_SET_CHILD_SUBREAPER = 36  # linux/prctl.h
_GRACE = 10.0  # for servers that are on their way out


def measured(command: list[str]) -> int:
    """Run a command, print what it took to standard error, and return its exit code."""
    if ctypes.CDLL(None, use_errno=True).prctl(_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "this kernel does not hand over orphans")
    began = time.monotonic()
    code = subprocess.call(command)  # noqa: S603  # the person who runs this chose it
    wall = time.monotonic() - began
    left = _reap()
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    parts = f"{used.ru_utime:.0f} user, {used.ru_stime:.0f} system"
    missing = ", without a process that still runs" if left else ""
    sys.stderr.write(f"{used.ru_utime + used.ru_stime:.0f} s of processor time ({parts}) in {wall:.0f} s{missing}\n")
    return code


def _reap() -> bool:
    """Wait for orphans, so that the kernel adds their time to ours; True if one does not end."""
    deadline = time.monotonic() + _GRACE
    while time.monotonic() < deadline:
        try:
            ended, _ = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return False
        if not ended:
            time.sleep(0.05)
    return True


if __name__ == "__main__":
    sys.exit(measured(sys.argv[1:]))
