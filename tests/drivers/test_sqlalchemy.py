"""The driver for SQLAlchemy engines, on PostgreSQL by way of asyncpg and of psycopg."""

from __future__ import annotations

import psycopg
import pytest
from sqlalchemy.ext.asyncio import AsyncEngine, create_async_engine

pytest.register_assert_rewrite("oncekey.testing.contract")

from oncekey.drivers.sqlalchemy import SqlalchemyDriver  # noqa: E402  (asserts are rewritten first)
from oncekey.stores import postgres  # noqa: E402
from oncekey.stores.postgres import PostgresStore  # noqa: E402
from oncekey.testing.contract import StoreContract, under_asyncio  # noqa: E402

DIALECTS = ("asyncpg", "psycopg")


def engine_for(dsn: str, dialect: str, **options: object) -> AsyncEngine:
    return create_async_engine(dsn.replace("postgresql://", f"postgresql+{dialect}://"), **options)


@pytest.fixture
def dsn(postgres_dsn: str) -> str:
    with psycopg.connect(postgres_dsn, autocommit=True) as connection:
        connection.execute(postgres.tables().script().encode())
    return postgres_dsn


class Owner(SqlalchemyDriver):
    """Disposes of the engine, which no application's driver does."""

    def __init__(self, engine: AsyncEngine) -> None:
        super().__init__(engine)
        self.engine = engine

    async def close(self) -> None:
        await super().close()
        await self.engine.dispose()


@pytest.mark.parametrize("dialect", DIALECTS)
class TestContract(StoreContract):
    @pytest.fixture
    def world(self, dsn: str, dialect: str):
        with under_asyncio(PostgresStore, Owner(engine_for(dsn, dialect))) as world:
            yield world
