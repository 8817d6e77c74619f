"""Stages on SQLite and PostgreSQL, for `def` and `async def` functions."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest

from frameworks.realshop import PostgresDatabase, SqliteFile
from functions.stage import Stage
from harness.databases import DatabaseServer
from oncekey.core.flow import drive
from oncekey.databases.postgres.generated.psycopg import PsycopgDriver
from oncekey.databases.postgres.store import PostgresStore
from oncekey.engine import migrating

STORES = [("sqlite", True), ("sqlite", False), ("psycopg", True), ("asyncpg", False)]


@pytest.fixture(scope="session")
def functions_dsn(postgres_server: DatabaseServer) -> Iterator[str]:
    """One database for all, emptied for each."""
    name = f"functions_{uuid.uuid4().hex}"
    dsn = postgres_server.create_database(name)
    driver = PsycopgDriver(dsn, pool_size=1)
    drive(migrating.up(PostgresStore().schema), driver.run)
    driver.close()
    yield dsn
    postgres_server.drop_database(name)


def make_stage(request: pytest.FixtureRequest, path: Path, package: str, *, blocking: bool) -> Stage:
    if package == "sqlite":
        return Stage(SqliteFile(path / "shop.db"), blocking=blocking)
    dsn = request.getfixturevalue("functions_dsn")
    with psycopg.connect(dsn, autocommit=True) as connection:
        connection.execute("TRUNCATE oncekey.record, oncekey.work, oncekey.outbox, oncekey.dead_letter")
        connection.execute("DROP TABLE IF EXISTS orders")
    return Stage(PostgresDatabase(dsn, package, pool_size=3), blocking=blocking)


@pytest.fixture(params=STORES, ids=lambda one: f"{one[0]}-{'def' if one[1] else 'async'}")
def stage(request: pytest.FixtureRequest, tmp_path: Path) -> Stage:
    """Every store and kind of function."""
    package, blocking = request.param
    return make_stage(request, tmp_path, package, blocking=blocking)


@pytest.fixture(params=[True, False], ids=["def", "async"])
def small_stage(request: pytest.FixtureRequest, tmp_path: Path) -> Stage:
    """Where the store makes no difference."""
    return make_stage(request, tmp_path, "sqlite", blocking=request.param)
