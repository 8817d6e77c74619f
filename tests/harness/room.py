"""Where tests keep their files: in memory where this machine has the room, on disk elsewhere.

A database waits for its disk at every commit, and the suite commits some hundred thousand times. A disk proves nothing
here: what a test kills is a process, and neither the page cache nor a file in memory dies with one. Every `fsync` is
still called as in production; in memory it is over at once.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

_MEMORY = Path("/dev/shm")
_ENOUGH = 4 * 2**30  # two workers with their servers and files take about one


def settle() -> None:
    """Make memory the folder for temporary files of this process and those that it starts.

    Whoever has set TMPDIR has chosen already, and a folder that runs no programs will not do: tests install some.
    """
    if "TMPDIR" not in os.environ and _MEMORY.is_dir() and os.access(_MEMORY, os.W_OK | os.X_OK):
        room = os.statvfs(_MEMORY)
        if not room.f_flag & os.ST_NOEXEC and room.f_bavail * room.f_frsize >= _ENOUGH:
            os.environ["TMPDIR"] = tempfile.tempdir = str(_MEMORY)
