"""Runs a blocking driver under asyncio, in separate threads.

A task that holds a connection must never queue behind a task that waits for one. So each open transaction has its own
thread, in which it can always continue, and whole transactions (claims, heartbeats) run in another set of threads.
Cancelling a call does not stop its thread: the job runs to its end, and only then does the next one begin.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Executor, ThreadPoolExecutor
from functools import partial
from threading import Lock
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, runtime_checkable

from oncekey.core.errors import RolledBackError, StoreBusyError, StoreUnavailableError, TransactionControlError
from oncekey.databases.handler_sql import OVER

if TYPE_CHECKING:
    from oncekey.core.flow import Body, Transaction

T = TypeVar("T")

OF_TRANSACTIONS = "oncekey-tx"
"""The prefix of the names of threads for open transactions."""

CANCELLED = "a statement of this transaction was cancelled, so all of it is rolled back"


class Blocking(Protocol):
    """A blocking driver."""

    def run(self, transaction: Transaction[T]) -> T:
        """Run one transaction."""

    def close(self) -> None:
        """Close all connections."""


class BlockingTransaction(Protocol):
    """An open transaction of a blocking driver."""

    @property
    def connection(self) -> Any:  # noqa: ANN401  (the driver's own)
        """The connection for the handler."""

    def run(self, body: Body[T]) -> T:
        """Run statements."""

    def commit(self) -> None:
        """Commit."""

    def rollback(self) -> None:
        """Roll back."""


@runtime_checkable
class BlockingSharing(Blocking, Protocol):
    """A blocking driver that shares the application's transactions."""

    def begin(self) -> BlockingTransaction:
        """Open a business transaction."""


def submitted(executor: Executor, job: Callable[[], T]) -> asyncio.Future[T]:
    """Start a job in a thread."""
    try:
        return asyncio.get_running_loop().run_in_executor(executor, job)
    except RuntimeError as error:  # the pool of threads or the interpreter was shut down
        raise StoreUnavailableError("the store's driver was closed") from error


async def to_its_end(executor: Executor, job: Callable[[], T]) -> T:
    """Run a job in a thread. The waiting task may be cancelled; the job is not."""
    return await asyncio.shield(submitted(executor, job))


class ThreadedTransaction:
    """An open transaction whose blocking calls run in a thread, one at a time.

    `connection` is the blocking one: its handler runs in a thread itself. A call whose task was cancelled continues in
    its thread, and the next call waits for it. After a cancelled statement the transaction can only be rolled back.
    """

    def __init__(
        self, inner: BlockingTransaction, executor: Executor, leave: Callable[[], None] = lambda: None
    ) -> None:
        self._inner = inner
        self._executor = executor
        self._leave = leave
        """Called when the transaction has ended."""
        self._turn = Lock()
        self._cancelled = False
        self._ending: asyncio.Future[None] | None = None

    @property
    def connection(self) -> Any:  # noqa: ANN401  (the driver's own)
        return self._inner.connection

    async def run(self, body: Body[T]) -> T:
        if self._ending is not None:
            raise TransactionControlError(OVER)
        if self._cancelled:
            raise RolledBackError(CANCELLED)
        try:
            return await to_its_end(self._executor, partial(self._in_turn, partial(self._inner.run, body)))
        except asyncio.CancelledError:
            self._cancelled = True
            raise

    async def commit(self) -> None:
        if self._cancelled:
            await self.rollback()
            raise RolledBackError(CANCELLED)
        if self._ending is None:
            await self._end(self._commit)

    async def rollback(self) -> None:
        """Roll back, or wait for an end that has already begun."""
        if self._ending is None:
            await self._end(self._inner.rollback)
        else:
            await asyncio.wait({self._ending})

    def _commit(self) -> None:
        try:
            self._inner.commit()
        finally:
            self._inner.rollback()  # no effect after a commit; a refused commit leaves the transaction open

    async def _end(self, job: Callable[[], None]) -> None:
        """Run the last job to its end, even if the waiting task is cancelled."""
        self._ending = submitted(self._executor, partial(self._in_turn, job))
        self._ending.add_done_callback(lambda _: self._leave())
        await asyncio.shield(self._ending)

    def _in_turn(self, job: Callable[[], T]) -> T:
        with self._turn:
            return job()


class ThreadedDriver:
    """A blocking driver as an asyncio driver. One for each event loop."""

    def __init__(self, driver: Blocking, *, threads: int = 8) -> None:
        self._driver = driver
        self._threads = ThreadPoolExecutor(threads, thread_name_prefix="oncekey-run")

    async def run(self, transaction: Transaction[T]) -> T:
        """Run one transaction, all of it in one thread."""
        return await to_its_end(self._threads, lambda: self._driver.run(transaction))

    async def close(self) -> None:
        await to_its_end(self._threads, self._driver.close)
        self._threads.shutdown(wait=False)


class SharingThreadedDriver(ThreadedDriver):
    """A `ThreadedDriver` that shares the application's transactions; at most `threads` are open at once."""

    def __init__(self, driver: BlockingSharing, *, threads: int = 8, patience: float = 5.0) -> None:
        super().__init__(driver, threads=threads)
        self._sharing = driver
        self._patience = patience
        self._free = asyncio.Semaphore(threads)

    @property
    def is_full(self) -> bool:
        return self._free.locked()

    async def begin(self) -> ThreadedTransaction:
        """Open a business transaction. A task that waits for one holds no thread."""
        try:
            async with asyncio.timeout(self._patience):
                await self._free.acquire()
        except TimeoutError:
            raise StoreBusyError("too many business transactions were open for too long") from None
        thread = ThreadPoolExecutor(1, thread_name_prefix=OF_TRANSACTIONS)

        def leave() -> None:
            self._free.release()
            thread.shutdown(wait=False)

        begun = asyncio.get_running_loop().run_in_executor(thread, self._sharing.begin)
        try:
            return ThreadedTransaction(await asyncio.shield(begun), thread, leave)
        except asyncio.CancelledError:
            begun.add_done_callback(partial(_undo, thread, leave))
            raise
        except BaseException:
            leave()
            raise


def threaded(driver: Blocking, *, threads: int = 8) -> ThreadedDriver:
    """The asyncio driver for a blocking one, which can share transactions if that one can."""
    if isinstance(driver, BlockingSharing):
        return SharingThreadedDriver(driver, threads=threads)
    return ThreadedDriver(driver, threads=threads)


def _undo(thread: Executor, leave: Callable[[], None], begun: asyncio.Future[BlockingTransaction]) -> None:
    """Roll back a transaction whose task was cancelled before it was opened."""
    if begun.exception() is None:
        thread.submit(begun.result().rollback)
    leave()
