"""Any blocking driver under asyncio, in threads of its own.

A task that holds a connection must never queue behind a task that waits for one. So each open transaction has a thread
to itself, in which it can always go on, and whole transactions (claims, heartbeats) run in another set of threads.
Cancelling a call does not stop its thread: the job is done to its end, and only then does the next one begin.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Executor, ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, runtime_checkable

from oncekey.core.errors import RolledBackError, StoreBusyError, StoreUnavailableError, TransactionControlError
from oncekey.drivers.handler_sql import OVER

if TYPE_CHECKING:
    from oncekey.flow import Body, Transaction

T = TypeVar("T")

OF_TRANSACTIONS = "oncekey-tx"
"""How the names of threads begin that have an open transaction to themselves."""

CANCELLED = "a statement of this transaction was cancelled half-way, so all of it is rolled back"


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
        """Open one."""


async def to_its_end(executor: Executor, job: Callable[[], T]) -> T:
    """Run a job in a thread. The waiting task may be cancelled; the job is not."""
    try:
        future = asyncio.get_running_loop().run_in_executor(executor, job)
    except RuntimeError as error:  # after its pool, or the interpreter, was shut down no thread takes a job
        raise StoreUnavailableError("the store's driver was closed") from error
    return await asyncio.shield(future)


class ThreadedTransaction:
    """An open transaction whose blocking calls are made in a thread.

    `connection` is the blocking one: its handler runs in a thread itself.
    """

    def __init__(self, inner: BlockingTransaction, thread: Executor, leave: Callable[[], None]) -> None:
        self._inner = inner
        self._thread = thread
        self._leave = leave
        self._cancelled = False
        self._over = False

    @property
    def connection(self) -> Any:  # noqa: ANN401  (the driver's own)
        return self._inner.connection

    async def run(self, body: Body[T]) -> T:
        return await self.say(partial(self._inner.run, body))

    async def commit(self) -> None:
        """Commit, unless a statement was cancelled: then its outcome is not known."""
        if self._cancelled:
            await self.rollback()
            raise RolledBackError(CANCELLED)
        await self._end(self._inner.commit)

    async def rollback(self) -> None:
        await self._end(self._inner.rollback)

    async def say(self, job: Callable[[], T]) -> T:
        """Do something with the connection."""
        if self._over:
            raise TransactionControlError(OVER)
        if self._cancelled:
            raise RolledBackError(CANCELLED)
        try:
            return await to_its_end(self._thread, job)
        except asyncio.CancelledError:
            self._cancelled = True
            raise

    async def _end(self, job: Callable[[], None]) -> None:
        if not self._over:
            await self._ended(job)

    async def _ended(self, job: Callable[[], T]) -> T:
        """Run the last job; the thread is free when it is done, even if the waiting task was cancelled."""
        self._over = True
        future = asyncio.get_running_loop().run_in_executor(self._thread, job)
        future.add_done_callback(lambda _: self._leave())
        return await asyncio.shield(future)


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
    """The same for a driver that shares the application's transactions; at most `threads` are open at once."""

    def __init__(self, driver: BlockingSharing, *, threads: int = 8, patience: float = 5.0) -> None:
        super().__init__(driver, threads=threads)
        self._sharing = driver
        self._patience = patience
        self._free = asyncio.Semaphore(threads)

    @property
    def crowded(self) -> bool:
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
