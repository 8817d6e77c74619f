"""The messages that are sent to a server through asyncpg, each with the meaning of its failure."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from oncekey.core.errors import StoreError
from oncekey.drivers.guard import RESET
from oncekey.drivers.placeholders import numbered
from oncekey.drivers.postgres.asyncpg_connections import (
    FAILURES,
    StoreConnection,
    cause,
    check_commit,
    commit_error,
    is_busy,
    is_taken,
    severed,
    statement_error,
    was_lost,
    was_never_sent,
)
from oncekey.drivers.postgres.errors import unsure_commit
from oncekey.drivers.postgres.transactions import as_text, row_told
from oncekey.drivers.retries import lost_commit
from oncekey.flow import Mode, Statement

if TYPE_CHECKING:
    from oncekey.flow import Rows


async def execute(connection: Any, limit: float | None, mode: Mode, statement: Statement) -> Rows:  # noqa: ANN401
    """Execute one statement of a transaction of this mode; asyncpg cancels one that takes too long."""
    assert isinstance(statement.command, str)
    said = numbered(statement.command)
    try:
        rows: Rows = await connection.fetch(said.text, *said.arguments(statement.params), timeout=limit)
    except FAILURES as error:
        raise statement_error(error, connection, mode, statement.name) from cause(error)
    return rows


async def execute_alone(connection: Any, limit: float | None, mode: Mode, statement: Statement) -> Rows:  # noqa: ANN401
    """The same for statements that commit by themselves, and so may come with a commit's warning."""
    try:
        rows = await execute(connection, limit, mode, statement)
    except asyncio.CancelledError:
        if mode is Mode.SINGLE:
            connection.doubt.arise()
        raise
    if connection.unsure and mode is Mode.SINGLE:
        raise unsure_commit(statement.name)
    return rows


async def begin(connection: StoreConnection, then: str, limit: float, what: str) -> Any:  # noqa: ANN401
    """Begin a transaction at READ COMMITTED; the text `then` is sent in the same message."""
    try:
        return await connection.open(then, limit)
    except FAILURES as error:
        raise statement_error(error, connection, Mode.ATOMIC, what) from cause(error)


async def commit(connection: Any, transaction: Any, limit: float | None, what: str) -> None:  # noqa: ANN401
    """Commit, or raise what happened to it."""
    try:
        connection.attend()
        async with asyncio.timeout(limit):
            await transaction.commit()
    except asyncio.CancelledError:
        connection.doubt.arise()
        raise
    except FAILURES as error:
        raise commit_error(error, connection, what) from cause(error)
    check_commit(connection, what)


async def commit_with(
    connection: StoreConnection, last: Statement, limit: float, what: str, *, cleans: bool
) -> Rows | None:
    """Send a last statement, COMMIT, and the session's clean-up in one message. None: its place was taken.

    The server executes a message up to the first statement that fails:

    - an error, and the transaction is still open: the last statement failed, so nothing is committed;
    - an error, and it is over: the COMMIT was refused, or the clean-up after it failed. The statement's own proof finds
      out which; if that cannot be asked, the outcome is ambiguous;
    - no error: committed. A COMMIT is answered with ROLLBACK only where a statement had failed before (F20), and then
      the last statement would have failed, too.
    """
    try:
        await connection.finish(f"{as_text(last)};COMMIT;{RESET if cleans else ''}", limit)
    except FAILURES as error:
        if was_lost(error, connection) and not was_never_sent(error, connection):
            raise commit_error(error, connection, what) from cause(error)
        if connection.is_closed() or connection.is_in_transaction():
            if is_taken(error):
                return None
            raise statement_error(error, connection, Mode.ATOMIC, last.name) from cause(error)
        if not cleans or not await _was_committed(connection, last, limit, what):
            raise commit_error(error, connection, what) from cause(error)
        connection.terminate()  # the session is not clean
    if connection.unsure:
        raise unsure_commit(what)
    return () if connection.told is None else [row_told(connection.told)]


async def _was_committed(connection: StoreConnection, last: Statement, limit: float | None, what: str) -> bool:
    assert last.proof is not None
    try:
        rows = await execute(connection, limit, Mode.READ, Statement("proof", last.proof, last.params))
    except StoreError as error:
        connection.doubt.arise()
        raise lost_commit(what) from error
    return bool(rows[0]["committed"])


async def undo(connection: Any, transaction: Any, limit: float | None) -> None:  # noqa: ANN401
    """Roll back if that is still possible, else close the connection."""
    if connection.is_closed():
        return
    try:
        async with asyncio.timeout(limit):
            await transaction.rollback()
    except FAILURES as error:
        if is_busy(error):
            await severed(connection)
        connection.terminate()
