"""Statements on a connection to SQLite, and the meaning of their errors. No message repeats a bound value."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from oncekey.core import errors
from oncekey.core.flow import Rows, Statement
from oncekey.databases.placeholders import marked

if TYPE_CHECKING:
    import sqlite3
    from types import ModuleType


TEMPORARIES = "SELECT 1 FROM sqlite_temp_master LIMIT 1"

_UNAVAILABLE: Final[tuple[tuple[str, str], ...]] = (
    ("SQLITE_CANTOPEN", "the SQLite file cannot be opened: its folder must exist and be writable for this process"),
    ("SQLITE_READONLY", "the SQLite file or its folder is read-only for this process"),
    ("SQLITE_PERM", "the SQLite file may not be used by this process"),
    ("SQLITE_FULL", "the disk that holds the SQLite file is full"),
    ("SQLITE_IOERR", "the disk failed while SQLite was reading or writing its file"),
    ("SQLITE_CORRUPT", "the SQLite file is damaged"),
    ("SQLITE_NOTADB", "the file is not a SQLite database"),
    ("SQLITE_PROTOCOL", "SQLite could not lock its file"),
    ("SQLITE_NOMEM", "SQLite ran out of memory"),
    ("SQLITE_INTERRUPT", "the statement was interrupted"),
    ("SQLITE_ABORT", "the statement was interrupted"),
    ("SQLITE_SCHEMA", "the schema changed while the statement ran"),
)
_BUSY: Final = ("SQLITE_BUSY", "SQLITE_LOCKED")
_OTHER_SCHEMA: Final = ("no such table", "no such column", "no such view", "has no column named")
_OTHER_VERSION: Final = "the tables are missing or have another version: run `oncekey migrate up --store URL`"


def store_error(error: Exception, what: str) -> errors.StoreError:
    """The store's error for an error of the SQLite module during `what`."""
    name = str(getattr(error, "sqlite_errorname", ""))
    if name.startswith(_BUSY):
        return errors.StoreBusyError(
            f"{what}: another writer held the SQLite file for longer than the busy timeout ({name})"
        )
    for prefix, sentence in _UNAVAILABLE:
        if name.startswith(prefix):
            return errors.StoreUnavailableError(f"{what}: {sentence} ({name})")
    if name == "SQLITE_ERROR" and any(part in str(error) for part in _OTHER_SCHEMA):
        return errors.SchemaError(f"{what}: {_OTHER_VERSION}")
    return errors.StoreError(f"{what}: SQLite refused it ({name or type(error).__name__})")


def commit_error(error: Exception, what: str) -> errors.StoreError:
    """The store's error for a COMMIT: a disk that failed halfway may or may not have stored it."""
    name = str(getattr(error, "sqlite_errorname", ""))
    if name.startswith("SQLITE_IOERR"):
        return errors.CommitAmbiguousError(f"{what}: the disk failed during the commit")
    if name.startswith("SQLITE_CONSTRAINT"):
        return errors.RolledBackError(f"{what}: SQLite refused the commit, so it was rolled back ({name})")
    return store_error(error, what)


def has_temporaries(module: ModuleType, connection: sqlite3.Connection) -> bool:
    """Whether a handler left temporary tables, which the connection's next borrower would see."""
    try:
        return connection.execute(TEMPORARIES).fetchone() is not None
    except module.Error:
        return True


def execute(module: ModuleType, connection: sqlite3.Connection, statement: Statement) -> Rows:
    """Execute one statement to its end: only then is it committed.

    Its values are bound by position. To bind them by name, CPython would release the interpreter's lock for each
    value, and wake a thread that waits for it: thirty times for a record.
    """
    assert isinstance(statement.command, str)
    text, values = marked(statement.command)
    try:
        return connection.execute(text, values(statement.params)).fetchall()
    except module.Error as error:
        raise store_error(error, statement.name) from error
    except (KeyError, OverflowError, ValueError, module.Warning) as error:
        # Such an error repeats the value that could not be bound, so it is not chained.
        raise store_error(error, statement.name) from None


def say(module: ModuleType, connection: sqlite3.Connection, sql: str, what: str) -> None:
    """Execute one of the driver's own statements."""
    try:
        connection.execute(sql)
    except module.Error as error:
        raise store_error(error, what) from error
