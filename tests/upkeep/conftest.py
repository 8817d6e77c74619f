"""Empty stores for sweepers and reapers: memory, SQLite, and PostgreSQL behind both of its client libraries."""

from __future__ import annotations

import uuid

import psycopg
import pytest

from oncekey.drivers.asyncpg import AsyncpgDriver
from oncekey.drivers.memory import MemoryDriver
from oncekey.drivers.psycopg import PsycopgDriver
from oncekey.drivers.sqlite import SqliteDriver
from oncekey.engine import migrate
from oncekey.flow import drive
from oncekey.stores.memory import MemoryStore
from oncekey.stores.postgres import PostgresStore
from oncekey.stores.sqlite import SqliteStore
from oncekey.testing.contract.world import blocking, under_asyncio


@pytest.fixture(scope="session")
def upkeep_dsn(postgres_server):
    """One database with the tables; each test empties them first."""
    name = f"upkeep_{uuid.uuid4().hex}"
    dsn = postgres_server.create_database(name)
    driver = PsycopgDriver(dsn, pool_size=1)
    drive(migrate.up(PostgresStore().schema), driver.run)
    driver.close()
    yield dsn
    postgres_server.drop_database(name)


@pytest.fixture
def empty_dsn(upkeep_dsn):
    """The same, empty."""
    with psycopg.connect(upkeep_dsn, autocommit=True) as connection:
        connection.execute("TRUNCATE oncekey.record, oncekey.work, oncekey.outbox, oncekey.dead_letter, oncekey.audit")
    return upkeep_dsn


def _world(kind, request, tmp_path):
    if kind == "memory":
        return blocking(MemoryStore, MemoryDriver())
    if kind == "sqlite":
        driver = SqliteDriver(tmp_path / "upkeep.db")
        drive(migrate.up(SqliteStore().schema), driver.run)
        return blocking(SqliteStore, driver)
    dsn = request.getfixturevalue("empty_dsn")
    if kind == "psycopg":
        return blocking(PostgresStore, PsycopgDriver(dsn))
    return under_asyncio(PostgresStore, AsyncpgDriver(dsn))


@pytest.fixture(params=["memory", "sqlite", "psycopg"])
def world(request, tmp_path):
    """A store behind a driver, with a clock that the test owns."""
    with _world(request.param, request, tmp_path) as world:
        yield world


@pytest.fixture(params=["sqlite", "psycopg", "asyncpg"])
def sql_world(request, tmp_path):
    """The same, of those that have an outbox."""
    with _world(request.param, request, tmp_path) as world:
        yield world
