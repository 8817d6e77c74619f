"""The asyncio driver for SQLite: it never blocks the event loop, and two writers of one loop never wait in a ring."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable
from concurrent.futures import Executor, ThreadPoolExecutor
from functools import partial
from threading import Lock
from types import ModuleType
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

from oncekey.core.errors import RolledBackError, TransactionControlError
from oncekey.core.sqltext import Dialect
from oncekey.drivers.guard import OVER, refusal, refuse_transaction_control
from oncekey.drivers.sqlite import BUSY_TIMEOUT, SqliteDriver, SqliteTransaction
from oncekey.drivers.sqlite_facade import ERRORS, GuardedConnection, GuardedCursor
from oncekey.drivers.sqlite_lane import Lane, lane_of
from oncekey.drivers.sqlite_reading import SqliteReading
from oncekey.drivers.threads import CANCELLED, ThreadedTransaction, to_its_end
from oncekey.flow import Mode

if TYPE_CHECKING:
    import os

    from oncekey.drivers.sqlite_writer import Writer
    from oncekey.flow import Rows, Statement, Steps, Transaction

T = TypeVar("T")

READERS = 4
"""Threads for reading. Writers have their own, so no crowd of readers can stand in a writer's way."""


class AsyncSqliteDriver:
    """Runs transactions on a SQLite file under asyncio."""

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        busy_timeout: float = BUSY_TIMEOUT,
        lock_timeout: float = BUSY_TIMEOUT,
        module: ModuleType | None = None,
    ) -> None:
        self._driver = SqliteDriver(path, busy_timeout=busy_timeout, module=module)
        self._lock_timeout = lock_timeout
        self._readers = ThreadPoolExecutor(READERS, thread_name_prefix="oncekey-read")

    async def run(self, transaction: Transaction[T]) -> T:
        """Run one transaction, all of it in one thread; a writer waits for its turn first."""

        def job() -> T:
            return self._driver.run(transaction)

        if transaction.mode is Mode.READ:
            return await to_its_end(self._readers, job)
        lane = self._lane
        await lane.enter(self._lock_timeout)
        future = asyncio.get_running_loop().run_in_executor(lane.thread, job)
        # The turn ends with the job and not with whoever waits for it.
        future.add_done_callback(lambda _: lane.leave())
        return await asyncio.shield(future)

    @property
    def writer(self) -> Writer:
        """The file's writer, which all drivers of this process share."""
        return self._driver.writer

    @property
    def crowded(self) -> bool:
        """Whether a writer would have to wait for another one's end, as far as this process knows."""
        return self._lane.taken or self._driver.crowded

    async def begin(self) -> AsyncSqliteTransaction:
        """Open a business transaction; nothing is locked before its first statement."""
        return AsyncSqliteTransaction(self._driver.begin(), self._lane, self._lock_timeout)

    async def begin_with(self, first: Steps[T]) -> tuple[AsyncSqliteTransaction, T]:
        """Open a business transaction and run `first` in it, all in one turn of its thread."""
        tx = await self.begin()
        try:
            return tx, await tx.step(first)
        except BaseException:
            await asyncio.shield(tx.rollback())
            raise

    async def read(self) -> AsyncSqliteReading:
        """Open a transaction that only reads: it waits for no writer, and no writer waits for it."""
        return AsyncSqliteReading(SqliteReading(self._driver.file), self._readers)

    async def close(self) -> None:
        """Close the connections, when what is under way has ended."""
        await to_its_end(self._lane.thread, self._driver.close)
        self._readers.shutdown(wait=False)

    @property
    def _lane(self) -> Lane:
        return lane_of(self._driver.writer.path)


class AsyncSqliteTransaction(ThreadedTransaction):
    """A business transaction that takes the writer's turn with its first statement and keeps it to its end."""

    def __init__(self, inner: SqliteTransaction, lane: Lane, patience: float) -> None:
        super().__init__(inner, lane.thread, lane.leave)
        self._sqlite = inner
        self._lane = lane
        self._patience = patience
        self._entering = asyncio.Lock()
        self._entered = False
        self._facade = AsyncGuardedConnection(self, inner.connection)

    @property
    def connection(self) -> AsyncGuardedConnection:
        """What the handler gets."""
        return self._facade

    async def step(self, steps: Steps[T]) -> T:
        """Run statements inside it. What they say before the first one is said before the turn is waited for."""
        try:
            first = next(steps)
        except StopIteration as stop:
            return stop.value  # type: ignore[no-any-return]  # a generator's return value is untyped here
        try:
            await self._take_turn()
        except BaseException:
            steps.close()
            raise
        return await super().say(partial(self._sqlite.step, _going_on(first, steps)))

    async def say(self, job: Callable[[], T]) -> T:
        """Do something with the connection, in the lane's thread."""
        await self._take_turn()
        return await super().say(job)

    async def commit_with(self, last: Statement) -> Rows | None:
        """Run `last` and commit, in one turn of the thread. None: it found no place, and everything is rolled back."""
        if self._cancelled:
            await self.rollback()
            raise RolledBackError(CANCELLED)
        await self._take_turn()
        if self._over:
            raise TransactionControlError(OVER)
        return await self._ended(partial(self._sqlite.commit_with, last))

    async def _take_turn(self) -> None:
        async with self._entering:
            if not (self._entered or self._over):
                await self._lane.enter(self._patience)
                self._entered = self._keep_turn()

    def _keep_turn(self) -> bool:
        """Whether there is still something to say; it may have been ended while a statement waited."""
        if self._over:
            self._lane.leave()
        return not self._over

    async def _end(self, job: Callable[[], None]) -> None:
        if self._entered:
            await super()._end(job)
        else:
            self._over = True  # nothing was said, so there is nothing to end


class AsyncSqliteReading(ThreadedTransaction):
    """A transaction that only reads, in the threads of readers: any of them, but one thing at a time."""

    def __init__(self, inner: SqliteReading, readers: Executor) -> None:
        super().__init__(inner, readers, lambda: None)
        self._one = Lock()
        self._facade = AsyncGuardedConnection(self, inner.connection)

    @property
    def connection(self) -> AsyncGuardedConnection:
        """What the application gets."""
        return self._facade

    async def say(self, job: Callable[[], T]) -> T:
        """Do something with the connection."""
        return await super().say(partial(self._in_turn, job))

    async def _end(self, job: Callable[[], None]) -> None:
        await super()._end(partial(self._in_turn, job))

    def _in_turn(self, job: Callable[[], T]) -> T:
        # A statement whose caller was cancelled may still be under way.
        with self._one:
            return job()


class AsyncGuardedConnection:
    """What `op.connection` is for SQLite in an `async def` handler.

    Its rows answer to names and to positions. Catch `op.connection.IntegrityError` and its kin: which module's
    they are depends on what is installed.
    """

    def __init__(self, transaction: ThreadedTransaction, connection: GuardedConnection) -> None:
        self._transaction = transaction
        self._connection = connection

    async def execute(self, sql: str, parameters: Any = (), /) -> AsyncCursor:  # noqa: ANN401  (as sqlite3 takes them)
        """Execute one statement and fetch its rows."""
        refuse_transaction_control(sql, Dialect.SQLITE)
        return await self._transaction.say(partial(_fetched, self._connection.execute, sql, parameters))

    async def executemany(self, sql: str, parameters: Iterable[Any], /) -> AsyncCursor:
        """Execute one statement for each of many parameters."""
        refuse_transaction_control(sql, Dialect.SQLITE)
        return await self._transaction.say(partial(_fetched, self._connection.executemany, sql, parameters))

    async def executescript(self, *_: object) -> NoReturn:
        """Refused: it commits first."""
        raise refusal("executescript()")

    async def commit(self) -> NoReturn:
        """Refused."""
        raise refusal("commit()")

    async def rollback(self) -> NoReturn:
        """Refused."""
        raise refusal("rollback()")

    async def close(self) -> NoReturn:
        """Refused."""
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
    """The rows of a statement, fetched already: awaiting them is for the look of it, and waits for nothing."""

    def __init__(self, cursor: GuardedCursor) -> None:
        self._rows = iter(cursor.fetchall())
        self.description = cursor.description
        self.rowcount = cursor.rowcount
        self.lastrowid = cursor.lastrowid
        cursor.close()

    async def fetchone(self) -> Any:  # noqa: ANN401  (a row, or None)
        """The next row."""
        return next(self._rows, None)

    async def fetchall(self) -> list[Any]:
        """All rows that are left."""
        return list(self._rows)

    async def __aiter__(self) -> AsyncIterator[Any]:
        for row in self._rows:
            yield row

    async def close(self) -> None:
        """Nothing is open."""


def _going_on(statement: Statement, steps: Steps[T]) -> Steps[T]:
    """Steps whose first statement is known already."""
    try:
        while True:
            statement = steps.send((yield statement))
    except StopIteration as stop:
        return stop.value  # type: ignore[no-any-return]  # a generator's return value is untyped here
    finally:
        steps.close()


def _fetched(execute: Callable[[str, Any], GuardedCursor], sql: str, parameters: Any) -> AsyncCursor:  # noqa: ANN401
    return AsyncCursor(execute(sql, parameters))
