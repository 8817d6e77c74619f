"""Flows inside the caller's own connection and open transaction.

Nothing here begins, commits, sets a savepoint or tries again: the transaction is the caller's. The result of a
flow is provisional until the caller commits (L7). An adapter says how one statement is executed; the adapters of a
database's drivers are in the modules named after them.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from oncekey.core.errors import ConfigurationError
from oncekey.drivers.sqlite.execute import store_error
from oncekey.flow import astep, step

if TYPE_CHECKING:
    import sqlite3

    from oncekey.flow import Rows, Statement, Transaction

T = TypeVar("T")

NOT_BEGUN = "begin a transaction on the connection first: what is written here must commit with your own rows"


class Within:
    """A driver that runs everything in the caller's transaction."""

    def __init__(self, execute: Callable[[Statement], Rows]) -> None:
        self._execute = execute

    def run(self, transaction: Transaction[T]) -> T:
        """Run one transaction's statements in the caller's."""
        return step(transaction.body(), self._execute)

    def close(self) -> None:
        """Nothing to close: the connection is the caller's."""


class AsyncWithin:
    """The same for asyncio."""

    def __init__(self, execute: Callable[[Statement], Awaitable[Rows]]) -> None:
        self._execute = execute

    async def run(self, transaction: Transaction[T]) -> T:
        """Run one transaction's statements in the caller's."""
        return await astep(transaction.body(), self._execute)

    async def close(self) -> None:
        """Nothing to close: the connection is the caller's."""


def sqlite_execute(connection: sqlite3.Connection) -> Callable[[Statement], Rows]:
    """The adapter for a connection of `sqlite3` or a module like it, whatever its rows look like."""
    if not connection.in_transaction and connection.isolation_level is None:
        raise ConfigurationError(NOT_BEGUN)
    return partial(_execute, connection)


def aiosqlite_execute(connection: Any) -> Callable[[Statement], Awaitable[Rows]]:  # noqa: ANN401  (duck-typed)
    """The adapter for a connection like `sqlite3`'s whose methods are awaited, as those of `aiosqlite` are."""
    if not connection.in_transaction and connection.isolation_level is None:
        raise ConfigurationError(NOT_BEGUN)
    return partial(_aexecute, connection)


def _execute(connection: sqlite3.Connection, statement: Statement) -> Rows:
    assert isinstance(statement.command, str)
    cursor = connection.cursor()
    cursor.row_factory = None
    try:
        cursor.execute(statement.command, statement.params)
        return _named(cursor.description, cursor.fetchall())
    except connection.Error as error:
        raise store_error(error, statement.name) from error
    except (OverflowError, ValueError) as error:
        # Such an error repeats the value that could not be bound, so it is not shown.
        raise store_error(error, statement.name) from None
    finally:
        cursor.close()


async def _aexecute(connection: Any, statement: Statement) -> Rows:  # noqa: ANN401  (duck-typed)
    try:
        cursor = await connection.execute(statement.command, statement.params)
        rows = await cursor.fetchall()
        await cursor.close()
    except Exception as error:
        if not hasattr(error, "sqlite_errorname"):
            raise
        raise store_error(error, statement.name) from error
    return _named(cursor.description, rows)


def _named(description: Any, rows: list[Any]) -> Rows:  # noqa: ANN401  (as the DB-API describes columns)
    names = [column[0] for column in description or ()]
    return [dict(zip(names, row, strict=True)) for row in rows]
