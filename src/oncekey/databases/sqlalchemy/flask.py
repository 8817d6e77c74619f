"""Flask-SQLAlchemy: keys are stored in its database, and its session's transaction is the business transaction.

A second session would not work: mapped classes choose their engine by the application, whatever connection a session
was given, and objects loaded earlier (such as the user) belong to the first one. So oncekey borrows the session of the
request: the session begins a transaction on a watched connection; during the operation its `commit()` only flushes; at
the end it commits, with the key's record as its last statement. The connection belongs to the application, so its
session settings are kept.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from functools import partial
from operator import is_
from typing import TYPE_CHECKING, Any, Final, TypeVar
from weakref import WeakSet, ref

import flask
from sqlalchemy import event

from oncekey.core.errors import ConfigurationError, TransactionControlError
from oncekey.core.sqltext import ONLY_READS
from oncekey.databases.sqlalchemy.blocking import FORKING
from oncekey.databases.sqlalchemy.errors import AUTOCOMMITS, BUSINESS, FAILURES, meaning, not_connected
from oncekey.databases.sqlalchemy.execute import committing, raw_of
from oncekey.databases.sqlalchemy.generated.connections import cancel_and_close, vetted
from oncekey.databases.sqlalchemy.generated.driver import BlockingSqlalchemyDriver, BlockingTransaction
from oncekey.databases.sqlalchemy.handler_connection import WATCH, Watch, commits_by_itself, watch_connections, watch_of

if TYPE_CHECKING:
    from sqlalchemy.engine import Connection, Engine
    from sqlalchemy.orm import Session
    from sqlalchemy.orm import SessionTransaction as OrmTransaction

    from oncekey.core.flow import Transaction

T = TypeVar("T")

TRANSACTION: Final = "oncekey_transaction"
STEPPING: Final = "oncekey_stepping"
LENT: Final = "oncekey_connection"

NO_APP: Final = "oncekey.flask.database(db) has no application: call db.init_app(app), with a SQLALCHEMY_DATABASE_URI"
WHICH_APP: Final = (
    "{count} applications with different databases share one Flask-SQLAlchemy, and it is not clear whose keys are "
    "meant: push an application context, or give each application its own Once"
)
WROTE_BEFORE: Final = (
    "db.session has uncommitted writes from before the handler: commit them where they are written, for example in "
    "before_request, or write them in the handler"
)
REMOVED: Final = (
    "the handler called remove() or close() of db.session, which discarded the transaction of its key, and now uses "
    "another session: leave remove() and close() to Flask-SQLAlchemy, which calls them after the request"
)
OTHER_BIND: Final = (
    "the handler wrote to another database through a model with a __bind_key__, which cannot commit with the key: "
    "write there from an outbox or in op.call of a PHASED handler"
)


class Database:
    """Wraps a Flask-SQLAlchemy for `Once`."""

    ambient = True
    """`db.session` is in the key's transaction, so handlers write in it without `op.connection`."""

    def __init__(self, db: Any) -> None:  # noqa: ANN401  (a package that need not be installed)
        if not hasattr(db, "session") or not hasattr(db, "_app_engines"):
            raise ConfigurationError("oncekey.flask.database takes the SQLAlchemy() of Flask-SQLAlchemy 3.1 or newer")
        self.db = db
        self._watched: WeakSet[Engine] = WeakSet()
        self._watching = threading.Lock()
        self.scopes: set[object] = set()
        """The scopes of `db.session` whose session belongs to an operation."""
        self._served: ContextVar[ref[Engine] | None] = ContextVar("oncekey_engine", default=None)
        event.listen(db.session, "after_begin", self._begun)
        event.listen(db.session, "before_flush", _refuse_to_flush)
        FORKING.add(self)

    @property
    def dialect(self) -> str | None:
        """The database's dialect, once there is an application."""
        try:
            return self.engine.dialect.name
        except ConfigurationError:
            return None

    @property
    def title(self) -> str:
        return "Flask-SQLAlchemy's db"

    @property
    def engines(self) -> list[Engine]:
        """The engines of all applications, whose pools a forked process must not use."""
        return [engine for bound in list(self.db._app_engines.values()) for engine in bound.values()]  # noqa: SLF001

    @property
    def engine(self) -> Engine:
        """The engine of the current application, of this thread's last one, or of the only one.

        An error that Flask does not handle is settled after the application context is gone.
        """
        served = self.db._app_engines  # noqa: SLF001
        app: Any = flask.current_app._get_current_object() if flask.has_app_context() else None  # type: ignore[attr-defined]  # noqa: SLF001
        last = self._served.get()
        if app is None and last is not None and (found := last()) is not None:
            return found
        bound = [served[app]] if app in served else list(served.values())
        engines: list[Engine] = [engine for one in bound if (engine := one.get(None)) is not None]
        if not engines:
            raise ConfigurationError(NO_APP)
        if len({str(engine.url) for engine in engines}) > 1:
            raise ConfigurationError(WHICH_APP.format(count=len(engines)))
        if app is not None:
            self._served.set(ref(engines[-1]))
        return engines[-1]

    def check_entry(self) -> None:
        """Raise if the session has uncommitted rows before the handler is called.

        On SQLite the claim and those rows would block each other.
        """
        scoped = self.db.session
        if scoped.registry.has():
            session = scoped()
            if TRANSACTION not in session.info and session.in_transaction() and _wrote(session):
                raise TransactionControlError(WROTE_BEFORE)

    def driver(self) -> FlaskSqlalchemyDriver:
        """A new driver on its engines."""
        return FlaskSqlalchemyDriver(self)

    def _begun(self, session: Session, transaction: OrmTransaction, connection: Connection) -> None:
        """Watch the session's statements even outside operations: it may become an operation's."""
        if transaction.nested:
            return  # on a connection that is watched
        engine = connection.engine
        if engine not in self._watched:
            with self._watching:
                if engine not in self._watched:
                    watch_connections(engine, borrowed=True)
                    self._watched.add(engine)
        watch = Watch()
        connection.execution_options(**{WATCH: watch})
        begun: list[Connection] | None = session.info.get(TRANSACTION)
        if begun is not None:
            watch.guards = bool(begun)  # after a rollback, too; `SessionTransaction` guards the first one
            begun.append(connection)
        elif self.scopes and self.db.session.registry.scopefunc() in self.scopes:
            raise TransactionControlError(REMOVED)
        else:
            session.info[LENT] = connection
            watch.reads = STEPPING in session.info


class FlaskSqlalchemyDriver:
    """Runs transactions on the engine of the current application; handlers write through its session."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._drivers: dict[Engine, BlockingSqlalchemyDriver] = {}
        self._making = threading.Lock()

    def run(self, transaction: Transaction[T]) -> T:
        """Run one transaction on a separate connection. A session that has only read releases its own first."""
        self._rest()
        return self._inner().run(transaction)

    @property
    def is_full(self) -> bool:
        return self._inner().is_full

    def begin(self) -> SessionTransaction:
        """Make the session's transaction a business transaction; the first statement begins it in the database."""
        session = self._session()
        if STEPPING in session.info:
            _check(session)
        inner, scope = self._inner(), self._database.db.session.registry.scopefunc()
        inner.enter()
        self._database.scopes.add(scope)
        ended = partial(self._database.scopes.discard, scope)
        try:
            return self._begun(session, inner, ended)
        except BaseException as error:
            ended()
            session.info.pop(TRANSACTION, None)
            _end_quietly(session)
            inner.leave()
            if isinstance(error, FAILURES):
                raise not_connected(error, session.get_bind().dialect.name) from error
            raise

    @staticmethod
    def _begun(session: Session, inner: BlockingSqlalchemyDriver, ended: Callable[[], None]) -> SessionTransaction:
        begun = session.info[TRANSACTION] = []  # the connection that the session begins on, from the event
        connection = session.connection()
        vetted(connection)
        if commits_by_itself(connection):
            raise ConfigurationError(AUTOCOMMITS)
        return SessionTransaction(session, connection, inner, begun, ended)

    @contextmanager
    def stepping(self) -> Iterator[None]:
        """The context of a PHASED handler: outside its phases the session is read-only."""
        session = self._session()
        _check(session)
        session.info[STEPPING] = True
        try:
            yield
            _check(session)
        finally:
            self._rest()
            session.info.pop(STEPPING, None)

    def close(self) -> None:
        """No-op: the engines belong to the application."""

    def _inner(self) -> BlockingSqlalchemyDriver:
        engine = self._database.engine
        with self._making:
            found = self._drivers.get(engine)
            if found is None:
                found = self._drivers[engine] = BlockingSqlalchemyDriver(engine)
        return found

    def _session(self) -> Session:
        """The request's session, without a transaction."""
        self._database.check_entry()
        self._rest()
        session: Session = self._database.db.session()
        return session

    def _rest(self) -> None:
        """Release the connection of a session that only read, so that no request waits for one while it holds one.

        Unlike `rollback()`, it keeps the state of objects.
        """
        scoped = self._database.db.session
        if flask.has_app_context() and scoped.registry.has():
            session: Session = scoped()
            if TRANSACTION not in session.info and session.in_transaction() and not _wrote(session):
                _end_quietly(session)


class SessionTransaction(BlockingTransaction):
    """The transaction of the request's session, while it is an operation's business transaction."""

    def __init__(
        self,
        session: Session,
        connection: Connection,
        inner: BlockingSqlalchemyDriver,
        begun: list[Connection],
        ended: Callable[[], None],
    ) -> None:
        watch = watch_of(connection)
        assert watch is not None
        super().__init__(connection, watch, self._end_session, inner.unconfirmed)
        self._session, self._inner, self._begun, self._ended = session, inner, begun, ended
        self._before = _pending(session)
        self._root, self._top = connection.get_transaction(), session.get_transaction()
        watch.guards = True
        begin = type(session).begin
        # `db.session.commit()` finds this attribute of the object; it is removed at the end.
        vars(session).update(commit=session.flush, begin=lambda nested=True: begin(session, nested=True))  # noqa: ARG005

    def flush(self) -> None:
        """Flush the session's pending changes; database errors are raised to the handler."""
        if self._is_same():
            self._session.flush()

    def commit(self) -> None:
        """Commit through the session, so that its objects and hooks are updated."""
        self._refuse_if_ended()
        try:
            try:
                self._session.flush()
            except FAILURES as error:
                raise meaning(error) from error
            for other in self._begun:
                watch = watch_of(other)
                if watch is None or other is self._connection:
                    continue
                if watch.wrote:
                    raise TransactionControlError(OTHER_BIND)
                watch.guards = False
            self._check()
            self._watch.guards = False
            self._hand_back()
            with committing(self._connection, self._unconfirmed, BUSINESS):
                self._session.commit()
        finally:
            self.rollback()  # the commit is final

    def _end_session(self) -> None:
        """Roll back uncommitted work, and leave the session to the application."""
        session, watch = self._session, self._watch
        try:
            self._hand_back()
            if watch.running:
                # The running statement would become part of the next borrower's transaction.
                cancel_and_close(raw_of(self._connection))
                session.invalidate()
            elif watch.used or not self._is_same() or self._changed():
                with suppress(*FAILURES):
                    session.rollback()
            else:
                _end_quietly(session)
        finally:
            self._inner.leave()

    def _hand_back(self) -> None:
        self._ended()
        self._session.info.pop(TRANSACTION, None)
        for name in ("commit", "begin"):
            vars(self._session).pop(name, None)

    def _changed(self) -> bool:
        """Whether the handler left pending changes, which the session's next commit would write."""
        pending = _pending(self._session)
        same = len(pending) == len(self._before) and all(map(is_, pending, self._before))
        return not same

    def _is_same(self) -> bool:
        top = self._top
        ours = top is not None and self._session.get_transaction() is top and top.is_active
        return ours and super()._is_same()


def _refuse_to_flush(session: Session, *_: object) -> None:
    if STEPPING in session.info and TRANSACTION not in session.info:
        raise TransactionControlError(ONLY_READS)


def _wrote(session: Session) -> bool:
    """Whether the session's transaction has executed anything but plain reads."""
    connection: Connection | None = session.info.get(LENT)
    watch = None if connection is None or connection.closed else watch_of(connection)
    return watch is not None and watch.wrote


def _check(session: Session) -> None:
    """Raise if there are changes that belong to no phase and would be lost."""
    if _pending(session):
        raise TransactionControlError(ONLY_READS)


def _pending(session: Session) -> list[object]:
    """Objects that were added, deleted or changed and are not yet flushed."""
    return [*session.new, *session.deleted, *filter(session.is_modified, session.dirty)]


def _end_quietly(session: Session) -> None:
    transaction = session.get_transaction()
    if transaction is not None:
        with suppress(*FAILURES):
            transaction.close()
