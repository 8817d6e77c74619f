"""Setup and use of a session on MariaDB or MySQL: aiomysql for asyncio, PyMySQL for threads.

aiomysql uses PyMySQL's codec and raises PyMySQL's errors, so both share one set of rules. They differ in how they wait:
one has a timeout around a task, the other on a socket. The blocking session does not need aiomysql.
"""

from __future__ import annotations

import asyncio
import select
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any, Final, TypeVar

from pymysql.constants import CLIENT

from oncekey.core.flow import Transaction, adrive, drive
from oncekey.databases.mariadb import messages
from oncekey.databases.mariadb.address import MariadbAddress

T = TypeVar("T")

TIMEOUT: Final = 2.0
"""Seconds to wait for a connection."""

STATEMENT_TIMEOUT: Final = 10.0
"""Timeout in seconds for one of oncekey's messages, and for any statement's lock wait."""

IDLE_TIMEOUT: Final = 300.0
"""Idle seconds after which the server ends a session, and with it the transaction of a dead host (L4)."""

MAX_AGE: Final = 1800.0
"""Seconds after which a connection is replaced, so that a new or moved server receives load."""


def greeting(lock_timeout: float, idle_timeout: float) -> bytes:
    """The first message of a session: READ COMMITTED, no autocommit, strict mode, idle timeout."""
    return (
        "SET NAMES utf8mb4; SET SESSION TRANSACTION ISOLATION LEVEL READ COMMITTED; "
        "SET SESSION sql_mode = 'STRICT_ALL_TABLES,ERROR_FOR_DIVISION_BY_ZERO,NO_ENGINE_SUBSTITUTION', autocommit = 0, "
        f"innodb_lock_wait_timeout = {max(1, round(lock_timeout)):d}, wait_timeout = {max(1, round(idle_timeout)):d}"
    ).encode("ascii")


class _AnySession:
    """A connection of either library, with the state that the driver tracks locally."""

    def __init__(self, raw: Any, hello: bytes) -> None:  # noqa: ANN401  (aiomysql's or PyMySQL's)
        self.raw = raw
        self._hello = hello
        self._born = time.monotonic()

    @property
    def in_transaction(self) -> bool:
        """Whether the server's last reply reported a transaction; an error comes without status flags."""
        return bool(self.raw.server_status & messages.IN_TRANSACTION)

    @property
    def has_to_go(self) -> bool:
        """Whether the pool must close it: a transaction is open, or it is too old."""
        return self.in_transaction or time.monotonic() - self._born > MAX_AGE


class AsyncSession(_AnySession):
    """An aiomysql connection with the driver's operations."""

    @classmethod
    async def opened(
        cls,
        kind: type[Any],
        address: MariadbAddress,
        timeout: float,  # noqa: ASYNC109
        hello: bytes,
    ) -> AsyncSession:
        """Connect with a subclass of aiomysql's connection, and set up the session."""
        raw = kind(**address.options(), db=address.database, autocommit=None, client_flag=CLIENT.FOUND_ROWS)
        session = cls(raw, hello)
        async with asyncio.timeout(timeout):
            try:
                await raw._connect()  # noqa: SLF001  (aiomysql's own function makes connections of its own class only)
                await session.execute_text(hello)
            except BaseException:
                session.sever()
                raise
        return session

    @property
    def open(self) -> bool:
        return not self.raw.closed

    @property
    def is_usable(self) -> bool:
        if not self.open or self.has_to_go:
            return False
        reader = self.raw._reader  # noqa: SLF001  (aiomysql shows its streams nowhere else)
        return not (reader.at_eof() or reader._buffer or reader.exception())  # noqa: SLF001

    async def clean(self, limit: float | None) -> None:
        """Reset the state that a handler may have left in the session."""
        await self.hold(limit, self._clean())

    async def hold(self, limit: float | None, action: Awaitable[T]) -> T:
        """Await with a time limit; on timeout the connection is closed."""
        try:
            async with asyncio.timeout(limit):
                return await action
        except BaseException as error:
            if isinstance(error, TimeoutError | asyncio.CancelledError):
                self.sever()
            raise

    async def talk(self, conversation: messages.Talk[T], limit: float | None) -> T:
        """Send messages in sequence; `limit` is the timeout of each reply."""
        try:
            return await adrive(
                conversation, lambda message: self.hold(limit, self.execute_text(message)), messages.FAILURES
            )
        finally:
            conversation.close()

    async def run(self, transaction: Transaction[T], limit: float, begin: bytes = messages.BEGIN) -> T:
        migrates = transaction.name == messages.MIGRATE
        try:
            return await self.talk(messages.running(transaction, begin), None if migrates else limit)
        except BaseException as error:
            if migrates or isinstance(error, messages.DemotedError):
                self.sever()  # the migration lock belongs to the session
            raise

    async def execute_text(self, message: bytes) -> list[messages.Result]:
        """Send a message, and read all replies to it."""
        raw = self.raw
        await raw.query(message)
        results = [messages.result_of(raw)]
        while raw._result.has_next:  # noqa: SLF001
            await raw.next_result()
            results.append(messages.result_of(raw))
        return results

    def sever(self) -> None:
        self.raw.close()

    def close(self) -> None:
        self.raw.close()

    async def _clean(self) -> None:
        await self.raw._execute_command(messages.RESET, b"")  # noqa: SLF001  (aiomysql has no word for it)
        await self.raw._read_packet()  # noqa: SLF001
        await self.execute_text(self._hello)


class Session(_AnySession):
    """A PyMySQL connection with the driver's operations."""

    @classmethod
    def opened(cls, kind: type[Any], address: MariadbAddress, timeout: float, hello: bytes) -> Session:
        """Connect with a subclass of PyMySQL's connection, and set up the session."""
        raw = kind(
            **address.options(),
            database=address.database,
            autocommit=None,
            connect_timeout=max(1, round(timeout)),
            client_flag=CLIENT.MULTI_STATEMENTS | CLIENT.FOUND_ROWS,
        )
        session = cls(raw, hello)
        session._hold(timeout, lambda: session._executed_text(hello))
        return session

    @property
    def open(self) -> bool:
        return bool(self.raw.open)

    @property
    def is_usable(self) -> bool:
        if not self.open or self.has_to_go:
            return False
        fileno = self.raw._sock.fileno()  # noqa: SLF001  (PyMySQL shows its socket nowhere else)
        if hasattr(select, "poll"):
            poll = select.poll()
            poll.register(fileno, select.POLLIN)
            return not poll.poll(0)
        return not select.select([fileno], [], [], 0)[0]

    def clean(self, limit: float) -> None:
        """Reset the state that a handler may have left in the session."""
        self._hold(limit, self._clean)

    def talk(self, conversation: messages.Talk[T], limit: float | None) -> T:
        """Send messages in sequence; `limit` is the timeout of each reply."""
        return self._hold(limit, lambda: drive(conversation, self._executed_text, messages.FAILURES))

    def run(self, transaction: Transaction[T], limit: float) -> T:
        migrates = transaction.name == messages.MIGRATE
        try:
            return self.talk(messages.running(transaction), None if migrates else limit)
        except BaseException as error:
            if migrates or isinstance(error, messages.DemotedError):
                self.sever()  # the migration lock belongs to the session
            raise

    def sever(self) -> None:
        with suppress(*messages.FAILURES):
            self.raw._force_close()  # noqa: SLF001

    def close(self) -> None:
        with suppress(*messages.FAILURES):
            self.raw.close()

    def _hold(self, limit: float | None, action: Callable[[], T]) -> T:
        """Set a time limit for each reply inside the block; without one, the connection's own applies."""
        if limit is None:
            return action()
        self.raw._read_timeout = limit  # noqa: SLF001  (PyMySQL takes it only when it connects)
        try:
            return action()
        finally:
            self.raw._read_timeout = None  # noqa: SLF001

    def _executed_text(self, message: bytes) -> list[messages.Result]:
        """Send a message, and read all replies to it."""
        raw = self.raw
        try:
            raw.query(message)
            results = [messages.result_of(raw)]
            while raw._result.has_next:  # noqa: SLF001
                raw.next_result()
                results.append(messages.result_of(raw))
        except BaseException as error:
            if not isinstance(error, messages.FAILURES):
                raw._force_close()  # noqa: SLF001  (interrupted: the next reader would take the rest for its own reply)
            raise
        return results

    def _clean(self) -> None:
        self.raw._execute_command(messages.RESET, b"")  # noqa: SLF001  (PyMySQL has no word for it)
        self.raw._read_ok_packet()  # noqa: SLF001
        self._executed_text(self._hello)


async def cancel_and_close(raw: Any) -> None:  # noqa: ANN401  (aiomysql's)
    """Close a connection that the application owns, even while a statement is running."""
    raw.close()


async def cleaned(raw: Any) -> None:  # noqa: ANN401  (aiomysql's)
    """Reset a session that the application owns to the state in which aiomysql opened it."""
    statements = [f"SET NAMES {raw.charset}"]
    if raw.sql_mode is not None:
        statements.append(f"SET sql_mode={raw.sql_mode}")
    if raw.init_command is not None:
        statements.append(raw.init_command)
    if raw.autocommit_mode is not None:
        statements.append(f"SET autocommit = {int(raw.autocommit_mode)}")
    await AsyncSession(raw, ";\n".join(statements).encode()).clean(None)
