"""A transaction on a SQLite file that only reads: it takes no turn, and keeps no writer waiting."""

from __future__ import annotations

import threading
from contextlib import suppress
from typing import TYPE_CHECKING

from oncekey.drivers.sqlite import SqliteTransaction, say

if TYPE_CHECKING:
    import sqlite3

    from oncekey.drivers.sqlite_files import SqliteFile

WHAT = "beginning to read"


class SqliteReading(SqliteTransaction):
    """A transaction that SQLite itself lets only read."""

    def __init__(self, file: SqliteFile) -> None:
        super().__init__(file, threading.Lock())  # a turn that no writer waits for

    def _say_begin(self, connection: sqlite3.Connection) -> None:
        say(self._file.module, connection, "PRAGMA query_only = ON", WHAT)
        say(self._file.module, connection, "BEGIN", WHAT)

    def _give_back(self, connection: sqlite3.Connection) -> None:
        with suppress(self._file.module.Error):
            connection.execute("PRAGMA query_only = OFF")
            super()._give_back(connection)
            return
        self._file.discard(connection)  # the next borrower may want to write
