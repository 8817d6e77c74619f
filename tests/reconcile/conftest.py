"""Stores in which something is unknown: SQLite under a blocking driver, PostgreSQL under asyncio."""

from __future__ import annotations

import pytest

from harness.tables import database_with_tables, empty_tables, sqlite_with_tables
from oncekey.databases.mariadb.generated.pymysql import PymysqlDriver
from oncekey.databases.mariadb.store import MariadbStore
from oncekey.databases.postgres.asyncpg import AsyncpgDriver
from oncekey.databases.postgres.store import PostgresStore
from oncekey.databases.sqlite.blocking import SqliteDriver
from oncekey.databases.sqlite.store import SqliteStore
from oncekey_contract.world import blocking, under_asyncio
from phased.conftest import make_bank, phased_dsn  # noqa: F401  (a fixture)


@pytest.fixture(scope="session")
def reconcile_dsn(postgres_server):
    """One database with the tables; each test empties them first."""
    with database_with_tables(postgres_server, "reconcile") as dsn:
        yield dsn


@pytest.fixture
def empty_dsn(reconcile_dsn):
    """The same, empty."""
    return empty_tables(reconcile_dsn)


@pytest.fixture(params=["sqlite", "asyncpg", "mariadb", "mysql"])
def world(request, tmp_path):
    """A store behind a driver, with a clock that the test owns."""
    if request.param == "sqlite":
        driver = SqliteDriver(sqlite_with_tables(tmp_path / "reconcile.db"))
        made = blocking(SqliteStore, driver)
    elif request.param in {"mariadb", "mysql"}:
        made = blocking(MariadbStore, PymysqlDriver(request.getfixturevalue(f"empty_{request.param}")))
    else:
        made = under_asyncio(PostgresStore, AsyncpgDriver(request.getfixturevalue("empty_dsn")))
    with made as world:
        yield world


@pytest.fixture(params=["sqlite", "asyncpg"])
def bank(request, tmp_path):
    """An application with a phased handler."""
    return make_bank(request, tmp_path, request.param, blocking=False)
