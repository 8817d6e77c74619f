"""The shipped contract on PostgreSQL, behind engines of SQLAlchemy."""

from __future__ import annotations

import uuid

import psycopg
import pytest
from sqlalchemy.ext.asyncio import AsyncEngine, create_async_engine

from oncekey.drivers.sqlalchemy import SqlalchemyDriver
from oncekey.stores import postgres
from oncekey.stores.postgres import PostgresStore
from oncekey.testing.contract import StoreContract, under_asyncio


class Owner(SqlalchemyDriver):
    """Disposes of the engine, which no application's driver does."""

    def __init__(self, engine: AsyncEngine) -> None:
        super().__init__(engine)
        self.engine = engine

    async def close(self) -> None:
        await super().close()
        await self.engine.dispose()


@pytest.fixture(scope="class")
def tables(postgres_server):
    """A database with the tables, for one engine's whole contract: every scenario has keys of its own."""
    name = f"contract_{uuid.uuid4().hex}"
    dsn = postgres_server.create_database(name)
    with psycopg.connect(dsn, autocommit=True) as connection:
        connection.execute(postgres.tables().script().encode())
    yield dsn
    postgres_server.drop_database(name)


class TestAsyncpg(StoreContract):
    @pytest.fixture
    def world(self, tables):
        engine = create_async_engine(tables.replace("postgresql:", "postgresql+asyncpg:"))
        with under_asyncio(PostgresStore, Owner(engine)) as world:
            yield world


class TestPsycopg(StoreContract):
    @pytest.fixture
    def world(self, tables):
        engine = create_async_engine(tables.replace("postgresql:", "postgresql+psycopg:"))
        with under_asyncio(PostgresStore, Owner(engine)) as world:
            yield world


class TestSerializable(StoreContract):
    """Under a stricter default the statements collide more often, and are said again."""

    @pytest.fixture
    def world(self, tables):
        engine = create_async_engine(
            tables.replace("postgresql:", "postgresql+asyncpg:"), isolation_level="SERIALIZABLE"
        )
        with under_asyncio(PostgresStore, Owner(engine)) as world:
            yield world
