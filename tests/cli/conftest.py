"""Stores for operators' commands: a SQLite file and a PostgreSQL database of the test's own."""

from __future__ import annotations

import uuid

import psycopg
import pytest

from oncekey import wire


@pytest.fixture(scope="session")
def operated_dsn(postgres_server):
    """One database with the tables for all tests of operators' commands; each finds it empty."""
    name = f"operated_{uuid.uuid4().hex}"
    dsn = postgres_server.create_database(name)
    engine = wire.connect(dsn)
    engine.migrate()
    engine.close()
    yield dsn
    postgres_server.drop_database(name)


@pytest.fixture(params=["sqlite", "postgresql"])
def url(request, tmp_path):
    """The address of a store with its tables."""
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path / 'shop.db'}"
    dsn = request.getfixturevalue("operated_dsn")
    with psycopg.connect(dsn, autocommit=True) as connection:
        tables = connection.execute(
            "SELECT string_agg('oncekey.' || tablename, ', ') FROM pg_tables "
            "WHERE schemaname = 'oncekey' AND tablename <> 'migration'"
        ).fetchone()
        connection.execute(f"TRUNCATE {tables[0]}")
    return dsn


@pytest.fixture
def shop(url):
    """The application's side of that store."""
    engine = wire.connect(url)
    engine.migrate()
    yield engine
    engine.close()
