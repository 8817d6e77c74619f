"""The driver for applications with a SQLAlchemy `AsyncEngine`: their engine, their pool, their sessions."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager, suppress
from functools import partial
from typing import TYPE_CHECKING, Final, TypeAlias, TypeVar

from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine, AsyncSession
from sqlalchemy.pool import NullPool

from oncekey.core.errors import CommitAmbiguousError, ConfigurationError, TransactionControlError
from oncekey.drivers.handler_sql import AS_HANDLER, AS_OPENED, LEFT_BEHIND, OVER
from oncekey.drivers.postgres.unconfirmed import CONFIRM, WHAT, AsyncConfirming, UnconfirmedCommits
from oncekey.drivers.retries import ConflictError, LostError, aretrying
from oncekey.drivers.slots import AsyncSlots
from oncekey.drivers.sqlalchemy import connections, handler_connection
from oncekey.drivers.sqlalchemy.errors import (
    AUTOCOMMITS,
    BUSINESS,
    ENDED,
    FAILURES,
    failed,
    meaning,
    not_connected,
    unproven,
)
from oncekey.drivers.sqlalchemy.execute import PROBE, PROVE, EngineFile, own_text, places_in, raw_of, sure
from oncekey.drivers.sqlalchemy.handler_connection import SqlalchemyHandlerConnection, Watch
from oncekey.drivers.sqlalchemy.sessions import OrdinarySession, SteppingSession, only_reading, placed
from oncekey.flow import Body, Mode, Statement, Transaction, arun_body

if TYPE_CHECKING:
    from sqlalchemy.engine import RootTransaction


T = TypeVar("T")

STATEMENT_TIMEOUT: Final = 10.0
"""Seconds that one of oncekey's own statements may take: a row may be locked by a commit that hangs."""

OURS: Final = "READ COMMITTED"
GRACE: Final = 1.0
"""Seconds for a statement to end after its connection was closed, and for a standby to confirm a commit."""

DIALECTS: Final = frozenset({"postgresql", "sqlite", "mysql", "mariadb"})


class SqlalchemyDriver:
    """Runs transactions on the application's own engine, which is never disposed here.

    While a handler holds one connection, its key's record needs another for a moment, to be claimed or renewed. So a
    fifth of the pool is never given to handlers: a handler with a connection must not wait for one without.
    """

    def __init__(self, engine: AsyncEngine, *, statement_timeout: float = STATEMENT_TIMEOUT) -> None:
        if engine.dialect.name not in DIALECTS:
            raise ConfigurationError(
                f"the records of keys cannot be kept in {engine.dialect.name}: use an engine for PostgreSQL, SQLite, "
                "MariaDB or MySQL"
            )
        self._engine = engine = AsyncEngine(handler_connection.own_engine(engine.sync_engine))
        self._file = EngineFile(engine.sync_engine)
        self._statement_timeout = statement_timeout
        self._autocommit = engine.execution_options(isolation_level="AUTOCOMMIT")
        # After waiting for a lock it must see what the holder committed, whatever the application's isolation level is.
        self._atomic = engine if engine.dialect.name == "sqlite" else engine.execution_options(isolation_level=OURS)
        self._for_handler = handler_connection.engine_for_handlers(engine)
        reader = only_reading(engine)
        self._reader_for_handlers = handler_connection.engine_for_handlers(reader)
        self._cleans = not isinstance(engine.pool, NullPool)  # a NullPool closes what is returned to it
        self._placed = placed(engine, self._enter, self._leave, cleans=self._cleans)
        self._placed_reader = placed(reader, self._enter, self._leave, cleans=self._cleans)
        self._patience = float(getattr(engine.pool, "_timeout", 30.0))
        places = places_in(engine.pool, "create_async_engine")
        self._places = None if places is None else AsyncSlots(places, self._patience)
        self._returns: set[asyncio.Task[None]] = set()
        self._unconfirmed = UnconfirmedCommits.of(str(engine.url))
        self._confirming = AsyncConfirming(self._unconfirmed, self._confirmed)

    @aretrying(ConflictError, LostError)
    async def run(self, transaction: Transaction[T]) -> T:
        """Run one transaction; again, if it lost against others or cannot have happened."""
        if self._unconfirmed:
            await self._confirming.confirm_all()
        name, mode = transaction.name, transaction.mode
        async with self._connected(self._atomic if mode is Mode.ATOMIC else self._autocommit) as connection:
            if mode is Mode.SINGLE:
                with sure(connection.sync_connection, self._unconfirmed, name):
                    return await self._stepped(connection, transaction, self._statement_timeout)
            if mode is Mode.READ:
                return await self._stepped(connection, transaction, self._statement_timeout)
            result = await self._stepped(connection, transaction, None)
            await connections.committed(connection, self._unconfirmed, name)
            return result

    @property
    def crowded(self) -> bool:
        return self._places is not None and self._places.full

    async def begin(self) -> SqlalchemyTransaction:
        """Open a business transaction; the first statement begins it in the database."""
        return await self._opened(self._for_handler)

    async def read(self) -> SqlalchemyTransaction:
        return await self._opened(self._reader_for_handlers)

    async def _opened(self, engine: AsyncEngine) -> SqlalchemyTransaction:
        if self._unconfirmed:
            await self._confirming.confirm_all()
        self._file.refuse_if_gone()
        await self._enter()
        try:
            connection, watch = await handler_connection.open_for_handler(engine)
        except BaseException as error:
            self._leave()
            if isinstance(error, FAILURES):
                raise not_connected(error, engine.dialect.name) from error
            raise
        transaction = self._begun(connection, watch, reads=engine is self._reader_for_handlers)
        try:
            await connections.vetted(connection)
            await transaction.start()
        except BaseException:
            await transaction.rollback()
            raise
        return transaction

    def _begun(self, connection: SqlalchemyHandlerConnection, watch: Watch, *, reads: bool) -> SqlalchemyTransaction:  # noqa: ARG002
        return SqlalchemyTransaction(connection, watch, self._end, self._unconfirmed)

    def session(self) -> OrdinarySession:
        """An ordinary session, which the application commits; it takes a connection when it is first used."""
        return OrdinarySession(self._placed, expire_on_commit=False)

    def stepping_session(self) -> SteppingSession:
        return SteppingSession(self._placed_reader)

    async def close(self) -> None:
        """Wait for the connections that are being returned to the pool; the engine is not ours."""
        if self._returns:
            await asyncio.wait(self._returns)

    def _end(self, connection: SqlalchemyHandlerConnection, session: AsyncSession | None) -> asyncio.Task[None]:
        """Roll back what is not committed, and return a business transaction's connection."""
        return self._in_background(self._ended(connection, session))

    async def _stepped(self, connection: AsyncConnection, transaction: Transaction[T], limit: float | None) -> T:
        try:
            async with asyncio.timeout(limit):
                return await arun_body(transaction.body(), partial(connections.execute, connection))
        except FAILURES as error:
            await connections.forsaken(connection, error)
            raise failed(error, transaction.mode, transaction.name) from error

    @asynccontextmanager
    async def _connected(self, engine: AsyncEngine) -> AsyncIterator[AsyncConnection]:
        self._file.refuse_if_gone()
        connection = engine.connect()
        try:
            await connection.start()
        except FAILURES as error:
            raise not_connected(error, engine.dialect.name) from error
        try:
            await connections.vetted(connection)
            yield connection
        finally:
            await asyncio.shield(self._in_background(connections.closed(connection)))

    async def _confirmed(self) -> bool:
        """Whether the standby has everything that was committed so far; a file has none."""
        if self._engine.dialect.name == "sqlite":
            return True
        question: Transaction[None] = Transaction(WHAT, Mode.SINGLE, _confirming)
        async with self._connected(self._autocommit) as connection:
            try:
                with sure(connection.sync_connection, self._unconfirmed, WHAT):
                    await self._stepped(connection, question, GRACE)
            except CommitAmbiguousError:
                return False
        return True

    async def _enter(self) -> None:
        if self._places is not None:
            await self._places.acquire(time.monotonic() + self._patience)

    def _leave(self) -> None:
        if self._places is not None:
            self._places.release()

    async def _ended(self, connection: SqlalchemyHandlerConnection, session: AsyncSession | None) -> None:
        try:
            if connection.watch.running and not await self._hushed(connection):
                await connections.discarded(connection)
                return
            if session is not None:
                with suppress(*FAILURES):
                    await session.close()
            clean = (
                partial(connections.as_opened, connection.sync_connection)
                if self._cleans and connection.watch.used
                else None
            )
            await connections.closed(connection, clean=clean)
        finally:
            connection.watch.released = True
            self._leave()

    async def _hushed(self, connection: SqlalchemyHandlerConnection) -> bool:
        """Whether a connection with a statement under way can be used again, once that has ended.

        A statement that was sent to PostgreSQL, or waits to be, would become part of the next borrower's transaction,
        so the connection is closed. SQLite runs one statement after the other in one thread, so it ends soon.
        """
        await connections.cancel_and_close(raw_of(connection.sync_connection))
        return await connection.watch.quiet(GRACE) and self._engine.dialect.name == "sqlite"

    def _in_background(self, work: Coroutine[None, None, None]) -> asyncio.Task[None]:
        """Return a connection to its pool in a task of its own, which a cancellation of the caller does not reach."""
        task = asyncio.get_running_loop().create_task(work)
        self._returns.add(task)
        task.add_done_callback(self._returns.discard)
        return task


def _confirming() -> Body[None]:
    yield Statement(WHAT, CONFIRM)


End: TypeAlias = Callable[[SqlalchemyHandlerConnection, AsyncSession | None], "asyncio.Task[None]"]
"""Rolls back what is not committed and returns the connection, in a task that is never cancelled."""


class SqlalchemyTransaction:
    """A business transaction that a handler writes through, as a connection or as a session, and that oncekey ends."""

    __slots__ = ("_connection", "_end", "_ending", "_root", "_session", "_unconfirmed", "_watch")

    def __init__(
        self, connection: SqlalchemyHandlerConnection, watch: Watch, end: End, unconfirmed: UnconfirmedCommits
    ) -> None:
        self._connection = connection
        self._unconfirmed = unconfirmed
        self._watch = watch
        self._end = end
        self._root: RootTransaction | None = None
        self._session: AsyncSession | None = None
        self._ending: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Begin. Listeners of the application may execute statements at once, to set a tenant for example."""
        if handler_connection.commits_by_itself(self._connection.sync_connection):
            raise ConfigurationError(AUTOCOMMITS)
        try:
            await AsyncConnection.begin(self._connection)
        except FAILURES as error:
            raise failed(error, Mode.ATOMIC, BUSINESS) from error
        self._root = self._current()
        self._watch.guards = True

    @property
    def connection(self) -> SqlalchemyHandlerConnection:
        return self._connection

    @property
    def session(self) -> AsyncSession:
        """The session that writes through it: its `commit()` only flushes."""
        if self._session is None:
            self._session = AsyncSession(
                bind=self._connection, join_transaction_mode="rollback_only", expire_on_commit=False
            )
        return self._session

    def adopt(self, session: AsyncSession) -> None:
        self._session = session

    async def flush(self) -> None:
        """Write the session's pending changes; the handler gets the database's errors."""
        if self._session is not None and self._goes_on():
            await self._session.flush()

    async def run(self, body: Body[T]) -> T:
        self._refuse_if_ended()
        handler_connection.refuse_if_ended(self._connection.sync_connection, self._watch)
        try:
            for setting in AS_OPENED if self._watch.sets else ():
                await self._connection.execute(own_text(setting))
            result = await arun_body(body, partial(connections.execute, self._connection))
            if self._watch.sets:
                await self._connection.execute(own_text(AS_HANDLER))
        except FAILURES as error:
            raise meaning(error) from error
        self._watch.forget()
        return result

    async def commit(self) -> None:
        """Commit, and return the connection; a transaction that can only be rolled back is refused (F20)."""
        self._refuse_if_ended()
        try:
            await self._refuse_late_users()
            if self._watch.has_failed:
                await self._probe()
            await self._prove()
            self._watch.guards = False
            await connections.committed(self._connection, self._unconfirmed, BUSINESS)
        except BaseException:
            await self.rollback()
            raise
        session, self._session = self._session, None
        if session is not None:
            # Now, and not with the connection: a phased handler goes on with it, and what it adds must not be lost.
            with suppress(*FAILURES):
                await session.close()
        self._ended()  # the caller need not wait until the connection is reset and returned

    async def rollback(self) -> None:
        await asyncio.shield(self._ended())

    def _ended(self) -> asyncio.Task[None]:
        if self._ending is None:
            self._watch.over = True
            self._watch.guards = False
            self._ending = self._end(self._connection, self._session)
        return self._ending

    async def _refuse_late_users(self) -> None:
        """Refuse further statements, and wait for those that a handler left running: they belong to the transaction."""
        self._watch.over = True
        if not await self._watch.quiet(handler_connection.PATIENCE):
            raise TransactionControlError(LEFT_BEHIND)

    async def _probe(self) -> None:
        try:
            await self._connection.execute(PROBE)
        except FAILURES as error:
            raise meaning(error) from error

    async def _prove(self) -> None:
        """Raise unless the database is still in the transaction that was begun: no other one is committed (L5)."""
        sync, watch = self._connection.sync_connection, self._watch
        handler_connection.refuse_if_ended(sync, watch)
        if watch.begun and sync is not None and sync.dialect.name == "sqlite":
            try:
                await self._connection.execute(PROVE)
            except FAILURES as error:
                raise unproven(error) from error

    def _refuse_if_ended(self) -> None:
        if self._ending is not None:
            raise TransactionControlError(OVER)
        if not self._goes_on():
            raise TransactionControlError(ENDED)

    def _goes_on(self) -> bool:
        """Whether it is still the transaction that we began, and not one that came after it."""
        root = self._root
        return root is not None and root.is_active and self._current() is root

    def _current(self) -> RootTransaction | None:
        sync = self._connection.sync_connection
        return None if sync is None else sync.get_transaction()
