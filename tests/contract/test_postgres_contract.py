"""The shipped contract on PostgreSQL, behind every driver."""

from __future__ import annotations

import psycopg
import pytest

from harness.postgres import PostgresServer, installations
from harness.postgres_binaries import preferred_installation
from harness.tables import database_with_tables
from oncekey.databases.postgres.asyncpg import AsyncpgDriver
from oncekey.databases.postgres.generated.psycopg import PsycopgDriver
from oncekey.databases.postgres.psycopg_async import AsyncPsycopgDriver
from oncekey.databases.postgres.store import PostgresStore
from oncekey_contract import StoreContract, blocking, under_asyncio


@pytest.fixture(scope="class")
def tables(postgres_server):
    """A database with the tables, for one driver's whole contract: every scenario has keys of its own."""
    with database_with_tables(postgres_server, "contract") as dsn:
        yield dsn


class TestPsycopg(StoreContract):
    matrix = "PostgreSQL {major}"

    @pytest.fixture
    def world(self, tables):
        with blocking(PostgresStore, PsycopgDriver(tables)) as world:
            yield world


class TestAsyncPsycopg(StoreContract):
    matrix = "PostgreSQL {major}"

    @pytest.fixture
    def world(self, tables):
        with under_asyncio(PostgresStore, AsyncPsycopgDriver(tables)) as world:
            yield world


class TestAsyncpg(StoreContract):
    matrix = "PostgreSQL {major}"

    @pytest.fixture
    def world(self, tables):
        with under_asyncio(PostgresStore, AsyncpgDriver(tables)) as world:
            yield world


class TestAsyncpgUnprepared(StoreContract):
    matrix = "PostgreSQL {major}"

    @pytest.fixture
    def world(self, tables):
        with under_asyncio(PostgresStore, AsyncpgDriver(f"{tables}?pgbouncer=1")) as world:
            yield world


@pytest.fixture(scope="module", params=[one for one in installations() if one != preferred_installation()], ids=str)
def other_major(request):
    """A server of every other version that this machine has."""
    with PostgresServer(request.param) as server:
        yield server


@pytest.fixture(scope="class")
def other_tables(other_major):
    """As `tables`, on that server."""
    with database_with_tables(other_major, "contract") as dsn:
        yield dsn


@pytest.fixture
def postgres_major(request, postgres_server):
    """The version of the server that a scenario runs on."""
    server = request.getfixturevalue("other_major") if "other_major" in request.fixturenames else postgres_server
    with psycopg.connect(server.dsn()) as connection:
        return str(connection.info.server_version // 10000)


class TestOtherMajors(StoreContract):
    matrix = "PostgreSQL {major}"

    @pytest.fixture
    def world(self, other_tables):
        with blocking(PostgresStore, PsycopgDriver(other_tables)) as world:
            yield world


class TestAsyncOtherMajors(StoreContract):
    matrix = "PostgreSQL {major}"

    @pytest.fixture
    def world(self, other_tables):
        with under_asyncio(PostgresStore, AsyncpgDriver(other_tables)) as world:
            yield world
