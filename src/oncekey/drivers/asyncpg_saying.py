"""What is said to a server through asyncpg, each sentence with what its failure means."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from oncekey.drivers.asyncpg_connections import (
    FAILURES,
    cause,
    check_commit,
    commit_error,
    is_busy,
    severed,
    statement_error,
)
from oncekey.drivers.placeholders import numbered
from oncekey.drivers.postgres_errors import unsure_commit
from oncekey.flow import Mode

if TYPE_CHECKING:
    from oncekey.flow import Rows, Statement


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
    """The same where each statement commits by itself, and so can come with a commit's warning."""
    rows = await execute(connection, limit, mode, statement)
    if connection.unsure and mode is Mode.SINGLE:
        raise unsure_commit(statement.name)
    return rows


async def begin(connection: Any, settings: str, limit: float | None, what: str) -> Any:  # noqa: ANN401
    """Begin a transaction at READ COMMITTED; the settings go along in the same message."""
    try:
        async with asyncio.timeout(limit):
            return await connection.open(settings)
    except FAILURES as error:
        raise statement_error(error, connection, Mode.ATOMIC, what) from cause(error)


async def commit(connection: Any, transaction: Any, limit: float | None, what: str) -> None:  # noqa: ANN401
    """Commit, or say what became of it."""
    try:
        connection.attend()
        async with asyncio.timeout(limit):
            await transaction.commit()
    except FAILURES as error:
        raise commit_error(error, connection, what) from cause(error)
    check_commit(connection, what)


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
