"""The drivers for PostgreSQL through psycopg: blocking, for asyncio, and inside the caller's transaction.

They work behind a pooler that lends server connections per transaction: nothing is set beyond a transaction, and
nothing is prepared unless `prepare_threshold` or the address (`?pgbouncer=0`) asks for it.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, closing, contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, Final, TypeVar, assert_never

from psycopg.pq import TransactionStatus

from oncekey.core.errors import ConfigurationError
from oncekey.drivers.postgres.address import BACKEND, Pooling, PostgresAddress
from oncekey.drivers.postgres.psycopg_execute import (
    abegin,
    abegin_with,
    acommit,
    aexecute,
    aexecute_alone,
    aundo,
    begin,
    begin_with,
    commit,
    execute,
    execute_alone,
    undo,
)
from oncekey.drivers.postgres.psycopg_pools import AsyncPool, Pool
from oncekey.drivers.postgres.psycopg_transactions import (
    AsyncPsycopgTransaction,
    PsycopgTransaction,
    may_be_undone,
)
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
from oncekey.drivers.retries import ConflictError, LostError, aretrying, retrying
from oncekey.drivers.within import NOT_BEGUN, AsyncWithin, Within
from oncekey.flow import Mode, Statement, astep, step

if TYPE_CHECKING:
    import psycopg

    from oncekey.drivers.postgres.psycopg_connections import AsyncStoreConnection, StoreConnection
    from oncekey.flow import Rows, Steps, Transaction

T = TypeVar("T")

PREPARE_AFTER: Final = 2
"""How often a statement is executed before it is prepared, if the address promises that there is no pooler."""


class PsycopgDriver:
    """Runs transactions on PostgreSQL, from any number of threads."""

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
        self._pool = Pool(address.dsn, pool_size, timeout, threshold(address, prepare_threshold))
        self._limit = statement_timeout
        # A pooler would execute it on whichever connection is free, and the handler's would stay as it is.
        self._cleans = not address.pooler
        self._begin = f"{BEGIN}; {idle_limit(idle_timeout)}"  # one message, so that it costs one round trip

    @retrying(ConflictError, LostError)
    def run(self, transaction: Transaction[T]) -> T:
        """Run one transaction; again, if it lost against others or cannot have happened."""
        mode = transaction.mode
        match mode:
            case Mode.READ | Mode.SINGLE:
                with self._pool.lent(self._limit) as connection:
                    return step(transaction.body(), partial(execute_alone, connection, mode))
            case Mode.ATOMIC:
                with self._pool.lent(self._limit) as connection, _begun(connection, transaction.name, self._limit):
                    connection.limit = None  # a migration may take long
                    result = step(transaction.body(), partial(execute, connection, mode))
                    connection.limit = self._limit
                    commit(connection, transaction.name)
                    return result
            case _:
                assert_never(mode)

    @property
    def crowded(self) -> bool:
        """Whether a new business transaction would have to wait for another one to end."""
        return self._pool.crowded

    def begin(self) -> PsycopgTransaction:
        """Open a business transaction."""
        return (self._opened(None))[0]

    def begin_with(self, first: Steps[T]) -> tuple[PsycopgTransaction, T]:
        """Open a business transaction and run `first` in it, its first statement with the BEGIN if it folds."""
        with closing(first):
            statement = next(first)
            tx, rows = self._opened(statement if folds_as_text(statement) else None)
            try:
                while True:
                    statement = first.send(tx.say(statement) if rows is None else rows)
                    rows = None
            except StopIteration as stop:
                return tx, stop.value
            except BaseException:
                tx.rollback()
                raise

    def close(self) -> None:
        """Close the connections."""
        self._pool.close()

    @retrying(LostError)
    def _opened(self, first: Statement | None) -> tuple[PsycopgTransaction, Rows | None]:
        """A transaction that has begun, and the row of its first statement, if that was sent with BEGIN and has one."""
        connection = self._pool.take()
        connection.limit = self._limit
        rows: Rows | None = None
        try:
            if first is None:
                begin(connection, self._begin, WHAT)
            else:
                rows = begin_with(connection, first)
        except BaseException:
            try:
                if may_be_undone(connection):
                    undo(connection)
            finally:
                self._pool.give(connection)
            raise
        connection.limit = None
        return PsycopgTransaction(self._pool, connection, self._limit, cleans=self._cleans), rows


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
        self._told = address.pooler
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
                    return await astep(transaction.body(), partial(aexecute_alone, connection, mode))
            case Mode.ATOMIC:
                async with (
                    self._pool.lent(self._limit) as connection,
                    _abegun(connection, transaction.name, self._limit),
                ):
                    connection.limit = None  # a migration may take long
                    result = await astep(transaction.body(), partial(aexecute, connection, mode))
                    connection.limit = self._limit
                    await acommit(connection, transaction.name)
                    return result
            case _:
                assert_never(mode)

    @property
    def crowded(self) -> bool:
        """Whether a new business transaction would have to wait for another one to end."""
        return self._pool.crowded

    async def room(self, seconds: float) -> bool:
        """Wait a moment for a free connection; whether there is one."""
        return await self._pool.room(seconds)

    async def begin(self) -> AsyncPsycopgTransaction:
        """Open a business transaction."""
        return (await self._opened(None))[0]

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

    async def read(self) -> AsyncPsycopgTransaction:
        """Open a transaction that only reads."""
        return await only_reading(await self.begin())

    async def pooling(self) -> Pooling:
        """Whether a pooler stands before the server."""
        async with self._pool.lent(self._limit) as one, self._pool.lent(self._limit) as two:
            greeted = (one.pgconn.backend_pid, two.pgconn.backend_pid)
            answered = [await aexecute(each, Mode.READ, Statement("pooling", BACKEND)) for each in (one, two)]
        first, second = (int(rows[0]["pg_backend_pid"]) for rows in answered)
        return Pooling.seen(greeted, (first, second), told=self._told)

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
                await abegin(connection, self._begin, WHAT)
            else:
                rows = await abegin_with(connection, first)
        except BaseException:
            try:
                if may_be_undone(connection):
                    await aundo(connection)
            finally:
                self._pool.give(connection)
            raise
        connection.limit = None
        return AsyncPsycopgTransaction(self._pool, connection, self._limit, cleans=self._cleans), rows


class PsycopgWithin(Within):
    """Runs everything in the open transaction of the caller's `psycopg.Connection`."""

    def __init__(self, connection: psycopg.Connection[Any]) -> None:
        _refuse_autocommit(connection)
        super().__init__(partial(execute, connection, Mode.ATOMIC))


class AsyncPsycopgWithin(AsyncWithin):
    """Runs everything in the open transaction of the caller's `psycopg.AsyncConnection`."""

    def __init__(self, connection: psycopg.AsyncConnection[Any]) -> None:
        _refuse_autocommit(connection)
        super().__init__(partial(aexecute, connection, Mode.ATOMIC))


def threshold(address: PostgresAddress, asked_for: int | None) -> int | None:
    """After how many executions a statement is prepared; None, never, if that may be unsafe."""
    match address.pooler:
        case True if not address.prepares:
            return None
        case True | False:
            return PREPARE_AFTER if asked_for is None else asked_for
        case None:
            return asked_for


@contextmanager
def _begun(connection: StoreConnection, what: str, limit: float) -> Iterator[None]:
    begin(connection, BEGIN, what)
    try:
        yield
    except BaseException:
        connection.limit = limit
        undo(connection)
        raise


@asynccontextmanager
async def _abegun(connection: AsyncStoreConnection, what: str, limit: float) -> AsyncIterator[None]:
    await abegin(connection, BEGIN, what)
    try:
        yield
    except BaseException:
        connection.limit = limit
        await aundo(connection)
        raise


def _refuse_autocommit(connection: psycopg.Connection[Any] | psycopg.AsyncConnection[Any]) -> None:
    """Raise for a connection with autocommit, on which every statement would be a transaction of its own."""
    if connection.autocommit and connection.pgconn.transaction_status == TransactionStatus.IDLE:
        raise ConfigurationError(NOT_BEGUN)
