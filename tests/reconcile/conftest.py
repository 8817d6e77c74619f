"""Stores in which something is unknown: SQLite under a blocking driver, PostgreSQL under asyncio."""

from __future__ import annotations

import uuid

import psycopg
import pytest

from oncekey.drivers.asyncpg import AsyncpgDriver
from oncekey.drivers.psycopg import PsycopgDriver
from oncekey.drivers.sqlite import SqliteDriver
from oncekey.engine import migrate
from oncekey.flow import drive
from oncekey.stores.postgres import PostgresStore
from oncekey.stores.sqlite import SqliteStore
from oncekey.testing.contract.world import blocking, under_asyncio
from phased.conftest import make_bank, phased_dsn  # noqa: F401  (a fixture)

TABLES = "record, oncekey.work, oncekey.outbox, oncekey.dead_letter, oncekey.audit, oncekey.call, oncekey.evidence"


@pytest.fixture(scope="session")
def reconcile_dsn(postgres_server):
    """One database with the tables; each test empties them first."""
    name = f"reconcile_{uuid.uuid4().hex}"
    dsn = postgres_server.create_database(name)
    driver = PsycopgDriver(dsn, pool_size=1)
    drive(migrate.up(PostgresStore().schema), driver.run)
    driver.close()
    yield dsn
    postgres_server.drop_database(name)


@pytest.fixture
def empty_dsn(reconcile_dsn):
    """The same, empty."""
    with psycopg.connect(reconcile_dsn, autocommit=True) as connection:
        connection.execute(f"TRUNCATE oncekey.{TABLES}")
    return reconcile_dsn


@pytest.fixture(params=["sqlite", "asyncpg"])
def world(request, tmp_path):
    """A store behind a driver, with a clock that the test owns."""
    if request.param == "sqlite":
        driver = SqliteDriver(tmp_path / "reconcile.db")
        drive(migrate.up(SqliteStore().schema), driver.run)
        made = blocking(SqliteStore, driver)
    else:
        made = under_asyncio(PostgresStore, AsyncpgDriver(request.getfixturevalue("empty_dsn")))
    with made as world:
        yield world


@pytest.fixture(params=["sqlite", "asyncpg"])
def bank(request, tmp_path):
    """An application with a phased handler."""
    made = make_bank(request, tmp_path, request.param, blocking=False)
    if request.param == "asyncpg":
        with psycopg.connect(made.database.dsn, autocommit=True) as connection:
            connection.execute("TRUNCATE oncekey.call, oncekey.evidence, oncekey.audit")
    return made
