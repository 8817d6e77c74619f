"""A database of `settings.DATABASES` as a store: keys are stored over Django's own connections.

The application's rows and the key's record have to be in one transaction, and Django uses one connection per thread. So
a business transaction is `transaction.atomic(durable=True)` on that connection, and oncekey sends nothing else over it
while it is open. Statements that commit separately, and those of other threads (heartbeats, workers), use separate
connections, which Django opens as well: `CONN_MAX_AGE` limits their lifetime.

oncekey's statements bypass `connection.cursor()`: its query log, enabled by `DEBUG`, would show keys in clear text.
"""

from __future__ import annotations

import logging
import os
import threading
from contextlib import closing, contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeVar
from weakref import WeakSet

from django.conf import settings
from django.db import Error, connections, transaction

from oncekey.core import errors
from oncekey.core.flow import Body, Mode, Rows, Statement, Transaction, run_body
from oncekey.core.sqltext import Dialect
from oncekey.databases.handler_sql import AS_HANDLER, AS_OPENED, ENDED, OVER, refuse_transaction_control
from oncekey.databases.placeholders import pyformat
from oncekey.databases.postgres import server as postgres_errors
from oncekey.databases.retries import ConflictError, LostError, lost, lost_commit, retrying
from oncekey.databases.sqlite.execute import commit_error, store_error
from oncekey.databases.threads import OF_TRANSACTIONS
from oncekey.django import files
from oncekey.django.project import alias_of_project
from oncekey.frameworks.shared import thread_exchange

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


T = TypeVar("T")

log = logging.getLogger("oncekey")

WHAT: Final = "the business transaction"
NO_ALIAS: Final = "{named} is not in settings.DATABASES, which has {known}"
NO_STORE: Final = (
    "Database({alias!r}) is {vendor}; Django databases that store keys must be PostgreSQL or SQLite: for views with "
    "effects=INLINE use Once('mariadb://...'), and for LOCAL views move their tables to one of those two"
)
NESTED: Final = (
    "a protected view runs inside another atomic block of the database {alias!r}, so it could not commit by itself: "
    "remove the atomic() around the view; under ATOMIC_REQUESTS, a view that is not LOCAL or OUTBOX on PostgreSQL "
    'needs @transaction.non_atomic_requests (on a class: @method_decorator(non_atomic_requests, "dispatch"))'
)
NO_AUTOCOMMIT: Final = (
    "the database {alias!r} is not in autocommit mode, so oncekey cannot commit a claim by itself: remove AUTOCOMMIT "
    "= False and calls of set_autocommit()"
)
GONE: Final = (
    "the business transaction must be rolled back: the handler called set_rollback(True) or closed the connection, or "
    "caught a database error without an atomic block around it"
)
LEFT_OPEN: Final = "oncekey: an atomic block of %r was left open; all its writes are rolled back"
HOOK_FAILED: Final = "oncekey: an on_commit function failed after the commit, which is final: %s"
NO_ASYNC: Final = (
    "an `async def` function of @once.function or once.inbox has no thread for its models, so its rows would not be "
    "in the transaction of its key: make it `def`, or set effects=INLINE"
)
WAITED: Final = "the view's transaction was closed to wait for another request, and cannot be reopened"
_PIN: Final = "SET TRANSACTION ISOLATION LEVEL READ COMMITTED"
_MARK: Final = "SAVEPOINT oncekey_begun"
_PROVE: Final = "RELEASE SAVEPOINT oncekey_begun"
"""A statement that SQLite accepts only in the transaction that was begun: some errors roll back the whole transaction.
"""
_IDLE: Final = 0
_INERROR: Final = 3
"""PostgreSQL connection states in psycopg and psycopg2: no transaction, and one that can only be rolled back."""


class _Verbs(NamedTuple):
    """The statements that begin and end a short transaction of oncekey's."""

    begin: str
    commit: str
    rollback: str


_VERBS: Final = {
    "postgresql": _Verbs("BEGIN ISOLATION LEVEL READ COMMITTED", "COMMIT", "ROLLBACK"),
    "sqlite": _Verbs("BEGIN IMMEDIATE", "COMMIT", "ROLLBACK"),
}
VENDORS: Final = frozenset(_VERBS)
"""The databases of Django that can store keys."""
_IN_A_TEST: Final = _Verbs("SAVEPOINT oncekey", "RELEASE SAVEPOINT oncekey", "ROLLBACK TO SAVEPOINT oncekey")
_OTHERS: Final = {"mysql": "MySQL or MariaDB", "oracle": "Oracle"}
_DIALECTS: Final = {"postgresql": Dialect.POSTGRES, "sqlite": Dialect.SQLITE}


class Database:
    """One of `settings.DATABASES`, by its alias or by `settings.ONCEKEY_DATABASE`; `Once` takes it instead of a URL."""

    ambient = True
    """Models use the connection of the key's transaction, so views write in it without `op.connection`."""

    def __init__(self, alias: str | None = None) -> None:
        self.alias = alias_of_project() if alias is None else alias
        _ALIASES.add(self.alias)

    @property
    def dialect(self) -> str:
        """`postgresql` or `sqlite`."""
        if self.alias not in connections.settings:
            known = ", ".join(repr(name) for name in sorted(connections.settings))
            by_setting = self.alias == getattr(settings, "ONCEKEY_DATABASE", None)
            named = f"ONCEKEY_DATABASE = {self.alias!r}" if by_setting else f"Database({self.alias!r})"
            raise errors.ConfigurationError(NO_ALIAS.format(named=named, known=known))
        vendor: str = connections[self.alias].vendor
        if vendor not in _VERBS:
            # Django's own attribute queries the server, which may be down.
            raise errors.ConfigurationError(NO_STORE.format(alias=self.alias, vendor=_OTHERS.get(vendor, vendor)))
        return vendor

    @property
    def title(self) -> str:
        """Its name in messages and logs."""
        return f"Django's database {self.alias!r}"

    @property
    def one_commit(self) -> bool:
        """Whether LOCAL rows and their record commit together, with nothing written before."""
        return self.dialect == "postgresql"

    def wraps(self, view: Any) -> bool:  # noqa: ANN401  (Django has no types)
        """Whether `ATOMIC_REQUESTS` opens a transaction around a view."""
        excepted = getattr(view, "_non_atomic_requests", ())
        return bool(connections.settings[self.alias]["ATOMIC_REQUESTS"]) and self.alias not in excepted

    def driver(self) -> DjangoDriver:
        """A driver over this process's connections."""
        return DjangoDriver(self.alias)


class DjangoDriver:
    """Runs transactions on Django's connections, from any number of threads."""

    def __init__(self, alias: str) -> None:
        self._alias = alias
        self._spares = Spares(alias)

    @retrying(ConflictError, LostError)
    def run(self, transaction: Transaction[T]) -> T:
        """Run a transaction; retry it if it lost a conflict or certainly did not commit."""
        connection = connections[self._alias]
        if _in_a_test(connection):
            return _executed(connection, transaction, _IN_A_TEST)
        if connection.in_atomic_block or thread_exchange.get() is None:
            with self._spares.lent() as spare:
                return _executed(spare, transaction, _VERBS[spare.vendor])
        if connection.connection is not None and not connection.autocommit:
            raise errors.ConfigurationError(NO_AUTOCOMMIT.format(alias=self._alias))
        return _executed(connection, transaction, _VERBS[connection.vendor])

    @retrying(LostError)  # no statement was sent, and Django has dropped the connection
    def begin(self) -> DjangoTransaction:
        """Open a business transaction on the connection that this thread's queries use."""
        if threading.current_thread().name.startswith(OF_TRANSACTIONS):
            raise errors.ConfigurationError(NO_ASYNC)
        connection = connections[self._alias]
        if _is_nested(connection):
            if any(hasattr(block, "oncekey") for block in connection.atomic_blocks):
                raise errors.StoreBusyError(WAITED)
            raise errors.ConfigurationError(NESTED.format(alias=self._alias))
        return DjangoTransaction(self._alias)

    def join(self) -> DjangoTransaction:
        """A transaction for rows without a record, nested in any transaction that is already open."""
        return DjangoTransaction(self._alias, joins=True)

    def close(self) -> None:
        """Close oncekey's own connections; Django closes those of requests."""
        self._spares.close()


class DjangoTransaction:
    """A business transaction: a Django `atomic` block that begins and ends in different functions.

    `durable` makes Django refuse it inside another block, whose owner could still roll it back. A transaction that
    `joins` may be nested: it has no record that could become wrong.
    """

    def __init__(self, alias: str, *, joins: bool = False) -> None:
        self._alias = alias
        self._joins = joins
        self._connection = connections[alias]
        self._in_a_test = _in_a_test(self._connection)
        self._over = self._committed = self._gone = self._ended = self._sets = False
        self.surrounds = False
        """Whether `ATOMIC_REQUESTS` opens its block inside; a rollback then waits for `close`."""
        self._atomic: Any = transaction.atomic(using=alias, durable=not joins)
        self._atomic.oncekey = True
        files.vet(self._connection)
        try:
            self._atomic.__enter__()
        except Error as error:
            raise _unreachable(error, self._connection.vendor) from error
        self._connection.execute_wrappers.append(self._guard)
        try:
            if self._connection.vendor == "postgresql" and not joins and not self._in_a_test:
                # Possible only before the first query; a snapshot older than the lock would hide a record.
                _plainly(self._connection, _PIN, Mode.ATOMIC)
            if self._connection.vendor == "sqlite" and not joins:
                _plainly(self._connection, _MARK, Mode.ATOMIC)
            if not joins and not self._in_a_test:
                transaction.on_commit(self._mark, using=alias)
        except BaseException:
            self.rollback()
            raise

    @property
    def connection(self) -> Any:  # noqa: ANN401  (Django has no types)
        """The connection that is passed to the handler: the one its models use."""
        return self._connection

    def look(self) -> None:
        """Save state that is visible only inside the view: the end of an enclosing block resets it."""
        self._gone = self._gone or self._connection.needs_rollback or self._connection.closed_in_transaction

    def run(self, body: Body[T]) -> T:
        """Run statements inside the transaction."""
        if self._over:
            body.close()
            raise errors.TransactionControlError(OVER)
        self._check()
        for setting in AS_OPENED if self._sets else ():
            _plainly(self._connection, setting, Mode.ATOMIC)
        result = run_body(body, partial(execute, self._connection, Mode.ATOMIC))
        if self._sets:
            _plainly(self._connection, AS_HANDLER, Mode.ATOMIC)
        return result

    def commit(self) -> None:
        """Commit; an error of an `on_commit` function does not undo the commit."""
        if self._over:
            return
        try:
            self._check()
            if not self._is_inside():
                self._prove()
        except errors.OncekeyError:
            self.rollback()
            raise
        if self._is_inside():
            self.close()
            raise errors.RolledBackError(f"{WHAT}: a view left an atomic block open")
        try:
            self._end(None)
        except Exception as error:
            if not self._committed:
                raise _commit_error(error, self._connection.vendor) from error
            log.error(HOOK_FAILED, type(error).__name__)
        files.check(self._connection)

    def rollback(self) -> None:
        """Roll back, unless the block of `ATOMIC_REQUESTS` is still open inside."""
        if not self.surrounds or not self._is_inside():
            self.close()

    def close(self) -> None:
        """Roll back everything uncommitted, including blocks that were left open inside."""
        if self._over:
            return
        if self._is_inside():
            log.error(LEFT_OPEN, self._alias)
        undone = errors.RolledBackError(WHAT)
        while self._is_inside() and self._atomic in self._connection.atomic_blocks:
            self._connection.atomic_blocks[-1].__exit__(type(undone), undone, None)
        if not self._is_inside():
            self._end(undone)
            return
        # The view ended this block too: only a new connection discards its writes.
        self._forget()
        self._connection.close()
        self._connection.connection = None
        self._connection.connect()

    def _check(self) -> None:
        """Raise if Django, PostgreSQL or the handler has doomed the transaction."""
        connection = self._connection
        if self._joins:
            return
        self.look()
        if self._gone:
            raise errors.RolledBackError(GONE)
        raw = connection.connection
        if connection.vendor == "postgresql" and raw.info.transaction_status == _INERROR:
            raise errors.RolledBackError(GONE)
        self._refuse_if_ended()

    def _refuse_if_ended(self) -> None:
        """Raise if the transaction has ended in the database: the next statement would commit by itself (L5)."""
        if self._over or (self._joins and self._connection.vendor == "postgresql"):
            return  # there, the first statement begins it
        self._ended = self._ended or _is_ended(self._connection)
        if self._ended:
            raise errors.TransactionControlError(ENDED)

    def _prove(self) -> None:
        """Raise unless SQLite is still in the transaction that was begun; no other one is committed."""
        if self._connection.vendor != "sqlite" or self._joins:
            return
        try:
            _plainly(self._connection, _PROVE, Mode.ATOMIC)
        except errors.StoreUnavailableError:
            raise
        except errors.StoreError as error:
            raise errors.TransactionControlError(ENDED) from error

    def _is_inside(self) -> bool:
        blocks: list[Any] = self._connection.atomic_blocks
        return blocks[-1:] != [self._atomic]

    def _end(self, error: Exception | None) -> None:
        self._forget()
        self._atomic.__exit__(None if error is None else type(error), error, None)

    def _forget(self) -> None:
        """Mark it as ended and remove the guard."""
        self._over = True
        self._connection.execute_wrappers.remove(self._guard)

    def _mark(self) -> None:
        """The first `on_commit` function: it records that the commit happened."""
        self._committed = True

    def _guard(self, go_on: Callable[..., Any], sql: Any, params: Any, many: bool, context: Any) -> Any:  # noqa: ANN401, FBT001  (Django's signature)
        text = sql if isinstance(sql, str) else sql.as_string(self._connection.connection)
        # The application owns the connection and may change its settings: django-tenants sets its search path.
        if refuse_transaction_control(text, _DIALECTS[self._connection.vendor], lent=True):
            self._sets = True
        self._refuse_if_ended()
        return go_on(sql, params, many, context)


class Spares:
    """Extra connections: for other threads, and for commits while a request's connection is in use."""

    def __init__(self, alias: str) -> None:
        self._alias = alias
        self._free: list[Any] = []
        self._lock = threading.Lock()
        _SPARES.add(self)

    @contextmanager
    def lent(self) -> Iterator[Any]:
        """Borrow a connection; Django decides whether to keep it."""
        with self._lock:
            connection = self._free.pop() if self._free else None
        if connection is None:
            connection = connections.create_connection(self._alias)
            connection.inc_thread_sharing()
        try:
            yield connection
        except BaseException:
            connection.close()
            raise
        connection.close_if_unusable_or_obsolete()
        if connection.connection is not None:
            with self._lock:
                self._free.append(connection)

    def inherited(self) -> list[Any]:
        """Remove and return the parent's connections; the lock is new, because a parent's thread may have held it."""
        self._lock = threading.Lock()
        free, self._free = self._free, []
        return free

    def close(self) -> None:
        """Close all idle connections."""
        with self._lock:
            free, self._free = self._free, []
        for connection in free:
            connection.close()


def _is_ended(connection: Any) -> bool:  # noqa: ANN401
    """Whether the database has no open transaction although Django is in a block."""
    raw = connection.connection
    if raw is None or connection.closed_in_transaction:
        return False
    if connection.vendor == "sqlite":
        return not raw.in_transaction
    return bool(raw.info.transaction_status == _IDLE)


def _in_a_test(connection: Any) -> bool:  # noqa: ANN401
    """Whether a `TestCase` holds the transaction that the whole test runs in."""
    return any(block._from_testcase for block in connection.atomic_blocks)  # noqa: SLF001  (Django has no public name for it)


def _is_nested(connection: Any) -> bool:  # noqa: ANN401
    return bool(connection.atomic_blocks) and not connection.atomic_blocks[-1]._from_testcase  # noqa: SLF001


def _executed(connection: Any, transaction: Transaction[T], verbs: _Verbs) -> T:  # noqa: ANN401
    """Run one of oncekey's transactions."""
    mode = transaction.mode
    files.vet(connection)
    if mode is not Mode.ATOMIC and verbs is not _IN_A_TEST:
        try:
            result = run_body(transaction.body(), partial(execute, connection, mode))
        except LostError:
            connection.close()
            raise
        files.check(connection)
        return result
    _plainly(connection, verbs.begin, Mode.ATOMIC)
    try:
        result = run_body(transaction.body(), partial(execute, connection, Mode.ATOMIC))
        _plainly(connection, verbs.commit, None)
    except LostError:
        connection.close()
        raise
    except BaseException:
        try:
            _plainly(connection, verbs.rollback, Mode.ATOMIC)
        except errors.StoreError:
            connection.close()
        raise
    files.check(connection)
    return result


def _plainly(connection: Any, sql: str, mode: Mode | None) -> None:  # noqa: ANN401
    """Execute a statement without parameters; a COMMIT has no mode."""
    try:
        with closing(_cursor(connection)) as cursor:
            cursor.execute(sql)
            tag = getattr(cursor, "statusmessage", None)
    except connection.Database.Error as error:
        connection.errors_occurred = True
        if mode is None:
            raise _commit_error(error, connection.vendor) from error
        raise _meaning(error, connection, mode, sql) from error
    if mode is None and tag == "ROLLBACK":
        raise postgres_errors.not_committed(tag, sql)


def execute(connection: Any, mode: Mode, statement: Statement) -> Rows:  # noqa: ANN401
    """Execute a statement of the store; Django's cursors accept `%(name)s` for both databases."""
    assert isinstance(statement.command, str)
    try:
        with closing(_cursor(connection)) as cursor:
            cursor.execute(pyformat(statement.command), statement.params)
            if cursor.description is None:
                return []
            names = [column[0] for column in cursor.description]
            return [dict(zip(names, map(_plain, row), strict=True)) for row in cursor.fetchall()]
    except connection.Database.Error as error:
        connection.errors_occurred = True
        raise _meaning(error, connection, mode, statement.name) from None
    except (OverflowError, ValueError) as error:
        # The message of such an error repeats the value that could not be bound, so it is not shown.
        raise errors.StoreError(f"{statement.name}: a value could not be bound ({type(error).__name__})") from None


def _plain(value: object) -> object:
    return bytes(value) if isinstance(value, memoryview) else value  # psycopg2's bytes


def _cursor(connection: Any) -> Any:  # noqa: ANN401
    try:
        if not connection.in_atomic_block:
            connection.close_if_health_check_failed()
        connection.ensure_connection()
        return connection.create_cursor()
    except Error as error:
        raise _unreachable(error, connection.vendor) from error


def _unreachable(error: Exception, vendor: str) -> errors.StoreError:
    """The store's error for a failed connection or BEGIN: no statement was sent."""
    if vendor == "sqlite":
        return store_error(_raw(error), "beginning")
    return postgres_errors.unreachable(type(error).__name__)


def _raw(error: Exception) -> Exception:
    """The original error of the database driver, below Django's."""
    return error.__cause__ if isinstance(error, Error) and isinstance(error.__cause__, Exception) else error


def _sqlstate(error: Exception) -> str | None:
    return getattr(error, "sqlstate", None) or getattr(error, "pgcode", None)


def _severity(error: Exception) -> str | None:
    diagnosis = getattr(error, "diag", None)
    return getattr(diagnosis, "severity_nonlocalized", None) or getattr(diagnosis, "severity", None)


def _meaning(error: Exception, connection: Any, mode: Mode, what: str) -> errors.StoreError:  # noqa: ANN401
    """The store's error for a statement."""
    if connection.vendor == "sqlite":
        return store_error(error, what)
    state = _sqlstate(error)
    lost_it = postgres_errors.is_the_end(state, _severity(error)) or connection.connection.closed
    if lost_it and not postgres_errors.was_too_slow(state):
        return lost(mode, what)
    doing = postgres_errors.handlers_doing(state, what) if connection.in_atomic_block else None
    return doing or postgres_errors.refused(state, what, type(error).__name__)


def _commit_error(error: Exception, vendor: str) -> errors.StoreError:
    """The store's error for a COMMIT: an error from the server is definite, a lost reply is not."""
    raw = _raw(error)
    if vendor == "sqlite":
        return commit_error(raw, WHAT)
    state = _sqlstate(raw)
    if state is None or postgres_errors.is_the_end(state, _severity(raw)):
        return lost_commit(WHAT)
    return postgres_errors.refused_commit(state, WHAT, type(raw).__name__)


_ALIASES: Final[set[str]] = set()
_SPARES: Final[WeakSet[Spares]] = WeakSet()
_inherited: Final[list[Any]] = []
"""Connections of the parent process. Closing or collecting them here would end the parent's sessions."""


def _forked() -> None:
    """Drop inherited connections: two processes on one connection would read each other's rows."""
    for spares in _SPARES:
        _inherited.extend(spares.inherited())
    for alias in _ALIASES:
        if alias not in connections.settings:  # it was refused
            continue
        connection = connections[alias]
        # A pool's connections belong to the parent too, and the threads that maintain the pool are gone.
        _inherited.append(getattr(connection, "_connection_pools", {}).pop(alias, None))
        if connection.connection is not None and not connection.in_atomic_block:
            _inherited.append(connection.connection)
            connection.connection = None


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forked)
