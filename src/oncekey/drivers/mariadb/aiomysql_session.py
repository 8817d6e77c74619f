"""A connection of aiomysql, and what the drivers do on it.

aiomysql uses PyMySQL's own codec and raises PyMySQL's own errors, so both drivers share one set of rules.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable
from typing import TYPE_CHECKING, Any, TypeVar

import aiomysql
from pymysql.constants import CLIENT

from oncekey.drivers.mariadb.address import MAX_AGE, MariadbAddress
from oncekey.drivers.mariadb.errors import FAILURES, DemotedError
from oncekey.drivers.mariadb.messages import IN_TRANSACTION, MIGRATE, OURS, RESET, Manner, Result, result_of, running

if TYPE_CHECKING:
    from oncekey.drivers.mariadb.messages import Talk
    from oncekey.flow import Transaction

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
                await session.execute_text(hello)
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

    async def clean(self, limit: float | None) -> None:
        """Reset what a handler may have left in the session."""
        await self.hold(limit, self._clean())

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
                    results = await self.hold(limit, self.execute_text(message))
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

    async def execute_text(self, message: bytes) -> list[Result]:
        """Send a message, and read all replies to it."""
        raw = self.raw
        await raw.query(message)
        results = [result_of(raw)]
        while raw._result.has_next:  # noqa: SLF001
            await raw.next_result()
            results.append(result_of(raw))
        return results

    def sever(self) -> None:
        """Close it at once, whatever is under way."""
        self.raw.close()

    def close(self) -> None:
        """Close it while nothing is under way."""
        self.raw.close()

    async def _clean(self) -> None:
        await self.raw._execute_command(RESET, b"")  # noqa: SLF001  (aiomysql has no word for it)
        await self.raw._read_packet()  # noqa: SLF001
        await self.execute_text(self._hello)


async def severed(raw: Any) -> None:  # noqa: ANN401  (aiomysql's)
    """End a connection of somebody else's, whatever is under way on it."""
    raw.close()


async def cleaned(raw: Any) -> None:  # noqa: ANN401  (aiomysql's)
    """Make a session of somebody else's what it was when aiomysql had opened it."""
    execute_text = [f"SET NAMES {raw.charset}"]
    if raw.sql_mode is not None:
        execute_text.append(f"SET sql_mode={raw.sql_mode}")
    if raw.init_command is not None:
        execute_text.append(raw.init_command)
    if raw.autocommit_mode is not None:
        execute_text.append(f"SET autocommit = {int(raw.autocommit_mode)}")
    await Session(raw, ";\n".join(execute_text).encode()).clean(None)
