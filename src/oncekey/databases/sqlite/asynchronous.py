"""The asyncio driver for SQLite: it never blocks the event loop, and two writers of one loop never deadlock."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable
from functools import partial
from threading import Lock
from types import ModuleType
from typing import TYPE_CHECKING, Any, NoReturn, Protocol, TypeVar

from oncekey.core.errors import RolledBackError, StoreBusyError, TransactionControlError
from oncekey.core.flow import Body, Mode, Rows, Statement, Transaction
from oncekey.core.sqltext import Dialect
from oncekey.databases.handler_sql import OVER, refusal, refuse_transaction_control
from oncekey.databases.sqlite.blocking import BUSY_TIMEOUT, SqliteDriver, SqliteReading, SqliteTransaction
from oncekey.databases.sqlite.files import LOOK_AFTER, Writer
from oncekey.databases.sqlite.handler_connection import ERRORS, SqliteHandlerConnection, SqliteHandlerCursor
from oncekey.databases.sqlite.lane import Lane, Turn, TurnState, WorkerThreads, lane_of
from oncekey.databases.threads import CANCELLED

if TYPE_CHECKING:
    import os


T = TypeVar("T")


class AsyncSqliteDriver:
    """Runs transactions on a SQLite file under asyncio."""

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        busy_timeout: float = BUSY_TIMEOUT,
        lock_timeout: float = BUSY_TIMEOUT,
        look_after: float = LOOK_AFTER,
        module: ModuleType | None = None,
    ) -> None:
        self._driver = SqliteDriver(path, busy_timeout=busy_timeout, look_after=look_after, module=module)
        self._lock_timeout = lock_timeout
        self._look_after = min(look_after, lock_timeout)

    async def run(self, transaction: Transaction[T]) -> T:
        """Run one transaction, all of it in one thread; a writer waits for its turn first."""
        job = partial(self._driver.run, transaction)
        if transaction.mode is Mode.READ:
            return await self._lane.reading.do(job)
        return await Turn(self._lane).do(job, self._lock_timeout, last=True)

    @property
    def writer(self) -> Writer:
        """The file's writer, which all drivers of this process share."""
        return self._driver.writer

    @property
    def is_full(self) -> bool:
        return self._lane.taken or self._driver.is_full

    async def begin(self) -> AsyncSqliteTransaction:
        return AsyncSqliteTransaction(self._driver.begin(), self._lane, self._lock_timeout, self._look_after)

    async def begin_with(self, first: Body[T]) -> tuple[AsyncSqliteTransaction, T]:
        """Open a business transaction and run `first` in it, in one job of the thread."""
        tx = AsyncSqliteTransaction(self._driver.begin(), self._lane, self._lock_timeout, self._look_after)
        try:
            return tx, await tx.run(first)
        except BaseException:
            await asyncio.shield(tx.rollback())
            raise

    async def read(self) -> AsyncSqliteReading:
        """Open a read-only transaction: it does not wait for writers, nor they for it."""
        return AsyncSqliteReading(SqliteReading(self._driver.file), self._lane.reading)

    async def close(self) -> None:
        """Close the connections when the running jobs have ended."""
        await self._lane.writing.do(self._driver.close)

    @property
    def _lane(self) -> Lane:
        return lane_of(self._driver.writer.path)


class AsyncSqliteTransaction:
    """A business transaction that takes the writer's turn with its first statement and keeps it to its end."""

    def __init__(self, inner: SqliteTransaction, lane: Lane, patience: float, look_after: float) -> None:
        self._sqlite = inner
        self._lane = lane
        self._turn = Turn(lane)
        self._patience = patience
        self._look_after = look_after
        self._over = False
        self._facade = AsyncSqliteHandlerConnection(self, inner.connection)

    @property
    def connection(self) -> AsyncSqliteHandlerConnection:
        return self._facade

    async def run(self, body: Body[T]) -> T:
        """Run statements inside it, in one job of the thread.

        Code before their first statement runs before waiting for the turn. A statement that need not wait for the
        turn (`at_once`, `reads`) is executed without queueing.
        """
        turn = self._turn
        try:
            statement = next(body)
            if statement.at_once and turn.state is TurnState.OUTSIDE:
                try:
                    return await self._say(self._job(statement, body), self._look_after)
                except StoreBusyError:
                    if turn.state is not TurnState.OUTSIDE:
                        raise
                    statement = body.send(())
            while statement.reads and turn.state is TurnState.OUTSIDE:
                statement = body.send(await self._lane.reading.do(partial(self._sqlite.look, statement)))
            return await self._say(self._job(statement, body), self._patience)
        except StopIteration as stop:
            return stop.value  # type: ignore[no-any-return]  # a generator's return value is untyped here
        finally:
            if turn.state is TurnState.OUTSIDE:  # otherwise the thread runs them to their end
                body.close()

    async def commit(self) -> None:
        await self._refuse_if_cancelled()
        await self._end(self._sqlite.commit)

    async def commit_with(self, last: Statement) -> Rows | None:
        """Run `last` and commit, in one job of the thread. None: the record already exists; all is rolled back."""
        await self._refuse_if_cancelled()
        if self._over:
            raise TransactionControlError(OVER)
        self._over = True
        return await self._turn.do(partial(self._sqlite.commit_with, last), self._patience, last=True)

    async def rollback(self) -> None:
        await self._end(self._sqlite.rollback)

    def say(self, job: Callable[[], T]) -> Coroutine[Any, Any, T]:
        """Run a job with the connection, in the writer's thread."""
        return self._say(job, self._patience)

    def _say(self, job: Callable[[], T], patience: float) -> Coroutine[Any, Any, T]:
        # Not a coroutine itself: every frame between a handler and its statement is entered twice.
        if self._over:
            raise TransactionControlError(OVER)
        if self._turn.cancelled:
            raise RolledBackError(CANCELLED)
        return self._turn.do(job, patience)

    def _job(self, statement: Statement, body: Body[T]) -> Callable[[], T]:
        return partial(self._sqlite.run, _going_on(statement, body))

    async def _refuse_if_cancelled(self) -> None:
        if self._turn.cancelled:
            await self.rollback()
            raise RolledBackError(CANCELLED)

    async def _end(self, job: Callable[[], None]) -> None:
        if self._over:
            return
        self._over = True
        if not self._turn.withdraw():  # otherwise nothing was executed, and there is nothing to end
            await self._turn.do(job, self._patience, last=True)


class AsyncSqliteReading:
    """A read-only connection in the reading threads: in any of them, but one job at a time."""

    def __init__(self, inner: SqliteReading, readers: WorkerThreads) -> None:
        self._sqlite = inner
        self._readers = readers
        self._one = Lock()
        self._over = False
        self._facade = AsyncSqliteHandlerConnection(self, inner.connection)

    @property
    def connection(self) -> AsyncSqliteHandlerConnection:
        """The connection for the application."""
        return self._facade

    async def run(self, body: Body[T]) -> T:
        """Run statements, each in a separate transaction."""
        return await self.say(partial(self._sqlite.run, body))

    async def commit(self) -> None:
        """Return the connection; nothing was written."""
        await self.rollback()

    async def rollback(self) -> None:
        """Return the connection."""
        if not self._over:
            self._over = True
            await self._readers.do(partial(self._in_turn, self._sqlite.rollback))

    async def say(self, job: Callable[[], T]) -> T:
        """Run a job with the connection."""
        if self._over:
            raise TransactionControlError(OVER)
        return await self._readers.do(partial(self._in_turn, job))

    def _in_turn(self, job: Callable[[], T]) -> T:
        # A statement whose caller was cancelled may still be running.
        with self._one:
            return job()


class SqliteExecutor(Protocol):
    """The transaction behind a facade."""

    def say(self, job: Callable[[], T]) -> Coroutine[Any, Any, T]:
        """Run a job with the connection, in a thread."""


class AsyncSqliteHandlerConnection:
    """`op.connection` for SQLite in an `async def` handler.

    Its rows have names and positions. Catch `op.connection.IntegrityError` and so on: the module of these classes
    depends on what is installed.
    """

    def __init__(self, transaction: SqliteExecutor, connection: SqliteHandlerConnection) -> None:
        self._transaction = transaction
        self._connection = connection

    async def execute(self, sql: str, parameters: Any = (), /) -> AsyncCursor:  # noqa: ANN401  (as sqlite3 takes them)
        """Execute one statement and fetch its rows."""
        refuse_transaction_control(sql, Dialect.SQLITE)
        return await self._transaction.say(partial(_fetched, self._connection.execute, sql, parameters))

    async def executemany(self, sql: str, parameters: Iterable[Any], /) -> AsyncCursor:
        """Execute a statement once for each set of parameters."""
        refuse_transaction_control(sql, Dialect.SQLITE)
        return await self._transaction.say(partial(_fetched, self._connection.executemany, sql, parameters))

    async def executescript(self, *_: object) -> NoReturn:
        """Refused: it commits first."""
        raise refusal("executescript()")

    async def commit(self) -> NoReturn:
        raise refusal("commit()")

    async def rollback(self) -> NoReturn:
        raise refusal("rollback()")

    async def close(self) -> NoReturn:
        raise refusal("close()")

    async def __aenter__(self) -> NoReturn:
        raise refusal("`async with connection:`")

    async def __aexit__(self, *_: object) -> None: ...

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401  (one of the DB-API's exceptions)
        if name in ERRORS:
            return getattr(self._connection, name)
        raise AttributeError(f"the connection of an operation has no {name}")

    def __setattr__(self, name: str, value: object) -> None:
        if name in {"isolation_level", "autocommit"}:
            raise refusal(f"setting {name}")
        object.__setattr__(self, name, value)


class AsyncCursor:
    """The rows of a statement, already fetched: its methods are awaitable but never wait."""

    def __init__(self, cursor: SqliteHandlerCursor) -> None:
        self._rows = iter(cursor.fetchall())
        self.description = cursor.description
        self.rowcount = cursor.rowcount
        self.lastrowid = cursor.lastrowid
        cursor.close()

    async def fetchone(self) -> Any:  # noqa: ANN401  (a row, or None)
        """The next row."""
        return next(self._rows, None)

    async def fetchall(self) -> list[Any]:
        """The remaining rows."""
        return list(self._rows)

    async def __aiter__(self) -> AsyncIterator[Any]:
        for row in self._rows:
            yield row

    async def close(self) -> None:
        """No-op: no cursor is open."""


def _going_on(statement: Statement, body: Body[T]) -> Body[T]:
    """The rest of a body whose first statement was already yielded."""
    try:
        while True:
            statement = body.send((yield statement))
    except StopIteration as stop:
        return stop.value  # type: ignore[no-any-return]  # a generator's return value is untyped here
    finally:
        body.close()


def _fetched(execute: Callable[[str, Any], SqliteHandlerCursor], sql: str, parameters: Any) -> AsyncCursor:  # noqa: ANN401
    return AsyncCursor(execute(sql, parameters))
