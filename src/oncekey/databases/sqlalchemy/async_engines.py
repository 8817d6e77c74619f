"""The driver's access to the application's `AsyncEngine`, and the connection for handlers on it (L5)."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, Final, NoReturn

from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

from oncekey.core.errors import ConfigurationError, TransactionControlError
from oncekey.databases.handler_sql import OVER, refusal
from oncekey.databases.sqlalchemy.handler_connection import (
    OURS,
    WATCH,
    HandlerEngine,
    Watch,
    log_foreign_connections,
    watch_connections,
)

if TYPE_CHECKING:
    from sqlalchemy.engine import Connection

MAKE: Final = "create_async_engine"
DIALECTS: Final = frozenset({"postgresql", "sqlite", "mysql", "mariadb"})


def borrowed_engine(engine: AsyncEngine) -> AsyncEngine:
    """The engine for oncekey itself; connections of the given one are logged if a LOCAL handler opens them."""
    if engine.dialect.name not in DIALECTS:
        raise ConfigurationError(
            f"records cannot be stored in {engine.dialect.name}: use an engine for PostgreSQL, SQLite, MariaDB or MySQL"
        )
    log_foreign_connections(engine.sync_engine)
    return engine.execution_options(**{OURS: True})


def limited(_connection: AsyncConnection, seconds: float | None) -> asyncio.Timeout:
    """Limit the total time of the statements inside the block, in seconds."""
    return asyncio.timeout(seconds)


class SqlalchemyHandlerConnection(AsyncConnection):
    """`op.connection` for SQLAlchemy: an `AsyncConnection` inside the operation's transaction."""

    __slots__ = ("watch",)

    def __init__(self, engine: AsyncEngine, watch: Watch) -> None:
        super().__init__(engine)
        self.watch = watch

    @property
    def _proxied(self) -> Connection:
        """SQLAlchemy's own connection; raises oncekey's error after the operation."""
        if self.watch.released:
            raise TransactionControlError(OVER)
        return super()._proxied

    async def commit(self) -> NoReturn:
        raise refusal("commit()")

    async def rollback(self) -> NoReturn:
        raise refusal("rollback()")

    async def close(self) -> NoReturn:
        raise refusal("close()")

    async def aclose(self) -> NoReturn:
        """Refused."""
        raise refusal("aclose()")

    async def invalidate(self, exception: BaseException | None = None) -> NoReturn:  # noqa: ARG002  (as its parent's)
        """Refused."""
        raise refusal("invalidate()")

    async def get_raw_connection(self) -> NoReturn:
        """Refused: a statement on the raw connection before SQLAlchemy begins would be committed at once."""
        raise refusal("get_raw_connection()")

    async def execution_options(self, **options: Any) -> AsyncConnection:  # noqa: ANN401  (as its parent takes them)
        """Set options; another isolation level would begin another transaction."""
        if "isolation_level" in options:
            raise refusal("setting isolation_level")
        return await super().execution_options(**options)

    def begin(self) -> NoReturn:
        raise refusal("begin()")

    async def __aenter__(self) -> NoReturn:
        raise refusal("`async with connection:`")


def engine_for_handlers(engine: AsyncEngine) -> AsyncEngine:
    """An engine on the same pool; only oncekey can end the transactions of its watched connections."""
    ours = HandlerEngine(engine.sync_engine, {})
    watch_connections(ours)
    return AsyncEngine(ours)


async def open_for_handler(engine: AsyncEngine) -> SqlalchemyHandlerConnection:
    """A watched connection for handlers."""
    watch = Watch()
    connection = SqlalchemyHandlerConnection(engine, watch)
    await connection.start()
    assert connection.sync_connection is not None
    connection.sync_connection.execution_options(**{WATCH: watch})
    return connection
