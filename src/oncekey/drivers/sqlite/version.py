"""Which SQLite versions may use a write-ahead log.

From 3.7.0 to 3.51.2 two connections that write and checkpoint at the same moment can lose a committed
transaction (SQLite calls it the WAL-reset bug). A lost claim is a second execution, so those versions use no WAL.
"""

from __future__ import annotations

from typing import TypeAlias

Version: TypeAlias = tuple[int, int, int]

FIXED: Version = (3, 51, 3)
BACKPORTS: dict[tuple[int, int], int] = {(3, 44): 6, (3, 50): 7}
"""The older branches that were repaired, and the first patch of each that is."""


def wal_is_safe(version: Version) -> bool:
    """Whether the write-ahead log of this SQLite keeps what was committed."""
    major, minor, patch = version
    repaired = BACKPORTS.get((major, minor))
    return version >= FIXED or (repaired is not None and patch >= repaired)
