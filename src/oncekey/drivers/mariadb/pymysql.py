"""The driver for MariaDB and MySQL through PyMySQL, for threads, and inside the caller's transaction."""

from __future__ import annotations

import os
import select
import threading
import time
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any, Final, TypeVar

import pymysql
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
from oncekey.drivers.mariadb.guard import GuardedConnection
from oncekey.drivers.mariadb.messages import (
    GRACE,
    IN_TRANSACTION,
    MIGRATE,
    RESET,
    Result,
    begun,
    committing,
    log,
    running,
    stepping,
    undoing,
    within,
)
from oncekey.drivers.retries import ConflictError, LostError, retrying
from oncekey.drivers.slots import Slots, business_share
from oncekey.drivers.within import NOT_BEGUN, Within

if TYPE_CHECKING:
    from oncekey.drivers.mariadb.messages import Talk
    from oncekey.flow import Rows, Statement, Steps, Transaction

T = TypeVar("T")

_parents: Final[list[Any]] = []


class Session:
    """A connection of PyMySQL, with what the driver does on it."""

    def __init__(self, address: MariadbAddress, timeout: float, hello: bytes) -> None:
        self.raw: Any = pymysql.connect(
            **address.options(),
            database=address.database,
            autocommit=True,
            connect_timeout=max(1, round(timeout)),
            client_flag=CLIENT.MULTI_STATEMENTS | CLIENT.FOUND_ROWS,
        )
        self.born = time.monotonic()
        self._hello = hello
        self.hold(timeout, self.greet)

    @property
    def in_transaction(self) -> bool:
        """Whether the server's last reply said so."""
        return bool(self.raw.server_status & IN_TRANSACTION)

    @property
    def is_usable(self) -> bool:
        """Whether the next borrower may have it: an idle server sends something only to close the connection."""
        raw = self.raw
        if not raw.open or self.in_transaction or time.monotonic() - self.born > MAX_AGE:
            return False
        fileno = raw._sock.fileno()  # noqa: SLF001  (PyMySQL shows its socket nowhere else)
        if hasattr(select, "poll"):
            poll = select.poll()
            poll.register(fileno, select.POLLIN)
            return not poll.poll(0)
        return not select.select([fileno], [], [], 0)[0]

    def greet(self) -> None:
        """Set the session up."""
        self.said(self._hello)

    def clean(self) -> None:
        """Reset what a handler may have left in the session."""
        self.raw._execute_command(RESET, b"")  # noqa: SLF001  (PyMySQL has no word for it)
        self.raw._read_ok_packet()  # noqa: SLF001
        self.greet()

    def hold(self, limit: float | None, action: Any) -> Any:  # noqa: ANN401  (what the action returns)
        """Do something with a time limit for each reply."""
        self.raw._read_timeout = limit  # noqa: SLF001  (PyMySQL takes it only when it connects)
        try:
            return action()
        finally:
            self.raw._read_timeout = None  # noqa: SLF001

    def talk(self, conversation: Talk[T]) -> T:
        """Run a conversation."""
        return _carried(self.raw, conversation)

    def said(self, message: bytes) -> list[Result]:
        """Send a message, and read all replies to it."""
        return _heard(self.raw, message)

    def sever(self) -> None:
        """Close it at once, whatever is under way."""
        with suppress(*FAILURES):
            self.raw._force_close()  # noqa: SLF001


def _carried(raw: Any, conversation: Talk[T]) -> T:  # noqa: ANN401  (PyMySQL's)
    try:
        message = next(conversation)
        while True:
            try:
                results = _heard(raw, message)
            except FAILURES as error:
                message = conversation.throw(error)
            else:
                message = conversation.send(results)
    except StopIteration as stop:
        return stop.value  # type: ignore[no-any-return]  # a generator's return value is untyped here


def _heard(raw: Any, message: bytes) -> list[Result]:  # noqa: ANN401  (PyMySQL's)
    try:
        raw.query(message)
        results = [_result(raw)]
        while raw._result.has_next:  # noqa: SLF001
            raw.next_result()
            results.append(_result(raw))
    except BaseException as error:
        if not isinstance(error, FAILURES):
            raw._force_close()  # noqa: SLF001  (interrupted: the rest of the answer would be taken for another one's)
        raise
    return results


def _result(raw: Any) -> Result:  # noqa: ANN401
    result = raw._result  # noqa: SLF001  (a cursor would hide what was answered to each sentence)
    return Result(result.description, result.rows or ())


class Pool:
    """Sessions for threads. The last one that was returned is the first one lent."""

    def __init__(self, address: MariadbAddress, size: int, timeout: float, hello: bytes) -> None:
        self._address, self._timeout, self._hello = address, timeout, hello
        self._slots = Slots(size, timeout, "MariaDB")
        self._business = Slots(business_share(size), timeout, "MariaDB")
        self._idle: list[Session] = []
        self._lock = threading.Lock()
        self._pid = os.getpid()
        self._closed = False

    @property
    def crowded(self) -> bool:
        """Whether business transactions hold all connections that they may."""
        return self._business.full

    def take(self, *, business: bool) -> Session:
        """A session, for a moment or for a business transaction."""
        deadline = time.monotonic() + self._timeout
        if business:
            self._business.acquire(deadline)
        try:
            self._slots.acquire(deadline)
            try:
                return self._popped() or Session(self._address, self._timeout, self._hello)
            except BaseException as error:
                self._slots.release()
                if isinstance(error, FAILURES):
                    raise unreachable(error) from error
                raise
        except BaseException:
            if business:
                self._business.release()
            raise

    def give(self, session: Session, *, business: bool) -> None:
        """Take a session back; one that is in the middle of something is closed."""
        try:
            with self._lock:
                keep = not self._closed and session.is_usable
                if keep:
                    self._idle.append(session)
            if not keep:
                session.sever()
        finally:
            self._slots.release()
            if business:
                self._business.release()

    def close(self) -> None:
        """Close the idle sessions now, and the others when they come back."""
        with self._lock:
            self._closed = True
            self._forget_parents()
            idle, self._idle = self._idle, []
        for session in idle:
            with suppress(*FAILURES):
                session.raw.close()

    def _popped(self) -> Session | None:
        while True:
            with self._lock:
                self._forget_parents()
                session = self._idle.pop() if self._idle else None
            if session is None or session.is_usable:
                return session
            session.sever()

    def _forget_parents(self) -> None:
        """After a fork the sockets are the parent's: closing one here would end the parent's session."""
        if self._pid != os.getpid():
            _parents.extend(self._idle)
            self._idle.clear()
            self._pid = os.getpid()


class PymysqlDriver:
    """Runs transactions on MariaDB or MySQL, from any number of threads."""

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

    @retrying(ConflictError, LostError)
    def run(self, transaction: Transaction[T]) -> T:
        """Run one transaction; again, if it lost against others or cannot have happened."""
        session = self._pool.take(business=False)
        migrates = transaction.name == MIGRATE
        limit = None if migrates else self._limit + GRACE
        try:
            result: T = session.hold(limit, partial(session.talk, running(transaction)))
        except BaseException as error:
            if migrates or isinstance(error, DemotedError):
                session.sever()  # a migration's lock is the session's
            raise
        else:
            return result
        finally:
            self._pool.give(session, business=False)

    @property
    def crowded(self) -> bool:
        """Whether a new business transaction would have to wait for another one to end."""
        return self._pool.crowded

    @retrying(LostError)
    def begin(self) -> PymysqlTransaction:
        """Open a business transaction."""
        session = self._pool.take(business=True)
        try:
            session.hold(self._limit, partial(session.talk, begun()))
        except BaseException:
            session.sever()
            self._pool.give(session, business=True)
            raise
        return PymysqlTransaction(self._pool, session, self._limit)

    def close(self) -> None:
        """Close the connections."""
        self._pool.close()


class PymysqlTransaction:
    """A business transaction that a blocking handler writes through."""

    def __init__(self, pool: Pool, session: Session, limit: float) -> None:
        self._pool = pool
        self._session: Session | None = session
        self._limit = limit
        self._lending = Lending()
        self._guarded = GuardedConnection(session.raw, self._lending)

    @property
    def connection(self) -> GuardedConnection:
        """The connection for the handler."""
        return self._guarded

    def step(self, steps: Steps[T]) -> T:
        """Run statements inside it."""
        session = self._session
        if session is None:
            raise TransactionControlError(OVER)
        ended = session.raw.open and not session.in_transaction
        talk = stepping(steps, ended=ended, undone=self._lending.undone)
        try:
            result: T = session.hold(self._limit + GRACE, partial(session.talk, talk))
        except DemotedError:
            session.sever()
            raise
        return result

    def commit(self) -> None:
        """Commit, and return the connection."""
        session = self._session
        if session is None:
            return
        self._lending.over = True
        try:
            if session.raw.open and not session.in_transaction:
                log.error(NOTHING_LEFT)
            else:
                session.hold(self._limit, partial(session.talk, committing()))
        finally:
            self.rollback()

    def rollback(self) -> None:
        """Roll back and return the connection; has no effect on a transaction that has ended."""
        session, self._session = self._session, None
        if session is None:
            return
        self._lending.over = True
        try:
            if session.raw.open and session.in_transaction:
                session.hold(self._limit, partial(session.talk, undoing()))
            if session.raw.open and self._lending.used:
                session.hold(self._limit, session.clean)
        except BaseException as error:
            session.sever()
            if not isinstance(error, FAILURES):
                raise
        finally:
            self._pool.give(session, business=True)


class PymysqlWithin(Within):
    """Runs everything in the open transaction of the caller's `pymysql.Connection`."""

    def __init__(self, connection: Any) -> None:  # noqa: ANN401  (a connection of PyMySQL's)
        if connection.get_autocommit() and not connection.server_status & IN_TRANSACTION:
            raise ConfigurationError(NOT_BEGUN)
        turn = threading.Lock()  # PyMySQL mixes up the replies to two threads

        def say(statement: Statement) -> Rows:
            with turn:
                return _carried(connection, within(statement))

        super().__init__(say)
