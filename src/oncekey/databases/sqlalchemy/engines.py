"""The driver's access to the application's blocking `Engine`, and the connection for handlers on it (L5)."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any, Final, NoReturn

from sqlalchemy.engine import Connection, Engine, RootTransaction
from sqlalchemy.exc import DontWrapMixin

from oncekey.core.errors import ConfigurationError, TransactionControlError
from oncekey.databases.handler_sql import OVER, refusal
from oncekey.databases.sqlalchemy.execute import module_of, package_of, raw_of
from oncekey.databases.sqlalchemy.handler_connection import (
    OURS,
    WATCH,
    HandlerEngine,
    JoinedConnection,
    Watch,
    log_foreign_connections,
    watch_connections,
)

MAKE: Final = "create_engine"
DRIVERS: Final = frozenset({"psycopg", "pysqlite"})
NO_DRIVER: Final = (
    "records cannot be stored through {dialect}+{driver}: create the engine for postgresql+psycopg:// or sqlite:///"
)


def check_engine(engine: Engine) -> None:
    """Raise for an engine with an unsupported database or driver."""
    dialect = engine.dialect
    if dialect.driver not in DRIVERS:
        raise ConfigurationError(NO_DRIVER.format(dialect=dialect.name, driver=dialect.driver))


def borrowed_engine(engine: Engine) -> Engine:
    """The engine for oncekey itself; connections of the given one are logged if a LOCAL handler opens them."""
    check_engine(engine)
    log_foreign_connections(engine)
    return engine.execution_options(**{OURS: True})


def limited(connection: Connection, seconds: float | None) -> AbstractContextManager[None]:
    """Limit each reply inside the block, in seconds; SQLite has its own time limit for locks."""
    raw = raw_of(connection)
    package = None if seconds is None else package_of(raw)
    if package is None:
        return nullcontext()
    within: AbstractContextManager[None] = module_of(package).limited_blocking(raw, seconds)
    return within


class _OverError(TransactionControlError, DontWrapMixin):
    """Rejects a connection that a handler kept; SQLAlchemy raises it unchanged."""


class BlockingHandlerConnection(JoinedConnection):
    """`op.connection` for a blocking engine: a `Connection` inside the operation's transaction."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:  # noqa: ANN401  (as an engine makes it)
        super().__init__(*args, **kwargs)
        self.watch = Watch()
        super().execution_options(**{WATCH: self.watch})

    def _revalidate_connection(self) -> Any:  # noqa: ANN401  (as its parent's)
        """Called by SQLAlchemy for a closed connection; after the operation it raises oncekey's error."""
        if self.watch.released:
            raise _OverError(OVER)
        return super()._revalidate_connection()

    def commit(self) -> NoReturn:
        raise refusal("commit()")

    def rollback(self) -> NoReturn:
        raise refusal("rollback()")

    def close(self) -> NoReturn:
        raise refusal("close()")

    def invalidate(self, exception: BaseException | None = None) -> None:
        """Refused, unless SQLAlchemy calls it for a lost connection."""
        if exception is None:
            raise refusal("invalidate()")
        super().invalidate(exception)

    def detach(self) -> NoReturn:
        """Refused."""
        raise refusal("detach()")

    def execution_options(self, **options: Any) -> Connection:  # noqa: ANN401  (as its parent takes them)
        """Set options; another isolation level would begin another transaction."""
        if "isolation_level" in options:
            raise refusal("setting isolation_level")
        return super().execution_options(**options)

    def begin(self) -> RootTransaction:
        """Refused, unless SQLAlchemy calls it for a statement after a rollback."""
        if not self.watch.guards or self.get_transaction() is not None:
            raise refusal("begin()")
        return super().begin()

    def __enter__(self) -> NoReturn:
        raise refusal("`with connection:`")


class _HandlerEngine(HandlerEngine):
    _connection_cls = BlockingHandlerConnection


def engine_for_handlers(engine: Engine) -> Engine:
    """An engine on the same pool; only oncekey can end the transactions of its connections."""
    ours = _HandlerEngine(engine, {})
    watch_connections(ours)
    return ours


def open_for_handler(engine: Engine) -> BlockingHandlerConnection:
    """A watched connection for handlers."""
    connection = engine.connect()
    assert isinstance(connection, BlockingHandlerConnection)
    return connection
