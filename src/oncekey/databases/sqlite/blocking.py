"""The blocking driver for SQLite."""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from types import ModuleType
from typing import TYPE_CHECKING, Any, TypeVar, assert_never
from weakref import WeakSet

from oncekey.core.errors import StoreBusyError, TransactionControlError
from oncekey.core.flow import Body, Mode, Rows, Statement, Transaction, run_body
from oncekey.databases.handler_sql import ENDED, OVER
from oncekey.databases.sqlite.execute import commit_error, execute, has_temporaries, say
from oncekey.databases.sqlite.files import LOOK_AFTER, POLL, SqliteFile, Writer, writer_of
from oncekey.databases.sqlite.handler_connection import SqliteHandlerConnection

if TYPE_CHECKING:
    import os


T = TypeVar("T")

BUSY_TIMEOUT = 5.0
"""Seconds that a writer waits for its turn."""

UNFINISHED = "SQL statements in progress"
"""SQLite's error for a COMMIT that only waits for a cursor that the handler left open."""


class SqliteDriver:
    """Runs transactions on a SQLite file, from any number of threads.

    SQLite has one writer at a time. Writers of this driver first queue for their turn in this process, and then wait
    for other processes, where SQLite can only try again every few milliseconds. With a write-ahead log, readers do not
    wait.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        busy_timeout: float = BUSY_TIMEOUT,
        look_after: float = LOOK_AFTER,
        module: ModuleType | None = None,
    ) -> None:
        self._file = SqliteFile(path, busy_timeout=busy_timeout, look_after=look_after, module=module or sqlite3)
        self._writer = writer_of(self._file.path)

    @property
    def file(self) -> SqliteFile:
        """The connections to the file."""
        return self._file

    @property
    def path(self) -> str:
        """The path of the file."""
        return self._file.path

    @property
    def writer(self) -> Writer:
        """The file's writer, which all drivers of this process share."""
        return self._writer

    @property
    def is_full(self) -> bool:
        return self._writer.busy

    def run(self, transaction: Transaction[T]) -> T:
        match transaction.mode:
            case Mode.READ:
                with self._file.lent() as connection:
                    return run_body(transaction.body(), partial(execute, self._file.module, connection))
            case Mode.SINGLE:
                with self._writing() as connection:
                    return run_body(transaction.body(), partial(execute, self._file.module, connection))
            case Mode.ATOMIC:
                with self._writing() as connection:
                    return self._atomically(transaction, connection)
            case _:
                assert_never(transaction.mode)

    def begin(self) -> SqliteTransaction:
        return SqliteTransaction(self._file, self._writer)

    def close(self) -> None:
        self._file.close()

    @contextmanager
    def _writing(self) -> Iterator[sqlite3.Connection]:
        self._writer.take(self._file.busy_timeout)
        try:
            with self._file.lent(writes=True) as connection:
                yield connection
        finally:
            self._writer.leave()

    def _atomically(self, transaction: Transaction[T], connection: sqlite3.Connection) -> T:
        module = self._file.module
        say(module, connection, "BEGIN IMMEDIATE", transaction.name)
        result = run_body(transaction.body(), partial(execute, module, connection))
        # Without a COMMIT the connection is closed, and SQLite rolls back.
        try:
            connection.execute("COMMIT")
        except module.Error as error:
            raise commit_error(error, transaction.name) from error
        return result


class SqliteTransaction:
    """A business transaction in which a handler writes and which oncekey ends."""

    def __init__(self, file: SqliteFile, writer: Writer) -> None:
        self._file = file
        self._writer = writer
        self._raw: sqlite3.Connection | None = None
        self._over = False
        self._ended = False
        self._temporary = self._altered = False
        self._cursors: WeakSet[sqlite3.Cursor] = WeakSet()
        self._facade = SqliteHandlerConnection(self)

    @property
    def connection(self) -> SqliteHandlerConnection:
        return self._facade

    def run(self, body: Body[T]) -> T:
        """Run statements inside it; the first one that is not read-only begins it."""
        if self._over:
            body.close()
            raise TransactionControlError(OVER)
        return run_body(body, self._execute)

    def commit(self) -> None:
        connection = self._raw
        if connection is None:
            self._over = True
            return
        try:
            self._commit(connection)
        finally:
            self._end(connection)

    def commit_with(self, last: Statement) -> Rows | None:
        """Execute `last` and commit. None: the record already exists, and everything is rolled back."""
        try:
            connection = self._ready()
            rows = execute(self._file.module, connection, last)
            if rows:
                self._commit(connection)
            return rows or None
        finally:
            self.rollback()  # a commit is final

    def rollback(self) -> None:
        if self._raw is None:
            self._over = True
            return
        self._end(self._raw)

    def handlers_cursor(self) -> sqlite3.Cursor:
        """A cursor for the handler."""
        cursor = self._ready().cursor()
        self._cursors.add(cursor)
        return cursor

    def executes(self) -> None:
        """Refuse a handler's statement after the end of the transaction: it would be committed by itself."""
        self._ready()

    def executed(self, sql: str) -> None:
        """Check after a statement: SQLite rolls back after some errors, and then nothing more may be executed."""
        # A handler cannot create a temporary object or change a setting without one of these words in its text.
        said = sql.casefold()
        self._temporary = self._temporary or "temp" in said
        self._altered = self._altered or "pragma" in said
        self._look_for_end()

    def error_class(self, name: str) -> Any:  # noqa: ANN401  (a class of the SQLite module in use)
        """An exception class of the SQLite module in use."""
        return getattr(self._file.module, name)

    def look(self, statement: Statement) -> Rows:
        """Execute a read-only statement outside the transaction: it needs no turn, so it does not wait."""
        with self._file.lent() as connection:
            return execute(self._file.module, connection, statement)

    def _execute(self, statement: Statement) -> Rows:
        if self._raw is None and not self._over:
            if statement.reads:
                return self.look(statement)
            if statement.at_once and not self._begins_soon():
                return ()
        return execute(self._file.module, self._ready(), statement)

    def _ready(self) -> sqlite3.Connection:
        """The connection, in the transaction that was begun."""
        connection = self._begun()
        self._refuse_if_ended()
        return connection

    def _commit(self, connection: sqlite3.Connection) -> None:
        self._refuse_if_ended()
        self._patiently(self._file.busy_timeout, lambda: self._send_commit(connection))
        self._file.check(connection)

    def _send_commit(self, connection: sqlite3.Connection) -> None:
        try:
            connection.execute("COMMIT")
        except self._file.module.Error as error:
            raise commit_error(error, "committing the business transaction") from error

    def _begun(self) -> sqlite3.Connection:
        if self._over:
            raise TransactionControlError(OVER)
        if self._raw is None:
            self._writer.take(self._file.busy_timeout)
            self._raw = self._taken(self._file.busy_timeout)
        return self._raw

    def _begins_soon(self) -> bool:
        """Begin, unless other writers take too long."""
        try:
            self._writer.take(self._file.look_after)
            self._raw = self._taken(0)
        except StoreBusyError:
            return False
        return True

    def _taken(self, patience: float) -> sqlite3.Connection:
        """A connection that has begun, for the transaction that has the turn; if it cannot begin, the turn ends."""
        try:
            connection = self._take()
            try:
                self._send_begin(connection, patience)
            except BaseException:
                self._file.discard(connection)
                raise
        except BaseException:
            self._writer.leave()
            raise
        return connection

    def _send_begin(self, connection: sqlite3.Connection, patience: float) -> None:
        what = "beginning the business transaction"
        self._patiently(patience, lambda: say(self._file.module, connection, "BEGIN IMMEDIATE", what))

    def _patiently(self, patience: float, say: Callable[[], None]) -> None:
        """Repeat `say` while other processes lock the file; each time the connection itself waits for `look_after`."""
        ends: float | None = None
        while True:
            began = time.monotonic()
            try:
                return say()
            except StoreBusyError as error:
                now = time.monotonic()
                ends = began + patience if ends is None else ends
                if now + self._file.look_after > ends or UNFINISHED in str(error.__cause__):
                    raise
                if now - began < POLL:  # an SQLite that can only sleep for whole seconds has not waited
                    time.sleep(POLL)

    def _look_for_end(self) -> None:
        """Note whether the transaction has ended. That is final: a handler cannot begin another one."""
        self._ended = self._ended or (self._raw is not None and not self._raw.in_transaction)

    def _refuse_if_ended(self) -> None:
        self._look_for_end()
        if self._ended:
            raise TransactionControlError(ENDED)

    def _end(self, connection: sqlite3.Connection) -> None:
        self._raw, self._over = None, True
        try:
            # An open cursor would keep an old snapshot alive for the next borrower.
            if self._cursors:
                for cursor in list(self._cursors):
                    cursor.close()
            if connection.in_transaction:
                with suppress(self._file.module.Error):
                    connection.execute("ROLLBACK")
            left = self._altered or (self._temporary and has_temporaries(self._file.module, connection))
            if connection.in_transaction or left:  # SQLite has no statement that resets a connection
                self._file.discard(connection)
            else:
                self._give_back(connection)
        finally:
            self._writer.leave()

    def __del__(self) -> None:
        # A transaction that was dropped must not keep the turn forever: its event loop may have been closed.
        if self._raw is not None:
            self.rollback()

    def _take(self) -> sqlite3.Connection:
        return self._file.take(business=True)

    def _give_back(self, connection: sqlite3.Connection) -> None:
        self._file.give_back(connection, business=True)


class SqliteReading(SqliteTransaction):
    """A read-only substitute for a transaction: it takes no turn, and SQLite refuses writes.

    Each statement is a separate transaction. One transaction for several would block every writer of a file without a
    write-ahead log for as long as the application takes between two statements.
    """

    def __init__(self, file: SqliteFile) -> None:
        super().__init__(file, Writer(file.path))  # a turn for which no writer waits

    def _look_for_end(self) -> None:
        """No-op: each statement is a separate transaction."""

    def _ready(self) -> sqlite3.Connection:
        return self._begun()  # there is no transaction that could have ended

    def _send_begin(self, connection: sqlite3.Connection, patience: float) -> None:  # noqa: ARG002  (it waits for no other transaction)
        say(self._file.module, connection, "PRAGMA query_only = ON", "beginning to read")

    def _take(self) -> sqlite3.Connection:
        return self._file.take()

    def _give_back(self, connection: sqlite3.Connection) -> None:
        with suppress(self._file.module.Error):
            connection.execute("PRAGMA query_only = OFF")
            self._file.give_back(connection)
            return
        self._file.discard(connection)  # the next borrower may want to write
