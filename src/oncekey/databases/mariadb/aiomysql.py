"""The driver for MariaDB and MySQL through aiomysql, for asyncio.

`messages` has the messages and the meaning of replies; `sessions` sends them over a connection.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, TypeVar

import aiomysql

from oncekey.core.errors import TransactionControlError
from oncekey.core.flow import Body, Transaction
from oncekey.databases.address import POOL_SIZE
from oncekey.databases.handler_sql import ENDED, OVER, ConnectionUse
from oncekey.databases.mariadb import messages
from oncekey.databases.mariadb.address import MariadbAddress
from oncekey.databases.mariadb.handler_connection import AsyncMariadbHandlerConnection
from oncekey.databases.mariadb.sessions import IDLE_TIMEOUT, STATEMENT_TIMEOUT, TIMEOUT, AsyncSession, greeting
from oncekey.databases.retries import ConflictError, LostError, aretrying
from oncekey.databases.slots import AsyncSlots, business_share

T = TypeVar("T")

_Connection: Any = aiomysql.Connection


class StoreConnection(_Connection):  # type: ignore[misc]  # the base is typed for one of the two libraries only
    """A connection that sends nothing for a handler after the handler's transaction has ended.

    Every command passes here, including those of `callproc`, `nextset` and `ping`. The server's status comes with each
    reply except an error, so after an error the status is queried before the next command.
    """

    use: ConnectionUse | None = None
    """The handler's use of the connection; None if only the driver uses it."""
    _unsure = False

    async def ping(self, reconnect: bool = False) -> None:  # noqa: ARG002, FBT001, FBT002  (as aiomysql takes it)
        """Ping the server. It never reconnects: a new session would have another transaction."""
        await super().ping(reconnect=False)

    async def _execute_command(self, command: int, sql: Any) -> None:  # noqa: ANN401  (text or bytes)
        use = self.use
        if use is not None and use.used and not use.over:
            if self._unsure:
                self._unsure = False
                await self.ping()
            use.check()
        await super()._execute_command(command, sql)

    async def _read_query_result(self, unbuffered: bool = False) -> Any:  # noqa: ANN401, FBT001, FBT002  (as aiomysql)
        self._unsure = True
        affected = await super()._read_query_result(unbuffered)
        self._unsure = unbuffered
        return affected


class Pool:
    """The sessions of one event loop. The session that was returned last is lent first."""

    def __init__(self, address: MariadbAddress, size: int, timeout: float, hello: bytes) -> None:
        self._address, self._timeout, self._hello = address, timeout, hello
        self._slots = AsyncSlots(size, timeout, "MariaDB")
        self.business = AsyncSlots(business_share(size), timeout, "MariaDB")
        self._shelf: messages.IdleSessions[AsyncSession] = messages.IdleSessions()

    async def take(self, *, business: bool) -> AsyncSession:
        """A session, for a single transaction or a business transaction."""
        deadline = time.monotonic() + self._timeout
        if business and not self.business.taken():
            await self.business.acquire(deadline)
        try:
            if not self._slots.taken():
                await self._slots.acquire(deadline)
            try:
                return self._shelf.pop() or await AsyncSession.opened(
                    StoreConnection, self._address, self._timeout, self._hello
                )
            except BaseException as error:
                self._slots.release()
                if isinstance(error, messages.FAILURES):
                    raise messages.unreachable(error) from error
                raise
        except BaseException:
            if business:
                self.business.release()
            raise

    def give(self, session: AsyncSession, *, business: bool) -> None:
        """Return a session to the pool; one with unfinished work is closed."""
        try:
            self._shelf.put(session)
        finally:
            self._slots.release()
            if business:
                self.business.release()

    def close(self) -> None:
        self._shelf.close()


class AiomysqlDriver:
    """Runs transactions on MariaDB or MySQL under asyncio; one per event loop."""

    def __init__(
        self,
        url: str,
        *,
        pool_size: int = POOL_SIZE,
        timeout: float = TIMEOUT,
        statement_timeout: float = STATEMENT_TIMEOUT,
        idle_timeout: float = IDLE_TIMEOUT,
    ) -> None:
        self._limit = statement_timeout
        hello = greeting(statement_timeout, idle_timeout)
        self._pool = Pool(MariadbAddress.parse(url), pool_size, timeout, hello)

    @aretrying(ConflictError, LostError)
    async def run(self, transaction: Transaction[T]) -> T:
        session = await self._pool.take(business=False)
        try:
            return await session.run(transaction, self._limit + messages.GRACE)
        finally:
            self._pool.give(session, business=False)

    @property
    def is_full(self) -> bool:
        return self._pool.business.full

    async def wait_for_slot(self, seconds: float) -> bool:  # asyncio only
        return await self._pool.business.wait_for_slot(seconds)

    async def begin(self) -> AiomysqlTransaction:
        return await self._begun(messages.begun)

    async def read(self) -> AiomysqlTransaction:  # asyncio only
        return await self._begun(messages.only_reading)

    async def close(self) -> None:
        self._pool.close()

    @aretrying(LostError)
    async def _begun(self, begin: Callable[[], messages.Talk[None]]) -> AiomysqlTransaction:
        session = await self._pool.take(business=True)
        try:
            await session.talk(begin(), self._limit)
        except BaseException:
            session.sever()
            self._pool.give(session, business=True)
            raise
        return AiomysqlTransaction(self._pool, session, self._limit)


class AiomysqlTransaction:
    """A business transaction of an `async def` handler."""

    def __init__(self, pool: Pool, session: AsyncSession, limit: float) -> None:
        self._pool = pool
        self._session: AsyncSession | None = session
        self._limit = limit
        self._use = session.raw.use = ConnectionUse(lambda: not session.in_transaction)
        self._for_handler = AsyncMariadbHandlerConnection(session.raw, self._use)

    @property
    def connection(self) -> AsyncMariadbHandlerConnection:
        return self._for_handler

    async def run(self, body: Body[T]) -> T:
        session = self._session
        if session is None:
            raise TransactionControlError(OVER)
        if not session.in_transaction:
            body.close()
            raise TransactionControlError(ENDED)
        talk = messages.running_body(body)
        try:
            return await session.talk(talk, self._limit + messages.GRACE)
        except messages.DemotedError:
            session.sever()
            raise

    async def commit(self) -> None:
        session = self._session
        if session is None:
            return
        self._use.over = True
        try:
            await session.talk(messages.committing(), self._limit)
        finally:
            await self.rollback()

    async def rollback(self) -> None:
        session, self._session = self._session, None
        if session is None:
            return
        self._use.over, session.raw.use = True, None
        try:
            if session.open and session.in_transaction:
                await session.talk(messages.undoing(), self._limit)
            if session.open and self._use.used:
                await session.clean(self._limit)
        except BaseException as error:
            session.sever()
            if not isinstance(error, messages.FAILURES):
                raise
        finally:
            self._pool.give(session, business=True)
