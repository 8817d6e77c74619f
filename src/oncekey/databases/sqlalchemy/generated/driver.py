# Generated from asynchronous.py by `python -m tools.twins`: edit that one.
"""The driver for a blocking SQLAlchemy `Engine`."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Final, TypeAlias, TypeVar

from sqlalchemy.engine import Connection, Engine
from sqlalchemy.pool import NullPool

from oncekey.core.errors import CommitAmbiguousError, ConfigurationError, TransactionControlError
from oncekey.core.flow import Body, Mode, Statement, Transaction, run_body
from oncekey.databases.handler_sql import AS_HANDLER, AS_OPENED, LEFT_BEHIND, OVER
from oncekey.databases.postgres.unconfirmed import CONFIRM, WHAT, Confirming, UnconfirmedCommits
from oncekey.databases.retries import ConflictError, LostError, retrying
from oncekey.databases.slots import Slots
from oncekey.databases.sqlalchemy import handler_connection
from oncekey.databases.sqlalchemy.engines import (
    MAKE,
    BlockingHandlerConnection,
    borrowed_engine,
    engine_for_handlers,
    limited,
    open_for_handler,
)
from oncekey.databases.sqlalchemy.errors import (
    AUTOCOMMITS,
    BUSINESS,
    ENDED,
    FAILURES,
    failed,
    mark_lost_connections,
    meaning,
    not_connected,
    unproven,
)
from oncekey.databases.sqlalchemy.execute import (
    PROBE,
    PROVE,
    EngineFile,
    is_in_transaction,
    own_text,
    places_in,
    raw_of,
    sure,
)
from oncekey.databases.sqlalchemy.generated import connections
from oncekey.databases.sqlalchemy.handler_connection import Watch, current_transaction

if TYPE_CHECKING:
    from sqlalchemy.engine import RootTransaction


T = TypeVar("T")

STATEMENT_TIMEOUT: Final = 10.0
"""Timeout in seconds for one of oncekey's own statements: a row may be locked by a commit that hangs."""

OURS: Final = "READ COMMITTED"
GRACE: Final = 1.0
"""Seconds for a statement to end after its connection was closed, and for a standby to confirm a commit."""


class BlockingSqlalchemyDriver:
    """Runs transactions on the application's own engine, and never disposes of it.

    While a handler holds one connection, its key's record briefly needs another, to be claimed or renewed. So a fifth
    of the pool is never lent to handlers: a handler with a connection must not wait for one without.
    """

    def __init__(self, engine: Engine, *, statement_timeout: float = STATEMENT_TIMEOUT) -> None:
        self._engine = engine = borrowed_engine(engine)
        mark_lost_connections(engine)
        self._file = EngineFile(engine)
        self._sqlite = engine.dialect.name == "sqlite"
        self._statement_timeout = statement_timeout
        self._autocommit = engine.execution_options(isolation_level="AUTOCOMMIT")
        # After waiting for a lock it must see the holder's commit, whatever isolation level the application has set.
        self._atomic = engine if self._sqlite else engine.execution_options(isolation_level=OURS)
        self._for_handler = engine_for_handlers(engine)
        self._cleans = not isinstance(engine.pool, NullPool)  # a NullPool closes connections that are returned to it
        self._patience = float(getattr(engine.pool, "_timeout", 30.0))
        places = places_in(engine.pool, MAKE)
        self._places = None if places is None else Slots(places, self._patience, engine.dialect.name)
        self.unconfirmed = UnconfirmedCommits.of(str(engine.url))
        self._confirming = Confirming(self.unconfirmed, self._confirmed)

    @retrying(ConflictError, LostError)
    def run(self, transaction: Transaction[T]) -> T:
        if self.unconfirmed:
            self._confirming.confirm_all()
        name, mode = transaction.name, transaction.mode
        with self._connected(self._atomic if mode is Mode.ATOMIC else self._autocommit) as connection:
            if mode is Mode.SINGLE:
                with sure(connection, self.unconfirmed, name):
                    return self._stepped(connection, transaction, self._statement_timeout)
            if mode is Mode.READ:
                return self._stepped(connection, transaction, self._statement_timeout)
            if self._sqlite:
                self._begin_to_write(connection, name)
            result = self._stepped(connection, transaction, None)
            connections.committed(connection, self.unconfirmed, name)
            return result

    @property
    def is_full(self) -> bool:
        return self._places is not None and self._places.full

    def begin(self) -> BlockingTransaction:
        """Open a business transaction; the first statement begins it in the database."""
        return self._opened(self._for_handler)

    def _opened(self, engine: Engine) -> BlockingTransaction:
        self.enter()
        try:
            connection = open_for_handler(engine)
        except BaseException as error:
            self.leave()
            if isinstance(error, FAILURES):
                raise not_connected(error, engine.dialect.name) from error
            raise
        transaction = self._begun(connection, engine)
        try:
            connections.vetted(connection)
            transaction.start()
        except BaseException:
            transaction.rollback()
            raise
        return transaction

    def _begun(self, connection: BlockingHandlerConnection, _engine: Engine) -> BlockingTransaction:
        end = partial(self._end, connection)
        return BlockingTransaction(connection, connection.watch, end, self.unconfirmed)

    def close(self) -> None:
        """No-op: the engine belongs to the application."""

    def _end(self, connection: BlockingHandlerConnection) -> None:
        """Roll back uncommitted work, and return a business transaction's connection."""
        self._ended(connection)

    def _stepped(self, connection: Connection, transaction: Transaction[T], limit: float | None) -> T:
        try:
            with limited(connection, limit):
                return run_body(transaction.body(), partial(connections.execute, connection))
        except FAILURES as error:
            connections.forsaken(connection, error)
            raise failed(error, transaction.mode, transaction.name) from error

    @contextmanager
    def _connected(self, engine: Engine) -> Iterator[Connection]:
        self._file.refuse_if_gone()
        try:
            connection = engine.connect()
        except FAILURES as error:
            raise not_connected(error, engine.dialect.name) from error
        try:
            connections.vetted(connection)
            yield connection
        finally:
            connections.closed(connection)

    def _confirmed(self) -> bool:
        """Whether the standby has everything that was committed so far; a file has no standby."""
        if self._sqlite:
            return True
        question: Transaction[None] = Transaction(WHAT, Mode.SINGLE, _confirming)
        with self._connected(self._autocommit) as connection:
            try:
                with sure(connection, self.unconfirmed, WHAT):
                    self._stepped(connection, question, GRACE)
            except CommitAmbiguousError:
                return False
        return True

    def enter(self) -> None:
        """Wait for one of the handlers' slots in the pool; commits must be confirmed first."""
        self._file.refuse_if_gone()
        if self.unconfirmed:
            self._confirming.confirm_all()
        self._take_place()

    def _take_place(self) -> None:
        if self._places is not None:
            self._places.acquire(time.monotonic() + self._patience)

    def leave(self) -> None:
        """Release the slot."""
        if self._places is not None:
            self._places.release()

    def _begin_to_write(self, connection: Connection, what: str) -> None:
        """Begin at once: Python's sqlite3 module would begin at the first write, after earlier reads."""
        try:
            connection.begin()
            if not is_in_transaction(raw_of(connection)):  # the application's engine may have begun
                connection.exec_driver_sql("BEGIN IMMEDIATE")
        except FAILURES as error:
            raise failed(error, Mode.ATOMIC, what) from error

    def _ended(self, connection: BlockingHandlerConnection) -> None:
        try:
            if connection.watch.running and not self._hushed(connection):
                connections.discarded(connection)
                return
            clean = partial(connections.as_opened, connection)
            connections.closed(connection, clean=clean if self._cleans and connection.watch.used else None)
        finally:
            connection.watch.released = True
            self.leave()

    def _hushed(self, connection: BlockingHandlerConnection) -> bool:
        """Whether a connection with a running statement is usable again after the statement ends.

        A statement that was sent to PostgreSQL, or is queued, would become part of the next borrower's transaction, so
        the connection is closed. SQLite runs statements in sequence in one thread, so the statement ends soon.
        """
        connections.cancel_and_close(raw_of(connection))
        return connection.watch.quiet_blocking(GRACE) and self._sqlite


def _confirming() -> Body[None]:
    yield Statement(WHAT, CONFIRM)


End: TypeAlias = Callable[[], None]
"""Rolls back uncommitted work and returns the connection."""


class BlockingTransaction:
    """A business transaction that a handler writes to; oncekey ends it."""

    def __init__(self, connection: Connection, watch: Watch, end: End, unconfirmed: UnconfirmedCommits) -> None:
        self._connection, self._watch = connection, watch
        self._end, self._unconfirmed = end, unconfirmed
        self._root: RootTransaction | None = None
        self._over = False

    def start(self) -> None:
        """Begin. Listeners of the application may execute statements immediately, for example to set a tenant."""
        if handler_connection.commits_by_itself(self._connection):
            raise ConfigurationError(AUTOCOMMITS)
        try:
            Connection.begin(self._connection)
        except FAILURES as error:
            raise failed(error, Mode.ATOMIC, BUSINESS) from error
        self._root = current_transaction(self._connection)
        self._watch.guards = True

    @property
    def connection(self) -> Connection:
        return self._connection

    def run(self, body: Body[T]) -> T:
        self._refuse_if_ended()
        handler_connection.refuse_if_ended(self._connection, self._watch)
        try:
            for setting in AS_OPENED if self._watch.sets else ():
                self._connection.execute(own_text(setting))
            result = run_body(body, partial(connections.execute, self._connection))
            if self._watch.sets:
                self._connection.execute(own_text(AS_HANDLER))
        except FAILURES as error:
            raise meaning(error) from error
        self._watch.forget()
        return result

    def commit(self) -> None:
        """Commit, and return the connection; a transaction that can only be rolled back is refused (F20)."""
        self._refuse_if_ended()
        try:
            self._check()
            self._watch.guards = False
            connections.committed(self._connection, self._unconfirmed, BUSINESS)
        except BaseException:
            self.rollback()
            raise
        self._finish()  # the caller need not wait until the connection is reset and returned

    def rollback(self) -> None:
        self._finish()

    def _finish(self) -> None:
        """Return the connection, at most once."""
        if not self._over:
            self._over = self._watch.over = True
            self._watch.guards = False
            self._end()

    def _check(self) -> None:
        """Reject further statements, and a transaction that cannot be committed.

        Statements that a handler left running belong to the transaction, so they are awaited.
        """
        self._watch.over = True
        if not self._watch.quiet_blocking(handler_connection.PATIENCE):
            raise TransactionControlError(LEFT_BEHIND)
        if self._watch.has_failed:
            try:
                self._connection.execute(PROBE)
            except FAILURES as error:
                raise meaning(error) from error
        self._prove()

    def _prove(self) -> None:
        """Raise unless the database is still in the transaction that was begun; no other one is committed (L5)."""
        handler_connection.refuse_if_ended(self._connection, self._watch)
        if self._watch.begun and self._connection.dialect.name == "sqlite":
            try:
                self._connection.execute(PROVE)
            except FAILURES as error:
                raise unproven(error) from error

    def _refuse_if_ended(self) -> None:
        if self._over:
            raise TransactionControlError(OVER)
        if not self._is_same():
            raise TransactionControlError(ENDED)

    def _is_same(self) -> bool:
        """Whether it is still the transaction that oncekey began, and not a later one."""
        root = self._root
        return root is not None and root.is_active and current_transaction(self._connection) is root
