"""Real stores for the console: SQLite, and PostgreSQL behind both of its client libraries."""

from __future__ import annotations

import uuid

import psycopg
import pytest

from harness.tables import make_tables
from oncekey.drivers.asyncpg import AsyncpgDriver
from oncekey.drivers.psycopg import PsycopgDriver
from oncekey.drivers.sqlite import SqliteDriver
from oncekey.engine import migrate
from oncekey.flow import drive
from oncekey.stores.postgres import PostgresStore
from oncekey.stores.sqlite import SqliteStore
from oncekey.testing.contract.world import blocking, under_asyncio


@pytest.fixture(scope="session")
def console_dsn(postgres_server):
    """One database with the tables for all tests of the console; each finds it empty."""
    name = f"console_{uuid.uuid4().hex}"
    yield make_tables(postgres_server.create_database(name))
    postgres_server.drop_database(name)


@pytest.fixture
def empty_dsn(console_dsn):
    """The same, emptied."""
    with psycopg.connect(console_dsn, autocommit=True) as connection:
        tables = connection.execute(
            "SELECT string_agg('oncekey.' || tablename, ', ') FROM pg_tables "
            "WHERE schemaname = 'oncekey' AND tablename <> 'migration'"
        ).fetchone()
        connection.execute(f"TRUNCATE {tables[0]}")
    return console_dsn


@pytest.fixture(params=["sqlite", "psycopg", "asyncpg"])
def world(request, tmp_path):
    """A store behind a driver, with a clock that the test owns."""
    if request.param == "sqlite":
        driver = SqliteDriver(tmp_path / "console.db")
        drive(migrate.up(SqliteStore().schema), driver.run)
        with blocking(SqliteStore, driver) as world:
            yield world
        return
    dsn = request.getfixturevalue("empty_dsn")
    if request.param == "psycopg":
        with blocking(PostgresStore, PsycopgDriver(dsn)) as world:
            yield world
    else:
        with under_asyncio(PostgresStore, AsyncpgDriver(dsn)) as world:
            yield world
