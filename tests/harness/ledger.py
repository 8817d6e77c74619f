"""A store in memory that shares transactions and fails on demand: what LOCAL is tested on without a database."""

from __future__ import annotations

import asyncio
import threading
import time
from collections import defaultdict, deque
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from oncekey.core.errors import CommitAmbiguousError, StoreUnavailableError, TransactionControlError
from oncekey.core.flow import Body, Rows, Statement, Transaction, run_body
from oncekey.databases.memory import MemoryDriver

T = TypeVar("T")
Fault = Callable[[Callable[[], Any]], Awaitable[Any]]


async def down(_: Callable[[], Any]) -> Any:
    """The store cannot be reached; nothing happened."""
    raise StoreUnavailableError("down")


async def reply_lost(do: Callable[[], Any]) -> Any:
    """It happened, and its reply was lost."""
    do()
    raise CommitAmbiguousError("reply lost")


async def request_lost(_: Callable[[], Any]) -> Any:
    """It did not happen, and nobody can know."""
    raise CommitAmbiguousError("request lost")


class Gate:
    """A fault that only waits: `reached` when somebody stands before it, `open` to let them through."""

    def __init__(self, *, then: Fault | None = None) -> None:
        self.reached = asyncio.Event()
        self._opened = asyncio.Event()
        self._then = then

    def open(self) -> None:
        """Let everybody through."""
        self._opened.set()

    async def __call__(self, do: Callable[[], Any]) -> Any:
        """Wait before the gate."""
        self.reached.set()
        await self._opened.wait()
        return do() if self._then is None else await self._then(do)


class Book:
    """What a business transaction writes into; a row is anything."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._rows: list[Any] = []
        self._over = False
        self._staged: dict[Any, dict[str, Any]] | None = None
        self._seen: dict[Any, int] = {}
        ledger.open += 1

    @property
    def rows(self) -> list[Any]:
        """Rows that are committed, and our own."""
        return [*self._ledger.rows, *self._rows]

    def add(self, row: Any) -> None:
        """Write a row."""
        if self._over:
            raise TransactionControlError("the transaction is over")
        self._rows.append(row)

    def run(self, body: Body[T]) -> T:
        """Statements on a copy of the table, which nobody else sees before the commit."""
        table = self._ledger.memory.table
        if self._staged is None:
            self._staged = {name: dict(line) for name, line in table.items()}
            self._seen = {name: line["version"] for name, line in table.items()}
        return run_body(body, self._execute)

    def commit(self) -> None:
        """Publish rows and records; what somebody else wrote meanwhile makes it fail, as a real store does."""
        self._end()
        table = self._ledger.memory.table
        changed = {name: line for name, line in (self._staged or {}).items() if line["version"] != self._seen[name]}
        if any(table.get(name, {}).get("version") != self._seen[name] for name in changed):
            raise StoreUnavailableError("somebody else wrote this record")
        table.update(changed)
        self._ledger.rows.extend(self._rows)

    def rollback(self) -> None:
        """Forget everything; what is over stays as it is."""
        if not self._over:
            self._end()

    def _end(self) -> None:
        if self._over:
            raise TransactionControlError("the transaction is over")
        self._over = True
        self._ledger.open -= 1

    def _execute(self, statement: Statement) -> Rows:
        assert callable(statement.command)
        now = statement.params["now"]
        params = {**statement.params, "now": time.time_ns() // 1000 if now is None else now}
        return statement.command(self._staged, **params)


class OpenBook:
    """A business transaction under asyncio."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._book = Book(ledger)

    @property
    def connection(self) -> Book:
        """What the handler gets."""
        return self._book

    async def run(self, body: Body[T]) -> T:
        """Run statements inside it."""
        return await self._ledger.meet("step", lambda: self._book.run(body))  # type: ignore[no-any-return]

    async def commit(self) -> None:
        """Commit."""
        try:
            await self._ledger.meet("commit", self._book.commit)
        finally:
            self._book.rollback()

    async def rollback(self) -> None:
        """Roll back; a real driver's roll-back waits too, and is cancelled there like anything else."""
        if self._ledger.yields:
            await asyncio.sleep(0)
        self._ledger.log.append("rollback")
        self._book.rollback()


class Ledger:
    """The asyncio driver. `faults["settle"]` holds what the next settlements meet; `dead` is a store that is down.

    `log` names everything that was asked of it, in order. With `yields` each of its operations waits before and
    after it is done, so that a test can cancel at both places.
    """

    def __init__(self, *, yields: bool = False) -> None:
        self.memory = MemoryDriver()
        self.rows: list[Any] = []
        self.open = 0
        self.yields = yields
        self.dead = False
        self.log: list[str] = []
        self.faults: defaultdict[str, deque[Fault]] = defaultdict(deque)

    async def run(self, transaction: Transaction[T]) -> T:
        """Run one transaction."""
        return await self.meet(transaction.name, lambda: self.memory.run(transaction))  # type: ignore[no-any-return]

    async def begin(self) -> OpenBook:
        """Open a business transaction."""
        opened: list[OpenBook] = []
        try:
            await self.meet("begin", lambda: opened.append(OpenBook(self)))
        except BaseException:
            # A driver that is cancelled while it takes a connection gives it back.
            for book in opened:
                book.connection.rollback()
            raise
        return opened[0]

    async def close(self) -> None:
        """Nothing to give back."""
        self.log.append("close")

    async def meet(self, name: str, do: Callable[[], Any]) -> Any:
        """Do something, or meet the fault that waits for it."""
        self.log.append(name)
        if self.dead:
            raise StoreUnavailableError("down")
        if self.yields:
            await asyncio.sleep(0)
        waiting = self.faults[name]
        result = await waiting.popleft()(do) if waiting else do()
        if self.yields:
            await asyncio.sleep(0)
        return result

    @property
    def records(self) -> list[dict[str, Any]]:
        """The rows of the key store."""
        return list(self.memory.table.values())

    @property
    def record(self) -> dict[str, Any]:
        """The only row of the key store."""
        (line,) = self.records
        return line


class BlockingLedger:
    """The same ledger for threads; one lock stands for the database's own."""

    def __init__(self, ledger: Ledger, *, connections: int = 10) -> None:
        self.ledger = ledger
        self._lock = threading.Lock()
        self._pool = threading.BoundedSemaphore(connections)

    def run(self, transaction: Transaction[T]) -> T:
        """Run one transaction."""
        return self.ledger.memory.run(transaction)

    def begin(self) -> LockedBook:
        """Open a business transaction, when a connection is free."""
        if self.ledger.dead or not self._pool.acquire(timeout=10):
            raise StoreUnavailableError("no connection")
        with self._lock:
            return LockedBook(Book(self.ledger), self._lock, self._pool)

    def close(self) -> None:
        """Nothing to give back."""


class LockedBook:
    """A business transaction for threads."""

    def __init__(self, book: Book, lock: threading.Lock, pool: threading.BoundedSemaphore) -> None:
        self._book = book
        self._lock = lock
        self._pool: threading.BoundedSemaphore | None = pool

    @property
    def connection(self) -> Book:
        """What the handler gets."""
        return self._book

    def run(self, body: Body[T]) -> T:
        """Run statements inside it."""
        with self._lock:
            return self._book.run(body)

    def commit(self) -> None:
        """Commit."""
        try:
            with self._lock:
                self._book.commit()
        finally:
            self._end()

    def rollback(self) -> None:
        """Roll back."""
        with self._lock:
            self._book.rollback()
        self._end()

    def _end(self) -> None:
        if self._pool is not None:
            self._pool.release()
            self._pool = None
