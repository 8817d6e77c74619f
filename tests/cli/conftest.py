"""Stores for operators' commands: a SQLite file and a PostgreSQL database of the test's own."""

from __future__ import annotations

import pytest

from harness.tables import database_with_tables, empty_tables
from oncekey import wire


@pytest.fixture(scope="session")
def operated_dsn(postgres_server):
    """One database with the tables for all tests of operators' commands; each finds it empty."""
    with database_with_tables(postgres_server, "operated") as dsn:
        yield dsn


@pytest.fixture(params=["sqlite", "postgresql"])
def url(request, tmp_path):
    """The address of a store with its tables."""
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path / 'shop.db'}"
    return empty_tables(request.getfixturevalue("operated_dsn"))


@pytest.fixture
def shop(url):
    """The application's side of that store."""
    engine = wire.connect(url)
    engine.migrate()
    yield engine
    engine.close()
