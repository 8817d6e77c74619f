"""Who holds which of asyncpg's connections, and for how long one waits for one."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

import asyncpg

from oncekey.drivers.asyncpg_connections import FAILURES, GRACE, StoreConnection, cleaned
from oncekey.drivers.postgres_errors import unreachable
from oncekey.drivers.slots import AsyncSlots, business_share


class AsyncpgPool:
    """asyncpg's pool, made when it is first needed; business transactions leave a part of it to others."""

    def __init__(self, dsn: str, size: int, timeout: float, statement_cache_size: int) -> None:
        self._dsn, self._size, self._timeout = dsn, size, timeout
        self._cache = statement_cache_size
        self._slots = AsyncSlots(size, timeout)
        self._business = AsyncSlots(business_share(size), timeout)
        self._pool: asyncpg.Pool | None = None
        self._returns: set[asyncio.Task[None]] = set()

    @asynccontextmanager
    async def lent(self) -> AsyncIterator[StoreConnection]:
        """A connection for a moment."""
        connection = await self._take(time.monotonic() + self._timeout)
        try:
            yield connection
        finally:
            await self._give(connection)

    @property
    def crowded(self) -> bool:
        """Whether business transactions hold all that they may."""
        return self._business.full

    async def take(self) -> StoreConnection:
        """A connection for a business transaction."""
        deadline = time.monotonic() + self._timeout
        await self._business.acquire(deadline)
        try:
            return await self._take(deadline)
        except BaseException:
            self._business.release()
            raise

    async def give(self, connection: StoreConnection, *, used: bool = False) -> None:
        """The end of a business transaction; what a handler used is cleaned up first, while the caller goes on."""
        if not used or connection.is_closed():
            await self._given(connection, used=False)
            return
        task = asyncio.get_running_loop().create_task(self._given(connection, used=True))
        self._returns.add(task)
        task.add_done_callback(self._returns.discard)

    async def close(self) -> None:
        """Close all of them; who still holds one has a moment to give it back."""
        if self._pool is None:
            return
        try:
            async with asyncio.timeout(self._timeout):
                if self._returns:
                    await asyncio.wait(self._returns)
                await self._pool.close()
        except TimeoutError:
            self._pool.terminate()

    async def _take(self, deadline: float) -> StoreConnection:
        await self._slots.acquire(deadline)
        try:
            lent = await (await self._opened()).acquire()
            connection: StoreConnection = lent.itself()
            connection.stand_in = lent
        except FAILURES as error:
            self._slots.release()
            raise unreachable(str(error) or "no answer in time") from error
        except BaseException:
            self._slots.release()
            raise
        return connection

    async def _given(self, connection: StoreConnection, *, used: bool) -> None:
        try:
            if used:
                with suppress(*FAILURES):
                    await cleaned(connection)
        finally:
            try:
                await self._give(connection)
            finally:
                self._business.release()

    async def _give(self, connection: StoreConnection) -> None:
        assert self._pool is not None
        try:
            if not connection.is_closed():
                connection.disregard()
                await self._pool.release(connection.stand_in, timeout=GRACE)
        except FAILURES:
            connection.suspect = True
        finally:
            if connection.is_closed():
                connection.terminate()
            if connection.suspect:
                # Where one server said goodbye or nothing at all, the others' silence is no good sign either.
                await self._pool.expire_connections()
            self._slots.release()

    async def _opened(self) -> asyncpg.Pool:
        if self._pool is None:
            self._pool = asyncpg.create_pool(
                self._dsn,
                min_size=0,
                max_size=self._size,
                connection_class=StoreConnection,
                timeout=self._timeout,
                statement_cache_size=self._cache,
            )
        # Without a minimum there is nothing to connect, so this does not wait and cannot be overtaken.
        await self._pool
        return self._pool
