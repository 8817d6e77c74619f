"""A connection of the application's pool as it was when the pool opened it, after a handler of ours used it.

The pool is the application's, and so is what its own listeners for "connect" set up. What they set for a session is
gone with everything else, so they are called once more. What the address or `connect_args` asked for is kept by
PostgreSQL itself.
"""

from __future__ import annotations

import logging
from importlib import import_module
from typing import TYPE_CHECKING, Any

from sqlalchemy.util import greenlet_spawn

from oncekey.drivers.sqlalchemy_guard import is_in_transaction, raw_of
from oncekey.drivers.sqlalchemy_saying import package_of
from oncekey.drivers.sqlite import TEMPORARIES

if TYPE_CHECKING:
    from collections.abc import Callable

    from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine


log = logging.getLogger("oncekey")


async def as_opened(connection: AsyncConnection, engine: AsyncEngine) -> bool:
    """Whether the session is as it was opened: without what the handler may have left, with what the application set.

    If not, the connection is of no use to anybody.
    """
    raw = raw_of(connection)
    if raw is None or is_in_transaction(raw):
        return False
    package = package_of(raw)
    try:
        if package is None:
            return not await _has_temporaries(raw)
        await import_module(f"oncekey.drivers.{package}_connections").cleaned(raw)
        listeners = [listener for listener in engine.pool.dispatch.connect if _is_the_applications(listener)]
        if listeners:
            await greenlet_spawn(_connected, connection, listeners)
    except Exception as error:  # noqa: BLE001  (a listener of the application's may raise anything)
        log.warning("oncekey: a connection could not be reset and is closed: %s", type(error).__name__)
        return False
    return True


async def _has_temporaries(raw: Any) -> bool:  # noqa: ANN401  (aiosqlite's)
    """SQLite has no word that removes a handler's temporary tables, but to close its connection costs little."""
    cursor = await raw.execute(TEMPORARIES)
    try:
        return await cursor.fetchone() is not None
    finally:
        await cursor.close()


def _connected(connection: AsyncConnection, listeners: list[Callable[..., Any]]) -> None:
    assert connection.sync_connection is not None
    lent: Any = connection.sync_connection.connection
    for listener in listeners:
        listener(lent.dbapi_connection, lent._connection_record)  # noqa: SLF001  (what the pool itself hands them)
    # Most listeners leave it to the first user to commit what they set.
    lent.dbapi_connection.commit()


def _is_the_applications(listener: Callable[..., Any]) -> bool:
    """SQLAlchemy listens, too, to prepare the client's side of a connection, which a reset does not touch."""
    return not (getattr(listener, "__module__", None) or "").startswith("sqlalchemy.")
