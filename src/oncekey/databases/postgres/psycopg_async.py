"""The driver for PostgreSQL through psycopg, for asyncio.

It works behind a pooler that lends server connections per transaction: no setting outlives a transaction, and
nothing is prepared unless `prepare_threshold` or the address (`?pgbouncer=0`) enables it.

If no connection is idle, one is opened in the caller's own task. So a server that is down is reported at once with
its own error, and one that is back is used at once: no background worker has to notice first.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing
from functools import partial
from typing import TYPE_CHECKING, TypeVar, assert_never

import psycopg

from oncekey.core.flow import Mode, Statement, arun_body
from oncekey.databases.postgres import psycopg_async_transactions as transactions
from oncekey.databases.postgres import psycopg_connections as connections
from oncekey.databases.postgres import psycopg_replies as replies
from oncekey.databases.postgres import server
from oncekey.databases.postgres.address import BACKEND, Pooling, PostgresAddress
from oncekey.databases.postgres.unconfirmed import CONFIRM, AsyncConfirming, UnconfirmedCommits
from oncekey.databases.postgres.unconfirmed import WHAT as QUESTION
from oncekey.databases.retries import ConflictError, LostError, aretrying
from oncekey.databases.slots import AsyncSlots, business_share

if TYPE_CHECKING:
    from oncekey.core.flow import Body, Rows, Transaction

T = TypeVar("T")


class AsyncPsycopgDriver:
    """Runs transactions on PostgreSQL under asyncio. One for each event loop."""

    def __init__(
        self,
        dsn: str,
        *,
        pool_size: int = server.POOL_SIZE,
        timeout: float = server.TIMEOUT,
        statement_timeout: float = server.STATEMENT_TIMEOUT,
        idle_timeout: float = server.IDLE_TIMEOUT,
        prepare_threshold: int | None = None,
    ) -> None:
        address = PostgresAddress.parse(dsn)
        self._pool = AsyncPool(address.dsn, pool_size, timeout, connections.threshold(address, prepare_threshold))
        self._limit = statement_timeout
        self._notice = address.pooler  # asyncio only
        # A pooler would execute the reset on any free connection, and the handler's would stay as it is.
        self._resets_session = not address.pooler
        self._begin = f"{server.BEGIN}; {server.opening(idle_timeout)}"  # one message, so that it costs one round trip

    @aretrying(ConflictError, LostError)
    async def run(self, transaction: Transaction[T]) -> T:
        mode = transaction.mode
        match mode:
            case Mode.READ | Mode.SINGLE:
                async with self._pool.lent(self._limit) as connection:
                    return await arun_body(transaction.body(), partial(transactions.execute_alone, connection, mode))
            case Mode.ATOMIC:
                async with (
                    self._pool.lent(self._limit) as connection,
                    _begun(connection, transaction.name, self._limit),
                ):
                    connection.limit = None  # a migration may take long
                    result = await arun_body(transaction.body(), partial(transactions.execute, connection, mode))
                    connection.limit = self._limit
                    await transactions.commit(connection, transaction.name)
                    return result
            case _:
                assert_never(mode)

    @property
    def is_full(self) -> bool:
        return self._pool.is_full

    async def wait_for_slot(self, seconds: float) -> bool:  # asyncio only
        return await self._pool.wait_for_slot(seconds)

    async def begin(self) -> transactions.AsyncPsycopgTransaction:
        tx, _ = await self._opened(None)
        return tx

    async def begin_with(self, first: Body[T]) -> tuple[transactions.AsyncPsycopgTransaction, T]:
        with closing(first):
            statement = next(first)
            tx, rows = await self._opened(statement if server.folds_as_text(statement) else None)
            try:
                while True:
                    statement = first.send(await tx.execute_own(statement) if rows is None else rows)
                    rows = None
            except StopIteration as stop:
                return tx, stop.value
            except BaseException:
                await tx.rollback()
                raise

    async def read(self) -> transactions.AsyncPsycopgTransaction:  # asyncio only
        return await server.only_reading(await self.begin())

    async def pooling(self) -> Pooling:  # asyncio only
        """Whether there is a pooler in front of the server."""
        async with self._pool.lent(self._limit) as one, self._pool.lent(self._limit) as two:
            greeted = (one.pgconn.backend_pid, two.pgconn.backend_pid)
            answered = [
                await transactions.execute(each, Mode.READ, Statement("pooling", BACKEND)) for each in (one, two)
            ]
        first, second = (int(rows[0]["pg_backend_pid"]) for rows in answered)
        return Pooling.seen(greeted, (first, second), declared=self._notice)

    async def close(self) -> None:
        self._pool.close()

    @aretrying(LostError)
    async def _opened(self, first: Statement | None) -> tuple[transactions.AsyncPsycopgTransaction, Rows | None]:
        """A transaction that has begun, and the row of its first statement if that was sent with BEGIN and has one."""
        connection = await self._pool.take()
        connection.limit = self._limit
        rows: Rows | None = None
        try:
            if first is None:
                await transactions.begin(connection, self._begin, server.WHAT)
            else:
                rows = await transactions.begin_with(connection, first)
        except BaseException:
            try:
                if replies.may_be_undone(connection):
                    await transactions.undo(connection)
            finally:
                self._pool.give(connection)
            raise
        connection.limit = None
        return transactions.AsyncPsycopgTransaction(
            self._pool, connection, self._limit, resets_session=self._resets_session
        ), rows


class AsyncPool:
    """Connections for asyncio."""

    def __init__(self, dsn: str, size: int, timeout: float, threshold: int | None) -> None:
        self._address = connections.bounded(dsn, timeout)
        self._timeout, self._threshold = timeout, threshold
        self._slots = AsyncSlots(size, timeout)
        self._business = AsyncSlots(business_share(size), timeout)
        self._shelf: connections.IdleConnections[connections.AsyncStoreConnection] = connections.IdleConnections()
        self.unconfirmed = UnconfirmedCommits.of(dsn)
        self._confirming = AsyncConfirming(self.unconfirmed, self._confirmed)

    @asynccontextmanager
    async def lent(self, limit: float) -> AsyncIterator[connections.AsyncStoreConnection]:
        """A connection for one statement or transaction of oncekey's own."""
        if self.unconfirmed:
            await self._confirming.confirm_all()
        connection = await self._take(time.monotonic() + self._timeout)
        connection.limit = limit
        try:
            yield connection
        finally:
            self._give(connection)

    @property
    def is_full(self) -> bool:
        """Whether business transactions hold all connections that they may use."""
        return self._business.full

    async def wait_for_slot(self, seconds: float) -> bool:  # asyncio only
        return await self._business.wait_for_slot(seconds)

    async def take(self) -> connections.AsyncStoreConnection:
        """A connection for a business transaction."""
        if self.unconfirmed:
            await self._confirming.confirm_all()
        deadline = time.monotonic() + self._timeout
        if not self._business.taken():
            await self._business.acquire(deadline)
        try:
            return await self._take(deadline)
        except BaseException:
            self._business.release()
            raise

    def give(self, connection: connections.AsyncStoreConnection, *, used: bool = False, undo: bool = False) -> None:
        """Return a business transaction's connection."""
        self._give(connection, used=used, undo=undo)
        self._business.release()

    def close(self) -> None:
        """Close all connections; those in use when they are returned."""
        self._shelf.close()

    async def _take(self, deadline: float) -> connections.AsyncStoreConnection:
        if not self._slots.taken():
            await self._slots.acquire(deadline)
        try:
            return await self._idle() or await connections.aconnect(self._address, self._threshold, self.unconfirmed)
        except psycopg.Error as error:
            self._slots.release()
            raise server.unreachable(replies.first_line(error)) from error
        except BaseException:
            self._slots.release()
            raise

    async def _idle(self) -> connections.AsyncStoreConnection | None:
        while (connection := self._shelf.pop()) is not None:
            if not connection.cleaning:
                return connection
            connection.limit = self._timeout
            clean = False
            try:
                clean = await connection.is_clean() and connections.is_quiet(connection)
            finally:
                if not clean:
                    connection.pgconn.finish()
            if clean:
                connection.limit = None
                return connection
        return None

    async def _confirmed(self) -> bool:
        """Whether the standby has everything that was committed so far."""
        connection = await self._take(time.monotonic() + self._timeout)
        connection.limit, connection.unsure = self._timeout, False
        try:
            await connection.execute(CONFIRM)
        except psycopg.Error as error:
            raise replies.statement_error(error, connection, Mode.READ, QUESTION) from error
        finally:
            self._give(connection)
        return not connection.unsure

    def _give(self, connection: connections.AsyncStoreConnection, *, used: bool = False, undo: bool = False) -> None:
        self._shelf.put(connection, used=used, undo=undo)
        self._slots.release()


@asynccontextmanager
async def _begun(connection: connections.AsyncStoreConnection, what: str, limit: float) -> AsyncIterator[None]:
    await transactions.begin(connection, server.BEGIN, what)
    try:
        yield
    except BaseException:
        connection.limit = limit
        await transactions.undo(connection)
        raise
