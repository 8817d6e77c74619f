"""A store in one SQLite table, with the minimum that a store has to implement.

`docs/howto/write-a-store.md` builds it step by step. It is an example: the SQLite store in oncekey also shares
the application's transactions.
"""

from __future__ import annotations

import base64
import json
import sqlite3
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

from oncekey.cells import Cell, Index, Place, Seen, indexed
from oncekey.core.errors import CommitAmbiguousError, StoreUnavailableError

SCHEMA = """
CREATE TABLE IF NOT EXISTS cell (
    scope TEXT NOT NULL, key TEXT NOT NULL,
    incarnation TEXT NOT NULL, version INTEGER NOT NULL,  -- compared by swap
    page TEXT, place INTEGER,                             -- its index and timestamp; NULL: in no index
    keep_until INTEGER,                                   -- may be deleted from then on; NULL: never
    content TEXT NOT NULL,
    PRIMARY KEY (scope, key)) STRICT;
CREATE INDEX IF NOT EXISTS cell_page ON cell (page, place, scope, key) WHERE page IS NOT NULL;
"""
PAGE = """
SELECT content FROM cell WHERE page = ? AND (place, scope, key) > (?, ?, ?) ORDER BY place, scope, key LIMIT ?
"""
INSERT = "INSERT INTO cell VALUES (:scope, :key, :incarnation, :version, :page, :place, :keep_until, :content)"
UPDATE = """
UPDATE cell SET incarnation = :incarnation, version = :version, page = :page, place = :place, keep_until = :keep_until,
    content = :content
WHERE scope = :scope AND key = :key AND incarnation = :seen_incarnation AND version = :seen_version
"""
DELETE = "DELETE FROM cell WHERE scope = ? AND key = ? AND incarnation = ? AND version = ?"


class SqliteCells:
    """Cells in a SQLite file, for the processes of one machine. Pass it to `CellDriver`."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._local = threading.local()
        self._all: list[sqlite3.Connection] = []
        with self._failing(StoreUnavailableError):
            self._connection.executescript(SCHEMA)

    def look(self, scope: str, key: str) -> tuple[Cell | None, int]:
        with self._failing(StoreUnavailableError):
            row = self._connection.execute(
                "SELECT content FROM cell WHERE (scope, key) = (?, ?)", (scope, key)
            ).fetchone()
        return (None if row is None else loads(row[0])), now()

    def swap(self, scope: str, key: str, seen: Seen | None, cell: Cell | None, keep_until: int | None) -> bool:
        with self._failing(CommitAmbiguousError):  # the write may have been committed
            if cell is None:
                assert seen is not None
                deleted = self._connection.execute(DELETE, (scope, key, seen.incarnation, seen.version))
                return deleted.rowcount == 1
            page, place = indexed(cell) or (None, None)
            columns = {
                "scope": scope,
                "key": key,
                "incarnation": cell["incarnation"],
                "version": cell["version"],
                "page": page,
                "place": place,
                "keep_until": keep_until,
                "content": dumps(cell),
            }
            if seen is None:
                try:
                    return self._connection.execute(INSERT, columns).rowcount == 1
                except sqlite3.IntegrityError:  # the cell exists
                    return False
            proof = {"seen_incarnation": seen.incarnation, "seen_version": seen.version}
            return self._connection.execute(UPDATE, columns | proof).rowcount == 1

    def page(self, index: Index, after: Place, limit: int) -> tuple[list[Cell], int]:
        with self._failing(StoreUnavailableError):
            rows = self._connection.execute(PAGE, (index, *after, limit)).fetchall()
        return [loads(row[0]) for row in rows], now()

    def forget(self) -> int:
        """Delete expired cells, for example from a cron job; nothing depends on when it runs."""
        with self._failing(StoreUnavailableError):
            return self._connection.execute("DELETE FROM cell WHERE keep_until <= ?", (now(),)).rowcount

    def close(self) -> None:
        for connection in self._all:
            connection.close()

    @property
    def _connection(self) -> sqlite3.Connection:
        """One connection per thread; each statement is its own transaction."""
        if not hasattr(self._local, "connection"):
            connection = sqlite3.connect(self._path, timeout=30, isolation_level=None, check_same_thread=False)
            connection.execute("PRAGMA journal_mode = WAL")
            connection.execute("PRAGMA synchronous = FULL")  # a swap that returns has to be durable
            self._local.connection = connection
            self._all.append(connection)
        return cast("sqlite3.Connection", self._local.connection)

    @contextmanager
    def _failing(self, error: type[Exception]) -> Iterator[None]:
        try:
            yield
        except sqlite3.Error as failure:
            raise error(str(failure)) from failure


def now() -> int:
    """The machine's clock, in microseconds."""
    return time.time_ns() // 1000


def dumps(cell: Cell) -> str:
    """Encode a cell as JSON; bytes are wrapped, because JSON has no bytes."""
    return json.dumps({name: _wrapped(value) for name, value in cell.items()})


def loads(text: str) -> dict[str, Any]:
    """Decode a cell; it has to equal the encoded one, to the byte."""
    return {name: _unwrapped(value) for name, value in json.loads(text).items()}


def _wrapped(value: object) -> object:
    return {"bytes": base64.b64encode(value).decode()} if isinstance(value, bytes) else value


def _unwrapped(value: object) -> object:
    return base64.b64decode(value["bytes"]) if isinstance(value, dict) else value
