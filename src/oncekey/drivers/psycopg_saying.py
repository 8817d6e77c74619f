"""What is said to a server through psycopg, each sentence with what its failure means."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from typing import TYPE_CHECKING, Any, Final

import psycopg
from psycopg.rows import dict_row

from oncekey.drivers.placeholders import pyformat
from oncekey.drivers.postgres_errors import unsure_commit
from oncekey.drivers.psycopg_errors import FAILURES, cause, check_commit, commit_error, ending_error, statement_error
from oncekey.flow import Mode

if TYPE_CHECKING:
    from oncekey.drivers.psycopg_connections import AsyncStoreConnection, StoreConnection
    from oncekey.flow import Rows, Statement

BEGIN: Final = "BEGIN ISOLATION LEVEL READ COMMITTED"


def execute(connection: psycopg.Connection[Any], mode: Mode, statement: Statement) -> Rows:
    """Execute one statement of a transaction of this mode."""
    assert isinstance(statement.command, str)
    cursor = psycopg.Cursor(connection, row_factory=dict_row)
    try:
        cursor.execute(pyformat(statement.command), statement.params, binary=True)
        return cursor.fetchall() if _has_rows(cursor) else []
    except FAILURES as error:
        raise statement_error(error, connection, mode, statement.name) from cause(error)


def execute_alone(connection: StoreConnection, mode: Mode, statement: Statement) -> Rows:
    """The same where each statement commits by itself, and so can come with a commit's warning."""
    connection.unsure = False
    rows = execute(connection, mode, statement)
    if connection.unsure and mode is Mode.SINGLE:
        raise unsure_commit(statement.name)
    return rows


def begin(connection: StoreConnection, text: str, what: str) -> None:
    """Begin a transaction, with settings of its own if the text has any."""
    try:
        connection.execute(text)
    except psycopg.Error as error:
        raise statement_error(error, connection, Mode.ATOMIC, what) from error


def commit(connection: StoreConnection, what: str) -> None:
    """Commit, or say what became of it."""
    connection.unsure = False
    try:
        tag = psycopg.Cursor(connection).execute("COMMIT").statusmessage
    except psycopg.Error as error:
        raise commit_error(error, connection, what) from cause(error)
    check_commit(connection, tag, what)


def begin_with(connection: StoreConnection, first: Statement) -> Rows:
    """Begin a transaction, and execute its first statement without waiting in between."""
    assert isinstance(first.command, str)
    cursor = psycopg.Cursor(connection, row_factory=dict_row)
    try:
        with _piped(connection):
            connection.execute(BEGIN)
            cursor.execute(pyformat(first.command), first.params, binary=True)
        return cursor.fetchall()
    except FAILURES as error:
        raise statement_error(error, connection, Mode.ATOMIC, first.name) from cause(error)


def commit_with(connection: StoreConnection, last: Statement, what: str) -> Rows | None:
    """Execute a last statement and commit, without waiting in between. None: its place was taken.

    What follows a statement that fails is not executed, up to the end of the pipeline: so there is no COMMIT then.
    """
    assert isinstance(last.command, str)
    connection.unsure = False
    cursor, end = psycopg.Cursor(connection, row_factory=dict_row), psycopg.Cursor(connection)
    try:
        with _piped(connection):
            cursor.execute(pyformat(last.command), last.params, binary=True)
            end.execute("COMMIT")
        rows = cursor.fetchall()
    except FAILURES as error:
        meaning = ending_error(error, connection, cursor, last.name, what)
        if meaning is None:
            return None
        raise meaning from cause(error)
    check_commit(connection, end.statusmessage, what)
    return rows


def undo(connection: StoreConnection) -> None:
    """Roll back if that is still possible; if not, whoever takes the connection back closes it."""
    with suppress(psycopg.Error):
        psycopg.Cursor(connection).execute("ROLLBACK")


async def aexecute(connection: psycopg.AsyncConnection[Any], mode: Mode, statement: Statement) -> Rows:
    """`execute`, awaited."""
    assert isinstance(statement.command, str)
    cursor = psycopg.AsyncCursor(connection, row_factory=dict_row)
    try:
        await cursor.execute(pyformat(statement.command), statement.params, binary=True)
        return await cursor.fetchall() if _has_rows(cursor) else []
    except FAILURES as error:
        raise statement_error(error, connection, mode, statement.name) from cause(error)


async def aexecute_alone(connection: AsyncStoreConnection, mode: Mode, statement: Statement) -> Rows:
    """`execute_alone`, awaited."""
    connection.unsure = False
    rows = await aexecute(connection, mode, statement)
    if connection.unsure and mode is Mode.SINGLE:
        raise unsure_commit(statement.name)
    return rows


async def abegin(connection: AsyncStoreConnection, text: str, what: str) -> None:
    """`begin`, awaited."""
    try:
        await connection.execute(text)
    except psycopg.Error as error:
        raise statement_error(error, connection, Mode.ATOMIC, what) from error


async def acommit(connection: AsyncStoreConnection, what: str) -> None:
    """`commit`, awaited."""
    connection.unsure = False
    try:
        tag = (await psycopg.AsyncCursor(connection).execute("COMMIT")).statusmessage
    except psycopg.Error as error:
        raise commit_error(error, connection, what) from cause(error)
    check_commit(connection, tag, what)


async def abegin_with(connection: AsyncStoreConnection, first: Statement) -> Rows:
    """`begin_with`, awaited."""
    assert isinstance(first.command, str)
    cursor = psycopg.AsyncCursor(connection, row_factory=dict_row)
    try:
        async with _apiped(connection):
            await connection.execute(BEGIN)
            await cursor.execute(pyformat(first.command), first.params, binary=True)
        return await cursor.fetchall()
    except FAILURES as error:
        raise statement_error(error, connection, Mode.ATOMIC, first.name) from cause(error)


async def acommit_with(connection: AsyncStoreConnection, last: Statement, what: str) -> Rows | None:
    """`commit_with`, awaited."""
    assert isinstance(last.command, str)
    connection.unsure = False
    cursor, end = psycopg.AsyncCursor(connection, row_factory=dict_row), psycopg.AsyncCursor(connection)
    try:
        async with _apiped(connection):
            await cursor.execute(pyformat(last.command), last.params, binary=True)
            await end.execute("COMMIT")
        rows = await cursor.fetchall()
    except FAILURES as error:
        meaning = ending_error(error, connection, cursor, last.name, what)
        if meaning is None:
            return None
        raise meaning from cause(error)
    check_commit(connection, end.statusmessage, what)
    return rows


async def aundo(connection: AsyncStoreConnection) -> None:
    """`undo`, awaited."""
    with suppress(psycopg.Error):
        await psycopg.AsyncCursor(connection).execute("ROLLBACK")


def _has_rows(cursor: psycopg.Cursor[Any] | psycopg.AsyncCursor[Any]) -> bool:
    # `description` would say so, too, but it describes every column at length each time.
    return cursor.pgresult is not None and cursor.pgresult.nfields > 0


@contextmanager
def _piped(connection: StoreConnection) -> Iterator[None]:
    """Psycopg's pipeline, which raises the first of its errors: psycopg itself would log those that follow from it."""
    first: Exception | None = None
    try:
        with connection.pipeline():
            try:
                yield
            except FAILURES as error:
                first = error
    except FAILURES as error:
        first = first or error
    if first is not None:
        raise first


@asynccontextmanager
async def _apiped(connection: AsyncStoreConnection) -> AsyncIterator[None]:
    """`_piped`, awaited."""
    first: Exception | None = None
    try:
        async with connection.pipeline():
            try:
                yield
            except FAILURES as error:
                first = error
    except FAILURES as error:
        first = first or error
    if first is not None:
        raise first
