"""The shipped proxy between a client and a real PostgreSQL: what the server did, and what the client could know."""

from __future__ import annotations

import asyncio

import asyncpg
import pytest

from harness.dsn import address
from oncekey.torture.plan import Plan
from oncekey.torture.proxy import Loss, Proxy

LOST = (OSError, asyncpg.PostgresConnectionError, asyncpg.InterfaceError)


async def _insert(dsn: str) -> None:
    connection = await asyncpg.connect(dsn)
    try:
        async with connection.transaction():
            await connection.execute("INSERT INTO t VALUES (1)")
    finally:
        connection.terminate()


@pytest.mark.parametrize(("loss", "rows"), [(Loss.COMMIT_REPLY, 1), (Loss.COMMIT_REQUEST, 0)])
async def test_a_lost_commit_is_there_or_not_and_its_client_cannot_tell(
    postgres_dsn: str, loss: Loss, rows: int
) -> None:
    # F8
    async with Proxy(*address(postgres_dsn)) as proxy:
        through = Plan(postgres_dsn, 5, 1).through(proxy.port)
        straight = await asyncpg.connect(postgres_dsn)
        await straight.execute("CREATE TABLE t (n int)")
        proxy.lose(loss)
        with pytest.raises(LOST):
            await _insert(through)
        assert proxy.lost == {loss: 1}
        assert await straight.fetchval("SELECT count(*) FROM t") == rows
        await _insert(through)
        assert await straight.fetchval("SELECT count(*) FROM t") == rows + 1
        await straight.close()


async def test_any_reply_can_be_lost_and_connections_cut(postgres_dsn: str) -> None:
    async with Proxy(*address(postgres_dsn)) as proxy:
        connection = await asyncpg.connect(Plan(postgres_dsn, 5, 1).through(proxy.port))
        proxy.lose(Loss.ANY_REPLY)
        with pytest.raises(LOST):
            await connection.fetchval("SELECT 1")
        connection = await asyncpg.connect(Plan(postgres_dsn, 5, 1).through(proxy.port))
        proxy.hold()
        asked = asyncio.ensure_future(connection.fetchval("SELECT 1"))
        proxy.calm()
        assert await asked == 1
        proxy.cut()
        with pytest.raises(LOST):
            await connection.fetchval("SELECT 1")
