"""SQLAlchemy on MariaDB and MySQL: the application's engine, pool and sessions, with oncekey's messages below them.

One of oncekey's operations may be several SQL statements in one message, and the application's sessions are not in
autocommit mode. So oncekey's messages go to the connection below SQLAlchemy's, by the rules of the driver without
SQLAlchemy (`databases/mariadb`); a handler's statements go through SQLAlchemy, as on every other database.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Final, TypeVar

from oncekey.core.errors import CommitAmbiguousError, ConfigurationError, TransactionControlError
from oncekey.databases.handler_sql import LEFT_BEHIND
from oncekey.databases.mariadb import messages
from oncekey.databases.mariadb.sessions import AsyncSession
from oncekey.databases.retries import ConflictError, LostError, aretrying
from oncekey.databases.sqlalchemy import handler_connection
from oncekey.databases.sqlalchemy.async_engines import SqlalchemyHandlerConnection
from oncekey.databases.sqlalchemy.asynchronous import End, SqlalchemyDriver, SqlalchemyTransaction
from oncekey.databases.sqlalchemy.connections import discarded
from oncekey.databases.sqlalchemy.errors import BROKEN
from oncekey.databases.sqlalchemy.execute import raw_of
from oncekey.databases.sqlalchemy.handler_connection import PATIENCE, Watch

if TYPE_CHECKING:
    from collections.abc import Callable

    from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

    from oncekey.core.flow import Body, Transaction
    from oncekey.databases.postgres.unconfirmed import UnconfirmedCommits

T = TypeVar("T")

DRIVER: Final = "aiomysql"
NO_DRIVER: Final = "MariaDB and MySQL need the aiomysql driver: use create_async_engine('mysql+aiomysql://...')"
_SETTINGS: Final = b"SELECT @@sql_mode, @@character_set_client, @@character_set_results"
_STRICT: Final = ("STRICT_TRANS_TABLES", "STRICT_ALL_TABLES")
LAX: Final = (
    "the engine's sessions are not in strict mode, so the server would silently truncate values that do not fit: add "
    "STRICT_TRANS_TABLES to sql_mode"
)
NOT_UTF8: Final = (
    "the engine's sessions use {charset}, which cannot store every character: add ?charset=utf8mb4 to its URL"
)


class SqlalchemyMariadbDriver(SqlalchemyDriver):
    """Runs transactions on the application's own engine for MariaDB or MySQL."""

    def __init__(self, engine: AsyncEngine) -> None:
        if engine.dialect.driver != DRIVER:
            raise ConfigurationError(NO_DRIVER)
        super().__init__(engine)
        self._begin_with = _begin_with(engine)
        self._checked = False

    @aretrying(ConflictError, LostError)
    async def run(self, transaction: Transaction[T]) -> T:
        async with self._connected(self._engine) as connection:
            session = _session_of(connection)
            try:
                if not self._checked:
                    await self._check(session)
                return await session.run(transaction, self._statement_timeout + messages.GRACE, messages.THEIRS)
            except CommitAmbiguousError:
                self.unconfirmed.add()
                raise
            finally:
                if not session.open:
                    await discarded(connection)

    async def _check(self, session: AsyncSession) -> None:
        """Raise for sessions that could not store a record unchanged."""
        try:
            [settings] = await session.hold(self._statement_timeout, session.execute_text(_SETTINGS))
        except messages.FAILURES as error:
            raise messages.unreachable(error) from error
        [[mode, *charsets]] = settings.rows
        if not any(word in mode.split(",") for word in _STRICT):
            raise ConfigurationError(LAX)
        strange = [charset for charset in charsets if charset != "utf8mb4"]
        if strange:
            raise ConfigurationError(NOT_UTF8.format(charset=strange[0]))
        self._checked = True

    async def _confirmed(self) -> bool:
        """No-op: MariaDB has no synchronous standby to wait for."""
        return True

    @aretrying(LostError)
    async def _opened(self, engine: AsyncEngine) -> SqlalchemyTransaction:
        """Retry with another connection if a pooled one turns out to be dead at the beginning of the transaction."""
        return await super()._opened(engine)

    def _begun(self, connection: SqlalchemyHandlerConnection, engine: AsyncEngine) -> MariadbTransaction:
        begin = messages.only_reading if engine is self._reader_for_handlers else messages.begun
        return MariadbTransaction(
            connection,
            connection.watch,
            partial(self._end, connection),
            self.unconfirmed,
            begin=partial(begin, self._begin_with),
            limit=self._statement_timeout,
        )


class MariadbTransaction(SqlalchemyTransaction):
    """A business transaction that a handler writes to, through a connection or a session; oncekey ends it."""

    def __init__(
        self,
        connection: AsyncConnection,
        watch: Watch,
        end: End,
        unconfirmed: UnconfirmedCommits,
        *,
        begin: Callable[[], messages.Talk[None]],
        limit: float,
    ) -> None:
        super().__init__(connection, watch, end, unconfirmed)
        self._begin = begin
        self._limit = limit

    async def start(self) -> None:
        """Begin before the application's listeners run: the isolation level must be set outside a transaction."""
        await _session_of(self._connection).talk(self._begin(), self._limit)
        self._watch.begun = True
        await super().start()

    async def run(self, body: Body[T]) -> T:
        """Run statements inside it, after any statement that a handler left running: the protocol is sequential."""
        self._refuse_if_ended()
        if not await self._watch.quiet(PATIENCE):
            raise TransactionControlError(LEFT_BEHIND)
        session, watch = _session_of(self._connection), self._watch
        if watch.unsure:  # an error comes without the server's status flags
            await session.talk(messages.asking(), self._limit)
            watch.unsure = False
        handler_connection.refuse_if_ended(self._connection.sync_connection, watch)
        try:
            result = await session.talk(messages.running_body(body, messages.THEIRS), self._limit + messages.GRACE)
        except BaseException as error:
            watch.unsure = True
            if isinstance(error, messages.DemotedError):
                session.sever()
            raise
        watch.forget()
        return result

    async def _prove(self) -> None:
        """Raise unless the server is still in the transaction that was begun; no other one is committed (L5)."""
        await _session_of(self._connection).talk(messages.proving(), self._limit)


def _session_of(connection: AsyncConnection) -> AsyncSession:
    """The connection below SQLAlchemy's; if it was lost, only a rollback is possible."""
    raw = raw_of(connection.sync_connection)
    if raw is None:
        raise TransactionControlError(BROKEN)
    return AsyncSession(raw, b"")


def _begin_with(engine: AsyncEngine) -> bytes:
    """Keep the application's isolation level for its handlers; otherwise use READ COMMITTED."""
    chosen = getattr(engine.dialect, "_on_connect_isolation_level", None)
    return messages.BEGIN if chosen or "isolation_level" in engine.get_execution_options() else messages.THEIRS
