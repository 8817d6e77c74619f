"""A task or a thread that a handler leaves behind: what it still does on `op.connection` reaches nobody else."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
import time
from typing import Any

import psycopg
import pytest
from fastapi import HTTPException

from harness.patience import PATIENCE
from oncekey.core.errors import TransactionControlError
from sessions.ways import WAYS, Shop

ORDERS = "CREATE TABLE orders (item text NOT NULL)"
BLOCKED = "INSERT INTO orders SELECT 'late' FROM pg_advisory_xact_lock_shared(4711)"
WAITING = "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND objid = 4711 AND NOT granted"


class Outside:
    """Somebody else's connection, which holds up whoever says `BLOCKED`."""

    def __init__(self, dsn: str) -> None:
        self.connection = psycopg.connect(dsn, autocommit=True)
        self.connection.execute(ORDERS)
        self.connection.execute("SELECT pg_advisory_lock(4711)")

    def waits(self, count: int) -> bool:
        return self.connection.execute(WAITING).fetchone() == (count,)

    async def until(self, count: int) -> None:
        deadline = time.monotonic() + PATIENCE
        while not self.waits(count):
            assert time.monotonic() < deadline
            await asyncio.sleep(0.01)

    def let_go(self) -> None:
        self.connection.execute("SELECT pg_advisory_unlock(4711)")

    @property
    def rows(self) -> list[str]:
        return [item for (item,) in self.connection.execute("SELECT item FROM orders ORDER BY item")]


@pytest.fixture
def outside(tables_dsn):
    there = Outside(tables_dsn)
    yield there
    there.connection.close()


class Left:
    """What was left behind, in a task or a thread, and what became of it."""

    def __init__(self, shop: Shop) -> None:
        self.shop = shop
        self.ends: list[BaseException | None] = []
        self._running: list[Any] = []

    def start(self, connection: Any, *statements: str) -> None:
        if self.shop.way == "def":
            thread = threading.Thread(target=lambda: asyncio.run(self._say(connection, statements)), daemon=True)
            thread.start()
            self._running.append(asyncio.to_thread(thread.join, 10))
        else:
            self._running.append(asyncio.create_task(self._say(connection, statements)))

    async def _say(self, connection: Any, statements: tuple[str, ...]) -> None:
        try:
            for statement in statements:
                await self.shop.say(connection, statement)
        except BaseException as error:
            self.ends.append(error)
        else:
            self.ends.append(None)

    async def over(self) -> None:
        async with asyncio.timeout(PATIENCE):
            await asyncio.gather(*self._running)


@pytest.mark.parametrize("way", WAYS)
async def test_statements_running_at_rollback_are_never_committed(tables_dsn, outside, way):  # X15
    shop = Shop(way, tables_dsn)
    left = Left(shop)

    async def fails(op: Any) -> None:
        await shop.say(op.connection, "INSERT INTO orders VALUES ('first')")
        # The second one waits for its turn on the connection, the third one comes when the first was answered.
        for _ in range(1 if way == "asyncpg" else 2):
            left.start(op.connection, BLOCKED, BLOCKED)
        await outside.until(1)
        raise HTTPException(402)

    async with shop.open():
        assert (await shop.send(fails)).status == 402
        await outside.until(0)  # the server was asked to stop, or lost its client
        outside.let_go()
        await left.over()
        assert None not in left.ends
        for number in range(4):
            assert (await shop.send(shop.saying(f"INSERT INTO orders VALUES ('next {number}')"))).status == 200
    assert outside.rows == [f"next {number}" for number in range(4)]


@pytest.mark.parametrize("way", [way for way in WAYS if way != "asyncpg"])
async def test_commit_waits_for_running_statements(tables_dsn, outside, way):  # X15
    shop = Shop(way, tables_dsn)
    left = Left(shop)

    answers = threading.Event()

    async def leaves(op: Any) -> None:
        left.start(op.connection, BLOCKED, "SELECT 1", BLOCKED)
        await outside.until(1)
        answers.set()

    async with shop.open():
        sending = asyncio.create_task(shop.send(leaves))
        assert await asyncio.to_thread(answers.wait, 10)
        outside.let_go()
        assert (await sending).status == 200
        await left.over()
        found = outside.rows  # as many as were said before the commit
        assert found in (["late"], ["late", "late"])
        assert (await shop.send(shop.saying("INSERT INTO orders VALUES ('next')"))).status == 200
        assert outside.rows == [*found, "next"]
        if found == ["late"]:
            assert [type(end) for end in left.ends] == [TransactionControlError]


async def test_asyncpg_rolls_back_if_a_statement_is_still_running(tables_dsn, outside, caplog):  # X15
    shop = Shop("asyncpg", tables_dsn)
    left = Left(shop)

    async def leaves(op: Any) -> None:
        left.start(op.connection, BLOCKED)
        await outside.until(1)

    async with shop.open():
        reply = await shop.send(leaves)
        assert (reply.status, reply.code) == (500, "idempotency_execution_failed")
        assert "left behind" in caplog.text
        outside.let_go()
        await left.over()
        assert left.ends != [None]
        assert (await shop.send(shop.saying("INSERT INTO orders VALUES ('next')"))).status == 200
    assert outside.rows == ["next"]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("fails", [False, True], ids=["committed", "rolled back"])
async def test_connection_kept_after_the_request_is_rejected(tables_dsn, outside, way, fails):  # X14, X15
    shop = Shop(way, tables_dsn)
    kept: list[Any] = []

    async def keeps(op: Any) -> None:
        kept.append(op.connection)
        await shop.say(op.connection, "INSERT INTO orders VALUES ('first')")
        if fails:
            raise HTTPException(402)

    async with shop.open():
        await shop.send(keeps)
        with pytest.raises(TransactionControlError, match="over"):
            await shop.say(kept[0], "INSERT INTO orders VALUES ('late')")
        assert (await shop.send(shop.saying("INSERT INTO orders VALUES ('next')"))).status == 200
    assert outside.rows == (["next"] if fails else ["first", "next"])


async def test_prepared_statements_and_cursors_are_rejected_after_the_end(tables_dsn, outside):
    for way, refusal in (("asyncpg", "released|closed"), ("psycopg", "over")):
        shop = Shop(way, tables_dsn)
        kept: list[Any] = []

        async def keeps(op: Any, shop: Shop = shop, kept: list[Any] = kept) -> None:
            sql = "INSERT INTO orders VALUES ('late')"
            if shop.way == "asyncpg":
                kept.append((await op.connection.prepare(sql)).fetch)
            else:
                cursor = op.connection.cursor()
                raw = object.__getattribute__(cursor, "_raw")  # as a library of the application's may hold it
                kept.append(lambda: raw.execute(sql))

        async with shop.open():
            assert (await shop.send(keeps)).status == 200
            with pytest.raises(Exception, match=refusal):
                await kept[0]()
    assert outside.rows == []


UVLOOP = """
import asyncio, sys, uvloop
from oncekey.databases.postgres.psycopg_async import AsyncPsycopgDriver
from sqlalchemy import text
from sqlalchemy.ext.asyncio import create_async_engine
from oncekey.databases.sqlalchemy.asynchronous import SqlalchemyDriver

async def main(dsn):
    engine = create_async_engine(dsn.replace("postgresql:", "postgresql+psycopg:"))
    own, theirs = AsyncPsycopgDriver(dsn, pool_size=2), SqlalchemyDriver(engine)
    for driver, sleep in ((own, "SELECT pg_sleep(60)"), (theirs, text("SELECT pg_sleep(60)"))):
        for _ in range(5):
            transaction = await driver.begin()
            late = asyncio.create_task(transaction.connection.execute(sleep))
            await asyncio.sleep(0.05)
            await transaction.rollback()
            try:
                await asyncio.wait_for(late, PATIENCE)
            except TimeoutError:
                raise SystemExit("it still waits")
            except Exception as error:
                print(type(error).__name__)
        await driver.close()
    await engine.dispose()

uvloop.run(main(sys.argv[1]))
"""


def test_no_event_loop_polls_a_closed_socket(tables_dsn):  # X14
    done = subprocess.run(
        [sys.executable, "-c", UVLOOP, tables_dsn], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.split()) == 10
