"""oncekey's own statements and commits on a SQLAlchemy connection, and access to the driver's connection below it.

The pool belongs to the application, and so do its "connect" listeners. Their session settings are reset with everything
else after a handler, so the listeners are called again. PostgreSQL itself keeps the settings of the URL and
`connect_args`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from importlib import import_module
from typing import TYPE_CHECKING, Any, Final, cast

from sqlalchemy import CursorResult, Executable, column, event, text
from sqlalchemy.pool import AssertionPool, ConnectionPoolEntry, Pool, QueuePool, SingletonThreadPool, StaticPool

from oncekey.core.errors import CommitAmbiguousError, ConfigurationError, StoreUnavailableError
from oncekey.databases.placeholders import escaped
from oncekey.databases.postgres.server import stopped_waiting, unsure_commit
from oncekey.databases.slots import business_share
from oncekey.databases.sqlalchemy.errors import FAILURES, commit_failed
from oncekey.databases.sqlite.files import GONE, OpenedFile

if TYPE_CHECKING:
    from sqlalchemy.engine import Connection, Engine

    from oncekey.core.flow import Rows, Statement
    from oncekey.databases.postgres.unconfirmed import UnconfirmedCommits

VETTED: Final = "oncekey_vetted"
"""Marks a pooled connection that was checked (`vetted`); on SQLite its value is the opened file."""

ALTERED: Final = "oncekey_altered"
"""Marks a SQLite connection whose settings a handler has changed."""

OWN: Final = "oncekey_own"
"""The execution option of oncekey's own statements."""


@lru_cache(maxsize=16)
def own_text(sql: str) -> Executable:
    """One of oncekey's statements, without parameters."""
    return text(sql).execution_options(**{OWN: True})


PROBE: Final = own_text("SELECT 1")
PROVE: Final = own_text("RELEASE SAVEPOINT oncekey")
"""A statement that SQLite accepts only in the transaction that was begun."""

_MODULES: Final = {
    "asyncpg": "postgres.asyncpg_connections",
    "psycopg": "postgres.psycopg_connections",
    "aiomysql": "mariadb.sessions",
}

TOO_SMALL: Final = (
    "the engine's pool has only one connection, but while a handler holds it, its key's record needs a second one: "
    "use {make}(..., pool_size=2) or more"
)

_ONE_CONNECTION: Final = (StaticPool, SingletonThreadPool, AssertionPool)


def rows_of(own: OwnStatement, result: CursorResult[Any]) -> Rows:
    """The rows of its result, by the names of their columns."""
    if not result.returns_rows:
        return ()
    cursor: Any = result.cursor
    names = [one[0] for one in cursor.description]
    if names != own.names:
        if len(set(names)) != len(names):
            return cast("Rows", result.mappings().all())
        own.learn(names)
    return [dict(zip(names, row, strict=True)) for row in result.all()]


class OwnStatement:
    """One of oncekey's statements, and the names of its columns once they are known.

    SQLAlchemy reads the description of all columns on every execution of a text unless it is given them. A migration
    may have run since, so rows are read by the names that the database sent with them.
    """

    __slots__ = ("_text", "executable", "names")

    def __init__(self, command: str) -> None:
        self._text = text(escaped(command))
        self.names: list[str] | None = None
        self.executable: Executable = self._text.execution_options(**{OWN: True})

    def learn(self, names: list[str]) -> None:
        """Use these columns from now on."""
        self.names = names
        self.executable = self._text.columns(*map(column, names)).execution_options(**{OWN: True})


_own = lru_cache(maxsize=512)(OwnStatement)


def prepared(statement: Statement) -> OwnStatement:
    """The statement in the form that SQLAlchemy executes, cached."""
    assert isinstance(statement.command, str)
    return _own(statement.command)


@contextmanager
def sure(connection: Connection | None, unconfirmed: UnconfirmedCommits, what: str) -> Iterator[None]:
    """Raise if a commit stopped waiting for its standby: only the driver's own connection gets that warning.

    Every other end that leaves the commit open also counts as unconfirmed, because the server was asked to cancel.
    """
    raw, opened, notices = raw_of(connection), opened_by(connection), []

    def take_notice(*notice: Any) -> None:  # noqa: ANN401  (asyncpg's message, or psycopg's)
        if stopped_waiting(notice[-1]):
            notices.append(notice)
            unconfirmed.add()

    with _listening(raw, take_notice):
        try:
            yield
        except BaseException as error:
            if isinstance(error, CommitAmbiguousError) or not isinstance(error, Exception):
                unconfirmed.add()
            raise
    if notices:
        raise unsure_commit(what)
    if opened is not None:
        opened.check()


@contextmanager
def committing(connection: Connection | None, unconfirmed: UnconfirmedCommits, what: str) -> Iterator[None]:
    """Run a commit inside the block, by the connection or a session on it; raises if it failed."""
    with sure(connection, unconfirmed, what):
        try:
            yield
        except FAILURES as error:
            raise commit_failed(error, what) from error


@contextmanager
def _listening(raw: Any, take_notice: Callable[..., None]) -> Iterator[None]:  # noqa: ANN401  (asyncpg's or psycopg's)
    match package_of(raw):
        case "asyncpg" if not raw.is_closed():  # a closed one would refuse a listener
            raw.add_log_listener(take_notice)
            try:
                yield
            finally:
                raw.remove_log_listener(take_notice)
        case "psycopg":
            raw.add_notice_handler(take_notice)
            try:
                yield
            finally:
                raw.remove_notice_handler(take_notice)
        case _:
            yield


def note_file(connection: Any, record: ConnectionPoolEntry) -> None:  # noqa: ANN401  (as a pool hands it to listeners)
    """Record which file a new SQLite connection has opened; an in-memory database has none."""
    cursor = connection.cursor()
    try:
        cursor.execute("PRAGMA database_list")
        path = next((file for _, name, file in cursor.fetchall() if name == "main"), "")
    finally:
        cursor.close()
    record.info[VETTED] = OpenedFile.at(path) if path else None


class EngineFile:
    """The file that the watched connections of a SQLite engine have opened."""

    __slots__ = ("_last",)

    def __init__(self, engine: Engine) -> None:
        self._last: OpenedFile | None = None
        if engine.dialect.name == "sqlite":
            event.listen(engine, "connect", self._note)

    def refuse_if_gone(self) -> None:
        """Raise if the file was deleted: a new connection would create an empty one."""
        if self._last is not None and self._last.is_gone:
            raise StoreUnavailableError(GONE)

    def _note(self, connection: Any, record: ConnectionPoolEntry) -> None:  # noqa: ANN401  (as a pool hands it to listeners)
        note_file(connection, record)
        self._last = record.info[VETTED]


def opened_by(connection: Connection | None) -> OpenedFile | None:
    """The SQLite file that a vetted connection has opened; None for others."""
    if raw_of(connection) is None:
        return None
    assert connection is not None
    found: OpenedFile | None = connection.info.get(VETTED)
    return found


def mixes_statements_up(connection: Connection) -> bool:
    """Whether it keeps prepared statements under names that another client of a pooler may use."""
    adapted: Any = connection.connection.dbapi_connection
    raw = raw_of(connection)
    match package_of(raw):
        case "asyncpg":
            name: Callable[[], str | None] = getattr(adapted, "_prepared_statement_name_func", str)
            return getattr(adapted, "_prepared_statement_cache", None) is not None and not name()
        case "psycopg":
            return raw.prepare_threshold is not None
        case _:
            return False


def places_in(pool: Pool, make: str) -> int | None:
    """How many connections of a pool handlers may hold; None if unlimited. `make` names the engine's factory."""
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


def alters(connection: Connection, statement: str) -> None:
    """Record a statement that may change a setting of SQLite, which has no statement to reset them."""
    if connection.dialect.name == "sqlite" and "pragma" in statement.casefold():
        connection.info[ALTERED] = True


def was_altered(connection: Connection) -> bool:
    """Whether there was such a statement."""
    return ALTERED in connection.info


def raw_of(connection: Connection | None) -> Any:  # noqa: ANN401  (asyncpg's, psycopg's or aiosqlite's)
    """The driver's own connection; None if SQLAlchemy has dropped it."""
    if connection is None or connection.closed or connection.invalidated:
        return None
    return connection.connection.driver_connection


def is_in_transaction(raw: Any) -> bool | None:  # noqa: ANN401  (of any of the drivers)
    """Whether the driver's own connection is in a transaction; None if it does not report that."""
    if hasattr(raw, "is_in_transaction"):
        return bool(raw.is_in_transaction())
    if hasattr(raw, "get_transaction_status"):
        return bool(raw.get_transaction_status())
    if hasattr(raw, "in_transaction"):
        return bool(raw.in_transaction)
    status = getattr(getattr(raw, "info", None), "transaction_status", None)
    return None if status is None else status.name != "IDLE"


def package_of(raw: object) -> str | None:
    """The package of a connection: asyncpg, psycopg or aiomysql; None for SQLite or no connection."""
    packages = {kind.__module__.partition(".")[0] for kind in type(raw).__mro__}
    return next((one for one in _MODULES if one in packages), None)


def module_of(package: str) -> Any:  # noqa: ANN401  (a module)
    """The module that ends and cleans connections of a package; imported only if the package is installed."""
    return import_module(f"oncekey.databases.{_MODULES[package]}")


def listeners(connection: Connection, *, all_of_them: bool = False) -> list[Callable[..., Any]]:
    """The listeners for new connections: the application's, and optionally SQLAlchemy's own."""
    return [one for one in connection.engine.pool.dispatch.connect if all_of_them or _is_the_applications(one)]


def connected(connection: Connection, found: list[Callable[..., Any]]) -> None:
    """Call listeners as the pool does for a new connection."""
    lent: Any = connection.connection
    for listener in found:
        listener(lent.dbapi_connection, lent._connection_record)  # noqa: SLF001  (what the pool itself hands them)
    # Most listeners leave the commit of their settings to the first user.
    lent.dbapi_connection.commit()


def _is_the_applications(listener: Callable[..., Any]) -> bool:
    """Whether it is not SQLAlchemy's own listener, which sets up the client side that a reset does not touch."""
    return not (getattr(listener, "__module__", None) or "").startswith("sqlalchemy.")
