"""Where SQLite's write-ahead log may be used."""

from __future__ import annotations

import pytest

from oncekey.databases.sqlite.files import wal_is_safe


@pytest.mark.parametrize(
    ("version", "safe"),
    [
        ((3, 6, 23), False),
        ((3, 7, 0), False),
        ((3, 40, 1), False),
        ((3, 44, 5), False),
        ((3, 44, 6), True),
        ((3, 44, 7), True),
        ((3, 45, 0), False),
        ((3, 46, 1), False),
        ((3, 50, 6), False),
        ((3, 50, 7), True),
        ((3, 51, 0), False),
        ((3, 51, 2), False),
        ((3, 51, 3), True),
        ((3, 52, 0), True),
        ((3, 54, 1), True),
        ((4, 0, 0), True),
    ],
)
def test_only_repaired_versions_are_safe(version, safe):
    assert wal_is_safe(version) is safe
