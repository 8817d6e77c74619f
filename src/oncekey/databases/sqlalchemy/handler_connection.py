"""Guards a handler's SQLAlchemy connection: it may do everything but end the transaction (L5).

The connection's class rejects methods (`async_engines.py`, `engines.py`); listeners on a separate engine, which shares
the application's pool, reject SQL text and anything that reaches the connection through a session or `run_sync`.
"""

from __future__ import annotations

import asyncio
import re
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Final, cast

from sqlalchemy import event
from sqlalchemy.engine import Connection
from sqlalchemy.engine.base import OptionEngine
from sqlalchemy.exc import OperationalError

from oncekey.core.errors import TransactionControlError
from oncekey.core.sqltext import Dialect, plainly_reads, refuse_changes
from oncekey.databases import handler_sql
from oncekey.databases.handler_sql import ENDED, OVER, refusal, refuse_transaction_control
from oncekey.databases.sqlalchemy.execute import OWN, alters, is_in_transaction, package_of, raw_of

if TYPE_CHECKING:
    from sqlalchemy.engine import Engine, ExceptionContext, ExecutionContext, RootTransaction

PATIENCE: Final = 5.0
"""Seconds that a handler's unfinished statement may take before the transaction is rolled back."""

WATCH: Final = "oncekey_watch"
OURS: Final = "oncekey"
"""The option of engines on the application's pool whose connections oncekey opens."""
_DIALECTS: Final = {
    "sqlite": Dialect.SQLITE,
    "postgresql": Dialect.POSTGRES,
    "mysql": Dialect.MARIADB,
    "mariadb": Dialect.MARIADB,
}
_PRAGMA: Final = re.compile(r"\s*PRAGMA\b", re.IGNORECASE)


class Watch:
    """The state of one connection, from the beginning of the transaction until oncekey ends it."""

    __slots__ = (
        "_quiet",
        "answered",
        "begun",
        "ended",
        "guards",
        "over",
        "reads",
        "released",
        "running",
        "sent",
        "sets",
        "unsure",
        "used",
        "wrote",
    )

    def __init__(self) -> None:
        self.guards = False
        self.over = False
        self.released = False
        self.used = False
        self.begun = False
        """Whether the transaction has begun in the database, so that its end would be noticed."""
        self.unsure = False
        """Whether a statement failed since the database was last checked for an open transaction."""
        self.ended = False
        """Whether it ended before oncekey committed it: the connection rejects further statements."""
        self.reads = False
        """Whether writes are rejected: a phased handler is between two phases."""
        self.sets = False
        """Whether the application may have set a role or a timeout for its transaction."""
        self.wrote = False
        """Whether the application executed anything but plain reads."""
        self.sent = 0
        self.answered = 0
        self.running: set[object] = set()
        self._quiet: asyncio.Event | threading.Event | None = None

    @property
    def has_failed(self) -> bool:
        """Whether a statement failed: the transaction may only be good for a rollback."""
        return self.sent != self.answered

    def begins(self, statement: object) -> None:
        """Record that a statement is about to be sent."""
        self.sent += 1
        self.running.add(statement)

    def ends(self, statement: object) -> None:
        """Record that it completed or failed."""
        self.running.discard(statement)
        if self._quiet is not None and not self.running:
            self._quiet.set()

    async def quiet(self, patience: float) -> bool:
        """Wait briefly for running statements; returns whether none is left."""
        if self.running:
            self._quiet = quiet = asyncio.Event()
            with suppress(TimeoutError):
                async with asyncio.timeout(patience):
                    await quiet.wait()
        return not self.running

    def quiet_blocking(self, patience: float) -> bool:
        """`quiet` for threads that a handler may have left behind."""
        if self.running:
            self._quiet = quiet = threading.Event()
            if self.running:  # the last one may have ended in the meantime
                quiet.wait(patience)
        return not self.running

    def forget(self) -> None:
        """Record that a later statement succeeded: the failed one was rolled back to a savepoint."""
        self.answered = self.sent


class JoinedConnection(Connection):
    """A handler's connection whose transactions sessions only join, so that their `commit()` flushes."""

    def in_transaction(self) -> bool:
        """Begin again after a rollback: a session would begin a transaction of its own, and try to commit it."""
        watch = watch_of(self)
        if watch is not None and watch.guards and self.get_transaction() is None:
            Connection.begin(self)
        return super().in_transaction()


class HandlerEngine(OptionEngine):
    """An engine on the application's pool; only oncekey ends the transactions of its connections."""

    _connection_cls = JoinedConnection


def log_foreign_connections(engine: Engine) -> None:
    """Log connections of the application's engine that a LOCAL handler opens outside its transaction."""
    if not event.contains(engine, "engine_connect", _log_if_not_ours):
        event.listen(engine, "engine_connect", _log_if_not_ours)


def _log_if_not_ours(connection: Connection) -> None:
    if OURS not in connection.get_execution_options():
        handler_sql.opened()


def watch_connections(engine: Engine, *, borrowed: bool = False) -> None:
    """Listen to the watched connections of an engine; a `borrowed` engine is the application's own."""
    harmless = _checked(_DIALECTS[engine.dialect.name], borrowed=borrowed)

    def before(
        connection: Connection,
        _cursor: object,
        statement: str,
        _values: object,
        context: ExecutionContext,
        _many: object,
    ) -> None:
        watch = watch_of(connection)
        if watch is None:
            return
        own = context.execution_options.get(OWN)
        if watch.over and not own:
            raise TransactionControlError(OVER)
        if watch.guards:
            refuse_if_ended(connection, watch)
            watch.sets = harmless(statement) or watch.sets
            watch.used = watch.used or not own
            if not own:
                alters(connection, statement)
        if borrowed and not own:
            if watch.reads:
                refuse_changes(statement)
            watch.wrote = watch.wrote or not plainly_reads(statement)
        watch.begins(context)

    if engine.dialect.name == "sqlite":
        event.listen(engine, "savepoint", lambda connection, _name: _begin_to_write(connection, "SAVEPOINT"))
        event.listen(engine, "before_cursor_execute", _begin_before)
    event.listen(engine, "before_cursor_execute", before)
    event.listen(engine, "after_cursor_execute", _after)
    event.listen(engine, "commit", _refuse_commit)
    event.listen(engine, "rollback", _rolled_back)
    event.listen(engine, "handle_error", _failed)


def _after(
    connection: Connection, _cursor: object, _statement: str, _values: object, context: object, _many: object
) -> None:
    watch = watch_of(connection)
    if watch is not None:
        watch.answered += 1
        watch.ends(context)
        if watch.guards and not watch.begun:
            watch.begun = connection.dialect.name != "sqlite" and bool(is_in_transaction(raw_of(connection)))


def _failed(error: ExceptionContext) -> None:
    # This listener is also called for the application's own connections: SQLAlchemy registers it per engine.
    watch = None if error.connection is None else watch_of(error.connection)
    if watch is not None:
        watch.ends(error.execution_context)
        watch.unsure = True
        if watch.over:
            # oncekey closed this connection, which does not concern the other connections of the pool.
            error.invalidate_pool_on_disconnect = False


def _refuse_commit(connection: Connection) -> None:
    watch = watch_of(connection)
    if watch is not None and watch.guards:
        # SQLAlchemy takes a failed commit for the end, and would lend the open transaction to others.
        connection.dialect.do_rollback(connection.connection)
        raise refusal("commit()")


def _rolled_back(connection: Connection) -> None:
    """Reset the state: after a rollback by SQLAlchemy a handler may keep reading, but cannot commit."""
    watch = watch_of(connection)
    if watch is not None:
        watch.begun = watch.unsure = watch.ended = False


def _begin_before(connection: Connection, _cursor: object, statement: str, *_: object) -> None:
    if not plainly_reads(statement) and not _PRAGMA.match(statement):
        _begin_to_write(connection, statement)


def _begin_to_write(connection: Connection, what: str) -> None:
    """Begin once if Python's sqlite3 module has not, which begins only before a write; then set the mark.

    Outside a transaction, the release of a savepoint is a commit, and so is the end of `WITH ... INSERT`.
    """
    watch, lent = watch_of(connection), cast("Any", connection.connection)
    if watch is None or not watch.guards:
        return
    refuse_if_ended(connection, watch)
    if watch.begun:
        return
    cursor = lent.cursor()
    try:
        if not lent.driver_connection.in_transaction:
            cursor.execute("BEGIN IMMEDIATE")
        cursor.execute("SAVEPOINT oncekey")
    except connection.dialect.loaded_dbapi.Error as error:
        raise OperationalError(what, None, error) from error  # as SQLAlchemy raises those of statements
    finally:
        cursor.close()
    watch.begun = True


def current_transaction(connection: Connection | None) -> RootTransaction | None:
    """The transaction that SQLAlchemy assumes for a connection."""
    return None if connection is None or connection.closed else connection.get_transaction()


def commits_by_itself(connection: Connection | None) -> bool:
    """Whether the application set its engine to autocommit; SQLite's own BEGIN looks the same."""
    if connection is None:
        return False
    dialect = connection.dialect
    if dialect.name == "sqlite" or not hasattr(dialect, "detect_autocommit_setting"):
        return False
    raw = connection.connection.dbapi_connection
    return raw is not None and dialect.detect_autocommit_setting(raw)


def refuse_if_ended(connection: Connection | None, watch: Watch) -> None:
    """Raise if the transaction has ended in the database without SQLAlchemy noticing (L5).

    MariaDB and MySQL send their status with every reply except an error, so it is queried after an error.
    """
    raw = raw_of(connection) if watch.begun else None
    if connection is not None and raw is not None and not watch.ended:
        if watch.unsure and package_of(raw) == "aiomysql":
            connection.dialect.do_ping(cast("Any", connection.connection).dbapi_connection)
        watch.unsure = False
        watch.ended = is_in_transaction(raw) is False
    if watch.ended:
        raise TransactionControlError(ENDED)


def watch_of(connection: Connection) -> Watch | None:
    """The watch of a connection; None if oncekey did not open it."""
    watch: Watch | None = connection.get_execution_options().get(WATCH)
    return watch


def _checked(dialect: Dialect, *, borrowed: bool) -> Callable[[str], bool]:
    """Cached check: the same few texts recur, so each is parsed once."""

    @lru_cache(maxsize=512)
    def harmless(sql: str) -> bool:
        return refuse_transaction_control(sql, dialect, lent=borrowed)

    return harmless
