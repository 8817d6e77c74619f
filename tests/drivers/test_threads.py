"""Blocking drivers in threads: who holds a connection never queues behind who waits for one."""

from __future__ import annotations

import asyncio
import threading

import pytest

from harness.patience import PATIENCE
from oncekey.core.errors import StoreUnavailableError, TransactionControlError
from oncekey.core.flow import Mode, Statement, Transaction
from oncekey.databases.memory import MemoryDriver
from oncekey.databases.sqlite.blocking import SqliteDriver
from oncekey.databases.threads import SharingThreadedDriver, ThreadedDriver, threaded
from oncekey.ports.store import AsyncShares


class Pool:
    """A blocking driver with few connections, which says what was done."""

    def __init__(self, size: int = 1) -> None:
        self.free = threading.BoundedSemaphore(size)
        self.said: list[str] = []
        self.waiting = 0
        self.begin_now = threading.Event()
        self.begin_now.set()

    def run(self, transaction):
        self._take()
        try:
            self.said.append(transaction.name)
            return transaction.name
        finally:
            self.free.release()

    def begin(self):
        assert self.begin_now.wait(PATIENCE)
        self._take()
        return Open(self)

    def close(self):
        self.said.append("close")

    def _take(self):
        self.waiting += 1
        if not self.free.acquire(timeout=PATIENCE):
            raise StoreUnavailableError("the pool is empty")
        self.waiting -= 1


class Open:
    def __init__(self, pool: Pool) -> None:
        self.pool = pool
        self.connection = f"connection of {threading.current_thread().name}"
        self.over = False

    def run(self, body):
        self.pool.said.append("step")
        return "stepped"

    def commit(self):
        self._end("commit")

    def rollback(self):
        if not self.over:
            self._end("rollback")

    def _end(self, how):
        self.over = True
        self.pool.said.append(how)
        self.pool.free.release()


def named(name: str) -> Transaction:
    return Transaction(name, Mode.SINGLE, lambda: iter(()))


async def until(condition) -> None:
    async with asyncio.timeout(PATIENCE):
        while not condition():  # noqa: ASYNC110  (threads are looked at, which set no event)
            await asyncio.sleep(0)


async def test_open_transaction_proceeds_while_all_threads_wait():
    pool = Pool(size=1)
    driver = SharingThreadedDriver(pool, threads=2)
    tx = await driver.begin()
    claims = [asyncio.ensure_future(driver.run(named(f"claim {number}"))) for number in range(6)]
    await until(lambda: pool.waiting == 2)  # all threads for claims are taken, and all wait

    assert await tx.run(iter(())) == "stepped"
    await tx.commit()
    await asyncio.gather(*claims)

    assert pool.said[:2] == ["step", "commit"]
    assert len(pool.said) == 8
    await driver.close()


async def test_open_transactions_proceed_while_others_begin():
    pool = Pool(size=2)
    driver = SharingThreadedDriver(pool, threads=4)
    held = [await driver.begin() for _ in range(2)]
    begins = [asyncio.ensure_future(driver.begin()) for _ in range(6)]
    await until(lambda: pool.waiting == 2)

    for tx in held:
        await tx.commit()
    for _ in begins:
        done, begins = await asyncio.wait(begins, return_when=asyncio.FIRST_COMPLETED)
        for begun in done:
            await begun.result().rollback()
        begins = list(begins)
        if not begins:
            break

    assert pool.said.count("commit") == 2
    assert pool.said.count("rollback") == 6
    await driver.close()


async def test_too_many_open_transactions_are_an_outage():
    driver = SharingThreadedDriver(Pool(size=5), threads=1, patience=0.01)
    tx = await driver.begin()

    with pytest.raises(StoreUnavailableError, match="too many"):
        await driver.begin()

    await tx.rollback()
    await (await driver.begin()).rollback()
    await driver.close()


async def test_failed_begin_releases_its_slot():
    pool = Pool(size=1)
    driver = SharingThreadedDriver(pool, threads=1, patience=PATIENCE)
    pool._take = lambda: (_ for _ in ()).throw(StoreUnavailableError("down"))
    with pytest.raises(StoreUnavailableError, match="down"):
        await driver.begin()
    del pool._take

    await (await driver.begin()).rollback()
    await driver.close()


async def test_transaction_of_a_cancelled_begin_is_rolled_back():
    pool = Pool(size=1)
    pool.begin_now.clear()
    driver = SharingThreadedDriver(pool, threads=1, patience=PATIENCE)
    begin = asyncio.ensure_future(driver.begin())
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    begin.cancel()
    with pytest.raises(asyncio.CancelledError):
        await begin
    pool.begin_now.set()

    tx = await driver.begin()  # the place and the connection come back
    assert pool.said == ["rollback"]
    await tx.rollback()
    await driver.close()


async def test_each_transaction_uses_its_own_thread():
    driver = SharingThreadedDriver(Pool(size=3), threads=3)
    open_ones = [await driver.begin() for _ in range(3)]

    assert all("oncekey-tx" in tx.connection for tx in open_ones)
    for tx in open_ones:
        await tx.commit()
        await tx.rollback()  # over is over
        with pytest.raises(TransactionControlError):
            await tx.run(iter(()))
    await driver.close()


async def test_rejected_commit_returns_the_connection(monkeypatch):
    def refused(_):
        raise TransactionControlError("the handler has ended it")

    monkeypatch.setattr(Open, "commit", refused)
    pool = Pool(size=1)
    driver = SharingThreadedDriver(pool, threads=1)
    tx = await driver.begin()
    with pytest.raises(TransactionControlError):
        await tx.commit()
    await tx.rollback()

    await (await driver.begin()).rollback()
    assert pool.said == ["rollback", "rollback"]
    await driver.close()


async def test_cancelled_statement_prevents_the_commit(monkeypatch):
    pool = Pool(size=1)
    driver = SharingThreadedDriver(pool, threads=1)
    tx = await driver.begin()
    begun, go_on = threading.Event(), threading.Event()

    def slow(_, __):
        begun.set()
        assert go_on.wait(PATIENCE)

    monkeypatch.setattr(Open, "run", slow)
    statement = asyncio.ensure_future(tx.run(iter(())))
    await until(begun.is_set)
    statement.cancel()
    with pytest.raises(asyncio.CancelledError):
        await statement
    go_on.set()

    with pytest.raises(StoreUnavailableError, match="rolled back"):
        await tx.commit()
    assert pool.said == ["rollback"]
    await driver.close()


async def test_cancelled_run_still_finishes():
    begun, go_on, ended = threading.Event(), threading.Event(), threading.Event()

    class Slow:
        def run(self, transaction):
            begun.set()
            assert go_on.wait(PATIENCE)
            ended.set()

        def close(self):
            pass

    driver = ThreadedDriver(Slow(), threads=1)
    running = asyncio.ensure_future(driver.run(named("slow")))
    await until(begun.is_set)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    go_on.set()
    await until(ended.is_set)
    await driver.close()


async def test_sharing_follows_the_wrapped_driver(tmp_path):
    memory, sqlite = threaded(MemoryDriver()), threaded(SqliteDriver(tmp_path / "a.db"))

    assert not isinstance(memory, AsyncShares)
    assert isinstance(sqlite, AsyncShares)
    await memory.close()
    await sqlite.close()


async def test_a_sqlite_transaction_in_threads(tmp_path):
    driver = threaded(SqliteDriver(tmp_path / "a.db"))

    def create():
        yield Statement("create", "CREATE TABLE t (x)")

    def count():
        rows = yield Statement("count", "SELECT count(*) AS n FROM t")
        return rows[0]["n"]

    await driver.run(Transaction("create", Mode.SINGLE, create))
    tx = await driver.begin()
    await asyncio.to_thread(tx.connection.execute, "INSERT INTO t VALUES (1)")
    assert await tx.run(count()) == 1
    assert await driver.run(Transaction("count", Mode.READ, count)) == 0
    await tx.commit()

    assert await driver.run(Transaction("count", Mode.READ, count)) == 1
    await driver.close()
