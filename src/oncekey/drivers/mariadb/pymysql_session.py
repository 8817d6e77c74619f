"""A connection of PyMySQL, and what the driver does on it."""

from __future__ import annotations

import select
import time
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Any, TypeVar

import pymysql
from pymysql.constants import CLIENT

from oncekey.drivers.mariadb.address import MAX_AGE, MariadbAddress
from oncekey.drivers.mariadb.errors import FAILURES, DemotedError
from oncekey.drivers.mariadb.messages import IN_TRANSACTION, MIGRATE, RESET, Result, result_of, running

if TYPE_CHECKING:
    from oncekey.drivers.mariadb.messages import Talk
    from oncekey.flow import Transaction

T = TypeVar("T")


class Session:
    """A connection of PyMySQL, with what the driver does on it."""

    def __init__(self, raw: Any, hello: bytes) -> None:  # noqa: ANN401  (PyMySQL's)
        self.raw = raw
        self.born = time.monotonic()
        self._hello = hello

    @classmethod
    def opened(cls, address: MariadbAddress, timeout: float, hello: bytes) -> Session:
        """Connect, and set the session up."""
        raw: Any = pymysql.connect(
            **address.options(),
            database=address.database,
            autocommit=True,
            connect_timeout=max(1, round(timeout)),
            client_flag=CLIENT.MULTI_STATEMENTS | CLIENT.FOUND_ROWS,
        )
        session = cls(raw, hello)
        session._hold(timeout, lambda: session._executed_text(hello))
        return session

    @property
    def open(self) -> bool:
        """Whether there is a connection."""
        return bool(self.raw.open)

    @property
    def in_transaction(self) -> bool:
        """Whether the server's last reply said so."""
        return bool(self.raw.server_status & IN_TRANSACTION)

    @property
    def is_usable(self) -> bool:
        """Whether the next borrower may have it: an idle server sends something only to close the connection."""
        if not self.open or self.in_transaction or time.monotonic() - self.born > MAX_AGE:
            return False
        fileno = self.raw._sock.fileno()  # noqa: SLF001  (PyMySQL shows its socket nowhere else)
        if hasattr(select, "poll"):
            poll = select.poll()
            poll.register(fileno, select.POLLIN)
            return not poll.poll(0)
        return not select.select([fileno], [], [], 0)[0]

    def clean(self, limit: float) -> None:
        """Reset what a handler may have left in the session."""
        self._hold(limit, self._clean)

    def talk(self, conversation: Talk[T], limit: float | None) -> T:
        """Run a conversation; each message has so long to be answered."""
        return self._hold(limit, lambda: self._carried(conversation))

    def run(self, transaction: Transaction[T], limit: float) -> T:
        """Run one transaction of ours; each message but those of a migration has so long to be answered."""
        migrates = transaction.name == MIGRATE
        try:
            return self.talk(running(transaction), None if migrates else limit)
        except BaseException as error:
            if migrates or isinstance(error, DemotedError):
                self.sever()  # a migration's lock is the session's
            raise

    def sever(self) -> None:
        """Close it at once, whatever is under way."""
        with suppress(*FAILURES):
            self.raw._force_close()  # noqa: SLF001

    def close(self) -> None:
        """Close it while nothing is under way."""
        with suppress(*FAILURES):
            self.raw.close()

    def _hold(self, limit: float | None, action: Callable[[], T]) -> T:
        """Do something with a time limit for each reply; without one, that of a caller's connection stays."""
        if limit is None:
            return action()
        self.raw._read_timeout = limit  # noqa: SLF001  (PyMySQL takes it only when it connects)
        try:
            return action()
        finally:
            self.raw._read_timeout = None  # noqa: SLF001

    def _carried(self, conversation: Talk[T]) -> T:
        try:
            message = next(conversation)
            while True:
                try:
                    results = self._executed_text(message)
                except FAILURES as error:
                    message = conversation.throw(error)
                else:
                    message = conversation.send(results)
        except StopIteration as stop:
            return stop.value  # type: ignore[no-any-return]  # a generator's return value is untyped here

    def _executed_text(self, message: bytes) -> list[Result]:
        """Send a message, and read all replies to it."""
        raw = self.raw
        try:
            raw.query(message)
            results = [result_of(raw)]
            while raw._result.has_next:  # noqa: SLF001
                raw.next_result()
                results.append(result_of(raw))
        except BaseException as error:
            if not isinstance(error, FAILURES):
                raw._force_close()  # noqa: SLF001  (interrupted: the next reader would take the rest for its own reply)
            raise
        return results

    def _clean(self) -> None:
        self.raw._execute_command(RESET, b"")  # noqa: SLF001  (PyMySQL has no word for it)
        self.raw._read_ok_packet()  # noqa: SLF001
        self._executed_text(self._hello)
