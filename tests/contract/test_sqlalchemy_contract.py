"""The shipped contract on PostgreSQL, SQLite and MariaDB, behind engines of SQLAlchemy."""

from __future__ import annotations

import pytest
from sqlalchemy import Engine, create_engine
from sqlalchemy.ext.asyncio import AsyncEngine, create_async_engine

from harness.mariadb import mariadb_with_tables
from harness.tables import database_with_tables
from oncekey.core.flow import drive
from oncekey.databases.mariadb.store import MariadbStore
from oncekey.databases.postgres.store import PostgresStore
from oncekey.databases.sqlalchemy.asynchronous import SqlalchemyDriver
from oncekey.databases.sqlalchemy.generated.driver import BlockingSqlalchemyDriver
from oncekey.databases.sqlalchemy.mariadb import SqlalchemyMariadbDriver
from oncekey.databases.sqlite.store import SqliteStore
from oncekey.engine import migrating
from oncekey_contract import StoreContract, blocking, under_asyncio


class Owner(SqlalchemyDriver):
    """Disposes of the engine, which no application's driver does."""

    def __init__(self, engine: AsyncEngine) -> None:
        super().__init__(engine)
        self.engine = engine

    async def close(self) -> None:
        await super().close()
        await self.engine.dispose()


class BlockingOwner(BlockingSqlalchemyDriver):
    """The same of a blocking engine."""

    def __init__(self, engine: Engine) -> None:
        super().__init__(engine)
        self.engine = engine

    def close(self) -> None:
        super().close()
        self.engine.dispose()


@pytest.fixture(scope="class")
def tables(postgres_server):
    """A database with the tables, for one engine's whole contract: every scenario has keys of its own."""
    with database_with_tables(postgres_server, "contract") as dsn:
        yield dsn


class TestAsyncpg(StoreContract):
    """On an engine with another isolation level, which the driver does not use: this shows the default, too."""

    matrix = "PostgreSQL {major}"

    @pytest.fixture
    def world(self, tables):
        engine = create_async_engine(
            tables.replace("postgresql:", "postgresql+asyncpg:"), isolation_level="SERIALIZABLE"
        )
        with under_asyncio(PostgresStore, Owner(engine)) as world:
            yield world


@pytest.fixture(scope="class")
def mariadb_keys(mariadb_server):
    """The same on MariaDB: MySQL has the same statements, and its own contract without SQLAlchemy."""
    with mariadb_with_tables(mariadb_server, "contract") as url:
        yield url


class MariadbOwner(SqlalchemyMariadbDriver):
    """Disposes of the engine, too."""

    async def close(self) -> None:
        await super().close()
        await self._engine.dispose()


class TestAiomysql(StoreContract):
    @pytest.fixture
    def world(self, mariadb_keys):
        engine = create_async_engine(mariadb_keys.replace("://", "+aiomysql://", 1))
        with under_asyncio(MariadbStore, MariadbOwner(engine)) as world:
            yield world


class TestBlockingPsycopg(StoreContract):
    matrix = "PostgreSQL {major}"

    @pytest.fixture
    def world(self, tables):
        engine = create_engine(tables.replace("postgresql:", "postgresql+psycopg:"))
        with blocking(PostgresStore, BlockingOwner(engine)) as world:
            yield world


class TestBlockingSqlite(StoreContract):
    matrix = "SQLite"

    @pytest.fixture
    def world(self, tmp_path):
        driver = BlockingOwner(create_engine(f"sqlite:///{tmp_path}/keys.db"))
        drive(migrating.up(SqliteStore().schema), driver.run)
        with blocking(SqliteStore, driver) as world:
            yield world
