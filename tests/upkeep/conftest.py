"""Empty stores for sweepers and reapers: memory, SQLite, and PostgreSQL behind both of its client libraries."""

from __future__ import annotations

import pytest

from harness.tables import database_with_tables, empty_tables, sqlite_with_tables
from oncekey.databases.mariadb.generated.pymysql import PymysqlDriver
from oncekey.databases.mariadb.store import MariadbStore
from oncekey.databases.memory import MemoryDriver
from oncekey.databases.postgres.asyncpg import AsyncpgDriver
from oncekey.databases.postgres.generated.psycopg import PsycopgDriver
from oncekey.databases.postgres.store import PostgresStore
from oncekey.databases.sqlite.blocking import SqliteDriver
from oncekey.databases.sqlite.store import SqliteStore
from oncekey.stores.memory import MemoryStore
from oncekey_contract.world import blocking, under_asyncio


@pytest.fixture(scope="session")
def upkeep_dsn(postgres_server):
    """One database with the tables; each test empties them first."""
    with database_with_tables(postgres_server, "upkeep") as dsn:
        yield dsn


@pytest.fixture
def empty_dsn(upkeep_dsn):
    """The same, empty."""
    return empty_tables(upkeep_dsn)


def _world(kind, request, tmp_path):
    if kind == "memory":
        return blocking(MemoryStore, MemoryDriver())
    if kind == "sqlite":
        driver = SqliteDriver(sqlite_with_tables(tmp_path / "upkeep.db"))
        return blocking(SqliteStore, driver)
    if kind in {"mariadb", "mysql"}:
        return blocking(MariadbStore, PymysqlDriver(request.getfixturevalue(f"empty_{kind}")))
    dsn = request.getfixturevalue("empty_dsn")
    if kind == "psycopg":
        return blocking(PostgresStore, PsycopgDriver(dsn))
    return under_asyncio(PostgresStore, AsyncpgDriver(dsn))


@pytest.fixture(params=["memory", "sqlite", "psycopg", "mariadb", "mysql"])
def world(request, tmp_path):
    """A store behind a driver, with a clock that the test owns."""
    with _world(request.param, request, tmp_path) as world:
        yield world


@pytest.fixture(params=["sqlite", "psycopg", "asyncpg", "mariadb", "mysql"])
def sql_world(request, tmp_path):
    """The same, of those that have an outbox."""
    with _world(request.param, request, tmp_path) as world:
        yield world
