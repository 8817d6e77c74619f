"""A connection to a SQLite file that only reads: it takes no turn, and no writer waits for it.

Each statement is a transaction of its own. One that spans several would hold off every writer of a file without a
write-ahead log, for as long as the application takes between two statements.
"""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING

from oncekey.drivers.sqlite.blocking import SqliteTransaction, say
from oncekey.drivers.sqlite.writer import Writer

if TYPE_CHECKING:
    import sqlite3

    from oncekey.drivers.sqlite.files import SqliteFile


class SqliteReading(SqliteTransaction):
    """Takes the place of a transaction where nothing is written: SQLite itself refuses writes."""

    def __init__(self, file: SqliteFile) -> None:
        super().__init__(file, Writer(file.path))  # a turn that no writer waits for

    def heard(self, sql: str, *, failed: bool) -> None:  # noqa: ARG002  (it changes nothing)
        """After a statement that failed there is nothing to roll back."""
        super().heard(sql, failed=False)

    def _ready(self) -> sqlite3.Connection:
        return self._begun()  # there is no transaction that could be ended

    def _say_begin(self, connection: sqlite3.Connection, patience: float) -> None:  # noqa: ARG002  (it waits for no other transaction)
        say(self._file.module, connection, "PRAGMA query_only = ON", "beginning to read")

    def _take(self) -> sqlite3.Connection:
        return self._file.take()

    def _give_back(self, connection: sqlite3.Connection) -> None:
        with suppress(self._file.module.Error):
            connection.execute("PRAGMA query_only = OFF")
            self._file.give_back(connection)
            return
        self._file.discard(connection)  # the next borrower may want to write
