"""Behind PgBouncer in transaction mode with an address that does not mention it.

Two clients give the same name to different statements, and the pooler lends both of them one server connection: the one
that prepared the name there has its statement executed for the other, too.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Iterator
from itertools import count
from typing import Any

import pytest
from asyncpg.exceptions import InvalidSQLStatementNameError
from sqlalchemy import create_engine, text
from sqlalchemy.ext.asyncio import create_async_engine

from drivers.postgres.drivers import ASYNC_PSYCOPG, ASYNCPG, PSYCOPG, opened, saying
from harness.cutting import CuttingProxy
from harness.dsn import through
from harness.pgbouncer import PgBouncer
from oncekey.core.errors import ConfigurationError
from oncekey.core.flow import Mode
from oncekey.databases.postgres.asyncpg_connections import StoreConnection
from oncekey.databases.sqlalchemy.asynchronous import SqlalchemyDriver
from oncekey.databases.sqlalchemy.generated.driver import BlockingSqlalchemyDriver

PREPARED = "SELECT count(*) FROM pg_prepared_statements"


@pytest.fixture
def pooled(tables_dsn: str) -> Iterator[str]:
    """An address without `?pgbouncer=1` of a pooler that has one server connection."""
    with PgBouncer(tables_dsn, size=1, prepared=0) as pooler:
        yield pooler.dsn(tables_dsn).partition("?")[0]


@pytest.mark.parametrize("kind", [ASYNCPG, ASYNC_PSYCOPG, PSYCOPG])
async def test_two_clients_never_execute_each_others_statements(
    kind: str, pooled: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # asyncpg has one counter for a process; two processes have the same names.
    counters: defaultdict[int, count[int]] = defaultdict(count)
    named = lambda self, prefix: f"__asyncpg_{prefix}_{next(counters[id(self)])}__"  # noqa: E731
    monkeypatch.setattr(StoreConnection, "_get_unique_id", named)
    async with opened(kind, pooled, pool_size=1) as one, opened(kind, pooled, pool_size=1) as other:
        for number in range(20):
            for driver, client in ((one, 1), (other, 2)):
                for extra in range(client):  # each counts its statements in another order
                    said = await driver.run(saying(Mode.READ, f"SELECT {client} AS a, {number % 4} AS b, {extra} AS c"))
                    assert said == [(client, number % 4, extra)]


async def test_asyncpg_notices_the_pooler_once(pooled: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "oncekey"):
        async with opened(ASYNCPG, pooled, pool_size=2) as driver:
            for _ in range(3):
                await driver.run(saying(Mode.READ, "SELECT 1"))
            assert await driver.run(saying(Mode.READ, PREPARED)) == [(0,)]
    assert sum("pgbouncer=1" in record.message for record in caplog.records) == 1


async def test_pooler_check_runs_once_per_connection(tables_dsn: str) -> None:
    with CuttingProxy.before(tables_dsn) as proxy:
        proxy.count()
        async with opened(ASYNCPG, through(tables_dsn, proxy.port), pool_size=1) as driver:
            for _ in range(5):
                await driver.run(saying(Mode.READ, "SELECT 1"))
        assert sum(b"pg_backend_pid() =" in message for message, _ in proxy.messages) == 1


async def test_an_engine_of_asyncpg_that_prepares_is_refused(pooled: str) -> None:
    # An old asyncpg prepares a statement while it connects, and refuses the pooler itself.
    refused = (ConfigurationError, InvalidSQLStatementNameError)
    address = pooled.replace("postgresql:", "postgresql+asyncpg:")
    engine = create_async_engine(address)
    with pytest.raises(refused, match=r"statement_cache_size(=| to )0"):
        await SqlalchemyDriver(engine).run(saying(Mode.READ, "SELECT 1"))
    with pytest.raises(refused, match=r"statement_cache_size(=| to )0"):
        await SqlalchemyDriver(engine).begin()
    await engine.dispose()
    arguments: dict[str, Any] = {"statement_cache_size": 0, "prepared_statement_name_func": str}
    sound = create_async_engine(f"{address}?prepared_statement_cache_size=0", connect_args=arguments)
    assert await SqlalchemyDriver(sound).run(saying(Mode.READ, "SELECT 1")) == [(1,)]
    await sound.dispose()


async def test_an_engine_of_psycopg_prepares_nothing_from_then_on(pooled: str) -> None:
    address = pooled.replace("postgresql:", "postgresql+psycopg:")
    engine = create_async_engine(address)
    driver = SqlalchemyDriver(engine)
    for _ in range(8):
        await driver.run(saying(Mode.READ, "SELECT 1"))
    assert await driver.run(saying(Mode.READ, PREPARED)) == [(0,)]
    await engine.dispose()
    blocking = create_engine(address)
    driver_in_threads = BlockingSqlalchemyDriver(blocking)
    for _ in range(8):
        driver_in_threads.run(saying(Mode.READ, "SELECT 1"))
    with blocking.connect() as connection:
        assert connection.execute(text(PREPARED)).scalar() == 0
    blocking.dispose()
