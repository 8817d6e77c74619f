"""The pool of asyncpg connections: who holds which, and how long a request waits for one.

asyncpg's own pool wraps each connection and returns it in a task of its own, which costs a request more than its BEGIN.
Here a connection that ended its transaction is returned as it is, without awaiting anything.
"""

from __future__ import annotations

import asyncio
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Final

import asyncpg

from oncekey.drivers.postgres.asyncpg_connections import FAILURES, StoreConnection, Watch, cleaned, statement_error
from oncekey.drivers.postgres.doubt import CONFIRM, WHAT, AsyncAsking, Doubt
from oncekey.drivers.postgres.errors import ONLY_READS, unreachable
from oncekey.drivers.slots import AsyncSlots, business_share
from oncekey.flow import Mode

if TYPE_CHECKING:
    from oncekey.drivers.postgres.address import PostgresAddress

MAX_IDLE: Final = 300.0
"""Seconds after which an unused connection is replaced: a firewall on the way may have dropped it."""

MAX_AGE: Final = 1800.0
"""Seconds after which a connection is replaced, so that load reaches a server that was added or moved."""


class AsyncpgPool:
    """Connections, made when they are first needed; business transactions leave a part of them to other statements."""

    def __init__(self, address: PostgresAddress, size: int, timeout: float, statement_cache_size: int) -> None:
        self._hosts, self._timeout, self._cache = list(address.each), timeout, statement_cache_size
        self._slots = AsyncSlots(size, timeout)
        self.business = AsyncSlots(business_share(size), timeout)
        self._idle: list[StoreConnection] = []
        self._lent: set[StoreConnection] = set()
        self._returns: set[asyncio.Task[None]] = set()
        self.doubt = Doubt.of(address.dsn)
        self._asking = AsyncAsking(self.doubt, self._confirmed)
        self._watch = Watch()
        self._generation = 0
        self._closed = False
        self._all_back: asyncio.Event | None = None

    async def borrow(self) -> StoreConnection:
        """A connection for one statement or transaction of oncekey's own."""
        if self.doubt:
            await self._asking.settle()
        now = time.monotonic()
        return self._at_once(now) or await self._take(now + self._timeout)

    async def give_back(self, connection: StoreConnection) -> None:
        """Return such a connection."""
        if not connection.is_closed() and connection.is_at_rest:
            self._put(connection)
        else:
            await self._give(connection)

    async def take(self) -> StoreConnection:
        """A connection for a business transaction."""
        if self.doubt:
            await self._asking.settle()
        now = time.monotonic()
        if not self.business.taken():
            await self.business.acquire(now + self._timeout)
        try:
            return self._at_once(now) or await self._take(now + self._timeout)
        except BaseException:
            self.business.release()
            raise

    def given_at_once(self, connection: StoreConnection) -> bool:
        """Return a connection of a transaction that left nothing behind, as nearly all do; False: `give` has to."""
        if connection.is_closed() or not connection.is_at_rest:
            return False
        self._put(connection)
        self.business.release()
        return True

    async def give(self, connection: StoreConnection, *, used: bool = False) -> None:
        """Return a business transaction's connection; if a handler used it, it is reset while the caller goes on."""
        if not used and self.given_at_once(connection):
            return
        if not used or connection.is_closed():
            await self._given(connection, used=False)
            return
        task = asyncio.get_running_loop().create_task(self._given(connection, used=True))
        self._returns.add(task)
        task.add_done_callback(self._returns.discard)

    async def close(self) -> None:
        """Close all connections; those that are in use have a moment to be returned."""
        self._closed = True
        try:
            async with asyncio.timeout(self._timeout):
                if self._lent:
                    self._all_back = asyncio.Event()
                    await self._all_back.wait()
                while self._idle:
                    await self._idle.pop().close()
        except FAILURES:
            for connection in (*self._idle, *self._lent):
                connection.terminate()
            self._idle.clear()

    def _at_once(self, now: float) -> StoreConnection | None:
        """An idle connection, if there is one and a place for it: the common case, without awaiting anything."""
        if not self._idle or not self._slots.taken():
            return None
        connection = self._rested(now)
        if connection is None:
            self._slots.release()
        else:
            self._lent.add(connection)
        return connection

    async def _take(self, deadline: float) -> StoreConnection:
        await self._slots.acquire(deadline)
        try:
            connection = self._rested(deadline - self._timeout) or await self._connected()
        except FAILURES as error:
            self._slots.release()
            raise unreachable(_why(error)) from error
        except BaseException:
            self._slots.release()
            raise
        self._lent.add(connection)
        return connection

    def _rested(self, now: float) -> StoreConnection | None:
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

    async def _connected(self) -> StoreConnection:
        if self._closed:
            raise asyncpg.InterfaceError("the pool is closed")
        # One after the other, each with the full time: asyncpg's own loop stops at a host that does not answer.
        hosts = self._hosts
        for _ in hosts[1:]:
            host = hosts[0]
            try:
                return await self._connected_to(host)
            except FAILURES:
                if hosts[0] == host:
                    hosts.append(hosts.pop(0))  # the next request begins with another one
        return await self._connected_to(hosts[0])

    async def _connected_to(self, host: str) -> StoreConnection:
        connection: StoreConnection = await asyncpg.connect(
            host,
            connection_class=StoreConnection,
            timeout=self._timeout,
            statement_cache_size=self._cache,
        )
        connection.generation, connection.watch = self._generation, self._watch
        connection.doubt = self.doubt
        return connection

    async def _confirmed(self) -> bool:
        """Whether the standby has everything that was committed so far."""
        connection = await self._take(time.monotonic() + self._timeout)
        try:
            connection.attend()
            await connection.fetch(CONFIRM, timeout=self._timeout)
        except TimeoutError:
            return False
        except FAILURES as error:
            raise statement_error(error, connection, Mode.READ, WHAT) from error
        finally:
            await self._give(connection)
        return not connection.unsure

    async def _given(self, connection: StoreConnection, *, used: bool) -> None:
        try:
            if used:
                with suppress(*FAILURES):
                    if not connection.is_at_rest:
                        await connection.settled()
                    await cleaned(connection)
        finally:
            try:
                await self._give(connection)
            finally:
                self.business.release()

    async def _give(self, connection: StoreConnection) -> None:
        try:
            if not connection.is_closed() and not connection.is_at_rest:
                await connection.settled()
        except FAILURES:
            connection.suspect = True
        finally:
            self._put(connection)

    def _put(self, connection: StoreConnection) -> None:
        """Return a connection. Nothing is awaited here, so a cancellation cannot interrupt it."""
        if connection.suspect:
            # If one server closed a connection or did not answer, the idle connections to it are probably dead, too.
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
        return ONLY_READS
    return str(error) or "no answer in time"
