"""The messages that are sent to a server through psycopg, each with the meaning of its failure."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final

import psycopg
from psycopg import generators
from psycopg.rows import dict_row

from oncekey.drivers.guard import RESET
from oncekey.drivers.placeholders import pyformat
from oncekey.drivers.postgres.errors import not_committed, unsure_commit
from oncekey.drivers.postgres.psycopg_errors import (
    FAILURES,
    cause,
    check_commit,
    commit_error,
    failure,
    is_taken,
    refuse_failed,
    statement_error,
    was_lost,
)
from oncekey.drivers.postgres.transactions import BEGIN, as_text, row_told
from oncekey.flow import Mode

if TYPE_CHECKING:
    from psycopg.pq.abc import PGconn, PGresult

    from oncekey.drivers.postgres.psycopg_connections import AsyncStoreConnection, StoreConnection
    from oncekey.flow import Row, Rows, Statement

COMMIT: Final = "COMMIT"
COMMIT_CLEANED: Final = f"COMMIT;{RESET}"


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
    """The same for statements that commit by themselves, and so may come with a commit's warning."""
    connection.unsure = False
    rows = execute(connection, mode, statement)
    if connection.unsure and mode is Mode.SINGLE:
        raise unsure_commit(statement.name)
    return rows


def begin(connection: StoreConnection, text: str, what: str) -> None:
    """Begin a transaction, with the settings in the text if there are any."""
    try:
        connection.execute(text)
    except psycopg.Error as error:
        raise statement_error(error, connection, Mode.ATOMIC, what) from error


def commit(connection: StoreConnection, what: str) -> None:
    """Commit, or raise what happened to it."""
    connection.unsure = False
    try:
        tag = psycopg.Cursor(connection).execute("COMMIT").statusmessage
    except psycopg.Error as error:
        raise commit_error(error, connection, what) from cause(error)
    check_commit(connection, tag, what)


def begin_with(connection: StoreConnection, first: Statement) -> Rows | None:
    """Begin a transaction with its first statement in the same message. None: it has to be executed by itself."""
    connection.told = None
    try:
        results = said(connection, f"{BEGIN};{as_text(first)}")
        refuse_failed(results)
    except FAILURES as error:
        raise statement_error(error, connection, Mode.ATOMIC, first.name) from cause(error)
    return _found(connection, results[-1])


def commit_with(connection: StoreConnection, last: Statement, what: str, *, cleans: bool) -> Rows | None:
    """Send a last statement, COMMIT, and the session's clean-up in one message. None: its place was taken."""
    connection.unsure, connection.told = False, None
    try:
        results = said(connection, f"{as_text(last)};{COMMIT_CLEANED if cleans else COMMIT}")
    except FAILURES as error:
        raise commit_error(error, connection, what) from cause(error)
    return _ended(connection, results, last.name, what)


def said(connection: StoreConnection, text: str) -> list[PGresult]:
    """Send several statements in one message; the reply to each, up to the first that failed."""
    with connection.lock:
        return connection.wait(_answers(connection.pgconn, text))


def undo(connection: StoreConnection) -> None:
    """Roll back if that is still possible; if not, the pool closes the connection."""
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


async def abegin_with(connection: AsyncStoreConnection, first: Statement) -> Rows | None:
    """`begin_with`, awaited."""
    connection.told = None
    try:
        results = await asaid(connection, f"{BEGIN};{as_text(first)}")
        refuse_failed(results)
    except FAILURES as error:
        raise statement_error(error, connection, Mode.ATOMIC, first.name) from cause(error)
    return _found(connection, results[-1])


async def acommit_with(connection: AsyncStoreConnection, last: Statement, what: str, *, cleans: bool) -> Rows | None:
    """`commit_with`, awaited."""
    connection.unsure, connection.told = False, None
    try:
        results = await asaid(connection, f"{as_text(last)};{COMMIT_CLEANED if cleans else COMMIT}")
    except FAILURES as error:
        raise commit_error(error, connection, what) from cause(error)
    return _ended(connection, results, last.name, what)


async def asaid(connection: AsyncStoreConnection, text: str) -> list[PGresult]:
    """Send several statements in one message; the reply to each, up to the first that failed."""
    async with connection.lock:
        return await connection.wait(_answers(connection.pgconn, text))


async def aundo(connection: AsyncStoreConnection) -> None:
    """`undo`, awaited."""
    with suppress(psycopg.Error):
        await psycopg.AsyncCursor(connection).execute("ROLLBACK")


def _answers(pgconn: PGconn, text: str) -> Generator[Any, Any, list[PGresult]]:
    pgconn.send_query(text.encode("ascii"))
    results: list[PGresult] = yield from generators.execute(pgconn)
    return results


def _ended(
    connection: StoreConnection | AsyncStoreConnection, results: list[PGresult], name: str, what: str
) -> Rows | None:
    """The meaning of the replies to a last statement, COMMIT and the clean-up.

    The server executes a message up to the first statement that fails: if the last statement failed there is no second
    reply, and if the clean-up failed the second reply says that everything is committed.
    """
    error = failure(results)
    if len(results) == 1 and error is not None:
        if is_taken(error):
            return None
        if not was_lost(error, connection):
            raise statement_error(error, connection, Mode.ATOMIC, name) from cause(error)
    committed = len(results) > 1 and results[1].command_status == b"COMMIT"
    if not committed:
        if error is not None:
            raise commit_error(error, connection, what) from cause(error)
        raise not_committed((results[1].command_status or b"").decode(), what)
    if error is not None:
        connection.pgconn.finish()  # the session is not clean
    if connection.unsure:
        raise unsure_commit(what)
    row = _told(connection)
    return () if row is None else [row]


def _found(connection: StoreConnection | AsyncStoreConnection, last: PGresult) -> Rows | None:
    """The row that a first statement sent in a notice; empty if there is nothing to report. None: execute it."""
    row = _told(connection)
    if row is None:
        return () if last.ntuples else None
    return [row]


def _told(connection: StoreConnection | AsyncStoreConnection) -> Row | None:
    return None if connection.told is None else row_told(connection.told)


def _has_rows(cursor: psycopg.Cursor[Any] | psycopg.AsyncCursor[Any]) -> bool:
    # `description` would say so, too, but it describes every column in full each time.
    return cursor.pgresult is not None and cursor.pgresult.nfields > 0
