"""Real stores for the outbox: SQLite, PostgreSQL by both of its client libraries and SQLAlchemy, MariaDB, MySQL."""

from __future__ import annotations

import pytest
from sqlalchemy.ext.asyncio import create_async_engine

from harness.tables import database_with_tables, sqlite_with_tables
from oncekey.databases.mariadb.aiomysql import AiomysqlDriver
from oncekey.databases.mariadb.store import MariadbStore
from oncekey.databases.postgres.asyncpg import AsyncpgDriver
from oncekey.databases.postgres.generated.psycopg import PsycopgDriver
from oncekey.databases.postgres.store import PostgresStore
from oncekey.databases.sqlalchemy.asynchronous import SqlalchemyDriver
from oncekey.databases.sqlalchemy.mariadb import SqlalchemyMariadbDriver
from oncekey.databases.sqlite.blocking import SqliteDriver
from oncekey.databases.sqlite.store import SqliteStore
from oncekey_contract.world import blocking, under_asyncio


@pytest.fixture(scope="session")
def outbox_dsn(postgres_server):
    """One database with the tables for all tests of the outbox: each has topics of its own."""
    with database_with_tables(postgres_server, "outbox") as dsn:
        yield dsn


@pytest.fixture(params=["sqlite", "psycopg", "asyncpg", "sqlalchemy", "mariadb", "mysql", "sqlalchemy-mariadb"])
def world(request, tmp_path):
    """A store behind a driver, with a clock that the test owns."""
    if request.param == "sqlite":
        driver = SqliteDriver(sqlite_with_tables(tmp_path / "outbox.db"))
        with blocking(SqliteStore, driver) as world:
            yield world
        return
    if request.param in {"mariadb", "mysql"}:
        url = request.getfixturevalue(f"empty_{request.param}")
        with under_asyncio(MariadbStore, AiomysqlDriver(url)) as world:
            yield world
        return
    if request.param == "sqlalchemy-mariadb":
        engine = create_async_engine(request.getfixturevalue("empty_mariadb").replace("://", "+aiomysql://", 1))
        with under_asyncio(MariadbStore, MariadbOwner(engine)) as world:
            yield world
        return
    dsn = request.getfixturevalue("outbox_dsn")
    if request.param == "psycopg":
        with blocking(PostgresStore, PsycopgDriver(dsn)) as world:
            yield world
    elif request.param == "asyncpg":
        with under_asyncio(PostgresStore, AsyncpgDriver(dsn)) as world:
            yield world
    else:
        engine = create_async_engine(dsn.replace("postgresql:", "postgresql+asyncpg:"))
        with under_asyncio(PostgresStore, Owner(engine)) as world:
            yield world


class MariadbOwner(SqlalchemyMariadbDriver):
    """Disposes of the engine, too."""

    async def close(self):
        await super().close()
        await self._engine.dispose()


class Owner(SqlalchemyDriver):
    """Disposes of the engine, which no application's driver does."""

    def __init__(self, engine):
        super().__init__(engine)
        self.engine = engine

    async def close(self):
        await super().close()
        await self.engine.dispose()
