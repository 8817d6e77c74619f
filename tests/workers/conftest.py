"""A real store for workers: the test looks at it blocking, the worker speaks to it under asyncio."""

from __future__ import annotations

import pytest

from harness.tables import database_with_tables, sqlite_with_tables
from oncekey.databases.postgres.asyncpg import AsyncpgDriver
from oncekey.databases.postgres.generated.psycopg import PsycopgDriver
from oncekey.databases.postgres.store import PostgresStore
from oncekey.databases.sqlite.asynchronous import AsyncSqliteDriver
from oncekey.databases.sqlite.blocking import SqliteDriver
from oncekey.databases.sqlite.store import SqliteStore
from oncekey_contract.world import blocking
from workers.working import Shop


@pytest.fixture(scope="session")
def worker_dsn(postgres_server):
    """One database with the tables for all tests of workers: each has topics of its own."""
    with database_with_tables(postgres_server, "workers") as dsn:
        yield dsn


@pytest.fixture(params=["sqlite", "postgres"])
def shop(request, tmp_path):
    """A topic of the test's own, on each store."""
    if request.param == "sqlite":
        path = tmp_path / "shop.db"
        driver = SqliteDriver(sqlite_with_tables(path))
        with blocking(SqliteStore, driver) as world:
            yield Shop(world, lambda: AsyncSqliteDriver(path))
        return
    dsn = request.getfixturevalue("worker_dsn")
    with blocking(PostgresStore, PsycopgDriver(dsn)) as world:
        yield Shop(world, lambda: AsyncpgDriver(dsn))
