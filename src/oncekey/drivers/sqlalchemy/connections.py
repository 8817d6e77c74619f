"""What oncekey does on a connection of an `AsyncEngine`: executes, commits, and returns it to the pool."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import TYPE_CHECKING

from sqlalchemy.ext.asyncio import AsyncConnection

from oncekey.drivers.postgres.errors import READS_ONLY
from oncekey.drivers.sqlalchemy.errors import FAILURES, sqlstate
from oncekey.drivers.sqlalchemy.execute import committing, prepared, rows_of

if TYPE_CHECKING:
    from oncekey.drivers.postgres.doubt import Doubt
    from oncekey.flow import Rows, Statement


async def execute(connection: AsyncConnection, statement: Statement) -> Rows:
    """Execute one statement."""
    own = prepared(statement)
    return rows_of(own, await connection.execute(own.said, statement.params))


async def committed(connection: AsyncConnection, doubt: Doubt, what: str) -> None:
    """Commit. SQLAlchemy does not show the reply, so the caller has to know that there is something to commit."""
    with committing(connection.sync_connection, doubt, what):
        await AsyncConnection.commit(connection)


async def forsaken(connection: AsyncConnection, error: BaseException) -> None:
    """Drop the connections to a server that takes no writes: another server may take them by now."""
    if sqlstate(error) == READS_ONLY:
        with suppress(*FAILURES):
            await AsyncConnection.invalidate(connection)


async def closed(connection: AsyncConnection, *, clean: Callable[[], Awaitable[bool]] | None = None) -> None:
    """Roll back what is open, reset the session if asked, and return the connection to its pool."""
    try:
        if connection.get_transaction() is not None:
            # Closing alone skips the roll-back if SQLAlchemy believes that a failed commit ended the transaction.
            await AsyncConnection.rollback(connection)
        if clean is not None and not await clean():
            await discarded(connection)
            return
        await AsyncConnection.close(connection)
    except FAILURES:
        # The connection is dead, so there is nothing left to roll back.
        await discarded(connection)


async def discarded(connection: AsyncConnection) -> None:
    """Close the connection instead of returning it."""
    with suppress(*FAILURES):
        await AsyncConnection.invalidate(connection)
    await AsyncConnection.close(connection)
