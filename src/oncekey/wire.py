"""The composition root: from a URL to a store, its driver and an engine. The only place that knows both sides.

A store is declared by one row of `STORES`: the schemes of its URLs and how they are read, its drivers with the extra
that installs what each needs, and how store and driver are put together. What it can do is not declared: it is seen
from the protocols that its store and its drivers satisfy (`abilities`).

Connecting does no I/O: connections are made when they are first needed, so an application can be imported, and
its mistakes in a URL found, without a database at hand.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType
from typing import TYPE_CHECKING, Any, Final, TypeAlias, TypeVar, cast

from oncekey import addresses
from oncekey.addresses import Address, Kind
from oncekey.core.errors import ConfigurationError
from oncekey.engine.shell import AsyncEngine, Engine
from oncekey.ports import AsyncShares, Borrowed, Shares, Store
from oncekey.stores import mariadb, postgres, sqlite
from oncekey.stores.cells import CellStore, DynamoStore
from oncekey.stores.mariadb import MariadbStore
from oncekey.stores.memory import MemoryStore
from oncekey.stores.postgres import PostgresStore
from oncekey.stores.sqlite import SqliteStore

if TYPE_CHECKING:
    from sqlalchemy.engine import Engine as BlockingEngine
    from sqlalchemy.ext.asyncio import AsyncEngine as SqlalchemyEngine

    from oncekey.core.model import Instant
    from oncekey.sealing import Seal
    from oncekey.stores.sql import SqlSchema

__all__ = [
    "FORMS",
    "STORES",
    "Abilities",
    "Address",
    "Declared",
    "DriverChoice",
    "Kind",
    "Source",
    "abilities",
    "aconnect",
    "aconnect_sqlalchemy",
    "aconnect_to",
    "called",
    "check_stakes",
    "connect",
    "connect_to",
    "declared",
    "has_threads",
    "migrations_for",
    "source_of",
    "understand",
]

Clock: TypeAlias = "Callable[[], Instant] | None"
"""Gives every instant, in tests that own time."""

Source: TypeAlias = "str | SqlalchemyEngine | Borrowed"
"""Where the keys are kept: a URL, or a database that the application has connected to already."""

Given: TypeAlias = "Source | BlockingEngine"
"""What `Once` is given."""

NO_ENGINE: Final = (
    "a store is a URL or a SQLAlchemy engine, made by create_async_engine(...) for `async def` or by "
    "create_engine(...) for `def`"
)
NO_DATABASE: Final = "it is not known yet which database {title} has: let it connect to an application first"
NO_BORROWED: Final = "there is no store for {dialect}: keys are kept in PostgreSQL, SQLite or MariaDB"
ASYNC_ONLY: Final = (
    "this Once has no blocking connections, because it was given a SQLAlchemy AsyncEngine: give it a URL"
)
ENGINES: Final = "sqlite+aiosqlite or postgresql+asyncpg or postgresql+psycopg or mysql+aiomysql"

_SCHEME: Final = re.compile(r"[a-z][a-z0-9+.]{0,30}")


@dataclass(frozen=True, slots=True)
class DriverChoice:
    """One driver of a store."""

    driver: str
    """Its class, as `module:name` below `oncekey.drivers`; imported when it is needed."""
    package: str | None = None
    """By which name a URL asks for it: `postgresql+asyncpg`. None: whatever the URL asks for, this is it."""
    needs: tuple[str, ...] = ()
    """The packages that it imports."""
    extra: str = ""
    """What of `oncekey[...]` installs them."""

    @property
    def missing(self) -> str | None:
        """The package that is not installed."""
        return next((name for name in self.needs if find_spec(name) is None), None)

    def check(self) -> None:
        """Refuse, with the command that installs what is missing."""
        missing = self.missing
        if missing is not None:
            raise ConfigurationError(f"{missing} is not installed: pip install 'oncekey[{self.extra}]'")

    def load(self) -> Any:  # noqa: ANN401  (a class of a driver)
        """The class of the driver."""
        self.check()
        module, _, name = self.driver.partition(":")
        return getattr(import_module(f"oncekey.drivers.{module}"), name)


@dataclass(frozen=True, slots=True)
class Declared:
    """One store."""

    kind: Kind
    title: str
    """Its name in sentences."""
    forms: tuple[str, ...]
    """Examples of its URLs."""
    schemes: Mapping[str, str | None]
    """The schemes of its URLs, each with the package of the driver that it asks for."""
    read: Callable[[str, str, str | None], Address]
    """Understands a URL: its scheme, what follows the colon, and the package that the scheme asks for."""
    blocking: tuple[DriverChoice, ...]
    """Its drivers for threads, the one that is preferred first."""
    asynchronous: tuple[DriverChoice, ...]
    """Its drivers for asyncio, the one that is preferred first."""
    store: Callable[..., Store]
    """Makes the store, with a `clock` or without."""
    join: Callable[[Any, Address, Clock], tuple[Store, Any]]
    """Puts store and driver together: of the driver's class, where it is, and a clock."""
    tables: Callable[[], SqlSchema] | None = None
    """Its tables; None: it has none."""
    low_stakes: str | None = None
    """Why it is only for requests of which a second execution does little harm; None: it is for all."""


def _join_memory(driver: Any, _: Address, clock: Clock) -> tuple[Store, Any]:  # noqa: ANN401
    return MemoryStore(clock=clock), driver()


def _join_sqlite(driver: Any, address: Address, clock: Clock) -> tuple[Store, Any]:  # noqa: ANN401
    opened = driver(address.place, module=_sqlite_module(address))
    return SqliteStore(writer=opened.writer, clock=clock), opened


def _join_postgres(driver: Any, address: Address, clock: Clock) -> tuple[Store, Any]:  # noqa: ANN401
    return PostgresStore(clock=clock), driver(address.place, pool_size=address.pool_size)


def _join_cells(driver: Any, address: Address, clock: Clock) -> tuple[Store, Any]:  # noqa: ANN401
    return CellStore(clock=clock), driver(address.place)


def _join_dynamodb(driver: Any, address: Address, clock: Clock) -> tuple[Store, Any]:  # noqa: ANN401
    place = {name: value or None for name, value in address.options}
    return DynamoStore(clock=clock), driver(
        _driver("dynamodb").Table(address.place, pool_size=address.pool_size, **place)
    )


def _join_mariadb(driver: Any, address: Address, clock: Clock) -> tuple[Store, Any]:  # noqa: ANN401
    return MariadbStore(clock=clock), driver(address.place, pool_size=address.pool_size)


STORES: Final[tuple[Declared, ...]] = (
    Declared(
        kind=Kind.MEMORY,
        title="memory",
        forms=("memory:",),
        schemes={"memory": None},
        read=addresses.memory,
        blocking=(DriverChoice("memory:MemoryDriver"),),
        asynchronous=(DriverChoice("memory:AsyncMemoryDriver"),),
        store=MemoryStore,
        join=_join_memory,
    ),
    Declared(
        kind=Kind.SQLITE,
        title="SQLite",
        forms=("sqlite:///relative.db", "sqlite:////absolute.db"),
        schemes={"sqlite": None, "sqlite+pysqlite3": "pysqlite3"},
        read=addresses.sqlite,
        blocking=(DriverChoice("sqlite.blocking:SqliteDriver"),),
        asynchronous=(DriverChoice("sqlite.asynchronous:AsyncSqliteDriver"),),
        store=SqliteStore,
        join=_join_sqlite,
        tables=sqlite.tables,
    ),
    Declared(
        kind=Kind.POSTGRES,
        title="PostgreSQL",
        forms=("postgresql://user@host/database",),
        schemes={
            "postgresql": None,
            "postgres": None,
            "postgresql+psycopg": "psycopg",
            "postgresql+asyncpg": "asyncpg",
        },
        read=addresses.postgres,
        blocking=(DriverChoice("postgres.psycopg:PsycopgDriver", "psycopg", ("psycopg",), "postgres"),),
        asynchronous=(
            DriverChoice("postgres.asyncpg:AsyncpgDriver", "asyncpg", ("asyncpg",), "asyncpg"),
            DriverChoice("postgres.psycopg_async:AsyncPsycopgDriver", "psycopg", ("psycopg",), "postgres"),
        ),
        store=PostgresStore,
        join=_join_postgres,
        tables=postgres.tables,
    ),
    Declared(
        kind=Kind.REDIS,
        title="Redis",
        forms=("redis://host:6379/0", "redis+cluster://host:7000,host:7001", "redis+sentinel://host:26379/name/0"),
        schemes=dict.fromkeys(
            f"{base}{mode}" for base in ("redis", "rediss") for mode in ("", "+cluster", "+sentinel")
        ),
        read=addresses.redis,
        blocking=(DriverChoice("redis:RedisDriver", needs=("redis",), extra="redis"),),
        asynchronous=(DriverChoice("redis:AsyncRedisDriver", needs=("redis",), extra="redis"),),
        store=CellStore,
        join=_join_cells,
        low_stakes=(
            "Redis can forget a key that it has acknowledged, when it fails over or before it has written its disk, "
            "and the next retry is then executed again"
        ),
    ),
    Declared(
        kind=Kind.DYNAMODB,
        title="DynamoDB",
        forms=("dynamodb://region/table",),
        schemes={"dynamodb": None},
        read=addresses.dynamodb,
        blocking=(DriverChoice("dynamodb:DynamoDriver", None, ("boto3",), "dynamodb"),),
        asynchronous=(DriverChoice("dynamodb:AsyncDynamoDriver", None, ("aiobotocore",), "dynamodb"),),
        store=DynamoStore,
        join=_join_dynamodb,
    ),
    Declared(
        kind=Kind.MARIADB,
        title="MariaDB or MySQL",
        forms=("mariadb://user@host/database",),
        schemes={
            "mariadb": None,
            "mysql": None,
            "mariadb+pymysql": "pymysql",
            "mysql+pymysql": "pymysql",
            "mariadb+aiomysql": "aiomysql",
            "mysql+aiomysql": "aiomysql",
        },
        read=addresses.mariadb,
        blocking=(DriverChoice("mariadb.pymysql:PymysqlDriver", "pymysql", ("pymysql",), "mariadb"),),
        asynchronous=(DriverChoice("mariadb.aiomysql:AiomysqlDriver", "aiomysql", ("aiomysql",), "mariadb"),),
        store=MariadbStore,
        join=_join_mariadb,
        tables=mariadb.tables,
    ),
)
"""Every store that a URL can choose."""


def _listed(words: Iterable[str]) -> str:
    *others, last = words
    return f"{', '.join(others)} or {last}"


FORMS: Final = _listed(form for row in STORES for form in row.forms)
"""The URLs there are, for sentences."""


def declared(kind: Kind) -> Declared:
    """The row of a kind of store."""
    return next(one for one in STORES if one.kind is kind)


@dataclass(frozen=True, slots=True)
class Abilities:
    """What a store can do, by the protocols that it and its drivers satisfy."""

    effects: tuple[str, ...]
    """The effects that handlers may have."""
    phase: bool
    """Whether a PHASED handler has `phase`, besides `call` and `value`: it needs the application's transactions."""
    outbox: bool
    audit: bool
    upkeep: bool
    """Whether sweepers and reapers work on it."""
    operate: bool
    """Whether operators look and move by hand: the commands, and with `survey` the console."""
    survey: bool
    reconcile: bool
    tables: bool
    """Whether it has tables that are to be migrated."""


def abilities(store: Store, *drivers: object) -> Abilities:
    """What a store can do with these drivers; drivers are asked by their classes, or as they are."""
    shares = any(isinstance(one, Shares | AsyncShares) or _begins(one) for one in drivers)
    outbox = shares and store.outbox is not None
    effects = {"LOCAL": shares, "PHASED": True, "OUTBOX": outbox, "INLINE": True}
    return Abilities(
        effects=tuple(name for name, has in effects.items() if has),
        phase=shares,
        outbox=outbox,
        audit=store.audit is not None,
        upkeep=store.upkeep is not None,
        operate=store.operate is not None,
        survey=store.survey is not None,
        reconcile=store.reconcile is not None,
        tables=bool(store.schema.migrations),
    )


def _begins(driver: object) -> bool:
    return isinstance(driver, type) and issubclass(driver, Shares | AsyncShares)


_DIALECTS: Final[Mapping[str, Callable[..., Store]]] = {
    "postgresql": PostgresStore,
    "sqlite": SqliteStore,
    "mysql": MariadbStore,
}
"""The stores of databases that frameworks connect to."""


def source_of(store: Given) -> Source:
    """Find a mistake in what `Once` was given when it is made: a URL, or a driver that is not installed."""
    if not isinstance(store, str | Borrowed):
        if hasattr(store, "sync_engine") or not _is_sqlalchemys(store):
            _check_engine(cast("SqlalchemyEngine", store))
            return cast("SqlalchemyEngine", store)
        borrowed: Borrowed = _driver("sqlalchemy.blocking").BorrowedEngine(store)
        return borrowed
    if isinstance(store, str):
        _check_url(store)
    elif store.dialect is not None:
        _borrowed_store(store)
    return store


def _borrowed_store(source: Borrowed) -> Store:
    dialect = source.dialect
    if dialect is None:
        raise ConfigurationError(NO_DATABASE.format(title=source.title))
    if dialect not in _DIALECTS:
        raise ConfigurationError(NO_BORROWED.format(dialect=dialect))
    return _DIALECTS[dialect]()


def _check_url(store: str) -> None:
    address = understand(store)
    row = declared(address.kind)
    ways = [*_ways(row.asynchronous, address), *_ways(row.blocking, address)]
    if all(way.missing for way in ways):
        ways[-1].check()


def check_stakes(store: Source, operation: str, *, low_stakes: bool) -> None:
    """Refuse to enrol an operation in a store that can forget its keys, unless that does little harm."""
    why = declared(understand(store).kind).low_stakes if isinstance(store, str) else None
    if why is not None and not low_stakes:
        raise ConfigurationError(
            f"{operation}: {why}; say low_stakes=True if that does little harm, or use another store"
        )


def has_threads(source: Source) -> bool:
    """Whether blocking code can use it: a SQLAlchemy AsyncEngine is for asyncio alone."""
    return isinstance(source, str | Borrowed)


def called(source: Source) -> str:
    """What it is called in logs, without a password; a URL is shown by `addresses`."""
    if isinstance(source, str):
        return source
    return source.title if isinstance(source, Borrowed) else source.url.render_as_string(hide_password=True)


def connect_to(source: Source) -> Engine:
    """An engine for blocking code, on whatever `Once` was given."""
    if isinstance(source, str):
        return connect(source)
    if not isinstance(source, Borrowed):
        raise ConfigurationError(ASYNC_ONLY)
    return Engine(_borrowed_store(source), source.driver())


def aconnect_to(source: Source) -> AsyncEngine:
    """An engine for asyncio, on whatever `Once` was given; a framework's blocking connections are used in threads."""
    if isinstance(source, str):
        return aconnect(source)
    if not isinstance(source, Borrowed):
        return aconnect_sqlalchemy(source)
    return AsyncEngine(_borrowed_store(source), _driver("threads").threaded(source.driver()))


def connect(url: str, *, clock: Clock = None) -> Engine:
    """An engine for blocking code."""
    address = understand(url)
    row = declared(address.kind)
    ways = _ways(row.blocking, address)
    if not ways:
        forms = " or ".join(f"{scheme}://" for scheme in _spelled(row, row.blocking))
        raise ConfigurationError(f"{address.package} is for `async def` only: use {forms} here")
    return Engine(*row.join(_preferred(ways).load(), address, clock))


def aconnect(url: str, *, clock: Clock = None) -> AsyncEngine:
    """An engine for asyncio; one for each event loop."""
    address = understand(url)
    row = declared(address.kind)
    ways = _ways(row.asynchronous, address)
    if not ways:
        forms = " or ".join(f"{scheme}://" for scheme in _spelled(row, row.asynchronous))
        raise ConfigurationError(f"{address.package} is for `def` only: use {forms} here")
    return AsyncEngine(*row.join(_preferred(ways).load(), address, clock))


def _ways(ways: tuple[DriverChoice, ...], address: Address) -> list[DriverChoice]:
    """Those that the URL leaves to choose from."""
    return [way for way in ways if way.package is None or address.package in (None, way.package)]


def _preferred(ways: list[DriverChoice]) -> DriverChoice:
    """The first one whose packages are there; if none is, the last one, which says what to install."""
    return next((way for way in ways if way.missing is None), ways[-1])


def _spelled(row: Declared, ways: tuple[DriverChoice, ...]) -> list[str]:
    packages = {way.package for way in ways}
    return [scheme for scheme, package in row.schemes.items() if package is not None and package in packages]


def aconnect_sqlalchemy(engine: SqlalchemyEngine, *, clock: Clock = None) -> AsyncEngine:
    """An engine for asyncio on the application's own SQLAlchemy engine, which stays the application's."""
    _check_engine(engine)
    drivers = partial(_driver, needs=("sqlalchemy",), extra="sqlalchemy")
    match engine.dialect.name:
        case "sqlite":
            return AsyncEngine(SqliteStore(clock=clock), drivers("sqlalchemy.asynchronous").SqlalchemyDriver(engine))
        case "postgresql":
            return AsyncEngine(PostgresStore(clock=clock), drivers("sqlalchemy.asynchronous").SqlalchemyDriver(engine))
        case _:
            driver = drivers("sqlalchemy.mariadb").SqlalchemyMariadbDriver(engine)
            return AsyncEngine(MariadbStore(clock=clock), driver)


E = TypeVar("E", Engine, AsyncEngine)


def sealing(engine: E, seal: Seal | None) -> E:
    """The same engine; where there is a seal, with the content of its store sealed."""
    if seal is not None:
        from oncekey.engine.sealed_store import sealed_store  # noqa: PLC0415  (most stores are not sealed)

        engine.store = sealed_store(engine.store, seal)
    return engine


def _check_engine(engine: SqlalchemyEngine) -> None:
    if not _is_sqlalchemys(engine) or not hasattr(engine, "sync_engine"):
        raise ConfigurationError(NO_ENGINE)
    if engine.dialect.name not in ("sqlite", "postgresql", "mysql", "mariadb"):
        raise ConfigurationError(f"there is no store for {engine.dialect.name}: make the engine for {ENGINES}")


def _is_sqlalchemys(engine: object) -> bool:
    # Looked at by its class's name, so that SQLAlchemy is imported only by those who have it.
    return hasattr(engine, "dialect") and "sqlalchemy" in _packages(engine)


def migrations_for(url: str) -> SqlSchema:
    """The tables of a URL's store, without connecting to it."""
    row = declared(understand(url).kind)
    if row.tables is None and row.store().schema.migrations:
        raise ConfigurationError(f"{row.title} has no SQL: `oncekey migrate up` makes its table")
    if row.tables is None:
        raise ConfigurationError(f"{row.forms[0].partition(':')[0]}: has no tables, so there is nothing to migrate")
    return row.tables()


def understand(url: str) -> Address:
    """What a URL says, or a sentence about what it should."""
    scheme, colon, rest = url.partition(":")
    if not colon or _SCHEME.fullmatch(scheme) is None:
        raise ConfigurationError(f"{_safely(url)} is no store: say {FORMS}")
    for row in STORES:
        if scheme in row.schemes:
            return row.read(scheme, rest, row.schemes[scheme])
    database, plus, driver = scheme.partition("+")
    for row in STORES:
        if plus and database in row.schemes:
            known = [one for one in row.schemes if one.partition("+")[0] == database]
            raise ConfigurationError(
                f"oncekey has no driver {driver} for {database}: say {' or '.join(f'{one}://' for one in known)}"
            )
    kept = _listed(row.title for row in reversed(STORES))
    raise ConfigurationError(f"there is no store for {scheme}: keys are kept in {kept}; say {FORMS}")


def _sqlite_module(address: Address) -> ModuleType | None:
    if address.package is None:
        return None
    module: ModuleType = _driver("sqlite.files").repaired_module()
    return module


def _mysql(package: str) -> ModuleType:
    return _driver(f"mariadb.{package}", needs=(package,), extra="mariadb")


def _psycopg(module: str) -> ModuleType:
    return _driver(f"postgres.{module}", needs=("psycopg",), extra="postgres")


def _driver(name: str, *, needs: tuple[str, ...] = (), extra: str = "") -> ModuleType:
    """The module of a driver, with the command that installs what it needs if that is missing."""
    DriverChoice("", needs=needs, extra=extra).check()
    return import_module(f"oncekey.drivers.{name}")


def _packages(connection: object) -> set[str]:
    """Where a connection comes from, its own class or one that it extends; nothing needs to be imported."""
    return {kind.__module__.partition(".")[0] for kind in type(connection).__mro__}


def _safely(url: str) -> str:
    """A URL may hold a password, and what is no URL may be one."""
    return repr(url) if len(url) < 20 and "@" not in url else "what was given"  # noqa: PLR2004  (a short word)
