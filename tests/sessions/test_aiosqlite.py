"""The same on SQLite by way of SQLAlchemy and aiosqlite, where one thread does one thing after the other."""

from __future__ import annotations

import asyncio
import sqlite3
from contextlib import closing
from typing import Any

import pytest
from fastapi import HTTPException

from oncekey.core.errors import TransactionControlError
from sessions.ways import Shop

SLOW = """
    INSERT INTO orders SELECT 'late' FROM
    (WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < {steps}) SELECT max(i) FROM n)
"""


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "shop.db"
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.execute("CREATE TABLE orders (item TEXT NOT NULL)")
    return path


def rows(path: Any) -> list[str]:
    with closing(sqlite3.connect(path)) as connection:
        return [item for (item,) in connection.execute("SELECT item FROM orders ORDER BY item")]


@pytest.mark.parametrize("fails", [False, True], ids=["committed", "rolled back"])
async def test_background_statements_commit_or_roll_back_with_their_request(path, fails):  # X15
    shop = Shop("sa-sqlite", f"sqlite+aiosqlite:///{path}")
    left: list[asyncio.Task[Any]] = []

    async def leaves(op: Any) -> None:
        await shop.say(op.connection, "INSERT INTO orders VALUES ('first')")
        for steps in (300_000, 10, 10):
            left.append(asyncio.create_task(shop.say(op.connection, SLOW.format(steps=steps))))
        await asyncio.sleep(0)  # all of them are on their way
        if fails:
            raise HTTPException(402)

    async with shop.open():
        assert (await shop.send(leaves)).status == (402 if fails else 200)
        await asyncio.gather(*left, return_exceptions=True)
        found = rows(path)
        assert found == ([] if fails else ["first", "late", "late", "late"])
        assert (await shop.send(shop.saying("INSERT INTO orders VALUES ('next')"))).status == 200
        assert rows(path) == [*found, "next"]


async def test_temporary_table_does_not_reach_the_next_request(path):  # X12
    shop = Shop("sa-sqlite", f"sqlite+aiosqlite:///{path}")
    async with shop.open():
        for _ in range(2):
            assert (await shop.send(shop.saying("CREATE TEMP TABLE mine (x)"))).status == 200
            assert (await shop.send(shop.saying("SELECT name FROM sqlite_temp_master"))).json() == []


async def test_connection_kept_after_the_request_is_rejected(path):
    shop = Shop("sa-sqlite", f"sqlite+aiosqlite:///{path}")
    kept: list[Any] = []

    async with shop.open():
        assert (await shop.send(lambda op: kept.append(op.connection))).status == 200
        with pytest.raises(TransactionControlError, match="over"):
            await shop.say(kept[0], "INSERT INTO orders VALUES ('late')")
    assert rows(path) == []


async def test_leading_savepoint_is_rolled_back_with_the_request(path):
    # SQLite's module begins nothing before a savepoint, whose release would then be a commit
    shop = Shop("sa-sqlite", f"sqlite+aiosqlite:///{path}")

    async def nests(op: Any) -> None:
        async with op.connection.begin_nested():
            await shop.say(op.connection, "INSERT INTO orders VALUES ('nested')")
        raise HTTPException(402)

    async with shop.open():
        assert (await shop.send(nests)).status == 402
    assert rows(path) == []
