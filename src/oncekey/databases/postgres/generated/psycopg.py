# Generated from psycopg_async.py by `python -m tools.twins`: edit that one.
"""The driver for PostgreSQL through psycopg, for threads.

It works behind a pooler that lends server connections per transaction: no setting outlives a transaction, and
nothing is prepared unless `prepare_threshold` or the address (`?pgbouncer=0`) enables it.

If no connection is idle, one is opened in the caller's own thread. So a server that is down is reported at once with
its own error, and one that is back is used at once: no background worker has to notice first.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from functools import partial
from typing import TYPE_CHECKING, TypeVar, assert_never

import psycopg

from oncekey.core.flow import Mode, Statement, run_body
from oncekey.databases.postgres import psycopg_connections as connections
from oncekey.databases.postgres import psycopg_replies as replies
from oncekey.databases.postgres import server
from oncekey.databases.postgres.address import PostgresAddress
from oncekey.databases.postgres.generated import psycopg_transactions as transactions
from oncekey.databases.postgres.unconfirmed import CONFIRM, Confirming, UnconfirmedCommits
from oncekey.databases.postgres.unconfirmed import WHAT as QUESTION
from oncekey.databases.retries import ConflictError, LostError, retrying
from oncekey.databases.slots import Slots, business_share

if TYPE_CHECKING:
    from oncekey.core.flow import Body, Rows, Transaction

T = TypeVar("T")


class PsycopgDriver:
    """Runs transactions on PostgreSQL from any number of threads."""

    def __init__(
        self,
        dsn: str,
        *,
        pool_size: int = server.POOL_SIZE,
        timeout: float = server.TIMEOUT,
        statement_timeout: float = server.STATEMENT_TIMEOUT,
        idle_timeout: float = server.IDLE_TIMEOUT,
        prepare_threshold: int | None = None,
    ) -> None:
        address = PostgresAddress.parse(dsn)
        self._pool = Pool(address.dsn, pool_size, timeout, connections.threshold(address, prepare_threshold))
        self._limit = statement_timeout
        # A pooler would execute the reset on any free connection, and the handler's would stay as it is.
        self._resets_session = not address.pooler
        self._begin = f"{server.BEGIN}; {server.opening(idle_timeout)}"  # one message, so that it costs one round trip

    @retrying(ConflictError, LostError)
    def run(self, transaction: Transaction[T]) -> T:
        mode = transaction.mode
        match mode:
            case Mode.READ | Mode.SINGLE:
                with self._pool.lent(self._limit) as connection:
                    return run_body(transaction.body(), partial(transactions.execute_alone, connection, mode))
            case Mode.ATOMIC:
                with (
                    self._pool.lent(self._limit) as connection,
                    _begun(connection, transaction.name, self._limit),
                ):
                    connection.limit = None  # a migration may take long
                    result = run_body(transaction.body(), partial(transactions.execute, connection, mode))
                    connection.limit = self._limit
                    transactions.commit(connection, transaction.name)
                    return result
            case _:
                assert_never(mode)

    @property
    def is_full(self) -> bool:
        return self._pool.is_full

    def begin(self) -> transactions.PsycopgTransaction:
        tx, _ = self._opened(None)
        return tx

    def begin_with(self, first: Body[T]) -> tuple[transactions.PsycopgTransaction, T]:
        with closing(first):
            statement = next(first)
            tx, rows = self._opened(statement if server.folds_as_text(statement) else None)
            try:
                while True:
                    statement = first.send(tx.execute_own(statement) if rows is None else rows)
                    rows = None
            except StopIteration as stop:
                return tx, stop.value
            except BaseException:
                tx.rollback()
                raise

    def close(self) -> None:
        self._pool.close()

    @retrying(LostError)
    def _opened(self, first: Statement | None) -> tuple[transactions.PsycopgTransaction, Rows | None]:
        """A transaction that has begun, and the row of its first statement if that was sent with BEGIN and has one."""
        connection = self._pool.take()
        connection.limit = self._limit
        rows: Rows | None = None
        try:
            if first is None:
                transactions.begin(connection, self._begin, server.WHAT)
            else:
                rows = transactions.begin_with(connection, first)
        except BaseException:
            try:
                if replies.may_be_undone(connection):
                    transactions.undo(connection)
            finally:
                self._pool.give(connection)
            raise
        connection.limit = None
        return transactions.PsycopgTransaction(
            self._pool, connection, self._limit, resets_session=self._resets_session
        ), rows


class Pool:
    """Connections for threads."""

    def __init__(self, dsn: str, size: int, timeout: float, threshold: int | None) -> None:
        self._address = connections.bounded(dsn, timeout)
        self._timeout, self._threshold = timeout, threshold
        self._slots = Slots(size, timeout)
        self._business = Slots(business_share(size), timeout)
        self._shelf: connections.IdleConnections[connections.StoreConnection] = connections.IdleConnections()
        self.unconfirmed = UnconfirmedCommits.of(dsn)
        self._confirming = Confirming(self.unconfirmed, self._confirmed)

    @contextmanager
    def lent(self, limit: float) -> Iterator[connections.StoreConnection]:
        """A connection for one statement or transaction of oncekey's own."""
        if self.unconfirmed:
            self._confirming.confirm_all()
        connection = self._take(time.monotonic() + self._timeout)
        connection.limit = limit
        try:
            yield connection
        finally:
            self._give(connection)

    @property
    def is_full(self) -> bool:
        """Whether business transactions hold all connections that they may use."""
        return self._business.full

    def take(self) -> connections.StoreConnection:
        """A connection for a business transaction."""
        if self.unconfirmed:
            self._confirming.confirm_all()
        deadline = time.monotonic() + self._timeout
        if not self._business.taken():
            self._business.acquire(deadline)
        try:
            return self._take(deadline)
        except BaseException:
            self._business.release()
            raise

    def give(self, connection: connections.StoreConnection, *, used: bool = False, undo: bool = False) -> None:
        """Return a business transaction's connection."""
        self._give(connection, used=used, undo=undo)
        self._business.release()

    def close(self) -> None:
        """Close all connections; those in use when they are returned."""
        self._shelf.close()

    def _take(self, deadline: float) -> connections.StoreConnection:
        if not self._slots.taken():
            self._slots.acquire(deadline)
        try:
            return self._idle() or connections.connect(self._address, self._threshold, self.unconfirmed)
        except psycopg.Error as error:
            self._slots.release()
            raise server.unreachable(replies.first_line(error)) from error
        except BaseException:
            self._slots.release()
            raise

    def _idle(self) -> connections.StoreConnection | None:
        while (connection := self._shelf.pop()) is not None:
            if not connection.cleaning:
                return connection
            connection.limit = self._timeout
            clean = False
            try:
                clean = connection.is_clean() and connections.is_quiet(connection)
            finally:
                if not clean:
                    connection.pgconn.finish()
            if clean:
                connection.limit = None
                return connection
        return None

    def _confirmed(self) -> bool:
        """Whether the standby has everything that was committed so far."""
        connection = self._take(time.monotonic() + self._timeout)
        connection.limit, connection.unsure = self._timeout, False
        try:
            connection.execute(CONFIRM)
        except psycopg.Error as error:
            raise replies.statement_error(error, connection, Mode.READ, QUESTION) from error
        finally:
            self._give(connection)
        return not connection.unsure

    def _give(self, connection: connections.StoreConnection, *, used: bool = False, undo: bool = False) -> None:
        self._shelf.put(connection, used=used, undo=undo)
        self._slots.release()


@contextmanager
def _begun(connection: connections.StoreConnection, what: str, limit: float) -> Iterator[None]:
    transactions.begin(connection, server.BEGIN, what)
    try:
        yield
    except BaseException:
        connection.limit = limit
        transactions.undo(connection)
        raise
