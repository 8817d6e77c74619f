"""Diagnoses a SQLite file: whether it keeps what was committed."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Final

from oncekey.databases.sqlite.files import wal_is_safe
from oncekey.ops.doctor import Finding, Level, Rows

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from oncekey.core.model import Duration, Instant


_MIB: Final = 1024 * 1024
_LARGE_WAL: Final = 64 * _MIB


def findings(diagnostics: Mapping[str, Rows], now: Instant, lease: Duration) -> Iterator[Finding]:  # noqa: ARG001
    """The findings from the results of the store's statements."""
    file = diagnostics.get("diagnostic_file", ())
    safe = wal_is_safe(_version(file))
    yield from kept(file, diagnostics["diagnostic_journal"], _wal_bytes(file), safe=safe)


def kept(file: Rows, journal: Rows, wal_bytes: int | None, *, safe: bool) -> Iterator[Finding]:
    """Whether a SQLite file keeps what was committed."""
    version = str(file[0]["version"]) if file else "?"
    mode = str(journal[0]["journal_mode"]).lower() if journal else "?"
    seen = f"SQLite {version}, journal_mode {mode}"
    if mode == "wal" and not safe:
        yield Finding(
            Level.ERROR,
            "sqlite",
            seen,
            "this version can lose a commit in write-ahead mode (the WAL-reset bug)",
            "stop all other programs so that only oncekey opens it, or use sqlite+pysqlite3:// everywhere",
        )
    elif mode in {"off", "memory"}:
        yield Finding(Level.ERROR, "sqlite", seen, "a crash corrupts the file", "PRAGMA journal_mode = PERSIST")
    elif not safe:
        yield Finding(
            Level.NOTE,
            "sqlite",
            seen,
            "this version can lose commits in write-ahead mode, so a rollback journal is used, which is slower",
            "use SQLite 3.51.3 or newer; without Django: pip install 'oncekey[sqlite]' and sqlite+pysqlite3://",
        )
    else:
        yield Finding(Level.OK, "sqlite", seen)
    if wal_bytes is not None and wal_bytes > _LARGE_WAL:
        yield Finding(
            Level.WARNING,
            "sqlite",
            f"the write-ahead log has {wal_bytes // _MIB} MiB",
            "a reader that never ends keeps it from being truncated, and every query gets slower",
            "find the connection with an open transaction",
        )


def _wal_bytes(file: Rows) -> int | None:
    wal = Path(f"{file[0]['path']}-wal") if file else None
    return wal.stat().st_size if wal is not None and wal.exists() else None


def _version(file: Rows) -> tuple[int, int, int]:
    major, minor, patch = (str(file[0]["version"]) if file else "0.0.0").split(".")[:3]
    return int(major), int(minor), int(patch)
