"""Banks on SQLite and PostgreSQL, with `async def` and `def` handlers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest

from frameworks.realshop import MariadbDatabase, PostgresDatabase, SqliteFile
from harness.databases import DatabaseServer
from harness.tables import database_with_tables, empty_tables
from phased.bank import Bank

EFFECT = "CREATE TABLE effect (item TEXT NOT NULL)"
WORLDS = [
    ("sqlite", False),
    ("sqlite", True),
    ("asyncpg", False),
    ("psycopg", False),
    ("psycopg", True),
    ("aiomysql", False),
]


@pytest.fixture(scope="session")
def phased_dsn(postgres_server: DatabaseServer) -> Iterator[str]:
    """One database for all, emptied by each."""
    with database_with_tables(postgres_server, "phased") as dsn:
        with psycopg.connect(dsn, autocommit=True) as connection:
            connection.execute(EFFECT)
        yield dsn


def emptied(dsn: str) -> str:
    with psycopg.connect(empty_tables(dsn), autocommit=True) as connection:
        connection.execute("TRUNCATE effect")
        connection.execute("DROP TABLE IF EXISTS orders")
    return dsn


def make_bank(request: pytest.FixtureRequest, path: Path, package: str, *, blocking: bool) -> Bank:
    if package == "sqlite":
        database = SqliteFile(path / "bank.db")
        database.execute(EFFECT)
        return Bank(database, blocking=blocking)
    if package == "aiomysql":
        mariadb = MariadbDatabase(request.getfixturevalue("mariadb_url"), package, pool_size=3)
        mariadb.execute(EFFECT)
        return Bank(mariadb, blocking=blocking)
    dsn = emptied(request.getfixturevalue("phased_dsn"))
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
    emptied(phased_dsn)
