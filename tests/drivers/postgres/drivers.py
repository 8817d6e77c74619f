"""Blocking and asyncio drivers with the same awaited verbs."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, contextmanager

from oncekey.core.flow import Mode, Statement, Transaction
from oncekey.databases.postgres.asyncpg import AsyncpgDriver
from oncekey.databases.postgres.asyncpg_transactions import AsyncpgTransaction
from oncekey.databases.postgres.generated.psycopg import PsycopgDriver
from oncekey.databases.postgres.psycopg_async import AsyncPsycopgDriver
from oncekey.databases.postgres.psycopg_async_transactions import AsyncPsycopgTransaction
from oncekey.databases.postgres.store import PostgresStore
from oncekey.engine.shell import AsyncEngine

PSYCOPG, ASYNC_PSYCOPG, ASYNCPG = "psycopg", "async psycopg", "asyncpg"
CLASSES = {PSYCOPG: PsycopgDriver, ASYNC_PSYCOPG: AsyncPsycopgDriver, ASYNCPG: AsyncpgDriver}


class InThreads:
    """A blocking driver; each call may find itself in another thread."""

    def __init__(self, driver: PsycopgDriver) -> None:
        self.driver = driver

    async def run(self, transaction):
        return await asyncio.to_thread(self.driver.run, transaction)

    async def begin(self):
        return TransactionInThreads(await asyncio.to_thread(self.driver.begin))

    async def begin_with(self, first):
        transaction, found = await asyncio.to_thread(self.driver.begin_with, first)
        return TransactionInThreads(transaction), found

    async def close(self):
        self.driver.close()


class TransactionInThreads:
    def __init__(self, transaction) -> None:
        self.transaction = transaction

    @property
    def connection(self):
        return self.transaction.connection

    async def run(self, body):
        return await asyncio.to_thread(self.transaction.run, body)

    async def commit(self):
        await asyncio.to_thread(self.transaction.commit)

    async def commit_with(self, last):
        return await asyncio.to_thread(self.transaction.commit_with, last)

    async def rollback(self):
        await asyncio.to_thread(self.transaction.rollback)


@asynccontextmanager
async def opened(kind: str, dsn: str, **options) -> AsyncIterator:
    """A driver of this kind."""
    driver = CLASSES[kind](dsn, **options)
    if kind == PSYCOPG:
        asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(64))
        driver = InThreads(driver)
    try:
        yield driver
    finally:
        await driver.close()


@contextmanager
def hurried(driver, *, limit: float = 0.1, wait: float | None = None) -> Iterator[None]:
    """A statement may take so long inside, and a connection so long to be had.

    What comes before and after has the driver's usual time: a busy machine takes a tenth of a second for anything.
    """
    ours = driver.driver if isinstance(driver, InThreads) else driver
    usual = ours._limit, ours._pool._timeout
    ours._limit, ours._pool._timeout = limit, usual[1] if wait is None else wait
    try:
        yield
    finally:
        ours._limit, ours._pool._timeout = usual


def engine(driver, clock=None) -> AsyncEngine:
    """The request path through a driver."""
    return AsyncEngine(PostgresStore(clock=clock), driver)


def saying(mode: Mode, *texts: str, name: str = "test", **params) -> Transaction:
    """A transaction of these statements; its result is the rows of the last one."""

    def body():
        rows = []
        for text in texts:
            rows = yield Statement(name, text, params)
        return [tuple(row.values()) for row in rows]

    return Transaction(name, mode, body)


def raw_of(transaction):
    """The connection behind the guard, as a handler could find it with some effort."""
    return transaction.transaction._raw if isinstance(transaction, TransactionInThreads) else transaction._raw


async def ask(transaction, text: str) -> list[tuple]:
    """Say something as a handler does; the rows, if there are any."""
    return await notify(transaction.connection, text, transaction)


async def notify(connection, text: str, transaction) -> list[tuple]:
    """The same on whichever connection."""
    if isinstance(transaction, AsyncpgTransaction):
        return [tuple(row) for row in await connection.fetch(text)]
    if isinstance(transaction, AsyncPsycopgTransaction):
        cursor = await connection.execute(text)
        return await cursor.fetchall() if cursor.description else []

    def say():
        cursor = connection.execute(text)
        return cursor.fetchall() if cursor.description else []

    return await asyncio.to_thread(say)
