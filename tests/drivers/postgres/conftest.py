"""The drivers for PostgreSQL behind one face, so that each test is said once and run by all of them."""

from __future__ import annotations

import psycopg
import pytest

from drivers.postgres.drivers import ASYNC_PSYCOPG, ASYNCPG, PSYCOPG
from harness.tables import database_with_tables

ORDERS = "CREATE TABLE orders (id serial PRIMARY KEY, item text NOT NULL UNIQUE DEFERRABLE)"


@pytest.fixture(params=(PSYCOPG, ASYNC_PSYCOPG, ASYNCPG))
def kind(request):
    """Which driver."""
    return request.param


@pytest.fixture(scope="module")
def dsn(postgres_server):
    """A database with oncekey's tables and one of the application's, for a file's tests."""
    with database_with_tables(postgres_server, "drivers") as dsn:
        with psycopg.connect(dsn) as connection:
            connection.execute(ORDERS)
        yield dsn


@pytest.fixture
def raw(dsn):
    """Somebody else's connection."""
    with psycopg.connect(dsn, autocommit=True) as connection:
        yield connection
