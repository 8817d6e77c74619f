"""Real stores for operators: SQLite, and PostgreSQL behind both of its client libraries."""

from __future__ import annotations

import pytest

from harness.tables import database_with_tables, sqlite_with_tables
from oncekey.databases.mariadb.generated.pymysql import PymysqlDriver
from oncekey.databases.mariadb.store import MariadbStore
from oncekey.databases.postgres.asyncpg import AsyncpgDriver
from oncekey.databases.postgres.generated.psycopg import PsycopgDriver
from oncekey.databases.postgres.store import PostgresStore
from oncekey.databases.sqlite.blocking import SqliteDriver
from oncekey.databases.sqlite.store import SqliteStore
from oncekey_contract.world import blocking, under_asyncio


@pytest.fixture(scope="session")
def operate_dsn(postgres_server):
    """One database with the tables for all tests of operators: each has keys of its own."""
    with database_with_tables(postgres_server, "operate") as dsn:
        yield dsn


@pytest.fixture(params=["sqlite", "psycopg", "asyncpg", "mariadb", "mysql"])
def world(request, tmp_path):
    """A store behind a driver, with a clock that the test owns."""
    if request.param == "sqlite":
        driver = SqliteDriver(sqlite_with_tables(tmp_path / "operate.db"))
        with blocking(SqliteStore, driver) as world:
            yield world
        return
    if request.param in {"mariadb", "mysql"}:
        with blocking(MariadbStore, PymysqlDriver(request.getfixturevalue(f"empty_{request.param}"))) as world:
            yield world
        return
    dsn = request.getfixturevalue("operate_dsn")
    if request.param == "psycopg":
        with blocking(PostgresStore, PsycopgDriver(dsn)) as world:
            yield world
    else:
        with under_asyncio(PostgresStore, AsyncpgDriver(dsn)) as world:
            yield world
