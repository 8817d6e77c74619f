"""The driver's own connection below SQLAlchemy's: what it is doing, how it is closed, how its session is reset.

The pool belongs to the application, and so do its listeners for "connect". What they set in a session is reset with
everything else after a handler, so they are called once more. PostgreSQL itself keeps what the address or
`connect_args` asked for.
"""

from __future__ import annotations

import logging
from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

from sqlalchemy.pool import AssertionPool, QueuePool, SingletonThreadPool, StaticPool
from sqlalchemy.util import greenlet_spawn

from oncekey.core.errors import ConfigurationError
from oncekey.drivers.slots import business_share
from oncekey.drivers.sqlite.execute import TEMPORARIES

if TYPE_CHECKING:
    from collections.abc import Callable

    from sqlalchemy.engine import Connection
    from sqlalchemy.pool import Pool


_MODULES: Final = {
    "asyncpg": "postgres.asyncpg_connections",
    "psycopg": "postgres.psycopg_connections",
    "aiomysql": "mariadb.aiomysql_session",
}
"""Where is written how a connection of a package is ended and cleaned."""

log = logging.getLogger("oncekey")

TOO_SMALL: Final = (
    "the engine's pool has only one connection, but while a handler holds one, its key's record needs another: use "
    "{make}(..., pool_size=2) or more"
)

NOT_RESET: Final = "oncekey: a connection could not be reset and is closed: %s"

_ONE_CONNECTION: Final = (StaticPool, SingletonThreadPool, AssertionPool)


def places_in(pool: Pool, make: str) -> int | None:
    """How many connections of a pool handlers may hold; None where it has no limit. `make` makes an engine."""
    if isinstance(pool, _ONE_CONNECTION):
        raise ConfigurationError(TOO_SMALL.format(make=make))
    if not isinstance(pool, QueuePool):
        return None
    size, overflow = pool.size(), int(getattr(pool, "_max_overflow", -1))
    if size == 0 or overflow < 0:
        return None
    if size + overflow == 1:
        raise ConfigurationError(TOO_SMALL.format(make=make))
    return business_share(size + overflow)


def raw_of(connection: Connection | None) -> Any:  # noqa: ANN401  (asyncpg's, psycopg's or aiosqlite's)
    """The driver's own connection; None if SQLAlchemy has dropped it."""
    if connection is None or connection.closed or connection.invalidated:
        return None
    return connection.connection.driver_connection


def is_in_transaction(raw: Any) -> bool | None:  # noqa: ANN401  (asyncpg's, psycopg's or aiosqlite's)
    """Whether the driver's own connection is in a transaction. None: it does not say."""
    if hasattr(raw, "is_in_transaction"):
        return bool(raw.is_in_transaction())
    if hasattr(raw, "get_transaction_status"):
        return bool(raw.get_transaction_status())
    status = getattr(getattr(raw, "info", None), "transaction_status", None)
    return None if status is None else status.name != "IDLE"


def package_of(raw: object) -> str | None:
    """Whose connection it is, or extends: asyncpg's, psycopg's or aiomysql's. None: SQLite's, or there is none."""
    packages = {kind.__module__.partition(".")[0] for kind in type(raw).__mro__}
    return next((one for one in _MODULES if one in packages), None)


async def severed(raw: Any) -> None:  # noqa: ANN401  (asyncpg's, psycopg's or aiosqlite's)
    """Close the driver's own connection although a statement is under way and its reply may be waited for."""
    package = package_of(raw)
    if package is not None:
        await import_module(f"oncekey.drivers.{_MODULES[package]}").severed(raw)
    elif hasattr(raw, "interrupt"):
        await raw.interrupt()


def severed_blocking(raw: Any) -> None:  # noqa: ANN401  (psycopg's or sqlite3's)
    """The same for a blocking connection, which another thread waits on."""
    if package_of(raw) is not None:
        import_module("oncekey.drivers.postgres.psycopg_connections").severed_blocking(raw)
    elif raw is not None:
        raw.interrupt()


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
        await import_module(f"oncekey.drivers.{_MODULES[package]}").cleaned(raw)
        # MariaDB resets what SQLAlchemy itself has set for a session, too.
        listeners = _listeners(connection, all_of_them=package == "aiomysql")
        if listeners:
            await greenlet_spawn(_connected, connection, listeners)
    except Exception as error:  # noqa: BLE001  (a listener of the application's may raise anything)
        log.warning(NOT_RESET, type(error).__name__)
        return False
    return True


def as_opened_blocking(connection: Connection) -> bool:
    """The same for a blocking connection."""
    raw = raw_of(connection)
    if raw is None or is_in_transaction(raw):
        return False
    try:
        if package_of(raw) is None:
            return raw.execute(TEMPORARIES).fetchone() is None
        import_module("oncekey.drivers.postgres.psycopg_connections").cleaned_blocking(raw)
        _connected(connection, _listeners(connection))
    except Exception as error:  # noqa: BLE001
        log.warning(NOT_RESET, type(error).__name__)
        return False
    return True


def _listeners(connection: Connection, *, all_of_them: bool = False) -> list[Callable[..., Any]]:
    return [one for one in connection.engine.pool.dispatch.connect if all_of_them or _is_the_applications(one)]


async def _has_temporaries(raw: Any) -> bool:  # noqa: ANN401  (aiosqlite's)
    """Whether a handler left temporary tables: SQLite has no statement that removes them all, so it is closed then."""
    cursor = await raw.execute(TEMPORARIES)
    try:
        return await cursor.fetchone() is not None
    finally:
        await cursor.close()


def _connected(connection: Connection, listeners: list[Callable[..., Any]]) -> None:
    if not listeners:
        return
    lent: Any = connection.connection
    for listener in listeners:
        listener(lent.dbapi_connection, lent._connection_record)  # noqa: SLF001  (what the pool itself hands them)
    # Most listeners leave it to the first user to commit what they set.
    lent.dbapi_connection.commit()


def _is_the_applications(listener: Callable[..., Any]) -> bool:
    """Whether it is not SQLAlchemy's own listener: those set up the client's side, which a reset does not touch."""
    return not (getattr(listener, "__module__", None) or "").startswith("sqlalchemy.")
