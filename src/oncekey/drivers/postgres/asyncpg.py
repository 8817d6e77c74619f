"""The driver for PostgreSQL through asyncpg, and asyncpg inside the caller's transaction.

Statements are prepared once per connection and kept, which halves their round trips. Behind a pooler that lends
server connections per transaction, say so in the address (`?pgbouncer=1`): then no statement is kept.
"""

from __future__ import annotations

import asyncio
from functools import partial
from typing import TYPE_CHECKING, Any, Final, TypeVar, cast

import asyncpg

from oncekey.core.errors import ConfigurationError
from oncekey.drivers.postgres.address import BACKEND, Pooling, PostgresAddress
from oncekey.drivers.postgres.asyncpg_connections import FAILURES, cause, statement_error
from oncekey.drivers.postgres.asyncpg_execute import begin, commit, execute, execute_alone, undo
from oncekey.drivers.postgres.asyncpg_pool import AsyncpgPool
from oncekey.drivers.postgres.asyncpg_transactions import AsyncpgTransaction
from oncekey.drivers.postgres.transactions import (
    IDLE_TIMEOUT,
    POOL_SIZE,
    STATEMENT_TIMEOUT,
    TIMEOUT,
    WHAT,
    as_text,
    idle_limit,
    only_reading,
)
from oncekey.drivers.retries import ConflictError, Failures, LostError, aretrying, is_last
from oncekey.drivers.within import NOT_BEGUN, AsyncWithin
from oncekey.flow import Mode, astep

if TYPE_CHECKING:
    from oncekey.flow import Rows, Statement, Steps, Transaction

T = TypeVar("T")

STATEMENT_CACHE: Final = 100
"""Prepared statements that a connection keeps; ours are a dozen, the rest is for handlers."""


class AsyncpgDriver:
    """Runs transactions on PostgreSQL under asyncio. One for each event loop."""

    def __init__(
        self,
        dsn: str,
        *,
        pool_size: int = POOL_SIZE,
        timeout: float = TIMEOUT,
        statement_timeout: float = STATEMENT_TIMEOUT,
        idle_timeout: float = IDLE_TIMEOUT,
        statement_cache_size: int = STATEMENT_CACHE,
    ) -> None:
        address = PostgresAddress.parse(dsn)
        cache = statement_cache_size if address.prepares or not address.pooler else 0
        self._pool = AsyncpgPool(address, pool_size, timeout, cache)
        self._limit = statement_timeout
        self._told = address.pooler
        # A pooler would execute it on whichever connection is free, and the handler's would stay as it is.
        self._cleans = not address.pooler
        self._settings = idle_limit(idle_timeout)

    @aretrying(ConflictError, LostError)
    async def run(self, transaction: Transaction[T]) -> T:
        """Run one transaction; again, if it lost against others or cannot have happened."""
        mode, limit = transaction.mode, self._limit
        connection = await self._pool.borrow()
        try:
            if mode is Mode.ATOMIC:
                return await self._atomically(connection, transaction)
            say = execute
            if mode is Mode.SINGLE:
                say = execute_alone
                connection.attend()
            steps = transaction.body()
            # As `astep` does, without its frame: a repeat is answered by this.
            try:
                statement = next(steps)
                while True:
                    statement = steps.send(await say(connection, limit, mode, statement))
            except StopIteration as stop:
                return cast("T", stop.value)
            finally:
                steps.close()
        finally:
            await self._pool.give_back(connection)

    @property
    def crowded(self) -> bool:
        """Whether a new business transaction would have to wait for another one to end."""
        return self._pool.business.full

    async def room(self, seconds: float) -> bool:
        """Wait a moment for a free connection; whether there is one."""
        return await self._pool.business.room(seconds)

    async def begin(self) -> AsyncpgTransaction:
        """Open a business transaction."""
        return await self._opened(None)

    async def begin_with(self, first: Steps[T]) -> tuple[AsyncpgTransaction, T]:
        """Open a business transaction and run `first` in it, its first statement with the BEGIN if it folds."""
        try:
            statement = next(first)
            folds = statement.folds and statement.told is not None
            tx = await self._opened(statement if folds else None)
            try:
                rows = tx.told if folds else None
                while True:
                    statement = first.send(await tx.say(statement) if rows is None else rows)
                    rows = None
            except StopIteration as stop:
                return tx, stop.value
            except BaseException:
                await tx.rollback()
                raise
        finally:
            first.close()

    async def read(self) -> AsyncpgTransaction:
        """Open a transaction that only reads."""
        return await only_reading(await self.begin())

    async def pooling(self) -> Pooling:
        """Whether a pooler stands before the server."""
        one, two = await self._pool.borrow(), await self._pool.borrow()
        try:
            greeted = (one.get_server_pid(), two.get_server_pid())
            answered = (await one.fetchval(BACKEND), await two.fetchval(BACKEND))
        except asyncpg.DuplicatePreparedStatementError:
            return Pooling(stands=True, per_transaction=True, told=self._told)
        except FAILURES as error:
            raise statement_error(error, one, Mode.READ, "pooling") from cause(error)
        finally:
            await self._pool.give_back(one)
            await self._pool.give_back(two)
        return Pooling.seen(greeted, answered, told=self._told)

    async def close(self) -> None:
        """Close the connections."""
        await self._pool.close()

    async def _atomically(self, connection: Any, transaction: Transaction[T]) -> T:  # noqa: ANN401  (asyncpg's)
        begun = await begin(connection, "", self._limit, transaction.name)
        try:
            # A migration may take long, so there is no limit here.
            result = await astep(transaction.body(), partial(execute, connection, None, Mode.ATOMIC))
        except BaseException:
            await undo(connection, begun, self._limit)
            raise
        await commit(connection, begun, self._limit, transaction.name)
        return result

    async def _opened(self, first: Statement | None) -> AsyncpgTransaction:
        """A transaction that has begun, with a first statement in the same message if there is one."""
        then, what = (self._settings, WHAT) if first is None else (as_text(first), first.name)
        failures: Failures = ()
        while True:  # as `aretrying` does, without its frame: each new key is claimed by this
            connection = await self._pool.take()
            try:
                try:  # as `begin` does, without its frame
                    begun = await connection.open(then, self._limit)
                except FAILURES as error:
                    raise statement_error(error, connection, Mode.ATOMIC, what) from cause(error)
            except LostError:
                await self._pool.give(connection)
                failures = (*failures, LostError)
                if is_last(failures):
                    raise
            except BaseException:
                await self._pool.give(connection)
                raise
            else:
                return AsyncpgTransaction(self._pool, connection, begun, self._limit, cleans=self._cleans)


class AsyncpgWithin(AsyncWithin):
    """Runs everything in the open transaction of the caller's `asyncpg.Connection`."""

    def __init__(self, connection: Any) -> None:  # noqa: ANN401  (a connection, or one that a pool lent)
        if not connection.is_in_transaction():
            raise ConfigurationError(NOT_BEGUN)
        # asyncpg refuses a second statement while the first is under way.
        turn = asyncio.Lock()

        async def say(statement: Statement) -> Rows:
            async with turn:
                return await execute(connection, None, Mode.ATOMIC, statement)

        super().__init__(say)
