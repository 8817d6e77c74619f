"""The shipped contract on PostgreSQL, behind every driver."""

from __future__ import annotations

import asyncio

import asyncpg
import psycopg
import pytest

from harness.tables import database_with_tables
from oncekey.drivers.asyncpg import AsyncpgDriver, AsyncpgWithin
from oncekey.drivers.psycopg import (
    AsyncPsycopgDriver,
    AsyncPsycopgWithin,
    PsycopgDriver,
    PsycopgWithin,
)
from oncekey.drivers.threads import threaded
from oncekey.stores.postgres import PostgresStore
from oncekey.testing.contract import StoreContract, blocking, under_asyncio


@pytest.fixture(scope="class")
def tables(postgres_server):
    """A database with the tables, for one driver's whole contract: every scenario has keys of its own."""
    with database_with_tables(postgres_server, "contract") as dsn:
        yield dsn


class TestPsycopg(StoreContract):
    @pytest.fixture
    def world(self, tables):
        with blocking(PostgresStore, PsycopgDriver(tables)) as world:
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


class TestAsyncpg(StoreContract):
    @pytest.fixture
    def world(self, tables):
        with under_asyncio(PostgresStore, AsyncpgDriver(tables)) as world:
            yield world


class TestAsyncpgUnprepared(StoreContract):
    @pytest.fixture
    def world(self, tables):
        with under_asyncio(PostgresStore, AsyncpgDriver(f"{tables}?pgbouncer=1")) as world:
            yield world


class InCallersTransaction:
    """A caller whose own transaction is open for the whole of a test, and then rolled back."""

    def __init__(self, dsn):
        self._connection = psycopg.connect(dsn)
        self.run = PsycopgWithin(self._connection).run

    def close(self):
        self._connection.rollback()
        self._connection.close()


class InAsyncCallersTransaction:
    """The same for asyncio; the connection belongs to the loop, so it is made there."""

    def __init__(self, begin):
        self._begin = begin
        self._begun = None

    async def run(self, transaction):
        # The tests' threads meet here: whoever comes first begins for all.
        if self._begun is None:
            self._begun = asyncio.ensure_future(self._begin())
        within, _ = await self._begun
        return await within.run(transaction)

    async def close(self):
        if self._begun is not None:
            _, undo = await self._begun
            await undo()


class TestWithinPsycopg(StoreContract):
    @pytest.fixture
    def world(self, tables):
        with blocking(PostgresStore, InCallersTransaction(tables)) as world:
            yield world


class TestWithinAsyncPsycopg(StoreContract):
    @pytest.fixture
    def world(self, tables):
        async def begin():
            connection = await psycopg.AsyncConnection.connect(tables)

            async def undo():
                await connection.rollback()
                await connection.close()

            return AsyncPsycopgWithin(connection), undo

        with under_asyncio(PostgresStore, InAsyncCallersTransaction(begin)) as world:
            yield world


class TestWithinAsyncpg(StoreContract):
    @pytest.fixture
    def world(self, tables):
        async def begin():
            connection = await asyncpg.connect(tables)
            transaction = connection.transaction()
            await transaction.start()

            async def undo():
                await transaction.rollback()
                await connection.close()

            return AsyncpgWithin(connection), undo

        with under_asyncio(PostgresStore, InAsyncCallersTransaction(begin)) as world:
            yield world
