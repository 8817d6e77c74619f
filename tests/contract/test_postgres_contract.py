"""The shipped contract on PostgreSQL, behind every driver."""

from __future__ import annotations

import uuid

import pytest

pytest.register_assert_rewrite("oncekey.testing.contract")

from oncekey.drivers.psycopg import AsyncPsycopgDriver, PsycopgDriver  # noqa: E402  (asserts are rewritten first)
from oncekey.drivers.threads import threaded  # noqa: E402
from oncekey.engine import migrate  # noqa: E402
from oncekey.flow import drive  # noqa: E402
from oncekey.stores.postgres import PostgresStore  # noqa: E402
from oncekey.testing.contract import StoreContract, blocking, under_asyncio  # noqa: E402


@pytest.fixture(scope="class")
def tables(postgres_server):
    """A database with the tables, for one driver's whole contract: every scenario has keys of its own."""
    name = f"contract_{uuid.uuid4().hex}"
    dsn = postgres_server.create_database(name)
    driver = PsycopgDriver(dsn, pool_size=1)
    drive(migrate.up(PostgresStore().schema), driver.run)
    driver.close()
    yield dsn
    postgres_server.drop_database(name)


class TestPsycopg(StoreContract):
    @pytest.fixture
    def world(self, tables):
        with blocking(PostgresStore, PsycopgDriver(tables)) as world:
            yield world


class TestPsycopgPrepared(StoreContract):
    @pytest.fixture
    def world(self, tables):
        with blocking(PostgresStore, PsycopgDriver(tables, prepare_threshold=0)) as world:
            yield world


class TestAsyncPsycopg(StoreContract):
    @pytest.fixture
    def world(self, tables):
        with under_asyncio(PostgresStore, AsyncPsycopgDriver(tables)) as world:
            yield world


class TestThreadedPsycopg(StoreContract):
    @pytest.fixture
    def world(self, tables):
        with under_asyncio(PostgresStore, threaded(PsycopgDriver(tables))) as world:
            yield world
