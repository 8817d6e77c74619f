"""A database of `settings.DATABASES` as a store: keys are kept on Django's own connections.

The application's rows and the key's record have to be in one transaction, and Django writes on one connection for each
thread. So a business transaction is `transaction.atomic(durable=True)` on that connection, and nothing else is ever
said on it while it is open. What has to be committed by itself meanwhile, and what other threads say (heartbeats,
workers), has connections of its own, which are Django's as well: `CONN_MAX_AGE` says how long they live.

Statements of ours go past `connection.cursor()`: its log of queries, which `DEBUG` turns on, would show keys in clear.
"""

from __future__ import annotations

import logging
import os
import threading
from contextlib import closing, contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeVar
from weakref import WeakSet

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
NO_ALIAS: Final = "Database({alias!r}) is not in settings.DATABASES, which has {known}"
NO_STORE: Final = (
    "Database({alias!r}) is {vendor}, and keys are kept in Django's databases of PostgreSQL and SQLite only: for views "
    "with effects=INLINE say Once('mariadb://...'), and keep what LOCAL views write in one of those two"
)
NESTED: Final = (
    "a protected view of oncekey runs inside of another atomic block of the database {alias!r}, so nothing of it could "
    "be committed by itself: take atomic() away from around the view; under ATOMIC_REQUESTS, a view that is not LOCAL "
    "on PostgreSQL needs @transaction.non_atomic_requests (on a class: @method_decorator(non_atomic_requests, "
    '"dispatch"))'
)
NO_AUTOCOMMIT: Final = (
    "the database {alias!r} is not in autocommit mode, so oncekey cannot commit a claim by itself: leave AUTOCOMMIT "
    "and set_autocommit() alone"
)
GONE: Final = (
    "the business transaction is to be rolled back: the handler called set_rollback(True) or closed the connection, or "
    "an error inside of it was caught without an atomic block around it"
)
LEFT_OPEN: Final = "oncekey: an atomic block of %r was left open, so everything that was written is rolled back"
HOOK_FAILED: Final = "oncekey: a function of transaction.on_commit failed after its commit, which stands: %s"
NO_ASYNC: Final = (
    "an `async def` function of @once.function or once.inbox has no thread of its own that its models could use, so "
    "its rows would not be in the transaction of its key: make it `def`, or effects=INLINE"
)
WAITED: Final = "the view's transaction was given up to wait, and cannot be opened anew"
_PIN: Final = "SET TRANSACTION ISOLATION LEVEL READ COMMITTED"
_MARK: Final = "SAVEPOINT oncekey_begun"
_PROVE: Final = "RELEASE SAVEPOINT oncekey_begun"
"""What SQLite refuses in any other transaction than the one that was begun: some errors roll a whole one back."""
_IDLE: Final = 0
_INERROR: Final = 3
"""States of PostgreSQL's connections, in psycopg and psycopg2: no transaction, and one that can only be rolled back."""


class _Verbs(NamedTuple):
    """How a short transaction of ours is begun and ended."""

    begin: str
    commit: str
    rollback: str


_VERBS: Final = {
    "postgresql": _Verbs("BEGIN ISOLATION LEVEL READ COMMITTED", "COMMIT", "ROLLBACK"),
    "sqlite": _Verbs("BEGIN IMMEDIATE", "COMMIT", "ROLLBACK"),
}
_IN_A_TEST: Final = _Verbs("SAVEPOINT oncekey", "RELEASE SAVEPOINT oncekey", "ROLLBACK TO SAVEPOINT oncekey")
_OTHERS: Final = {"mysql": "MySQL or MariaDB", "oracle": "Oracle"}
_DIALECTS: Final = {"postgresql": Dialect.POSTGRES, "sqlite": Dialect.SQLITE}


class Database:
    """One of `settings.DATABASES`, by its alias or by `settings.ONCEKEY_DATABASE`; what `Once` takes for a URL."""

    ambient = True
    """Views write in the transaction of their key without being handed it: models use the same connection."""

    def __init__(self, alias: str | None = None) -> None:
        self.alias = alias_of_project() if alias is None else alias
        _ALIASES.add(self.alias)

    @property
    def dialect(self) -> str:
        """`postgresql` or `sqlite`."""
        if self.alias not in connections.settings:
            known = ", ".join(repr(name) for name in sorted(connections.settings))
            raise errors.ConfigurationError(NO_ALIAS.format(alias=self.alias, known=known))
        vendor: str = connections[self.alias].vendor
        if vendor not in _VERBS:
            # Django's own name for it asks the server, which may not be there.
            raise errors.ConfigurationError(NO_STORE.format(alias=self.alias, vendor=_OTHERS.get(vendor, vendor)))
        return vendor

    @property
    def title(self) -> str:
        """Its name in sentences and logs."""
        return f"Django's database {self.alias!r}"

    @property
    def one_commit(self) -> bool:
        """Whether LOCAL rows and their record are one commit, so that nothing is written before it."""
        return self.dialect == "postgresql"

    def wraps(self, view: Any) -> bool:  # noqa: ANN401  (Django has no types)
        """Whether `ATOMIC_REQUESTS` opens a transaction around a view."""
        excepted = getattr(view, "_non_atomic_requests", ())
        return bool(connections.settings[self.alias]["ATOMIC_REQUESTS"]) and self.alias not in excepted

    def driver(self) -> DjangoDriver:
        """A driver on this process's connections."""
        return DjangoDriver(self.alias)


class DjangoDriver:
    """Runs transactions on Django's connections, from any number of threads."""

    def __init__(self, alias: str) -> None:
        self._alias = alias
        self._spares = Spares(alias)

    @retrying(ConflictError, LostError)
    def run(self, transaction: Transaction[T]) -> T:
        """Run one transaction; again, if it lost against others or cannot have happened."""
        connection = connections[self._alias]
        if _in_a_test(connection):
            return _executed(connection, transaction, _IN_A_TEST)
        if connection.in_atomic_block or thread_exchange.get() is None:
            with self._spares.lent() as spare:
                return _executed(spare, transaction, _VERBS[spare.vendor])
        if connection.connection is not None and not connection.autocommit:
            raise errors.ConfigurationError(NO_AUTOCOMMIT.format(alias=self._alias))
        return _executed(connection, transaction, _VERBS[connection.vendor])

    @retrying(LostError)  # nothing was said yet, and Django has dropped the connection
    def begin(self) -> DjangoTransaction:
        """Open a business transaction on the connection that this thread's own queries use."""
        if threading.current_thread().name.startswith(OF_TRANSACTIONS):
            raise errors.ConfigurationError(NO_ASYNC)
        connection = connections[self._alias]
        if _is_nested(connection):
            if any(hasattr(block, "oncekey") for block in connection.atomic_blocks):
                raise errors.StoreBusyError(WAITED)
            raise errors.ConfigurationError(NESTED.format(alias=self._alias))
        return DjangoTransaction(self._alias)

    def join(self) -> DjangoTransaction:
        """The same for rows without a record: inside of whatever transaction is open already."""
        return DjangoTransaction(self._alias, joins=True)

    def close(self) -> None:
        """Close the connections of our own; those of requests are Django's to close."""
        self._spares.close()


class DjangoTransaction:
    """A business transaction: an `atomic` block of Django's that begins and ends in different functions.

    `durable` makes Django refuse it inside of another block, whose owner could still undo what we take for committed.
    What `joins` is inside of others on purpose: it has no record that could be wrong.
    """

    def __init__(self, alias: str, *, joins: bool = False) -> None:
        self._alias = alias
        self._joins = joins
        self._connection = connections[alias]
        self._in_a_test = _in_a_test(self._connection)
        self._over = self._committed = self._gone = self._ended = self._sets = False
        self.surrounds = False
        """Whether `ATOMIC_REQUESTS` opens its block inside of it, which a roll-back has to wait for (`close`)."""
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
                # It is possible only before the first query, and a snapshot older than the lock would hide a record.
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
        """What the handler gets: the connection that its models use anyway."""
        return self._connection

    def look(self) -> None:
        """Remember what only the handler's own place shows: a block of the view's that ends forgets it."""
        self._gone = self._gone or self._connection.needs_rollback or self._connection.closed_in_transaction

    def run(self, body: Body[T]) -> T:
        """Run statements inside it."""
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
        """Commit; what a function of `on_commit` raises afterwards changes nothing of it."""
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
        """Undo everything, unless the block of `ATOMIC_REQUESTS` is still open inside of it."""
        if not self.surrounds or not self._is_inside():
            self.close()

    def close(self) -> None:
        """Undo everything that is not committed, with the blocks that were left open inside of it."""
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
        # The view has ended our block as well: only a new connection forgets what it did.
        self._forget()
        self._connection.close()
        self._connection.connection = None
        self._connection.connect()

    def _check(self) -> None:
        """Refuse to go on where Django, PostgreSQL or a handler has given the transaction up."""
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
        """Raise if the transaction has ended in the database: the next statement would be committed by itself (L5)."""
        if self._over or (self._joins and self._connection.vendor == "postgresql"):
            return  # there, its first statement begins it
        self._ended = self._ended or _is_ended(self._connection)
        if self._ended:
            raise errors.TransactionControlError(ENDED)

    def _prove(self) -> None:
        """Raise unless SQLite is still in the transaction that was begun: no other one is committed."""
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
        """Be over: the guard goes with the transaction, however it ends."""
        self._over = True
        self._connection.execute_wrappers.remove(self._guard)

    def _mark(self) -> None:
        """The first function of `on_commit`: what fails after it was committed."""
        self._committed = True

    def _guard(self, go_on: Callable[..., Any], sql: Any, params: Any, many: bool, context: Any) -> Any:  # noqa: ANN401, FBT001  (Django's signature)
        text = sql if isinstance(sql, str) else sql.as_string(self._connection.connection)
        # The connection is the application's, which may leave on it what it likes: django-tenants sets its search path.
        if refuse_transaction_control(text, _DIALECTS[self._connection.vendor], lent=True):
            self._sets = True
        self._refuse_if_ended()
        return go_on(sql, params, many, context)


class Spares:
    """Connections beside those of requests: for other threads, and for what is committed while one is in use."""

    def __init__(self, alias: str) -> None:
        self._alias = alias
        self._free: list[Any] = []
        self._lock = threading.Lock()
        _SPARES.add(self)

    @contextmanager
    def lent(self) -> Iterator[Any]:
        """One of them; Django decides whether it is kept."""
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
        """Those of a parent process, whose threads may have held the lock, too: this one begins without any."""
        self._lock = threading.Lock()
        free, self._free = self._free, []
        return free

    def close(self) -> None:
        """Close all that are not in use."""
        with self._lock:
            free, self._free = self._free, []
        for connection in free:
            connection.close()


def _is_ended(connection: Any) -> bool:  # noqa: ANN401
    """Whether the database is in no transaction, although Django is in a block."""
    raw = connection.connection
    if raw is None or connection.closed_in_transaction:
        return False
    if connection.vendor == "sqlite":
        return not raw.in_transaction
    return bool(raw.info.transaction_status == _IDLE)


def _in_a_test(connection: Any) -> bool:  # noqa: ANN401
    """Whether a `TestCase` holds the transaction, which all of a test has to be in."""
    return any(block._from_testcase for block in connection.atomic_blocks)  # noqa: SLF001  (Django has no other word)


def _is_nested(connection: Any) -> bool:  # noqa: ANN401
    return bool(connection.atomic_blocks) and not connection.atomic_blocks[-1]._from_testcase  # noqa: SLF001


def _executed(connection: Any, transaction: Transaction[T], verbs: _Verbs) -> T:  # noqa: ANN401
    """Run a transaction of our own."""
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
    """Say something without parameters; a COMMIT has no mode."""
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
    """Execute a statement of a store's; both databases take `%(name)s` from Django's cursors."""
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
        # Such an error repeats the value that could not be bound, so it is not shown.
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
    """The store's error for a connection or a BEGIN: nothing was said yet."""
    if vendor == "sqlite":
        return store_error(_raw(error), "beginning")
    return postgres_errors.unreachable(type(error).__name__)


def _raw(error: Exception) -> Exception:
    """The database module's own error, below Django's."""
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
    """The store's error for a COMMIT: what the server itself says is definite, silence is not."""
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
"""What a parent process had open. To close it here, or to let it be collected, would say goodbye in its name."""


def _forked() -> None:
    """Two processes on one connection read each other's rows, so a child makes its own."""
    for spares in _SPARES:
        _inherited.extend(spares.inherited())
    for alias in _ALIASES:
        if alias not in connections.settings:  # which was refused
            continue
        connection = connections[alias]
        # A pool's connections are as much the parent's as the one in use, and the threads that look after it are gone.
        _inherited.append(getattr(connection, "_connection_pools", {}).pop(alias, None))
        if connection.connection is not None and not connection.in_atomic_block:
            _inherited.append(connection.connection)
            connection.connection = None


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forked)
