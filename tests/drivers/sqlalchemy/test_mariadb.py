"""The driver for SQLAlchemy engines, on MariaDB and MySQL by way of aiomysql."""

from __future__ import annotations

import asyncio
import gc
import warnings
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any

import pytest
from sqlalchemy import text
from sqlalchemy.exc import OperationalError
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession, create_async_engine

from drivers.speaking import insert, saying
from harness.asgi import until
from harness.dsn import through
from harness.mariadb import MariadbServer
from harness.proxy import Proxy
from oncekey.core.errors import (
    CommitAmbiguousError,
    ConfigurationError,
    SchemaError,
    StoreError,
    StoreUnavailableError,
    TransactionControlError,
)
from oncekey.core.flow import Body, Mode, Statement
from oncekey.databases.mariadb.store import MariadbStore
from oncekey.databases.sqlalchemy import mariadb as sqlalchemy_mariadb
from oncekey.databases.sqlalchemy.asynchronous import SqlalchemyTransaction
from oncekey.databases.sqlalchemy.errors import ENDED
from oncekey.databases.sqlalchemy.mariadb import SqlalchemyMariadbDriver
from oncekey.once import Once
from oncekey.wire.given import aconnect_sqlalchemy

SLEEPERS = "SELECT count(*) FROM information_schema.processlist WHERE info LIKE 'SELECT SLEEP%'"


@pytest.fixture
def url(either_url: str, either_server: MariadbServer) -> str:
    either_server.say(
        "CREATE TABLE orders (id SERIAL PRIMARY KEY, item VARCHAR(255) NOT NULL UNIQUE)", either_url.rpartition("/")[2]
    )
    return either_url


@asynccontextmanager
async def driving(url: str, **options: Any) -> AsyncIterator[tuple[SqlalchemyMariadbDriver, AsyncEngine]]:
    """A driver; at the end all connections must be back."""
    engine = create_async_engine(url.replace("://", "+aiomysql://", 1), **options)
    driver = SqlalchemyMariadbDriver(engine)
    try:
        yield driver, engine
        await driver.close()
        assert getattr(engine.pool, "checkedout", int)() == 0
    finally:
        await engine.dispose()
        # aiomysql leaves a connection open which it could not say goodbye to; that is told by whoever collects it.
        with warnings.catch_warnings(action="ignore", category=ResourceWarning):
            gc.collect()


async def items(driver: SqlalchemyMariadbDriver) -> list[str]:
    (rows,) = await driver.run(saying(Mode.READ, "SELECT item FROM orders ORDER BY id"))
    return [row[0] for row in rows]


def steps(sql: str, **params: Any) -> Body[Any]:
    rows = yield Statement("test", sql, params)
    return [dict(row) for row in rows]


@pytest.mark.parametrize("isolation", [{}, {"isolation_level": "SERIALIZABLE"}, {"isolation_level": "AUTOCOMMIT"}])
@pytest.mark.parametrize("mode", [Mode.SINGLE, Mode.ATOMIC])
async def test_statements_commit_under_every_isolation_setting(url: str, mode: Mode, isolation: dict[str, Any]) -> None:
    async with driving(url, pool_reset_on_return=None, **isolation) as (driver, engine):
        await driver.run(saying(mode, insert("tea"), insert("milk")))
        assert await items(driver) == ["tea", "milk"]
        async with engine.connect() as connection:  # what only read has left no transaction open
            raw: Any = (await connection.get_raw_connection()).driver_connection
            assert not raw.get_transaction_status()


async def test_atomic_is_all_or_nothing_and_single_is_not(url: str) -> None:
    async with driving(url) as (driver, _):
        for mode in (Mode.ATOMIC, Mode.SINGLE):
            with pytest.raises(StoreError, match="1062"):
                await driver.run(saying(mode, insert("tea"), insert("tea")))
        assert await items(driver) == ["tea"]


async def test_errors_map_to_store_errors(url: str) -> None:
    async with driving(url) as (driver, _):
        with pytest.raises(SchemaError):
            await driver.run(saying(Mode.SINGLE, "SELECT * FROM missing"))
    async with driving("mysql://nobody@127.0.0.1:1/nothing") as (driver, _):
        with pytest.raises(StoreUnavailableError):
            await driver.run(saying(Mode.SINGLE, "SELECT 1"))
        with pytest.raises(StoreUnavailableError):
            await driver.begin()


async def test_lost_connection_error_depends_on_the_operation(url: str) -> None:
    # P7, F8
    with Proxy.before(url) as proxy:
        async with driving(through(url, proxy.port)) as (driver, _):
            lost = proxy.lose_reply(b"SELECT item")
            assert await items(driver) == []  # a read is said again
            assert lost.is_set()

            proxy.lose_reply(b"single")
            with pytest.raises(CommitAmbiguousError):
                await driver.run(saying(Mode.SINGLE, insert("single")))

            lost = proxy.lose_reply(b"atomic")
            await driver.run(saying(Mode.ATOMIC, insert("atomic")))  # never committed, so it is said again
            assert lost.is_set()

            proxy.lose_reply(b"\x03COMMIT")
            with pytest.raises(CommitAmbiguousError):
                await driver.run(saying(Mode.ATOMIC, insert("commit")))
            assert await items(driver) == ["single", "atomic", "commit"]


async def test_business_transaction_commits_or_rolls_back(url: str) -> None:
    async with driving(url) as (driver, engine):
        for item, end in (("tea", SqlalchemyTransaction.commit), ("milk", SqlalchemyTransaction.rollback)):
            tx = await driver.begin()
            await tx.connection.execute(text("INSERT INTO orders (item) VALUES (:item)"), {"item": item})
            assert await tx.run(steps("SELECT count(*) AS n FROM orders")) == [{"n": 1 if item == "tea" else 2}]
            await end(tx)
            await tx.rollback()  # what is over stays as it is
            assert engine.pool.checkedout() == 0  # type: ignore[attr-defined]
            with pytest.raises(TransactionControlError, match="over"):
                await tx.run(steps("SELECT 1"))
        assert await items(driver) == ["tea"]


@pytest.mark.parametrize("how", ["run_sync", "transaction", "session"])
async def test_commit_that_bypasses_oncekey_is_rolled_back(url: str, how: str) -> None:
    # F16: and the connection that goes back has no open transaction
    async with driving(url, pool_size=2, max_overflow=0, pool_reset_on_return=None) as (driver, engine):
        tx = await driver.begin()
        await tx.connection.execute(text("INSERT INTO orders (item) VALUES ('tea')"))
        session = AsyncSession(tx.connection, join_transaction_mode="control_fully")
        await session.execute(text("SELECT 1"))
        current: Any = tx.connection.get_transaction()
        doors: dict[str, Any] = {
            "run_sync": lambda: tx.connection.run_sync(lambda sync: sync.get_transaction().commit()),
            "transaction": current.commit,
            "session": session.commit,
        }
        with pytest.raises(TransactionControlError, match=r"commit\(\)"):
            await doors[how]()
        with pytest.raises(TransactionControlError) as caught:
            await tx.run(steps("SELECT 1"))
        assert str(caught.value) == ENDED
        await tx.rollback()
        async with engine.connect() as one, engine.connect() as two:
            for connection in (one, two):
                assert await connection.scalar(text("SELECT count(*) FROM orders")) == 0


@pytest.mark.parametrize("sql", ["COMMIT", "ROLLBACK", "SET autocommit = 1", "CREATE TABLE mine (x INT)", "BEGIN"])
async def test_no_text_ends_the_transaction(url: str, sql: str) -> None:
    # L5: what changes tables commits on MariaDB and MySQL
    async with driving(url) as (driver, _):
        tx = await driver.begin()
        with pytest.raises(TransactionControlError):
            await tx.session.execute(text(sql))
        with pytest.raises(TransactionControlError):
            await tx.connection.exec_driver_sql(sql)
        await tx.rollback()


async def test_a_connection_that_ended_in_the_pool_is_replaced(url: str, either_server: MariadbServer) -> None:
    async with driving(url) as (driver, _):
        for _ in range(2):
            assert await items(driver) == []
            either_server.end_sessions(url.rpartition("/")[2])
            await (await driver.begin()).rollback()
            either_server.end_sessions(url.rpartition("/")[2])


async def test_a_connection_that_died_under_the_handler_is_unavailable(url: str, either_server: MariadbServer) -> None:
    async with driving(url) as (driver, _):
        for heard in (False, True):
            tx = await driver.begin()
            either_server.end_sessions(url.rpartition("/")[2])
            if heard:
                with suppress(OperationalError):
                    await tx.connection.scalar(text("SELECT 1"))
            with pytest.raises((StoreUnavailableError, TransactionControlError)):
                await tx.run(steps("SELECT 1"))
            await tx.rollback()


async def test_running_statement_of_a_handler_does_not_reach_others(
    url: str, either_server: MariadbServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sqlalchemy_mariadb, "PATIENCE", 0.05)
    late = text("INSERT INTO orders (item) SELECT 'late' FROM (SELECT SLEEP(60) AS slept) AS pause")
    async with driving(url, pool_size=2, max_overflow=0) as (driver, _):
        tx = await driver.begin()
        left = asyncio.create_task(tx.connection.execute(late))
        await until(lambda: either_server.say(SLEEPERS.replace("'SELECT", "'INSERT%")) == ((1,),))
        with pytest.raises(TransactionControlError, match="left behind"):
            await tx.run(steps("SELECT 1"))
        await tx.rollback()
        with pytest.raises(OperationalError):
            await left
        assert [await items(driver) for _ in range(3)] == [[]] * 3


async def test_cancelled_statement_returns_its_connection(url: str, either_server: MariadbServer) -> None:
    async with driving(url) as (driver, engine):
        for mode in (Mode.SINGLE, Mode.ATOMIC):
            task = asyncio.create_task(driver.run(saying(mode, insert(f"tea {mode}"), "SELECT SLEEP(60)")))
            await until(lambda: either_server.say(SLEEPERS) == ((1,),))
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            await driver.close()
            assert engine.pool.checkedout() == 0  # type: ignore[attr-defined]
        assert await items(driver) == [f"tea {Mode.SINGLE}"]


async def test_autocommit_and_unsupported_drivers_are_rejected(url: str) -> None:
    async with driving(url, isolation_level="AUTOCOMMIT") as (driver, _):
        with pytest.raises(ConfigurationError, match="AUTOCOMMIT"):
            await driver.begin()
    engine = create_async_engine(url.replace("://", "+aiomysql://", 1))
    assert isinstance(aconnect_sqlalchemy(engine).store, MariadbStore)
    engine.sync_engine.dialect.driver = "asyncmy"
    with pytest.raises(ConfigurationError, match="aiomysql"):
        await Once(engine).start()
