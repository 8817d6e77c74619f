"""`op.connection` for SQLite in a blocking handler, which refuses to end the transaction (L5)."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Final, NoReturn, Protocol

from oncekey.core.sqltext import Dialect
from oncekey.databases.handler_sql import refusal, refuse_transaction_control

ERRORS: Final = frozenset(
    {
        "Warning",
        "Error",
        "InterfaceError",
        "DatabaseError",
        "DataError",
        "OperationalError",
        "IntegrityError",
        "InternalError",
        "ProgrammingError",
        "NotSupportedError",
    }
)
"""The exceptions of the DB-API, which are attributes of a connection, because the two SQLite modules have their own."""


class SqliteExecutor(Protocol):
    """The transaction behind a facade."""

    def handlers_cursor(self) -> sqlite3.Cursor:
        """A new cursor; the first one begins the transaction."""

    def executes(self) -> None:
        """Check before each statement that the transaction is still open."""

    def executed(self, sql: str) -> None:
        """Check after each statement whether the transaction is still open, and what the statement may have left."""

    def error_class(self, name: str) -> Any:  # noqa: ANN401  (a class of the SQLite module in use)
        """One of `ERRORS`."""


class SqliteHandlerCursor:
    """A cursor whose statements cannot end the transaction."""

    def __init__(self, speaker: SqliteExecutor) -> None:
        self._speaker = speaker
        self._cursor = speaker.handlers_cursor()

    def execute(self, sql: str, parameters: Any = (), /) -> SqliteHandlerCursor:  # noqa: ANN401  (as sqlite3 takes them)
        return self._say(sql, lambda: self._cursor.execute(sql, parameters))

    def executemany(self, sql: str, parameters: Iterable[Any], /) -> SqliteHandlerCursor:
        """Execute one statement for each of many parameters."""
        return self._say(sql, lambda: self._cursor.executemany(sql, parameters))

    def executescript(self, *_: object) -> NoReturn:
        """Refused: it commits first."""
        raise refusal("executescript()")

    def fetchone(self) -> Any:  # noqa: ANN401  (a row, or None)
        """The next row."""
        return self._cursor.fetchone()

    def fetchmany(self, size: int | None = None) -> list[Any]:
        """The next rows."""
        return self._cursor.fetchmany(self._cursor.arraysize if size is None else size)

    def fetchall(self) -> list[Any]:
        """The remaining rows."""
        return self._cursor.fetchall()

    def __iter__(self) -> Iterator[Any]:
        return iter(self._cursor)

    @property
    def description(self) -> Any:  # noqa: ANN401  (as sqlite3 describes columns)
        """The columns."""
        return self._cursor.description

    @property
    def rowcount(self) -> int:
        """How many rows the last statement changed."""
        return self._cursor.rowcount

    @property
    def lastrowid(self) -> int | None:
        """The id of the last row that was inserted."""
        return self._cursor.lastrowid

    def close(self) -> None:
        """Close the cursor."""
        self._cursor.close()

    def _say(self, sql: str, say: Callable[[], object]) -> SqliteHandlerCursor:
        refuse_transaction_control(sql, Dialect.SQLITE)
        self._speaker.executes()
        try:
            say()
        finally:
            self._speaker.executed(sql)
        return self


class SqliteHandlerConnection:
    """`op.connection` for SQLite. Its rows have names and positions.

    Catch `op.connection.IntegrityError` and so on: the module of these classes depends on what is installed.
    """

    def __init__(self, speaker: SqliteExecutor) -> None:
        self._speaker = speaker

    def execute(self, sql: str, parameters: Any = (), /) -> SqliteHandlerCursor:  # noqa: ANN401  (as sqlite3 takes them)
        refuse_transaction_control(sql, Dialect.SQLITE)
        return SqliteHandlerCursor(self._speaker).execute(sql, parameters)

    def executemany(self, sql: str, parameters: Iterable[Any], /) -> SqliteHandlerCursor:
        """Execute one statement for each of many parameters."""
        refuse_transaction_control(sql, Dialect.SQLITE)
        return SqliteHandlerCursor(self._speaker).executemany(sql, parameters)

    def cursor(self) -> SqliteHandlerCursor:
        """A cursor."""
        return SqliteHandlerCursor(self._speaker)

    def executescript(self, *_: object) -> NoReturn:
        """Refused: it commits first."""
        raise refusal("executescript()")

    def commit(self) -> NoReturn:
        raise refusal("commit()")

    def rollback(self) -> NoReturn:
        raise refusal("rollback()")

    def close(self) -> NoReturn:
        raise refusal("close()")

    def __enter__(self) -> NoReturn:
        raise refusal("`with connection:`")

    def __exit__(self, *_: object) -> None: ...

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401  (one of the DB-API's exceptions)
        if name in ERRORS:
            return self._speaker.error_class(name)
        raise AttributeError(f"the connection of an operation has no {name}")

    def __setattr__(self, name: str, value: object) -> None:
        if name in {"isolation_level", "autocommit"}:
            raise refusal(f"setting {name}")
        object.__setattr__(self, name, value)
