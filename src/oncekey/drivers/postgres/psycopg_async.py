"""The driver for PostgreSQL through psycopg, for asyncio, and inside the caller's transaction.

It works behind a pooler that lends server connections per transaction: nothing is set beyond a transaction, and
nothing is prepared unless `prepare_threshold` or the address (`?pgbouncer=0`) asks for it.

A connection is made in the caller's own task if there is none to lend. So a server that is down is reported at once
with its own error, and one that is back is used at once: no background worker has to find out first.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar, assert_never

import psycopg

from oncekey.drivers.postgres.address import BACKEND, Pooling, PostgresAddress
from oncekey.drivers.postgres.doubt import CONFIRM, AsyncAsking, Doubt
from oncekey.drivers.postgres.doubt import WHAT as QUESTION
from oncekey.drivers.postgres.errors import unreachable
from oncekey.drivers.postgres.psycopg_async_transactions import (
    AsyncPsycopgTransaction,
    begin,
    begin_with,
    commit,
    execute,
    execute_alone,
    undo,
)
from oncekey.drivers.postgres.psycopg_connections import (
    AsyncStoreConnection,
    IdleConnections,
    aconnect,
    bounded,
    is_quiet,
    threshold,
)
from oncekey.drivers.postgres.psycopg_replies import first_line, may_be_undone, refuse_autocommit, statement_error
from oncekey.drivers.postgres.transactions import (
    BEGIN,
    IDLE_TIMEOUT,
    POOL_SIZE,
    STATEMENT_TIMEOUT,
    TIMEOUT,
    WHAT,
    folds_as_text,
    idle_limit,
    only_reading,
)
from oncekey.drivers.retries import ConflictError, LostError, aretrying
from oncekey.drivers.slots import AsyncSlots, business_share
from oncekey.drivers.within import AsyncWithin
from oncekey.flow import Mode, Statement, astep

if TYPE_CHECKING:
    from oncekey.flow import Rows, Steps, Transaction

T = TypeVar("T")


class AsyncPsycopgDriver:
    """Runs transactions on PostgreSQL under asyncio. One for each event loop."""

    def __init__(
        self,
        dsn: str,
        *,
        pool_size: int = POOL_SIZE,
        timeout: float = TIMEOUT,
        statement_timeout: float = STATEMENT_TIMEOUT,
        idle_timeout: float = IDLE_TIMEOUT,
        prepare_threshold: int | None = None,
    ) -> None:
        address = PostgresAddress.parse(dsn)
        self._pool = AsyncPool(address.dsn, pool_size, timeout, threshold(address, prepare_threshold))
        self._limit = statement_timeout
        self._notice = address.pooler  # asyncio only
        # A pooler would execute it on whichever connection is free, and the handler's would stay as it is.
        self._cleans = not address.pooler
        self._begin = f"{BEGIN}; {idle_limit(idle_timeout)}"  # one message, so that it costs one round trip

    @aretrying(ConflictError, LostError)
    async def run(self, transaction: Transaction[T]) -> T:
        """Run one transaction; again, if it lost against others or cannot have happened."""
        mode = transaction.mode
        match mode:
            case Mode.READ | Mode.SINGLE:
                async with self._pool.lent(self._limit) as connection:
                    return await astep(transaction.body(), partial(execute_alone, connection, mode))
            case Mode.ATOMIC:
                async with (
                    self._pool.lent(self._limit) as connection,
                    _begun(connection, transaction.name, self._limit),
                ):
                    connection.limit = None  # a migration may take long
                    result = await astep(transaction.body(), partial(execute, connection, mode))
                    connection.limit = self._limit
                    await commit(connection, transaction.name)
                    return result
            case _:
                assert_never(mode)

    @property
    def crowded(self) -> bool:
        """Whether a new business transaction would have to wait for another one to end."""
        return self._pool.crowded

    async def room(self, seconds: float) -> bool:  # asyncio only
        """Wait a moment for a free connection; whether there is one."""
        return await self._pool.room(seconds)

    async def begin(self) -> AsyncPsycopgTransaction:
        """Open a business transaction."""
        tx, _ = await self._opened(None)
        return tx

    async def begin_with(self, first: Steps[T]) -> tuple[AsyncPsycopgTransaction, T]:
        """Open a business transaction and run `first` in it, its first statement with the BEGIN if it folds."""
        with closing(first):
            statement = next(first)
            tx, rows = await self._opened(statement if folds_as_text(statement) else None)
            try:
                while True:
                    statement = first.send(await tx.say(statement) if rows is None else rows)
                    rows = None
            except StopIteration as stop:
                return tx, stop.value
            except BaseException:
                await tx.rollback()
                raise

    async def read(self) -> AsyncPsycopgTransaction:  # asyncio only
        """Open a transaction that only reads."""
        return await only_reading(await self.begin())

    async def pooling(self) -> Pooling:  # asyncio only
        """Whether a pooler stands before the server."""
        async with self._pool.lent(self._limit) as one, self._pool.lent(self._limit) as two:
            greeted = (one.pgconn.backend_pid, two.pgconn.backend_pid)
            answered = [await execute(each, Mode.READ, Statement("pooling", BACKEND)) for each in (one, two)]
        first, second = (int(rows[0]["pg_backend_pid"]) for rows in answered)
        return Pooling.seen(greeted, (first, second), declared=self._notice)

    async def close(self) -> None:
        """Close the connections."""
        self._pool.close()

    @aretrying(LostError)
    async def _opened(self, first: Statement | None) -> tuple[AsyncPsycopgTransaction, Rows | None]:
        """A transaction that has begun, and the row of its first statement, if that was sent with BEGIN and has one."""
        connection = await self._pool.take()
        connection.limit = self._limit
        rows: Rows | None = None
        try:
            if first is None:
                await begin(connection, self._begin, WHAT)
            else:
                rows = await begin_with(connection, first)
        except BaseException:
            try:
                if may_be_undone(connection):
                    await undo(connection)
            finally:
                self._pool.give(connection)
            raise
        connection.limit = None
        return AsyncPsycopgTransaction(self._pool, connection, self._limit, cleans=self._cleans), rows


class AsyncPsycopgWithin(AsyncWithin):
    """Runs everything in the open transaction of the caller's `psycopg.AsyncConnection`."""

    def __init__(self, connection: psycopg.AsyncConnection[Any]) -> None:
        refuse_autocommit(connection)
        super().__init__(partial(execute, connection, Mode.ATOMIC))


class AsyncPool:
    """Connections for asyncio."""

    def __init__(self, dsn: str, size: int, timeout: float, threshold: int | None) -> None:
        self._address = bounded(dsn, timeout)
        self._timeout, self._threshold = timeout, threshold
        self._slots = AsyncSlots(size, timeout)
        self._business = AsyncSlots(business_share(size), timeout)
        self._shelf: IdleConnections[AsyncStoreConnection] = IdleConnections()
        self.doubt = Doubt.of(dsn)
        self._asking = AsyncAsking(self.doubt, self._confirmed)

    @asynccontextmanager
    async def lent(self, limit: float) -> AsyncIterator[AsyncStoreConnection]:
        """A connection for one statement or transaction of oncekey's own."""
        if self.doubt:
            await self._asking.settle()
        connection = await self._take(time.monotonic() + self._timeout)
        connection.limit = limit
        try:
            yield connection
        finally:
            self._give(connection)

    @property
    def crowded(self) -> bool:
        """Whether business transactions hold all connections that they may."""
        return self._business.full

    async def room(self, seconds: float) -> bool:  # asyncio only
        """Wait a moment for a free connection; whether there is one."""
        return await self._business.room(seconds)

    async def take(self) -> AsyncStoreConnection:
        """A connection for a business transaction."""
        if self.doubt:
            await self._asking.settle()
        deadline = time.monotonic() + self._timeout
        if not self._business.taken():
            await self._business.acquire(deadline)
        try:
            return await self._take(deadline)
        except BaseException:
            self._business.release()
            raise

    def give(self, connection: AsyncStoreConnection, *, used: bool = False) -> None:
        """Return a business transaction's connection."""
        self._give(connection, used=used)
        self._business.release()

    def close(self) -> None:
        """Close all connections; those in use when they come back."""
        self._shelf.close()

    async def _take(self, deadline: float) -> AsyncStoreConnection:
        if not self._slots.taken():
            await self._slots.acquire(deadline)
        try:
            return await self._idle() or await aconnect(self._address, self._threshold, self.doubt)
        except psycopg.Error as error:
            self._slots.release()
            raise unreachable(first_line(error)) from error
        except BaseException:
            self._slots.release()
            raise

    async def _idle(self) -> AsyncStoreConnection | None:
        while (connection := self._shelf.pop()) is not None:
            if not connection.cleaning:
                return connection
            connection.limit = self._timeout
            clean = False
            try:
                clean = await connection.is_clean() and is_quiet(connection)
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
            raise statement_error(error, connection, Mode.READ, QUESTION) from error
        finally:
            self._give(connection)
        return not connection.unsure

    def _give(self, connection: AsyncStoreConnection, *, used: bool = False) -> None:
        self._shelf.put(connection, used=used)
        self._slots.release()


@asynccontextmanager
async def _begun(connection: AsyncStoreConnection, what: str, limit: float) -> AsyncIterator[None]:
    await begin(connection, BEGIN, what)
    try:
        yield
    except BaseException:
        connection.limit = limit
        await undo(connection)
        raise
