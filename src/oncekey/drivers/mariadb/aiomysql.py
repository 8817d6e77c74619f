"""The driver for MariaDB and MySQL through aiomysql, for asyncio, and inside the caller's transaction.

aiomysql uses PyMySQL's own codec and raises PyMySQL's own errors, so both drivers share one set of rules.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any, TypeVar

import aiomysql
from pymysql.constants import CLIENT

from oncekey.core.errors import ConfigurationError, TransactionControlError
from oncekey.drivers.guard import NOTHING_LEFT, OVER, Lending
from oncekey.drivers.mariadb.address import (
    IDLE_TIMEOUT,
    MAX_AGE,
    POOL_SIZE,
    STATEMENT_TIMEOUT,
    TIMEOUT,
    MariadbAddress,
    greeting,
)
from oncekey.drivers.mariadb.errors import FAILURES, DemotedError, unreachable
from oncekey.drivers.mariadb.guard import AsyncGuardedConnection
from oncekey.drivers.mariadb.messages import (
    GRACE,
    IN_TRANSACTION,
    MIGRATE,
    OURS,
    RESET,
    Manner,
    Result,
    begun,
    committing,
    log,
    only_reading,
    running,
    stepping,
    undoing,
    within,
)
from oncekey.drivers.retries import ConflictError, LostError, aretrying
from oncekey.drivers.slots import AsyncSlots, business_share
from oncekey.drivers.within import NOT_BEGUN, AsyncWithin

if TYPE_CHECKING:
    from oncekey.drivers.mariadb.messages import Talk
    from oncekey.flow import Rows, Statement, Steps, Transaction

T = TypeVar("T")


class Session:
    """A connection of aiomysql, with what the driver does on it."""

    def __init__(self, raw: Any, hello: bytes) -> None:  # noqa: ANN401  (aiomysql's)
        self.raw = raw
        self.born = time.monotonic()
        self._hello = hello

    @classmethod
    async def opened(cls, address: MariadbAddress, timeout: float, hello: bytes) -> Session:  # noqa: ASYNC109
        """Connect, and set the session up."""
        async with asyncio.timeout(timeout):
            raw = await aiomysql.connect(
                **address.options(), db=address.database, autocommit=None, client_flag=CLIENT.FOUND_ROWS
            )
            session = cls(raw, hello)
            try:
                await session.said(hello)
            except BaseException:
                session.sever()
                raise
        return session

    @property
    def open(self) -> bool:
        """Whether there is a connection."""
        return not self.raw.closed

    @property
    def in_transaction(self) -> bool:
        """Whether the server's last reply said so."""
        return bool(self.raw.server_status & IN_TRANSACTION)

    @property
    def is_usable(self) -> bool:
        """Whether the next borrower may have it: an idle server sends something only to close the connection."""
        if not self.open or self.in_transaction or time.monotonic() - self.born > MAX_AGE:
            return False
        reader = self.raw._reader  # noqa: SLF001  (aiomysql shows its streams nowhere else)
        return not (reader.at_eof() or reader._buffer or reader.exception())  # noqa: SLF001

    async def clean(self) -> None:
        """Reset what a handler may have left in the session."""
        await self.raw._execute_command(RESET, b"")  # noqa: SLF001  (aiomysql has no word for it)
        await self.raw._read_packet()  # noqa: SLF001
        await self.said(self._hello)

    async def hold(self, limit: float | None, action: Awaitable[T]) -> T:
        """Await something with a time limit; if it takes too long, the connection is closed."""
        try:
            async with asyncio.timeout(limit):
                return await action
        except BaseException as error:
            if isinstance(error, TimeoutError | asyncio.CancelledError):
                self.sever()
            raise

    async def talk(self, conversation: Talk[T], limit: float | None) -> T:
        """Run a conversation; each message has so long to be answered."""
        try:
            message = next(conversation)
            while True:
                try:
                    results = await self.hold(limit, self.said(message))
                except FAILURES as error:
                    message = conversation.throw(error)
                except BaseException:
                    conversation.close()
                    raise
                else:
                    message = conversation.send(results)
        except StopIteration as stop:
            return stop.value  # type: ignore[no-any-return]  # a generator's return value is untyped here

    async def run(self, transaction: Transaction[T], limit: float, manner: Manner = OURS) -> T:
        """Run one transaction of ours; each message but those of a migration has so long to be answered."""
        migrates = transaction.name == MIGRATE
        try:
            return await self.talk(running(transaction, manner), None if migrates else limit)
        except BaseException as error:
            if migrates or isinstance(error, DemotedError):
                self.sever()  # a migration's lock is the session's
            raise

    async def said(self, message: bytes) -> list[Result]:
        """Send a message, and read all replies to it."""
        return await _heard(self.raw, message)

    def sever(self) -> None:
        """Close it at once, whatever is under way."""
        self.raw.close()


async def _heard(raw: Any, message: bytes) -> list[Result]:  # noqa: ANN401  (aiomysql's)
    await raw.query(message)
    results = [_result(raw)]
    while raw._result.has_next:  # noqa: SLF001
        await raw.next_result()
        results.append(_result(raw))
    return results


def _result(raw: Any) -> Result:  # noqa: ANN401
    result = raw._result  # noqa: SLF001  (a cursor would hide what was answered to each sentence)
    return Result(result.description, result.rows or ())


async def severed(raw: Any) -> None:  # noqa: ANN401  (aiomysql's)
    """End a connection of somebody else's, whatever is under way on it."""
    raw.close()


async def cleaned(raw: Any) -> None:  # noqa: ANN401  (aiomysql's)
    """Make a session of somebody else's what it was when aiomysql had opened it."""
    said = [f"SET NAMES {raw.charset}"]
    if raw.sql_mode is not None:
        said.append(f"SET sql_mode={raw.sql_mode}")
    if raw.init_command is not None:
        said.append(raw.init_command)
    if raw.autocommit_mode is not None:
        said.append(f"SET autocommit = {int(raw.autocommit_mode)}")
    await Session(raw, ";\n".join(said).encode()).clean()


class Pool:
    """Sessions for one event loop. The last one that was returned is the first one lent."""

    def __init__(self, address: MariadbAddress, size: int, timeout: float, hello: bytes) -> None:
        self._address, self._timeout, self._hello = address, timeout, hello
        self.slots = AsyncSlots(size, timeout, "MariaDB")
        self.business = AsyncSlots(business_share(size), timeout, "MariaDB")
        self._idle: list[Session] = []
        self._closed = False

    async def take(self, *, business: bool) -> Session:
        """A session, for a moment or for a business transaction."""
        deadline = time.monotonic() + self._timeout
        if business and not self.business.taken():
            await self.business.acquire(deadline)
        try:
            if not self.slots.taken():
                await self.slots.acquire(deadline)
            try:
                return self._popped() or await Session.opened(self._address, self._timeout, self._hello)
            except BaseException as error:
                self.slots.release()
                if isinstance(error, FAILURES):
                    raise unreachable(error) from error
                raise
        except BaseException:
            if business:
                self.business.release()
            raise

    def give(self, session: Session, *, business: bool) -> None:
        """Take a session back; one that is in the middle of something is closed."""
        if not self._closed and session.is_usable:
            self._idle.append(session)
        else:
            session.sever()
        self.slots.release()
        if business:
            self.business.release()

    def close(self) -> None:
        """Close the idle sessions now, and the others when they come back."""
        self._closed = True
        while self._idle:
            self._idle.pop().sever()

    def _popped(self) -> Session | None:
        while self._idle:
            session = self._idle.pop()
            if session.is_usable:
                return session
            session.sever()
        return None


class AiomysqlDriver:
    """Runs transactions on MariaDB or MySQL under asyncio. One for each event loop."""

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
        """Run one transaction; again, if it lost against others or cannot have happened."""
        session = await self._pool.take(business=False)
        try:
            return await session.run(transaction, self._limit + GRACE)
        finally:
            self._pool.give(session, business=False)

    @property
    def crowded(self) -> bool:
        """Whether a new business transaction would have to wait for another one to end."""
        return self._pool.business.full

    async def room(self, seconds: float) -> bool:
        """Wait a moment for a free connection; whether there is one."""
        return await self._pool.business.room(seconds)

    async def begin(self) -> AiomysqlTransaction:
        """Open a business transaction."""
        return await self._begun(begun)

    async def read(self) -> AiomysqlTransaction:
        """Open a transaction that only reads."""
        return await self._begun(only_reading)

    async def close(self) -> None:
        """Close the connections."""
        self._pool.close()

    @aretrying(LostError)
    async def _begun(self, begin: Callable[[], Talk[None]]) -> AiomysqlTransaction:
        session = await self._pool.take(business=True)
        try:
            await session.talk(begin(), self._limit)
        except BaseException:
            session.sever()
            self._pool.give(session, business=True)
            raise
        return AiomysqlTransaction(self._pool, session, self._limit)


class AiomysqlTransaction:
    """A business transaction that an `async def` handler writes through."""

    def __init__(self, pool: Pool, session: Session, limit: float) -> None:
        self._pool = pool
        self._session: Session | None = session
        self._limit = limit
        self._lending = Lending()
        self._guarded = AsyncGuardedConnection(session.raw, self._lending)

    @property
    def connection(self) -> AsyncGuardedConnection:
        """The connection for the handler."""
        return self._guarded

    async def step(self, steps: Steps[T]) -> T:
        """Run statements inside it."""
        session = self._session
        if session is None:
            raise TransactionControlError(OVER)
        ended = session.open and not session.in_transaction
        talk = stepping(steps, ended=ended, undone=self._lending.undone)
        try:
            return await session.talk(talk, self._limit + GRACE)
        except DemotedError:
            session.sever()
            raise

    async def commit(self) -> None:
        """Commit, and return the connection."""
        session = self._session
        if session is None:
            return
        self._lending.over = True
        try:
            if session.open and not session.in_transaction:
                log.error(NOTHING_LEFT)
            else:
                await session.talk(committing(), self._limit)
        finally:
            await self.rollback()

    async def rollback(self) -> None:
        """Roll back and return the connection; has no effect on a transaction that has ended."""
        session, self._session = self._session, None
        if session is None:
            return
        self._lending.over = True
        try:
            if session.open and session.in_transaction:
                await session.talk(undoing(), self._limit)
            if session.open and self._lending.used:
                await session.hold(self._limit, session.clean())
        except BaseException as error:
            session.sever()
            if not isinstance(error, FAILURES):
                raise
        finally:
            self._pool.give(session, business=True)


class AiomysqlWithin(AsyncWithin):
    """Runs everything in the open transaction of the caller's `aiomysql.Connection`."""

    def __init__(self, connection: Any) -> None:  # noqa: ANN401  (a connection of aiomysql's, or one that a pool lent)
        if connection.get_autocommit() and not connection.get_transaction_status():
            raise ConfigurationError(NOT_BEGUN)
        session, turn = Session(connection, b""), asyncio.Lock()

        async def say(statement: Statement) -> Rows:
            async with turn:
                return await session.talk(within(statement), None)

        super().__init__(say)
