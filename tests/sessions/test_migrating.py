"""Several processes migrate at once: one does it, the others wait, whatever isolation the application's engine has."""

from __future__ import annotations

import asyncio

import psycopg
import pytest
from sqlalchemy.ext.asyncio import create_async_engine

from harness.tables import await_waiters
from oncekey.databases.postgres.store import tables
from oncekey.once import Once

LOCK = "SELECT pg_advisory_xact_lock(6012904419870137)"
MIGRATORS = 3


@pytest.mark.parametrize("isolation", ["READ COMMITTED", "REPEATABLE READ", "SERIALIZABLE"])
@pytest.mark.parametrize("dialect", ["asyncpg", "psycopg"])
async def test_processes_waiting_for_a_migration_see_its_result(postgres_dsn, dialect, isolation):  # X17
    async def start() -> None:
        address = postgres_dsn.replace("postgresql:", f"postgresql+{dialect}:")
        engine = create_async_engine(address, isolation_level=isolation)
        once = Once(engine, migrate=True)
        try:
            await once.start()
            await once.stop()
        finally:
            await engine.dispose()

    with psycopg.connect(postgres_dsn) as held:
        held.execute(LOCK)
        # All of them took their snapshots, if they take any before the lock, while there was nothing to see.
        starting = [asyncio.create_task(start()) for _ in range(MIGRATORS)]
        await asyncio.to_thread(await_waiters, postgres_dsn, MIGRATORS)
        held.rollback()
        await asyncio.gather(*starting)
        applied = held.execute("SELECT count(*) FROM oncekey.migration").fetchone()
    assert applied == (len(tables().migrations),)
