"""Stores on existing connections of the application: a SQLAlchemy engine, or a framework's own database."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Final, cast

from oncekey.core.errors import ConfigurationError
from oncekey.engine.blocking_shell import Engine
from oncekey.engine.shell import AsyncEngine
from oncekey.ports.driver import Borrowed
from oncekey.wire import Clock, MariadbStore, PostgresStore, SqliteStore, driver_module

if TYPE_CHECKING:
    from sqlalchemy.engine import Engine as BlockingEngine
    from sqlalchemy.ext.asyncio import AsyncEngine as SqlalchemyEngine

    from oncekey.ports.store import Store

NO_ENGINE: Final = (
    "a store is a URL or a SQLAlchemy engine, from create_async_engine(...) for `async def` or "
    "create_engine(...) for `def`"
)
NO_DATABASE: Final = "the database of {title} is not known yet: connect it to an application first"
NO_BORROWED: Final = "there is no store for {dialect}: keys can be stored in PostgreSQL, SQLite or MariaDB"
ASYNC_ONLY: Final = (
    "this Once has no blocking connections, because it was given a SQLAlchemy AsyncEngine: give it a URL"
)
ENGINES: Final = "sqlite+aiosqlite or postgresql+asyncpg or postgresql+psycopg or mysql+aiomysql"
_DIALECTS: Final[Mapping[str, Callable[..., Store]]] = {
    "postgresql": PostgresStore,
    "sqlite": SqliteStore,
    "mysql": MariadbStore,
}
"""The stores of databases that frameworks connect to."""


def source_of(store: SqlalchemyEngine | BlockingEngine | Borrowed) -> SqlalchemyEngine | Borrowed:
    """Check the argument of `Once` when it is created."""
    if isinstance(store, Borrowed):
        if store.dialect is not None:
            _borrowed_store(store)
        return store
    if hasattr(store, "sync_engine") or not _is_sqlalchemys(store):
        _check_engine(cast("SqlalchemyEngine", store))
        return cast("SqlalchemyEngine", store)
    borrowed: Borrowed = driver_module("sqlalchemy.blocking").BorrowedEngine(store)
    return borrowed


def connect_to(source: SqlalchemyEngine | Borrowed) -> Engine:
    """An engine for blocking code."""
    if not isinstance(source, Borrowed):
        raise ConfigurationError(ASYNC_ONLY)
    return Engine(_borrowed_store(source), source.driver())


def aconnect_to(source: SqlalchemyEngine | Borrowed) -> AsyncEngine:
    """An engine for asyncio; a framework's blocking connections are used in threads."""
    if not isinstance(source, Borrowed):
        return aconnect_sqlalchemy(source)
    return AsyncEngine(_borrowed_store(source), driver_module("threads").threaded(source.driver()))


def _borrowed_store(source: Borrowed) -> Store:
    dialect = source.dialect
    if dialect is None:
        raise ConfigurationError(NO_DATABASE.format(title=source.title))
    if dialect not in _DIALECTS:
        raise ConfigurationError(NO_BORROWED.format(dialect=dialect))
    made: Store = _DIALECTS[dialect]()
    return made


def aconnect_sqlalchemy(engine: SqlalchemyEngine, *, clock: Clock = None) -> AsyncEngine:
    """An engine for asyncio on the application's own SQLAlchemy engine, which oncekey does not close."""
    _check_engine(engine)
    drivers = partial(driver_module, needs=("sqlalchemy",), extra="sqlalchemy")
    match engine.dialect.name:
        case "sqlite":
            return AsyncEngine(SqliteStore(clock=clock), drivers("sqlalchemy.asynchronous").SqlalchemyDriver(engine))
        case "postgresql":
            return AsyncEngine(PostgresStore(clock=clock), drivers("sqlalchemy.asynchronous").SqlalchemyDriver(engine))
        case _:
            driver = drivers("sqlalchemy.mariadb").SqlalchemyMariadbDriver(engine)
            return AsyncEngine(MariadbStore(clock=clock), driver)


def _check_engine(engine: SqlalchemyEngine) -> None:
    if not _is_sqlalchemys(engine) or not hasattr(engine, "sync_engine"):
        raise ConfigurationError(NO_ENGINE)
    if engine.dialect.name not in ("sqlite", "postgresql", "mysql", "mariadb"):
        raise ConfigurationError(f"there is no store for {engine.dialect.name}: create the engine for {ENGINES}")


def _is_sqlalchemys(engine: object) -> bool:
    # Recognised by the name of its class, so that SQLAlchemy is not imported here.
    return hasattr(engine, "dialect") and "sqlalchemy" in _packages(engine)


def _packages(connection: object) -> set[str]:
    """The packages of a connection's class and its base classes, without importing them."""
    return {kind.__module__.partition(".")[0] for kind in type(connection).__mro__}
