"""The driver for applications with a blocking SQLAlchemy `Engine`, and what its transactions have in common.

What is said, refused and understood is shared with the driver for asyncio; here it is said by blocking calls, in the
thread of the request. A pool that was made before a fork is the parent's: the child's engines get an empty one.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, Final, NoReturn, TypeVar
from weakref import WeakSet

from sqlalchemy.engine import Connection, Engine, RootTransaction
from sqlalchemy.engine.base import OptionEngine
from sqlalchemy.pool import NullPool

from oncekey.core.errors import CommitAmbiguousError, ConfigurationError, TransactionControlError
from oncekey.drivers.handler_sql import AS_HANDLER, AS_OPENED, LEFT_BEHIND, OVER, refusal
from oncekey.drivers.postgres.unconfirmed import CONFIRM, WHAT, Confirming, UnconfirmedCommits
from oncekey.drivers.retries import ConflictError, LostError, retrying
from oncekey.drivers.slots import Slots
from oncekey.drivers.sqlalchemy import connections_blocking as connections
from oncekey.drivers.sqlalchemy import handler_connection
from oncekey.drivers.sqlalchemy.errors import (
    AUTOCOMMITS,
    BUSINESS,
    ENDED,
    FAILURES,
    failed,
    meaning,
    not_connected,
    unproven,
)
from oncekey.drivers.sqlalchemy.execute import PROBE, PROVE, EngineFile, own_text, places_in, raw_of, sure
from oncekey.flow import Body, Mode, Statement, Transaction, run_body

T = TypeVar("T")

OURS: Final = "READ COMMITTED"
GRACE: Final = 1.0
"""Seconds that a statement under way has to end when its connection was cut."""

DRIVERS: Final = frozenset({"psycopg", "pysqlite"})
NO_DRIVER: Final = (
    "the records of keys cannot be kept by way of {dialect}+{driver}: make the engine for postgresql+psycopg:// or "
    "sqlite:///"
)


class BlockingSqlalchemyDriver:
    """Runs transactions on the application's own engine, which is never disposed here.

    While a handler holds one connection, its key's record needs another for a moment, to be claimed or renewed. So a
    fifth of the pool is never given to handlers: a handler with a connection must not wait for one without.
    """

    def __init__(self, engine: Engine) -> None:
        check_engine(engine)
        self.engine = engine = handler_connection.own_engine(engine)
        self._file = EngineFile(engine)
        self._sqlite = engine.dialect.name == "sqlite"
        self._autocommit = engine.execution_options(isolation_level="AUTOCOMMIT")
        # Who waited for a lock has to see what its holder committed, whatever the application's own transactions see.
        self._atomic = engine if self._sqlite else engine.execution_options(isolation_level=OURS)
        self._for_handler = _HandlerEngine(engine, {})
        handler_connection.watch_connections(self._for_handler)
        self._cleans = not isinstance(engine.pool, NullPool)  # which closes what it is given back
        self._patience = float(getattr(engine.pool, "_timeout", 30.0))
        places = places_in(engine.pool, "create_engine")
        self._places = None if places is None else Slots(places, self._patience, engine.dialect.name)
        self.unconfirmed = UnconfirmedCommits.of(str(engine.url))
        self._confirming = Confirming(self.unconfirmed, self._confirmed)

    @retrying(ConflictError, LostError)
    def run(self, transaction: Transaction[T]) -> T:
        """Run one transaction; again, if it lost against others or cannot have happened."""
        if self.unconfirmed:
            self._confirming.confirm_all()
        name, mode = transaction.name, transaction.mode
        with self._connected(self._atomic if mode is Mode.ATOMIC else self._autocommit) as connection:
            if mode is Mode.SINGLE:
                with sure(connection, self.unconfirmed, name):
                    return _stepped(connection, transaction)
            if mode is Mode.READ:
                return _stepped(connection, transaction)
            if self._sqlite:
                self._begin_to_write(connection, name)
            result = _stepped(connection, transaction)
            connections.committed(connection, self.unconfirmed, name)
            return result

    @property
    def crowded(self) -> bool:
        return self._places is not None and self._places.full

    def begin(self) -> BlockingTransaction:
        """Open a business transaction; the database hears of it with its first statement."""
        self.enter()
        try:
            connection = self._for_handler.connect()
        except BaseException as error:
            self.leave()
            if isinstance(error, FAILURES):
                raise not_connected(error, self._for_handler.dialect.name) from error
            raise
        assert isinstance(connection, BlockingHandlerConnection)
        transaction = BlockingTransaction(connection, self.unconfirmed, self._end)
        try:
            connections.vetted(connection)
            transaction.start()
        except BaseException:
            transaction.rollback()
            raise
        return transaction

    def close(self) -> None:
        """Nothing is ours to give back: the engine is the application's."""

    def enter(self) -> None:
        """Wait for one of the places that handlers have in the pool."""
        self._file.refuse_if_gone()
        if self.unconfirmed:
            self._confirming.confirm_all()
        if self._places is not None:
            self._places.acquire(time.monotonic() + self._patience)

    def leave(self) -> None:
        """Give the place back."""
        if self._places is not None:
            self._places.release()

    @staticmethod
    def _begin_to_write(connection: Connection, what: str) -> None:
        """Begin at once: SQLite's module would begin with the first change, after what was read."""
        try:
            connection.begin()
            raw: Any = connection.connection.dbapi_connection
            if not raw.in_transaction:  # where the application's engine says BEGIN by itself, that has to do
                connection.exec_driver_sql("BEGIN IMMEDIATE")
        except FAILURES as error:
            raise failed(error, Mode.ATOMIC, what) from error

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
        """Whether the standby has all that was committed so far; a file has none."""
        if self._sqlite:
            return True
        question: Transaction[None] = Transaction(WHAT, Mode.SINGLE, _confirming)
        with self._connected(self._autocommit) as connection:
            try:
                with sure(connection, self.unconfirmed, WHAT):
                    _stepped(connection, question)
            except CommitAmbiguousError:
                return False
        return True

    def _end(self, connection: BlockingHandlerConnection) -> None:
        """Undo what is not committed, and give a business transaction's connection back."""
        watch = connection.watch
        try:
            if watch.running:
                # What is under way there would be the beginning of the next borrower's transaction.
                connections.cancel_and_close(raw_of(connection))
                watch.quiet_blocking(GRACE)
                connections.discarded(connection)
                return
            connections.closed(
                connection, clean=partial(connections.as_opened, connection) if self._cleans and watch.used else None
            )
        finally:
            watch.released = True
            self.leave()


class BlockingHandlerConnection(Connection):
    """What `op.connection` is for a blocking engine: a `Connection` inside of the operation's transaction."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:  # noqa: ANN401  (as an engine makes it)
        super().__init__(*args, **kwargs)
        self.watch = handler_connection.Watch()
        super().execution_options(**{handler_connection.WATCH: self.watch})

    def commit(self) -> NoReturn:
        """Refused."""
        raise refusal("commit()")

    def rollback(self) -> NoReturn:
        """Refused."""
        raise refusal("rollback()")

    def close(self) -> NoReturn:
        """Refused."""
        raise refusal("close()")

    def invalidate(self, exception: BaseException | None = None) -> None:
        """Refused, unless SQLAlchemy itself says so of a connection that was lost."""
        if exception is None:
            raise refusal("invalidate()")
        super().invalidate(exception)

    def detach(self) -> NoReturn:
        """Refused."""
        raise refusal("detach()")

    def execution_options(self, **options: Any) -> Connection:  # noqa: ANN401  (as its parent takes them)
        """Set options; another isolation level would begin another transaction."""
        if "isolation_level" in options:
            raise refusal("setting isolation_level")
        return super().execution_options(**options)

    def begin(self) -> NoReturn:
        """Refused: it has begun; `begin_nested()` makes a savepoint."""
        raise refusal("begin()")

    def __enter__(self) -> NoReturn:
        raise refusal("`with connection:`")


class _HandlerEngine(OptionEngine):
    """An engine on the application's pool whose connections only oncekey ends."""

    _connection_cls = BlockingHandlerConnection


class BoundTransaction:
    """A transaction that a handler writes through and oncekey ends, on a connection of ours or of a session."""

    def __init__(self, connection: Connection, watch: handler_connection.Watch) -> None:
        self._connection, self._watch = connection, watch
        self._root: RootTransaction | None = None
        self._over = False

    @property
    def connection(self) -> Connection:
        """What the handler gets."""
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

    def _refuse_if_ended(self) -> None:
        if self._over:
            raise TransactionControlError(OVER)
        if not self._goes_on():
            raise TransactionControlError(ENDED)

    def _goes_on(self) -> bool:
        """Whether it still is the transaction that we began, and not one that came after it."""
        root, connection = self._root, self._connection
        return root is not None and root.is_active and not connection.closed and connection.get_transaction() is root

    def _hear_last_words(self) -> None:
        """Let nothing more pass, wait for what a handler left under way, and refuse what can only be rolled back."""
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
        """Raise unless the database is still in the transaction that was begun: no other one is committed (L5)."""
        handler_connection.refuse_if_ended(self._connection, self._watch)
        if self._watch.begun and self._connection.dialect.name == "sqlite":
            try:
                self._connection.execute(PROVE)
            except FAILURES as error:
                raise unproven(error) from error


class BlockingTransaction(BoundTransaction):
    """A business transaction on a connection of the engine's pool, which is lent for it."""

    def __init__(
        self,
        connection: BlockingHandlerConnection,
        unconfirmed: UnconfirmedCommits,
        end: Callable[[BlockingHandlerConnection], None],
    ) -> None:
        super().__init__(connection, connection.watch)
        self._lent, self._unconfirmed, self._end = connection, unconfirmed, end

    def start(self) -> None:
        """Begin. Listeners of the application may speak at once, to set a tenant for example."""
        if handler_connection.commits_by_itself(self._connection):
            raise ConfigurationError(AUTOCOMMITS)
        try:
            self._root = Connection.begin(self._connection)
        except FAILURES as error:
            raise failed(error, Mode.ATOMIC, BUSINESS) from error
        self._watch.guards = True

    def commit(self) -> None:
        """Commit, and give the connection back; a transaction that can only be rolled back is refused (F20)."""
        self._refuse_if_ended()
        try:
            self._hear_last_words()
            self._watch.guards = False
            connections.committed(self._connection, self._unconfirmed, BUSINESS)
        finally:
            self.rollback()  # what is committed stays so

    def rollback(self) -> None:
        """Undo everything and give the connection back; what is over stays as it is."""
        if not self._over:
            self._over = self._watch.over = True
            self._watch.guards = False
            self._end(self._lent)


def _stepped(connection: Connection, transaction: Transaction[T]) -> T:
    try:
        return run_body(transaction.body(), partial(connections.execute, connection))
    except FAILURES as error:
        connections.forsaken(connection, error)
        raise failed(error, transaction.mode, transaction.name) from error


def _confirming() -> Body[None]:
    yield Statement(WHAT, CONFIRM)


def check_engine(engine: Engine) -> None:
    """Refuse an engine whose database or whose driver this one does not know."""
    dialect = engine.dialect
    if dialect.driver not in DRIVERS:
        raise ConfigurationError(NO_DRIVER.format(dialect=dialect.name, driver=dialect.driver))


# An engine in the place of a URL.


class BorrowedEngine:
    """The application's engine, as `Once` takes it."""

    def __init__(self, engine: Engine) -> None:
        check_engine(engine)
        self._engine = engine
        FORKING.add(self)

    @property
    def dialect(self) -> str:
        """Which database it is."""
        return self._engine.dialect.name

    @property
    def title(self) -> str:
        return self._engine.url.render_as_string(hide_password=True)

    @property
    def engines(self) -> tuple[Engine, ...]:
        """The engines whose pools a forked process may not use."""
        return (self._engine,)

    def driver(self) -> BlockingSqlalchemyDriver:
        """A new driver on it."""
        return BlockingSqlalchemyDriver(self._engine)


FORKING: Final[WeakSet[Any]] = WeakSet()
"""Everything that has `engines`."""
_parents: Final[list[Any]] = []
"""What a parent process had open. To close it here, or to let it be collected, would say goodbye in its name."""


def _forked() -> None:
    for lender in FORKING:
        for engine in lender.engines:
            _parents.append(engine.pool)
            engine.dispose(close=False)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forked)
