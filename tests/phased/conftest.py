"""Banks on SQLite and PostgreSQL, with `async def` and `def` handlers."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest

from frameworks.realshop import PostgresDatabase, SqliteFile
from harness.databases import DatabaseServer
from oncekey.drivers.psycopg import PsycopgDriver
from oncekey.engine import migrate
from oncekey.flow import drive
from oncekey.stores.postgres import PostgresStore
from phased.bank import Bank

EFFECT = "CREATE TABLE effect (item TEXT NOT NULL)"
WORLDS = [("sqlite", False), ("sqlite", True), ("asyncpg", False), ("psycopg", False), ("psycopg", True)]


@pytest.fixture(scope="session")
def phased_dsn(postgres_server: DatabaseServer) -> Iterator[str]:
    """One database for all, emptied by each."""
    name = f"phased_{uuid.uuid4().hex}"
    dsn = postgres_server.create_database(name)
    driver = PsycopgDriver(dsn, pool_size=1)
    drive(migrate.up(PostgresStore().schema), driver.run)
    driver.close()
    with psycopg.connect(dsn, autocommit=True) as connection:
        connection.execute(EFFECT)
    yield dsn
    postgres_server.drop_database(name)


def make_bank(request: pytest.FixtureRequest, path: Path, package: str, *, blocking: bool) -> Bank:
    if package == "sqlite":
        database = SqliteFile(path / "bank.db")
        database.execute(EFFECT)
        return Bank(database, blocking=blocking)
    dsn = request.getfixturevalue("phased_dsn")
    with psycopg.connect(dsn, autocommit=True) as connection:
        connection.execute("TRUNCATE oncekey.record, oncekey.work, oncekey.outbox, oncekey.dead_letter, effect")
        connection.execute("DROP TABLE IF EXISTS orders")
    return Bank(PostgresDatabase(dsn, package, pool_size=3), blocking=blocking)


@pytest.fixture(params=WORLDS, ids=lambda world: f"{world[0]}-{'def' if world[1] else 'async'}")
def bank(request: pytest.FixtureRequest, tmp_path: Path) -> Bank:
    """Every store, driver and kind of handler."""
    package, blocking = request.param
    return make_bank(request, tmp_path, package, blocking=blocking)


@pytest.fixture(params=[("sqlite", False), ("sqlite", True)], ids=["async", "def"])
def small_bank(request: pytest.FixtureRequest, tmp_path: Path) -> Bank:
    """Where the store makes no difference."""
    package, blocking = request.param
    return make_bank(request, tmp_path, package, blocking=blocking)


@pytest.fixture(params=[("sqlite", False), ("asyncpg", False)], ids=["sqlite", "asyncpg"])
def async_bank(request: pytest.FixtureRequest, tmp_path: Path) -> Bank:
    """Where the kind of handler makes no difference."""
    package, blocking = request.param
    return make_bank(request, tmp_path, package, blocking=blocking)


@pytest.fixture(
    params=[("sqlite", True), ("psycopg", True), ("asyncpg", False)], ids=["sqlite-def", "psycopg-def", "asyncpg"]
)
def mixed_bank(request: pytest.FixtureRequest, tmp_path: Path) -> Bank:
    """Each store and each kind of handler, if not all together."""
    package, blocking = request.param
    return make_bank(request, tmp_path, package, blocking=blocking)


@pytest.fixture
def empty(phased_dsn: str) -> None:
    """The shared database, emptied, for a test that makes its own bank."""
    with psycopg.connect(phased_dsn, autocommit=True) as connection:
        connection.execute("TRUNCATE oncekey.record, oncekey.work, oncekey.outbox, oncekey.dead_letter, effect")
        connection.execute("DROP TABLE IF EXISTS orders")
