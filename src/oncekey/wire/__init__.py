"""The composition root: builds a store, its driver and an engine from a URL. Only it imports stores and drivers.

A store is declared by one row of `STORES`: the schemes of its URLs and how they are parsed, its drivers with the extra
that installs each, and how store and driver are combined. Its capabilities are not declared: they follow from the
protocols that its store and its drivers satisfy (`shares`; `oncekey stores` lists the rest).

Connecting does no I/O: connections are opened when they are first needed, so an application can be imported, and
its mistakes in a URL found, without a database.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType
from typing import TYPE_CHECKING, Any, Final, TypeAlias, TypeVar

from oncekey.core.errors import ConfigurationError
from oncekey.core.lazy import Lazy
from oncekey.databases.address import Address, Kind
from oncekey.engine.shell import AsyncEngine
from oncekey.ports.driver import AsyncShares, Borrowed, Shares

if TYPE_CHECKING:
    from sqlalchemy.engine import Engine as BlockingEngine
    from sqlalchemy.ext.asyncio import AsyncEngine as SqlalchemyEngine

    from oncekey.core.model import Instant
    from oncekey.engine import blocking_shell
    from oncekey.ports.store import Store
    from oncekey.sealing import Seal
    from oncekey.stores.sql import SqlSchema
    from oncekey.wire import given
else:
    given = Lazy("oncekey.wire.given")
    blocking_shell = Lazy("oncekey.engine.blocking_shell")

Clock: TypeAlias = "Callable[[], Instant] | None"
"""Returns every instant, in tests that control time."""

Source: TypeAlias = "str | SqlalchemyEngine | Borrowed"
"""The store of the keys: a URL, or a database to which the application is already connected."""

Given: TypeAlias = "Source | BlockingEngine"
"""The argument `store` of `Once`."""

_SCHEME: Final = re.compile(r"[a-z][a-z0-9+.]{0,30}")


@dataclass(frozen=True, slots=True)
class DriverChoice:
    """One driver of a store."""

    driver: str
    """Its class, as `module:name` below `oncekey.databases`; imported when it is needed."""
    package: str | None = None
    """The name that selects it in a URL: `postgresql+asyncpg`. None: it serves every URL of the store."""
    needs: tuple[str, ...] = ()
    """The packages that it imports."""
    extra: str = ""
    """The extra in `oncekey[...]` that installs them."""

    @property
    def missing(self) -> str | None:
        """The package that is not installed; None if all are."""
        return next((name for name in self.needs if find_spec(name) is None), None)

    def check(self) -> None:
        """Raise if a package is missing, with the command that installs it."""
        missing = self.missing
        if missing is not None:
            raise ConfigurationError(f"{missing} is not installed: pip install 'oncekey[{self.extra}]'")

    def load(self) -> Any:  # noqa: ANN401  (a class of a driver)
        """The class of the driver."""
        self.check()
        module, _, name = self.driver.partition(":")
        return getattr(import_module(f"oncekey.databases.{module}"), name)


@dataclass(frozen=True, slots=True)
class Declared:
    """The declaration of one store."""

    kind: Kind
    title: str
    """Its name in messages."""
    forms: tuple[str, ...]
    """Examples of its URLs."""
    schemes: Mapping[str, str | None]
    """The schemes of its URLs, each with the package of the driver that it selects."""
    read: Callable[[str, str, str | None], Address]
    """Parses a URL, given its scheme, the rest after the colon, and the package that the scheme selects."""
    blocking: tuple[DriverChoice, ...]
    """Its drivers for threads, the preferred one first."""
    asynchronous: tuple[DriverChoice, ...]
    """Its drivers for asyncio, the preferred one first."""
    store: Callable[..., Store]
    """Creates the store, with or without a `clock`."""
    join: Callable[[Any, Address, Clock], tuple[Store, Any]]
    """Creates store and driver from the driver's class, the address and a clock."""
    tables: Callable[[], SqlSchema] | None = None
    """Creates the schema of its tables; None: it has no tables."""
    low_stakes: str | None = None
    """Why it is only for requests whose second execution does little harm; None: it is for all."""


def _reader(module: str) -> Callable[[str, str, str | None], Address]:
    """A function that parses a store's URLs; its module below `oncekey.databases` is imported at the first call."""

    def read(scheme: str, rest: str, package: str | None) -> Address:
        understood: Address = import_module(f"oncekey.databases.{module}").read(scheme, rest, package)
        return understood

    return read


def _later(place: str) -> Callable[..., Any]:
    """A function that creates a store or its tables, `module:name` below `oncekey`; imported at the first call."""
    module, _, name = place.partition(":")

    def make(**options: Any) -> Any:  # noqa: ANN401  (a store, or its tables)
        return getattr(import_module(f"oncekey.{module}"), name)(**options)

    return make


MemoryStore: Final = _later("stores.memory:MemoryStore")
SqliteStore: Final = _later("databases.sqlite.store:SqliteStore")
PostgresStore: Final = _later("databases.postgres.store:PostgresStore")
MariadbStore: Final = _later("databases.mariadb.store:MariadbStore")
CellStore: Final = _later("stores.cells:CellStore")
DynamoStore: Final = _later("stores.cells:DynamoStore")


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
        driver_module("dynamodb.driver").Table(address.place, pool_size=address.pool_size, **place)
    )


def _join_mariadb(driver: Any, address: Address, clock: Clock) -> tuple[Store, Any]:  # noqa: ANN401
    return MariadbStore(clock=clock), driver(address.place, pool_size=address.pool_size)


STORES: Final[tuple[Declared, ...]] = (
    Declared(
        kind=Kind.MEMORY,
        title="memory",
        forms=("memory:",),
        schemes={"memory": None},
        read=_reader("memory"),
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
        read=_reader("sqlite.address"),
        blocking=(DriverChoice("sqlite.blocking:SqliteDriver"),),
        asynchronous=(DriverChoice("sqlite.asynchronous:AsyncSqliteDriver"),),
        store=SqliteStore,
        join=_join_sqlite,
        tables=_later("databases.sqlite.store:tables"),
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
        read=_reader("postgres.address"),
        blocking=(DriverChoice("postgres.generated.psycopg:PsycopgDriver", "psycopg", ("psycopg",), "postgres"),),
        asynchronous=(
            DriverChoice("postgres.asyncpg:AsyncpgDriver", "asyncpg", ("asyncpg",), "asyncpg"),
            DriverChoice("postgres.psycopg_async:AsyncPsycopgDriver", "psycopg", ("psycopg",), "postgres"),
        ),
        store=PostgresStore,
        join=_join_postgres,
        tables=_later("databases.postgres.store:tables"),
    ),
    Declared(
        kind=Kind.REDIS,
        title="Redis",
        forms=("redis://host:6379/0", "redis+cluster://host:7000,host:7001", "redis+sentinel://host:26379/name/0"),
        schemes=dict.fromkeys(
            f"{base}{mode}" for base in ("redis", "rediss") for mode in ("", "+cluster", "+sentinel")
        ),
        read=_reader("redis.address"),
        blocking=(DriverChoice("redis.driver:RedisDriver", needs=("redis",), extra="redis"),),
        asynchronous=(DriverChoice("redis.driver:AsyncRedisDriver", needs=("redis",), extra="redis"),),
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
        read=_reader("dynamodb.address"),
        blocking=(DriverChoice("dynamodb.driver:DynamoDriver", None, ("boto3",), "dynamodb"),),
        asynchronous=(DriverChoice("dynamodb.driver:AsyncDynamoDriver", None, ("aiobotocore",), "dynamodb"),),
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
        read=_reader("mariadb.address"),
        blocking=(DriverChoice("mariadb.generated.pymysql:PymysqlDriver", "pymysql", ("pymysql",), "mariadb"),),
        asynchronous=(DriverChoice("mariadb.aiomysql:AiomysqlDriver", "aiomysql", ("aiomysql",), "mariadb"),),
        store=MariadbStore,
        join=_join_mariadb,
        tables=_later("databases.mariadb.store:tables"),
    ),
)
"""Every store that a URL can choose."""


def _listed(words: Iterable[str]) -> str:
    *others, last = words
    return f"{', '.join(others)} or {last}"


FORMS: Final = _listed(form for row in STORES for form in row.forms)
"""The forms of URLs, for messages."""


def declared(kind: Kind) -> Declared:
    """The row of a kind of store."""
    return next(one for one in STORES if one.kind is kind)


def shares(*drivers: object) -> bool:
    """Whether one of these drivers, or classes of drivers, shares its transactions with the application."""
    return any(isinstance(one, Shares | AsyncShares) or _begins(one) for one in drivers)


def _begins(driver: object) -> bool:
    return isinstance(driver, type) and issubclass(driver, Shares | AsyncShares)


def source_of(store: Given) -> Source:
    """Check the argument of `Once` when it is created; raises for a wrong URL or a driver that is not installed."""
    if not isinstance(store, str):
        return given.source_of(store)
    _check_url(store)
    return store


def _check_url(store: str) -> None:
    address = understand(store)
    row = declared(address.kind)
    ways = [*_ways(row.asynchronous, address), *_ways(row.blocking, address)]
    if all(way.missing for way in ways):
        ways[-1].check()


def check_stakes(store: Source, operation: str, *, low_stakes: bool) -> None:
    """Refuse to enrol an operation in a store that can lose its keys, unless that does little harm."""
    why = declared(understand(store).kind).low_stakes if isinstance(store, str) else None
    if why is not None and not low_stakes:
        raise ConfigurationError(
            f"{operation}: {why}; set low_stakes=True if that does little harm, or use another store"
        )


def has_threads(source: Source) -> bool:
    """Whether blocking code can use it: a SQLAlchemy AsyncEngine is for asyncio only."""
    return isinstance(source, str | Borrowed)


def called(source: Source) -> str:
    """The name of the store in logs, without a password; `addresses` formats a URL."""
    if isinstance(source, str):
        return source
    return source.title if isinstance(source, Borrowed) else source.url.render_as_string(hide_password=True)


def connect_to(source: Source) -> blocking_shell.Engine:
    """An engine for blocking code on the store of `Once`."""
    return connect(source) if isinstance(source, str) else given.connect_to(source)


def aconnect_to(source: Source) -> AsyncEngine:
    """An engine for asyncio on the store of `Once`; a framework's blocking connections are used in threads."""
    return aconnect(source) if isinstance(source, str) else given.aconnect_to(source)


def connect(url: str, *, clock: Clock = None) -> blocking_shell.Engine:
    """An engine for blocking code."""
    address = understand(url)
    row = declared(address.kind)
    ways = _ways(row.blocking, address)
    if not ways:
        forms = " or ".join(f"{scheme}://" for scheme in _spelled(row, row.blocking))
        raise ConfigurationError(f"{address.package} is for `async def` only: use {forms} here")
    return blocking_shell.Engine(*row.join(_preferred(ways).load(), address, clock))


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
    """The drivers that the URL allows."""
    return [way for way in ways if way.package is None or address.package in (None, way.package)]


def _preferred(ways: list[DriverChoice]) -> DriverChoice:
    """The first driver whose packages are installed; without one the last, whose check names the package to install."""
    return next((way for way in ways if way.missing is None), ways[-1])


def _spelled(row: Declared, ways: tuple[DriverChoice, ...]) -> list[str]:
    packages = {way.package for way in ways}
    return [scheme for scheme, package in row.schemes.items() if package is not None and package in packages]


E = TypeVar("E", bound="blocking_shell.Engine | AsyncEngine")


def sealing(engine: E, seal: Seal | None) -> E:
    """The engine, with the content of its store sealed if there is a seal."""
    if seal is not None:
        from oncekey.stores.sealed_content import SealedContent  # noqa: PLC0415  (most stores are not sealed)

        engine.store.seal_with(SealedContent(seal))
    return engine


def migrations_for(url: str) -> SqlSchema:
    """The tables of a URL's store, without connecting to it."""
    row = declared(understand(url).kind)
    if row.tables is None and row.store().schema.migrations:
        raise ConfigurationError(f"{row.title} has no SQL: `oncekey migrate up` creates its table")
    if row.tables is None:
        raise ConfigurationError(f"{row.forms[0].partition(':')[0]}: has no tables, so there is nothing to migrate")
    return row.tables()


def understand(url: str) -> Address:
    """The address in a URL; raises with the accepted forms if it is not one."""
    scheme, colon, rest = url.partition(":")
    if not colon or _SCHEME.fullmatch(scheme) is None:
        raise ConfigurationError(f"{_safely(url)} is not a store: use {FORMS}")
    for row in STORES:
        if scheme in row.schemes:
            return row.read(scheme, rest, row.schemes[scheme])
    database, plus, driver = scheme.partition("+")
    for row in STORES:
        if plus and database in row.schemes:
            known = [one for one in row.schemes if one.partition("+")[0] == database]
            raise ConfigurationError(
                f"oncekey has no driver {driver} for {database}: use {' or '.join(f'{one}://' for one in known)}"
            )
    kept = _listed(row.title for row in reversed(STORES))
    raise ConfigurationError(f"there is no store for {scheme}: keys can be stored in {kept}; use {FORMS}")


def _sqlite_module(address: Address) -> ModuleType | None:
    if address.package is None:
        return None
    module: ModuleType = driver_module("sqlite.files").repaired_module()
    return module


def driver_module(name: str, *, needs: tuple[str, ...] = (), extra: str = "") -> ModuleType:
    """The module of a driver; raises with the command that installs a missing package."""
    DriverChoice("", needs=needs, extra=extra).check()
    return import_module(f"oncekey.databases.{name}")


def diagnostics_of(kind: Kind) -> ModuleType:
    """The module that checks the server or file of a store."""
    return import_module(f"oncekey.databases.{kind}.diagnostics")


def _safely(url: str) -> str:
    """A text for messages: a URL may contain a password, and text that is not a URL may be one."""
    return repr(url) if len(url) < 20 and "@" not in url else "what was given"  # noqa: PLR2004  (a short word)
