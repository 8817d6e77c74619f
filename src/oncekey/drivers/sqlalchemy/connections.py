"""What oncekey does on a connection of an `AsyncEngine`: executes, commits, resets, and returns it to the pool."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final

from sqlalchemy.ext.asyncio import AsyncConnection
from sqlalchemy.util import greenlet_spawn

from oncekey.drivers.postgres.server import READS_ONLY
from oncekey.drivers.sqlalchemy.errors import FAILURES, sqlstate
from oncekey.drivers.sqlalchemy.execute import (
    committing,
    connected,
    is_in_transaction,
    listeners,
    module_of,
    package_of,
    prepared,
    raw_of,
    rows_of,
)
from oncekey.drivers.sqlite.execute import TEMPORARIES

if TYPE_CHECKING:
    from sqlalchemy.engine import Connection  # asyncio only

    from oncekey.drivers.postgres.unconfirmed import UnconfirmedCommits
    from oncekey.flow import Rows, Statement


NOT_RESET: Final = "oncekey: a connection could not be reset and is closed: %s"

_log = logging.getLogger("oncekey")


async def execute(connection: AsyncConnection, statement: Statement) -> Rows:
    """Execute one statement."""
    own = prepared(statement)
    return rows_of(own, await connection.execute(own.executable, statement.params))


async def committed(connection: AsyncConnection, unconfirmed: UnconfirmedCommits, what: str) -> None:
    """Commit. SQLAlchemy does not show the reply, so the caller has to know that there is something to commit."""
    with committing(connection.sync_connection, unconfirmed, what):
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


async def cancel_and_close(raw: Any) -> None:  # noqa: ANN401  (the driver's)
    """Close the driver's own connection although a statement is under way and its reply may be waited for."""
    package = package_of(raw)
    if package is not None:
        await module_of(package).cancel_and_close(raw)
    elif hasattr(raw, "interrupt"):
        await raw.interrupt()


async def as_opened(connection: Connection | None) -> bool:
    """Reset the session to how it was opened, with what the application's listeners set; whether that worked.

    If not, the connection must not be used again.
    """
    raw = raw_of(connection)
    if connection is None or raw is None or is_in_transaction(raw):
        return False
    package = package_of(raw)
    try:
        if package is None:
            return not await _has_temporaries(raw)
        await module_of(package).cleaned(raw)
        # MariaDB resets what SQLAlchemy itself has set for a session, too.
        found = listeners(connection, all_of_them=package == "aiomysql")
        if found:
            await greenlet_spawn(connected, connection, found)
    except Exception as error:  # noqa: BLE001  (a listener of the application's may raise anything)
        _log.warning(NOT_RESET, type(error).__name__)
        return False
    return True


async def _has_temporaries(raw: Any) -> bool:  # noqa: ANN401  (SQLite's)
    """Whether a handler left temporary tables: SQLite has no statement that removes them all, so it is closed then."""
    cursor = await raw.execute(TEMPORARIES)
    try:
        return await cursor.fetchone() is not None
    finally:
        await cursor.close()
