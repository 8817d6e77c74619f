"""The shipped proxy between a client and a real PostgreSQL: what the server did, and what the client could know."""

from __future__ import annotations

import asyncio

import asyncpg
import pytest

from harness.dsn import address
from oncekey.core.errors import CommitAmbiguousError
from oncekey.core.flow import adrive
from oncekey.databases.mariadb.aiomysql import AiomysqlDriver
from oncekey.databases.mariadb.store import MariadbStore
from oncekey.testing.claims import a_claim
from oncekey_demo.torture.plan import Plan
from oncekey_demo.torture.proxy import Loss, Proxy, answered_mysql

LOST = (OSError, asyncpg.PostgresConnectionError, asyncpg.InterfaceError)


async def _insert(dsn: str) -> None:
    connection = await asyncpg.connect(dsn)
    try:
        async with connection.transaction():
            await connection.execute("INSERT INTO t VALUES (1)")
    finally:
        connection.terminate()


@pytest.mark.parametrize(("loss", "rows"), [(Loss.COMMIT_REPLY, 1), (Loss.COMMIT_REQUEST, 0)])
async def test_lost_commit_reply_raises_whether_or_not_it_was_applied(postgres_dsn: str, loss: Loss, rows: int) -> None:
    # F8
    async with Proxy(*address(postgres_dsn)) as proxy:
        through = Plan(postgres_dsn, 5, 1).url_through(proxy.port)
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
        connection = await asyncpg.connect(Plan(postgres_dsn, 5, 1).url_through(proxy.port))
        proxy.lose(Loss.ANY_REPLY)
        with pytest.raises(LOST):
            await connection.fetchval("SELECT 1")
        connection = await asyncpg.connect(Plan(postgres_dsn, 5, 1).url_through(proxy.port))
        proxy.hold()
        asked = asyncio.ensure_future(connection.fetchval("SELECT 1"))
        proxy.calm()
        assert await asked == 1
        proxy.cut()
        with pytest.raises(LOST):
            await connection.fetchval("SELECT 1")


@pytest.mark.parametrize(("loss", "rows"), [(Loss.COMMIT_REPLY, 1), (Loss.COMMIT_REQUEST, 0)])
def test_repeated_mariadb_claim_after_a_lost_reply_is_exact(empty_mariadb: str, loss: Loss, rows: int) -> None:
    """F8: PyMySQL says 2013 either way, so a lost reply is ambiguous; what is stored says which it was."""
    store, claim = MariadbStore(), a_claim(f"lost-{rows}")

    async def run() -> None:
        async with Proxy(*Plan(empty_mariadb, 5, 1).databases[0], is_whole=answered_mysql) as proxy:
            driver = AiomysqlDriver(Plan(empty_mariadb, 5, 1).url_through(proxy.port))
            straight = AiomysqlDriver(empty_mariadb)
            await adrive(store.find(claim.id), driver.run)
            proxy.lose(loss)
            with pytest.raises(CommitAmbiguousError):
                await adrive(store.claim(claim), driver.run)
            assert proxy.lost == {loss: 1}
            found = (await adrive(store.find(claim.id), straight.run)).record
            assert (found is not None) == bool(rows)
            # Said again it finds its own record, or makes it.
            again = (await adrive(store.claim(claim), driver.run)).record
            assert again is not None
            assert again.owner == claim.owner
            await driver.close()
            await straight.close()

    asyncio.run(run())


@pytest.mark.parametrize(
    ("reply", "whole"),
    [
        (b"\x07\0\0\x01\0\0\0\x02\0\0\0", True),
        (b"\x07\0\0\x01\0\0\0\x0a\0\0\0", False),  # more follows
        (b"\x09\0\0\x01\0\xfc\x01\x02\0\x02\0\0\0", True),  # many rows
        (b"\x07\0\0\x01\0\0\0\x0a\0\0\0\x03\0\0\x02\xff\x10\x04", True),
        (b"\x07\0\0\x01\0\0", False),
    ],
)
def test_mariadb_reply_parser_detects_complete_replies(reply: bytes, whole: bool) -> None:
    assert answered_mysql(reply) is whole
