"""The composition root: from a URL to a store, its driver and an engine. The only place that knows both sides.

Connecting does no I/O: connections are made when they are first needed, so an application can be imported, and
its mistakes in a URL found, without a database at hand.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType
from typing import TYPE_CHECKING, Any, Final, assert_never
from urllib.parse import unquote

from oncekey.core.errors import ConfigurationError
from oncekey.drivers.memory import AsyncMemoryDriver, MemoryDriver
from oncekey.drivers.postgres_address import objection
from oncekey.engine.shell import AsyncEngine, Engine
from oncekey.stores import postgres, sqlite
from oncekey.stores.memory import MemoryStore
from oncekey.stores.postgres import PostgresStore
from oncekey.stores.sqlite import SqliteStore

if TYPE_CHECKING:
    from sqlalchemy.ext.asyncio import AsyncEngine as SqlalchemyEngine

    from oncekey.core.model import Instant
    from oncekey.stores.migrations import SqlSchema

FORMS: Final = "memory:, sqlite:///relative.db, sqlite:////absolute.db or postgresql://user@host/database"
NO_STORE: Final = "keys are kept in PostgreSQL, in SQLite or in memory"
NO_ENGINE: Final = "a store is a URL or a SQLAlchemy engine made by create_async_engine(...)"
ENGINES: Final = "sqlite+aiosqlite or postgresql+asyncpg or postgresql+psycopg"
POOL_SIZE: Final = 10

_SCHEME: Final = re.compile(r"[a-z][a-z0-9+.]{0,30}")
_SQLITE: Final = {"sqlite": None, "sqlite+pysqlite3": "pysqlite3"}
_POSTGRES: Final = {
    "postgresql": None,
    "postgres": None,
    "postgresql+psycopg": "psycopg",
    "postgresql+asyncpg": "asyncpg",
}


class Kind(StrEnum):
    """The stores there are."""

    MEMORY = "memory"
    SQLITE = "sqlite"
    POSTGRES = "postgres"


@dataclass(frozen=True, slots=True)
class Address:
    """A store's URL, understood. `place` is the file or the DSN; `package` the driver that was asked for."""

    kind: Kind
    place: str = ""
    package: str | None = None
    pool_size: int = POOL_SIZE


def check_store(store: str | SqlalchemyEngine) -> None:
    """Find a mistake in what `Once` was given when it is made."""
    if isinstance(store, str):
        understand(store)
    else:
        _check_engine(store)


def connect(url: str, *, clock: Callable[[], Instant] | None = None) -> Engine:
    """An engine for blocking code."""
    address = understand(url)
    match address.kind:
        case Kind.MEMORY:
            return Engine(MemoryStore(clock=clock), MemoryDriver())
        case Kind.SQLITE:
            blocking = _driver("sqlite").SqliteDriver(address.place, module=_sqlite_module(address))
            return Engine(SqliteStore(writer=blocking.writer, clock=clock), blocking)
        case Kind.POSTGRES:
            if address.package == "asyncpg":
                raise ConfigurationError("asyncpg is for `async def` only: use postgresql+psycopg:// here")
            driver = _psycopg().PsycopgDriver(address.place, pool_size=address.pool_size)
            return Engine(PostgresStore(clock=clock), driver)
        case _:
            assert_never(address.kind)


def aconnect(url: str, *, clock: Callable[[], Instant] | None = None) -> AsyncEngine:
    """An engine for asyncio; one for each event loop."""
    address = understand(url)
    match address.kind:
        case Kind.MEMORY:
            return AsyncEngine(MemoryStore(clock=clock), AsyncMemoryDriver())
        case Kind.SQLITE:
            driver = _driver("sqlite_async").AsyncSqliteDriver(address.place, module=_sqlite_module(address))
            return AsyncEngine(SqliteStore(writer=driver.writer, clock=clock), driver)
        case Kind.POSTGRES:
            driver = _postgres_async(address.package)(address.place, pool_size=address.pool_size)
            return AsyncEngine(PostgresStore(clock=clock), driver)
        case _:
            assert_never(address.kind)


def aconnect_sqlalchemy(engine: SqlalchemyEngine, *, clock: Callable[[], Instant] | None = None) -> AsyncEngine:
    """An engine for asyncio on the application's own SQLAlchemy engine, which stays the application's."""
    _check_engine(engine)
    driver = _driver("sqlalchemy", needs=("sqlalchemy",), extra="sqlalchemy").SqlalchemyDriver(engine)
    store = SqliteStore(clock=clock) if engine.dialect.name == "sqlite" else PostgresStore(clock=clock)
    return AsyncEngine(store, driver)


def _check_engine(engine: SqlalchemyEngine) -> None:
    # Looked at by its class's name, so that SQLAlchemy is imported only by those who have it.
    ours = any(kind.__module__.partition(".")[0] == "sqlalchemy" for kind in type(engine).__mro__)
    if not ours or not hasattr(engine, "sync_engine"):
        raise ConfigurationError(NO_ENGINE)
    if engine.dialect.name not in ("sqlite", "postgresql"):
        raise ConfigurationError(f"there is no store for {engine.dialect.name}: make the engine for {ENGINES}")


def within(connection: Any, *, clock: Callable[[], Instant] | None = None) -> Engine:  # noqa: ANN401  (any of many)
    """An engine inside a connection's open transaction, which its owner commits: `sqlite3`, `psycopg`."""
    packages = _packages(connection)
    if packages & {"sqlite3", "pysqlite3"}:
        driver = _driver("within")
        return Engine(SqliteStore(clock=clock), driver.Within(driver.sqlite_execute(connection)))
    if "psycopg" in packages and hasattr(connection, "__enter__"):
        return Engine(PostgresStore(clock=clock), _psycopg().PsycopgWithin(connection))
    raise ConfigurationError(f"{_kind(connection)} is no blocking connection of sqlite3 or psycopg")


def awithin(connection: Any, *, clock: Callable[[], Instant] | None = None) -> AsyncEngine:  # noqa: ANN401
    """The same for asyncio: `asyncpg`, `psycopg`, `aiosqlite`."""
    packages = _packages(connection)
    if "aiosqlite" in packages:
        driver = _driver("within")
        return AsyncEngine(SqliteStore(clock=clock), driver.AsyncWithin(driver.aiosqlite_execute(connection)))
    if "asyncpg" in packages:
        return AsyncEngine(PostgresStore(clock=clock), _driver("asyncpg").AsyncpgWithin(connection))
    if "psycopg" in packages and hasattr(connection, "__aenter__"):
        return AsyncEngine(PostgresStore(clock=clock), _psycopg().AsyncPsycopgWithin(connection))
    raise ConfigurationError(f"{_kind(connection)} is no asyncio connection of asyncpg, psycopg or aiosqlite")


def migrations_for(url: str) -> SqlSchema:
    """The tables of a URL's store, without connecting to it."""
    address = understand(url)
    match address.kind:
        case Kind.MEMORY:
            raise ConfigurationError("memory: has no tables, so there is nothing to migrate")
        case Kind.SQLITE:
            return sqlite.tables()
        case Kind.POSTGRES:
            return postgres.tables()
        case _:
            assert_never(address.kind)


def understand(url: str) -> Address:
    """What a URL says, or a sentence about what it should."""
    scheme, colon, rest = url.partition(":")
    if not colon or _SCHEME.fullmatch(scheme) is None:
        raise ConfigurationError(f"{_safely(url)} is no store: say {FORMS}")
    if scheme == "memory":
        if rest.strip("/"):
            raise ConfigurationError("memory: has no name and no file: say memory:, without anything after it")
        return Address(Kind.MEMORY)
    if scheme in _SQLITE:
        return _sqlite(rest, _SQLITE[scheme])
    if scheme in _POSTGRES:
        return _postgres(scheme, rest)
    database, plus, driver = scheme.partition("+")
    if plus and database in {"sqlite", "postgresql", "postgres"}:
        known = " or ".join(
            f"{one}://" for one in (_SQLITE if database == "sqlite" else _POSTGRES) if one != "postgres"
        )
        raise ConfigurationError(f"oncekey has no driver {driver} for {database}: say {known}")
    raise ConfigurationError(f"there is no store for {scheme}: {NO_STORE}, say {FORMS}")


def _sqlite(rest: str, package: str | None) -> Address:
    if "?" in rest:
        raise ConfigurationError("a SQLite store takes no options; a question mark in a file's name is %3F")
    path = unquote(rest.removeprefix("///"))
    if not rest.startswith("///") or path in {"", ":memory:"}:
        raise ConfigurationError(
            "a SQLite store is a file: sqlite:///relative.db (three slashes) or sqlite:////absolute.db (four)"
        )
    return Address(Kind.SQLITE, path, package)


def _postgres(scheme: str, rest: str) -> Address:
    # What is not ours is passed on letter by letter: no library for URLs reads them as PostgreSQL does.
    place, mark, query = rest.partition("?")
    options = query.split("&") if mark else []
    sizes = [option.partition("=")[2] for option in options if option.startswith("pool_size=")]
    kept = "&".join(option for option in options if not option.startswith("pool_size="))
    dsn = f"postgresql:{place}?{kept}" if kept else f"postgresql:{place}"
    wrong = objection(dsn)
    if wrong is not None:
        raise ConfigurationError(wrong)
    return Address(Kind.POSTGRES, dsn, _POSTGRES[scheme], _pool_size(sizes))


def _sqlite_module(address: Address) -> ModuleType | None:
    if address.package is None:
        return None
    module: ModuleType = _driver("sqlite_files").repaired_module()
    return module


def _pool_size(sizes: list[str]) -> int:
    if not sizes:
        return POOL_SIZE
    if not sizes[-1].isascii() or not sizes[-1].isdigit() or int(sizes[-1]) < 1:
        raise ConfigurationError(f"pool_size={sizes[-1]} is no number of connections: pool_size=10 is one")
    return int(sizes[-1])


def _postgres_async(package: str | None) -> Callable[..., Any]:
    """The driver that was asked for; if none was, asyncpg where it is installed, else psycopg."""
    if package == "asyncpg" or (package is None and find_spec("asyncpg") is not None):
        module, name = _driver("asyncpg", needs=("asyncpg",), extra="asyncpg"), "AsyncpgDriver"
    else:
        module, name = _psycopg(), "AsyncPsycopgDriver"
    driver: Callable[..., Any] = getattr(module, name)
    return driver


def _psycopg() -> ModuleType:
    return _driver("psycopg", needs=("psycopg",), extra="postgres")


def _driver(name: str, *, needs: tuple[str, ...] = (), extra: str = "") -> ModuleType:
    """The module of a driver, with the command that installs what it needs if that is missing."""
    for package in needs:
        if find_spec(package) is None:
            raise ConfigurationError(f"{package} is not installed: pip install 'oncekey[{extra}]'")
    return import_module(f"oncekey.drivers.{name}")


def _packages(connection: object) -> set[str]:
    """Where a connection comes from, its own class or one that it extends; nothing needs to be imported."""
    return {kind.__module__.partition(".")[0] for kind in type(connection).__mro__}


def _kind(connection: object) -> str:
    return f"{type(connection).__module__}.{type(connection).__qualname__}"


def _safely(url: str) -> str:
    """A URL may hold a password, and what is no URL may be one."""
    return repr(url) if len(url) < 20 and "@" not in url else "what was given"  # noqa: PLR2004  (a short word)
