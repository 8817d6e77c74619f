"""The driver for a SQLAlchemy `AsyncEngine`, with the application's own pool and sessions."""

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
from oncekey.core.flow import Body, Mode, Statement, Transaction, arun_body
from oncekey.databases.handler_sql import AS_HANDLER, AS_OPENED, LEFT_BEHIND, OVER
from oncekey.databases.postgres.unconfirmed import CONFIRM, WHAT, AsyncConfirming, UnconfirmedCommits
from oncekey.databases.retries import ConflictError, LostError, aretrying
from oncekey.databases.slots import AsyncSlots
from oncekey.databases.sqlalchemy import connections, handler_connection
from oncekey.databases.sqlalchemy.async_engines import (
    MAKE,
    SqlalchemyHandlerConnection,
    borrowed_engine,
    engine_for_handlers,
    limited,
    open_for_handler,
)
from oncekey.databases.sqlalchemy.errors import (
    AUTOCOMMITS,
    BUSINESS,
    ENDED,
    FAILURES,
    failed,
    mark_lost_connections,
    meaning,
    not_connected,
    unproven,
)
from oncekey.databases.sqlalchemy.execute import (
    PROBE,
    PROVE,
    EngineFile,
    is_in_transaction,
    own_text,
    places_in,
    raw_of,
    sure,
)
from oncekey.databases.sqlalchemy.handler_connection import Watch, current_transaction
from oncekey.databases.sqlalchemy.sessions import OrdinarySession, SteppingSession, only_reading, reserved

if TYPE_CHECKING:
    from sqlalchemy.engine import RootTransaction


T = TypeVar("T")

STATEMENT_TIMEOUT: Final = 10.0
"""Timeout in seconds for one of oncekey's own statements: a row may be locked by a commit that hangs."""

OURS: Final = "READ COMMITTED"
GRACE: Final = 1.0
"""Seconds for a statement to end after its connection was closed, and for a standby to confirm a commit."""


class SqlalchemyDriver:
    """Runs transactions on the application's own engine, and never disposes of it.

    While a handler holds one connection, its key's record briefly needs another, to be claimed or renewed. So a fifth
    of the pool is never lent to handlers: a handler with a connection must not wait for one without.
    """

    def __init__(self, engine: AsyncEngine, *, statement_timeout: float = STATEMENT_TIMEOUT) -> None:
        self._engine = engine = borrowed_engine(engine)
        mark_lost_connections(engine.sync_engine)
        self._file = EngineFile(engine.sync_engine)
        self._sqlite = engine.dialect.name == "sqlite"
        self._statement_timeout = statement_timeout
        self._autocommit = engine.execution_options(isolation_level="AUTOCOMMIT")
        # After waiting for a lock it must see the holder's commit, whatever isolation level the application has set.
        self._atomic = engine if self._sqlite else engine.execution_options(isolation_level=OURS)
        self._for_handler = engine_for_handlers(engine)
        self._cleans = not isinstance(engine.pool, NullPool)  # a NullPool closes connections that are returned to it
        self._patience = float(getattr(engine.pool, "_timeout", 30.0))
        places = places_in(engine.pool, MAKE)
        self._places = None if places is None else AsyncSlots(places, self._patience, engine.dialect.name)
        self.unconfirmed = UnconfirmedCommits.of(str(engine.url))
        self._confirming = AsyncConfirming(self.unconfirmed, self._confirmed)
        reader = only_reading(engine)  # asyncio only
        self._reader_for_handlers = engine_for_handlers(reader)  # asyncio only
        self._reserved = reserved(engine, self._take_place, self.leave, cleans=self._cleans)  # asyncio only
        self._reserved_reader = reserved(reader, self._take_place, self.leave, cleans=self._cleans)  # asyncio only
        self._returns: set[asyncio.Task[None]] = set()  # asyncio only

    @aretrying(ConflictError, LostError)
    async def run(self, transaction: Transaction[T]) -> T:
        if self.unconfirmed:
            await self._confirming.confirm_all()
        name, mode = transaction.name, transaction.mode
        async with self._connected(self._atomic if mode is Mode.ATOMIC else self._autocommit) as connection:
            if mode is Mode.SINGLE:
                with sure(connection.sync_connection, self.unconfirmed, name):
                    return await self._stepped(connection, transaction, self._statement_timeout)
            if mode is Mode.READ:
                return await self._stepped(connection, transaction, self._statement_timeout)
            if self._sqlite:
                await self._begin_to_write(connection, name)
            result = await self._stepped(connection, transaction, None)
            await connections.committed(connection, self.unconfirmed, name)
            return result

    @property
    def is_full(self) -> bool:
        return self._places is not None and self._places.full

    async def begin(self) -> SqlalchemyTransaction:
        """Open a business transaction; the first statement begins it in the database."""
        return await self._opened(self._for_handler)

    async def read(self) -> SqlalchemyTransaction:  # asyncio only
        return await self._opened(self._reader_for_handlers)

    async def _opened(self, engine: AsyncEngine) -> SqlalchemyTransaction:
        await self.enter()
        try:
            connection = await open_for_handler(engine)
        except BaseException as error:
            self.leave()
            if isinstance(error, FAILURES):
                raise not_connected(error, engine.dialect.name) from error
            raise
        transaction = self._begun(connection, engine)
        try:
            await connections.vetted(connection)
            await transaction.start()
        except BaseException:
            await transaction.rollback()
            raise
        return transaction

    def _begun(self, connection: SqlalchemyHandlerConnection, _engine: AsyncEngine) -> SqlalchemyTransaction:
        end = partial(self._end, connection)
        return SqlalchemyTransaction(connection, connection.watch, end, self.unconfirmed)

    def session(self) -> OrdinarySession:  # asyncio only
        """An ordinary session, which the application commits; it takes a connection on first use."""
        return OrdinarySession(self._reserved, expire_on_commit=False)

    def stepping_session(self) -> SteppingSession:  # asyncio only
        return SteppingSession(self._reserved_reader)

    async def close(self) -> None:
        """Wait for the connections that are being returned to the pool; the engine belongs to the application."""
        if self._returns:  # asyncio only
            await asyncio.wait(self._returns)

    def _end(self, connection: SqlalchemyHandlerConnection, session: AsyncSession | None) -> asyncio.Task[None]:
        """Roll back uncommitted work, and return a business transaction's connection."""
        return self._in_background(self._ended(connection, session))

    async def _stepped(self, connection: AsyncConnection, transaction: Transaction[T], limit: float | None) -> T:
        try:
            async with limited(connection, limit):
                return await arun_body(transaction.body(), partial(connections.execute, connection))
        except FAILURES as error:
            await connections.forsaken(connection, error)
            raise failed(error, transaction.mode, transaction.name) from error

    @asynccontextmanager
    async def _connected(self, engine: AsyncEngine) -> AsyncIterator[AsyncConnection]:
        self._file.refuse_if_gone()
        try:
            connection = await engine.connect()
        except FAILURES as error:
            raise not_connected(error, engine.dialect.name) from error
        try:
            await connections.vetted(connection)
            yield connection
        finally:
            await asyncio.shield(self._in_background(connections.closed(connection)))

    async def _confirmed(self) -> bool:
        """Whether the standby has everything that was committed so far; a file has no standby."""
        if self._sqlite:
            return True
        question: Transaction[None] = Transaction(WHAT, Mode.SINGLE, _confirming)
        async with self._connected(self._autocommit) as connection:
            try:
                with sure(connection.sync_connection, self.unconfirmed, WHAT):
                    await self._stepped(connection, question, GRACE)
            except CommitAmbiguousError:
                return False
        return True

    async def enter(self) -> None:
        """Wait for one of the handlers' slots in the pool; commits must be confirmed first."""
        self._file.refuse_if_gone()
        if self.unconfirmed:
            await self._confirming.confirm_all()
        await self._take_place()

    async def _take_place(self) -> None:
        if self._places is not None:
            await self._places.acquire(time.monotonic() + self._patience)

    def leave(self) -> None:
        """Release the slot."""
        if self._places is not None:
            self._places.release()

    async def _begin_to_write(self, connection: AsyncConnection, what: str) -> None:
        """Begin at once: Python's sqlite3 module would begin at the first write, after earlier reads."""
        try:
            await connection.begin()
            if not is_in_transaction(raw_of(connection.sync_connection)):  # the application's engine may have begun
                await connection.exec_driver_sql("BEGIN IMMEDIATE")
        except FAILURES as error:
            raise failed(error, Mode.ATOMIC, what) from error

    async def _ended(self, connection: SqlalchemyHandlerConnection, session: AsyncSession | None) -> None:
        try:
            if connection.watch.running and not await self._hushed(connection):
                await connections.discarded(connection)
                return
            if session is not None:  # asyncio only
                with suppress(*FAILURES):
                    await session.close()
            clean = partial(connections.as_opened, connection.sync_connection)
            await connections.closed(connection, clean=clean if self._cleans and connection.watch.used else None)
        finally:
            connection.watch.released = True
            self.leave()

    async def _hushed(self, connection: SqlalchemyHandlerConnection) -> bool:
        """Whether a connection with a running statement is usable again after the statement ends.

        A statement that was sent to PostgreSQL, or is queued, would become part of the next borrower's transaction, so
        the connection is closed. SQLite runs statements in sequence in one thread, so the statement ends soon.
        """
        await connections.cancel_and_close(raw_of(connection.sync_connection))
        return await connection.watch.quiet(GRACE) and self._sqlite

    def _in_background(self, work: Coroutine[None, None, None]) -> asyncio.Task[None]:  # asyncio only
        """Return a connection to its pool in a separate task, so that cancelling the caller does not interrupt it."""
        task = asyncio.get_running_loop().create_task(work)
        self._returns.add(task)
        task.add_done_callback(self._returns.discard)
        return task


def _confirming() -> Body[None]:
    yield Statement(WHAT, CONFIRM)


End: TypeAlias = Callable[[AsyncSession | None], "asyncio.Task[None]"]
"""Rolls back uncommitted work and returns the connection, in a task that is never cancelled."""


class SqlalchemyTransaction:
    """A business transaction that a handler writes to, through a connection or a session; oncekey ends it."""

    _session: AsyncSession | None = None  # asyncio only
    _ending: asyncio.Task[None] | None = None  # asyncio only

    def __init__(self, connection: AsyncConnection, watch: Watch, end: End, unconfirmed: UnconfirmedCommits) -> None:
        self._connection, self._watch = connection, watch
        self._end, self._unconfirmed = end, unconfirmed
        self._root: RootTransaction | None = None
        self._over = False

    async def start(self) -> None:
        """Begin. Listeners of the application may execute statements immediately, for example to set a tenant."""
        if handler_connection.commits_by_itself(self._connection.sync_connection):
            raise ConfigurationError(AUTOCOMMITS)
        try:
            await AsyncConnection.begin(self._connection)
        except FAILURES as error:
            raise failed(error, Mode.ATOMIC, BUSINESS) from error
        self._root = current_transaction(self._connection.sync_connection)
        self._watch.guards = True

    @property
    def connection(self) -> AsyncConnection:
        return self._connection

    @property
    def session(self) -> AsyncSession:  # asyncio only
        """The session inside the transaction: its `commit()` only flushes."""
        if self._session is None:
            self._session = AsyncSession(
                bind=self._connection, join_transaction_mode="rollback_only", expire_on_commit=False
            )
        return self._session

    def adopt(self, session: AsyncSession) -> None:  # asyncio only
        self._session = session

    async def flush(self) -> None:  # asyncio only
        """Write the session's pending changes; database errors are raised to the handler."""
        if self._session is not None and self._is_same():
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
            await self._check()
            self._watch.guards = False
            await connections.committed(self._connection, self._unconfirmed, BUSINESS)
        except BaseException:
            await self.rollback()
            raise
        session = self._session  # asyncio only
        if session is not None:  # asyncio only
            # Expire objects now, not with the connection: a phased handler keeps using it, and its additions must not
            # be lost.
            self._session = None
            with suppress(*FAILURES):
                await session.close()
        self._finish()  # the caller need not wait until the connection is reset and returned

    async def rollback(self) -> None:
        self._finish()
        if self._ending is not None:  # asyncio only
            await asyncio.shield(self._ending)

    def _finish(self) -> None:
        """Return the connection, at most once."""
        if not self._over:
            self._over = self._watch.over = True
            self._watch.guards = False
            self._ending = self._end(self._session)

    async def _check(self) -> None:
        """Reject further statements, and a transaction that cannot be committed.

        Statements that a handler left running belong to the transaction, so they are awaited.
        """
        self._watch.over = True
        if not await self._watch.quiet(handler_connection.PATIENCE):
            raise TransactionControlError(LEFT_BEHIND)
        if self._watch.has_failed:
            try:
                await self._connection.execute(PROBE)
            except FAILURES as error:
                raise meaning(error) from error
        await self._prove()

    async def _prove(self) -> None:
        """Raise unless the database is still in the transaction that was begun; no other one is committed (L5)."""
        handler_connection.refuse_if_ended(self._connection.sync_connection, self._watch)
        if self._watch.begun and self._connection.dialect.name == "sqlite":
            try:
                await self._connection.execute(PROVE)
            except FAILURES as error:
                raise unproven(error) from error

    def _refuse_if_ended(self) -> None:
        if self._over:
            raise TransactionControlError(OVER)
        if not self._is_same():
            raise TransactionControlError(ENDED)

    def _is_same(self) -> bool:
        """Whether it is still the transaction that oncekey began, and not a later one."""
        root = self._root
        return root is not None and root.is_active and current_transaction(self._connection.sync_connection) is root
