"""What the drivers for an `AsyncEngine` and for an `Engine` have in common, tried on both."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import psycopg
import pytest
from sqlalchemy import create_engine, text
from sqlalchemy.ext.asyncio import create_async_engine

from drivers.postgres.drivers import InThreads
from drivers.speaking import saying
from oncekey.core.errors import (
    CommitAmbiguousError,
    StoreBusyError,
    StoreUnavailableError,
    TransactionControlError,
)
from oncekey.core.flow import Body, Mode, Statement, Transaction
from oncekey.databases.sqlalchemy.asynchronous import SqlalchemyDriver
from oncekey.databases.sqlalchemy.generated.driver import BlockingSqlalchemyDriver

POSTGRES = ("postgresql+asyncpg", "postgresql+psycopg", "postgresql+psycopg blocking")
SQLITE = ("sqlite+aiosqlite", "sqlite blocking")
TABLE = "CREATE TABLE orders (item text NOT NULL)"

Opened = Callable[..., AbstractAsyncContextManager[Any]]


@pytest.fixture(params=[*POSTGRES, *SQLITE])
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def opened(kind: str, request: pytest.FixtureRequest, tmp_path: Path) -> Opened:
    """Opens a driver of the kind on a database with a table; at the end all connections must be back."""
    scheme, _, blocking = kind.partition(" ")
    if scheme in {"sqlite", "sqlite+aiosqlite"}:
        url = f"{scheme}:///{tmp_path}/shop.db"
        engine = create_engine(f"sqlite:///{tmp_path}/shop.db")
        with engine.begin() as connection:
            connection.execute(text(TABLE))
        engine.dispose()
    else:
        dsn: str = request.getfixturevalue("postgres_dsn")
        url = dsn.replace("postgresql:", f"{scheme}:")
        with psycopg.connect(dsn, autocommit=True) as raw:
            raw.execute(TABLE.encode())

    @asynccontextmanager
    async def opening(statement_timeout: float = 10.0, **options: Any) -> AsyncIterator[Any]:
        if blocking:
            engine = create_engine(url, **options)
            yield InThreads(BlockingSqlalchemyDriver(engine, statement_timeout=statement_timeout))
            assert engine.pool.checkedout() == 0
            engine.dispose()
        else:
            aengine = create_async_engine(url, **options)
            driver = SqlalchemyDriver(aengine, statement_timeout=statement_timeout)
            yield driver
            await driver.close()
            assert aengine.pool.checkedout() == 0
            await aengine.dispose()

    return opening


@pytest.mark.parametrize("kind", SQLITE, indirect=True)
async def test_first_read_belongs_to_the_atomic_transaction(opened: Opened, tmp_path: Path) -> None:
    # ATOMIC on SQLite: nobody writes between a read and the write that follows from it
    other = create_engine(f"sqlite:///{tmp_path}/shop.db", connect_args={"timeout": 0})
    tried: list[str] = []

    def body() -> Body[None]:
        yield Statement("count", "SELECT count(*) FROM orders")
        with suppress(Exception), other.begin() as connection:
            connection.execute(text("INSERT INTO orders VALUES ('theirs')"))
            tried.append("theirs")
        yield Statement("insert", "INSERT INTO orders VALUES ('ours')")

    async with opened() as driver:
        await driver.run(Transaction("test", Mode.ATOMIC, body))
        assert await driver.run(saying(Mode.READ, "SELECT item FROM orders")) == [[("ours",)]]
    other.dispose()
    assert tried == []


async def test_a_full_pool_names_its_database(kind: str, opened: Opened) -> None:
    async with opened(pool_size=2, max_overflow=0, pool_timeout=0.05) as driver:
        tx = await driver.begin()
        with pytest.raises(StoreBusyError, match=f"connections to {kind.partition('+')[0].partition(' ')[0]} were in"):
            await driver.begin()
        await tx.rollback()


@pytest.mark.parametrize("end", ["commit", "rollback"])
async def test_a_connection_that_a_handler_kept_is_refused_after_the_end(opened: Opened, end: str) -> None:
    async with opened() as driver:
        tx = await driver.begin()
        kept = tx.connection
        await getattr(tx, end)()
        await driver.close()
        with pytest.raises(TransactionControlError, match="over"):
            await kept.execute(text("SELECT 1"))


@pytest.mark.parametrize("kind", POSTGRES, indirect=True)
@pytest.mark.parametrize("mode", [Mode.SINGLE, Mode.READ])
async def test_a_statement_that_hangs_is_given_up(opened: Opened, mode: Mode) -> None:
    # P7: asyncio leaves the reply, and a thread waits for it: then the server's own proves that nothing happened
    async with opened(statement_timeout=0.05) as driver:
        with pytest.raises((CommitAmbiguousError, StoreUnavailableError)):
            await driver.run(saying(mode, "SELECT pg_sleep(3600)"))
        assert await driver.run(saying(Mode.READ, "SELECT 1")) == [[(1,)]]
        await driver.run(saying(Mode.ATOMIC, "SELECT pg_sleep(0.06)"))  # a migration may take longer
