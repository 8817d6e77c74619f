"""oncekey's operations on a connection of an `AsyncEngine`: execute, commit, reset, return to the pool."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final

from sqlalchemy.ext.asyncio import AsyncConnection
from sqlalchemy.util import greenlet_spawn

from oncekey.core.errors import ConfigurationError, StoreUnavailableError
from oncekey.databases.postgres.server import READS_ONLY
from oncekey.databases.retries import LostError
from oncekey.databases.sqlalchemy.errors import FAILURES, sqlstate
from oncekey.databases.sqlalchemy.execute import (
    VETTED,
    committing,
    connected,
    is_in_transaction,
    listeners,
    mixes_statements_up,
    module_of,
    note_file,
    package_of,
    prepared,
    raw_of,
    rows_of,
    was_altered,
)
from oncekey.databases.sqlite.execute import TEMPORARIES
from oncekey.databases.sqlite.files import GONE, REOPENED, OpenedFile

if TYPE_CHECKING:
    from sqlalchemy.engine import Connection  # asyncio only

    from oncekey.core.flow import Rows, Statement
    from oncekey.databases.postgres.unconfirmed import UnconfirmedCommits


POOLED: Final = (
    "a connection pooler is in front of PostgreSQL, and the engine keeps prepared statements under names that other "
    "clients of the pooler use for other statements: create it with ?prepared_statement_cache_size=0 in its URL and "
    'connect_args={"statement_cache_size": 0, "prepared_statement_name_func": str} for asyncpg, or with '
    'connect_args={"prepare_threshold": None} for psycopg'
)
NOT_RESET: Final = "oncekey: a connection could not be reset; it was closed: %s"
_DEAD: Final[tuple[type[Exception], ...]] = (*FAILURES, RuntimeError)
"""Errors of a lost connection; uvloop raises RuntimeError for a closed transport, through aiomysql."""

_log = logging.getLogger("oncekey")


async def vetted(connection: AsyncConnection) -> None:
    """Raise for a connection that must not be used for keys.

    The check for a pooler in front of the server runs once per connection; the check that its file is still the one at
    its path runs each time. A connection is dropped if a new one would open another file, or would open it writable.
    """
    sync = connection.sync_connection
    assert sync is not None
    if VETTED not in sync.info:
        try:
            await _vet(sync)
        except LostError:
            await AsyncConnection.invalidate(connection)
            raise
    opened: OpenedFile | None = sync.info[VETTED]
    if opened is None or not opened.is_outdated:
        return
    if opened.is_gone:  # a new connection would create the file
        raise StoreUnavailableError(GONE)
    await AsyncConnection.invalidate(connection)
    raise LostError(REOPENED)


async def _vet(connection: Connection) -> None:
    if connection.dialect.name == "sqlite":
        await greenlet_spawn(connected, connection, [note_file])
        return
    if mixes_statements_up(connection):
        raw = raw_of(connection)
        package = package_of(raw)
        assert package is not None
        try:
            pooled = await module_of(package).is_pooled(raw)
        except Exception as error:
            raise LostError("the connection was lost in the pool") from error
        if pooled and package == "asyncpg":
            raise ConfigurationError(POOLED)
        if pooled:
            _log.warning(POOLED)
            raw.prepare_threshold = None
    connection.info[VETTED] = None


async def execute(connection: AsyncConnection, statement: Statement) -> Rows:
    """Execute one statement."""
    own = prepared(statement)
    return rows_of(own, await connection.execute(own.executable, statement.params))


async def committed(connection: AsyncConnection, unconfirmed: UnconfirmedCommits, what: str) -> None:
    """Commit. SQLAlchemy does not expose the reply, so the caller must ensure that there is something to commit."""
    with committing(connection.sync_connection, unconfirmed, what):
        await AsyncConnection.commit(connection)


async def forsaken(connection: AsyncConnection, error: BaseException) -> None:
    """Drop the connections to a server that rejects writes: another server may be the primary now."""
    if sqlstate(error) == READS_ONLY:
        with suppress(*FAILURES):
            await AsyncConnection.invalidate(connection)


async def closed(connection: AsyncConnection, *, clean: Callable[[], Awaitable[bool]] | None = None) -> None:
    """Roll back what is open, optionally reset the session, and return the connection to its pool."""
    try:
        if connection.get_transaction() is not None:
            # Closing alone skips the rollback if SQLAlchemy assumes that a failed commit ended the transaction.
            await AsyncConnection.rollback(connection)
        if clean is not None and not await clean():
            await discarded(connection)
            return
        await AsyncConnection.close(connection)
    except _DEAD:
        # The connection is dead, so there is nothing left to roll back.
        await discarded(connection)


async def discarded(connection: AsyncConnection) -> None:
    """Close the connection instead of returning it."""
    with suppress(*_DEAD):
        await AsyncConnection.invalidate(connection)
    await AsyncConnection.close(connection)


async def cancel_and_close(raw: Any) -> None:  # noqa: ANN401  (the driver's)
    """Close the driver's own connection even while a statement is running and its reply is awaited."""
    package = package_of(raw)
    if package is not None:
        await module_of(package).cancel_and_close(raw)
    elif hasattr(raw, "interrupt"):
        await raw.interrupt()


async def as_opened(connection: Connection | None) -> bool:
    """Reset the session to its initial state, including the application's listeners; returns whether it worked.

    If not, the connection must not be used again.
    """
    raw = raw_of(connection)
    if connection is None or raw is None or is_in_transaction(raw):
        return False
    package = package_of(raw)
    try:
        if package is None:
            return not (was_altered(connection) or await _has_temporaries(raw))
        await module_of(package).cleaned(raw)
        # MariaDB also resets what SQLAlchemy itself has set for a session.
        found = listeners(connection, all_of_them=package == "aiomysql")
        if found:
            await greenlet_spawn(connected, connection, found)
    except Exception as error:  # noqa: BLE001  (a listener of the application's may raise anything)
        _log.warning(NOT_RESET, type(error).__name__)
        return False
    return True


async def _has_temporaries(raw: Any) -> bool:  # noqa: ANN401  (SQLite's)
    """Whether a handler left temporary tables: SQLite cannot remove them all in one statement, so it is closed."""
    cursor = await raw.execute(TEMPORARIES)
    try:
        return await cursor.fetchone() is not None
    finally:
        await cursor.close()
