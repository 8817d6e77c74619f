"""The driver for PostgreSQL through asyncpg.

Statements are prepared once per connection and kept, which halves their round trips. Behind a pooler that lends
server connections per transaction, declare it in the address (`?pgbouncer=1`): then no statement is kept. asyncpg
names its statements by a counter, so on a pooler's connection another client's statement may have the same name, and
would be executed instead. So if the address does not mention a pooler, each new connection checks which server process
executes its statements. If another one greeted it, there is a pooler, and the pool keeps no statements from then on.
"""

from __future__ import annotations

import asyncio
import logging
import time
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any, Final, TypeVar, cast

import asyncpg

from oncekey.core.flow import Mode, arun_body
from oncekey.databases.postgres import asyncpg_connections as connections
from oncekey.databases.postgres import asyncpg_transactions as transactions
from oncekey.databases.postgres import server
from oncekey.databases.postgres.address import BACKEND, Pooling, PostgresAddress
from oncekey.databases.postgres.unconfirmed import CONFIRM, AsyncConfirming, UnconfirmedCommits
from oncekey.databases.postgres.unconfirmed import WHAT as QUESTION
from oncekey.databases.retries import ConflictError, Failures, LostError, aretrying, is_last
from oncekey.databases.slots import AsyncSlots, business_share

if TYPE_CHECKING:
    from oncekey.core.flow import Body, Statement, Transaction

T = TypeVar("T")

_log = logging.getLogger("oncekey")

MAX_IDLE: Final = 300.0
"""Seconds after which an unused connection is replaced: a firewall may have dropped it."""

MAX_AGE: Final = 1800.0
"""Seconds after which a connection is replaced, so that load reaches a server that was added or moved."""

POOLED: Final = (
    "oncekey: there is a pooler in front of PostgreSQL, so statements are not prepared: add ?pgbouncer=1 to the URL or "
    "?pgbouncer=0 if the pooler lends its connections per session"
)

STATEMENT_CACHE: Final = 100
"""Prepared statements that a connection keeps: a dozen are oncekey's, the rest is for handlers."""


class AsyncpgDriver:
    """Runs transactions on PostgreSQL under asyncio. One for each event loop."""

    def __init__(
        self,
        dsn: str,
        *,
        pool_size: int = server.POOL_SIZE,
        timeout: float = server.TIMEOUT,
        statement_timeout: float = server.STATEMENT_TIMEOUT,
        idle_timeout: float = server.IDLE_TIMEOUT,
        statement_cache_size: int = STATEMENT_CACHE,
    ) -> None:
        address = PostgresAddress.parse(dsn)
        cache = statement_cache_size if address.prepares or not address.pooler else 0
        self._pool = AsyncpgPool(address, pool_size, timeout, cache)
        self._limit = statement_timeout
        self._notice = address.pooler
        # A pooler would execute the reset on any free connection, and the handler's would stay as it is.
        self._resets_session = not address.pooler
        self._settings = server.opening(idle_timeout)

    @aretrying(ConflictError, LostError)
    async def run(self, transaction: Transaction[T]) -> T:
        mode, limit = transaction.mode, self._limit
        connection = await self._pool.borrow()
        try:
            if mode is Mode.ATOMIC:
                return await self._atomically(connection, transaction)
            say = transactions.execute
            if mode is Mode.SINGLE:
                say = transactions.execute_alone
                connection.forget_notices()
            body = transaction.body()
            # Inlines `arun_body` to save its frame: a repeat takes this path.
            try:
                statement = next(body)
                while True:
                    statement = body.send(await say(connection, limit, mode, statement))
            except StopIteration as stop:
                return cast("T", stop.value)
            finally:
                body.close()
        finally:
            await self._pool.give_back(connection)

    @property
    def is_full(self) -> bool:
        return self._pool.business.full

    async def wait_for_slot(self, seconds: float) -> bool:
        return await self._pool.business.wait_for_slot(seconds)

    async def begin(self) -> transactions.AsyncpgTransaction:
        return await self._opened(None)

    async def begin_with(self, first: Body[T]) -> tuple[transactions.AsyncpgTransaction, T]:
        try:
            statement = next(first)
            folds = statement.folds and statement.text is not None
            tx = await self._opened(statement if folds else None)
            try:
                rows = tx.first_row if folds else None
                while True:
                    statement = first.send(await tx.execute_own(statement) if rows is None else rows)
                    rows = None
            except StopIteration as stop:
                return tx, stop.value
            except BaseException:
                await tx.rollback()
                raise
        finally:
            first.close()

    async def read(self) -> transactions.AsyncpgTransaction:
        return await server.only_reading(await self.begin())

    async def pooling(self) -> Pooling:
        """Whether there is a pooler in front of the server."""
        one, two = await self._pool.borrow(), await self._pool.borrow()
        try:
            greeted = (one.get_server_pid(), two.get_server_pid())
            answered = (await one.fetchval(BACKEND), await two.fetchval(BACKEND))
        except asyncpg.DuplicatePreparedStatementError:
            return Pooling(stands=True, per_transaction=True, declared=self._notice)
        except connections.FAILURES as error:
            raise connections.statement_error(error, one, Mode.READ, "pooling") from connections.cause(error)
        finally:
            await self._pool.give_back(one)
            await self._pool.give_back(two)
        return Pooling.seen(greeted, answered, declared=self._notice)

    async def close(self) -> None:
        await self._pool.close()

    async def _atomically(self, connection: Any, transaction: Transaction[T]) -> T:  # noqa: ANN401  (asyncpg's)
        begun = await transactions.begin(connection, "", self._limit, transaction.name)
        try:
            # A migration may take long, so it has no limit.
            result = await arun_body(transaction.body(), partial(transactions.execute, connection, None, Mode.ATOMIC))
        except BaseException:
            await transactions.undo(connection, begun, self._limit)
            raise
        await transactions.commit(connection, begun, self._limit, transaction.name)
        return result

    async def _opened(self, first: Statement | None) -> transactions.AsyncpgTransaction:
        """A transaction that has begun, with its first statement in the same message if there is one."""
        then, what = (self._settings, server.WHAT) if first is None else (server.as_text(first), first.name)
        failures: Failures = ()
        while True:  # inlines `aretrying` to save its frame: each new key takes this path
            connection = await self._pool.take()
            try:
                try:  # inlines `begin` to save its frame
                    begun = await connection.open(then, self._limit)
                except connections.FAILURES as error:
                    raise connections.statement_error(error, connection, Mode.ATOMIC, what) from connections.cause(
                        error
                    )
            except LostError:
                await self._pool.give(connection)
                failures = (*failures, LostError)
                if is_last(failures):
                    raise
            except BaseException:
                await self._pool.give(connection)
                raise
            else:
                return transactions.AsyncpgTransaction(
                    self._pool, connection, begun, self._limit, resets_session=self._resets_session
                )


class AsyncpgPool:
    """Connections, opened when first needed; business transactions leave some of them to other statements.

    asyncpg's own pool wraps each connection and returns it in a separate task, which costs a request more than its
    BEGIN. Here a connection that ended its transaction is returned as it is, without awaiting anything.
    """

    def __init__(self, address: PostgresAddress, size: int, timeout: float, statement_cache_size: int) -> None:
        self._hosts, self._timeout, self._cache = list(address.each), timeout, statement_cache_size
        self._checks_for_pooler = address.pooler is None
        """Whether each new connection checks for a pooler in front of the server."""
        self._slots = AsyncSlots(size, timeout)
        self.business = AsyncSlots(business_share(size), timeout)
        self._idle: list[connections.StoreConnection] = []
        self._lent: set[connections.StoreConnection] = set()
        self._returns: set[asyncio.Task[None]] = set()
        self.unconfirmed = UnconfirmedCommits.of(address.dsn)
        self._confirming = AsyncConfirming(self.unconfirmed, self._confirmed)
        self._watch = connections.Watch()
        self._generation = 0
        self._closed = False
        self._all_back: asyncio.Event | None = None

    async def borrow(self) -> connections.StoreConnection:
        """A connection for one statement or transaction of oncekey's own."""
        if self.unconfirmed:
            await self._confirming.confirm_all()
        now = time.monotonic()
        return self._at_once(now) or await self._take(now + self._timeout)

    async def give_back(self, connection: connections.StoreConnection) -> None:
        """Return a connection that was borrowed."""
        if not connection.is_closed() and connection.is_at_rest:
            self._put(connection)
        else:
            await self._give(connection)

    async def take(self) -> connections.StoreConnection:
        """A connection for a business transaction."""
        if self.unconfirmed:
            await self._confirming.confirm_all()
        now = time.monotonic()
        if not self.business.taken():
            await self.business.acquire(now + self._timeout)
        try:
            return self._at_once(now) or await self._take(now + self._timeout)
        except BaseException:
            self.business.release()
            raise

    def returned_at_once(self, connection: connections.StoreConnection) -> bool:
        """Return the connection of a transaction that left nothing behind, the common case; False: use `give`."""
        if connection.is_closed() or not connection.is_at_rest:
            return False
        self._put(connection)
        self.business.release()
        return True

    async def give(self, connection: connections.StoreConnection, *, used: bool = False) -> None:
        """Return a business transaction's connection; if a handler used it, it is reset in the background."""
        if not used and self.returned_at_once(connection):
            return
        if not used or connection.is_closed():
            await self._given(connection, used=False)
            return
        task = asyncio.get_running_loop().create_task(self._given(connection, used=True))
        self._returns.add(task)
        task.add_done_callback(self._returns.discard)

    async def close(self) -> None:
        """Close all connections; those in use have a moment to be returned."""
        self._closed = True
        try:
            async with asyncio.timeout(self._timeout):
                if self._lent:
                    self._all_back = asyncio.Event()
                    await self._all_back.wait()
                while self._idle:
                    await self._idle.pop().close()
        except connections.FAILURES:
            for connection in (*self._idle, *self._lent):
                connection.terminate()
            self._idle.clear()

    def _at_once(self, now: float) -> connections.StoreConnection | None:
        """An idle connection, if there is one and a free slot: the common case, without awaiting anything."""
        if not self._idle or not self._slots.taken():
            return None
        connection = self._idle_connection(now)
        if connection is None:
            self._slots.release()
        else:
            self._lent.add(connection)
        return connection

    async def _take(self, deadline: float) -> connections.StoreConnection:
        await self._slots.acquire(deadline)
        try:
            connection = self._idle_connection(deadline - self._timeout) or await self._connected()
        except connections.FAILURES as error:
            self._slots.release()
            raise server.unreachable(_why(error)) from error
        except BaseException:
            self._slots.release()
            raise
        self._lent.add(connection)
        return connection

    def _idle_connection(self, now: float) -> connections.StoreConnection | None:
        """The connection that was returned last, if the server has not closed it."""
        idle = self._idle
        while idle and now - idle[0].rested > MAX_IDLE:
            idle.pop(0).terminate()
        while idle:
            connection = idle.pop()
            if not connection.is_closed():
                return connection
            connection.terminate()
        return None

    async def _connected(self) -> connections.StoreConnection:
        if self._closed:
            raise asyncpg.InterfaceError("the pool is closed")
        # One after the other, each with the full timeout: asyncpg's own loop stops at a host that does not respond.
        hosts = self._hosts
        for _ in hosts[1:]:
            host = hosts[0]
            try:
                return await self._connected_to(host)
            except connections.FAILURES:
                if hosts[0] == host:
                    hosts.append(hosts.pop(0))  # the next request begins with another one
        return await self._connected_to(hosts[0])

    async def _connected_to(self, host: str) -> connections.StoreConnection:
        connection = await self._opened(host)
        if self._checks_for_pooler and self._cache and await self._is_pooled(connection):
            _log.warning(POOLED)
            self._cache = 0
            connection.terminate()
            connection = await self._opened(host)
        return connection

    async def _is_pooled(self, connection: connections.StoreConnection) -> bool:
        try:
            async with asyncio.timeout(self._timeout):
                return await connections.is_pooled(connection)
        except BaseException:
            connection.terminate()
            raise

    async def _opened(self, host: str) -> connections.StoreConnection:
        connection: connections.StoreConnection = await asyncpg.connect(
            host,
            connection_class=connections.StoreConnection,
            timeout=self._timeout,
            statement_cache_size=self._cache,
        )
        connection.generation, connection.watch = self._generation, self._watch
        connection.unconfirmed = self.unconfirmed
        return connection

    async def _confirmed(self) -> bool:
        """Whether the standby has everything that was committed so far."""
        connection = await self._take(time.monotonic() + self._timeout)
        try:
            connection.forget_notices()
            await connection.fetch(CONFIRM, timeout=self._timeout)
        except TimeoutError:
            return False
        except connections.FAILURES as error:
            raise connections.statement_error(error, connection, Mode.READ, QUESTION) from error
        finally:
            await self._give(connection)
        return not connection.unsure

    async def _given(self, connection: connections.StoreConnection, *, used: bool) -> None:
        try:
            if used:
                with suppress(*connections.FAILURES):
                    if not connection.is_at_rest:
                        await connection.settled()
                    await connections.cleaned(connection)
        finally:
            try:
                await self._give(connection)
            finally:
                self.business.release()

    async def _give(self, connection: connections.StoreConnection) -> None:
        try:
            if not connection.is_closed() and not connection.is_at_rest:
                await connection.settled()
        except connections.FAILURES:
            connection.suspect = True
        finally:
            self._put(connection)

    def _put(self, connection: connections.StoreConnection) -> None:
        """Return a connection. Nothing is awaited here, so a cancellation cannot interrupt it."""
        if connection.suspect:
            # If one server closed a connection or did not respond, the idle connections to it are probably dead too.
            self._generation += 1
            while self._idle:
                self._idle.pop().terminate()
        now = time.monotonic()
        stale = connection.generation != self._generation or now - connection.born > MAX_AGE
        if stale or connection.is_closed():
            connection.terminate()
        else:
            connection.rest(now)
            self._idle.append(connection)
        self._lent.discard(connection)
        self._slots.release()
        if self._all_back is not None and not self._lent:
            self._all_back.set()


def _why(error: BaseException) -> str:
    if isinstance(error, asyncpg.TargetServerAttributeNotMatched):
        return server.ONLY_READS
    return str(error) or "no reply in time"
