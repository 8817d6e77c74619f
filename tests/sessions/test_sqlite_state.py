"""What a handler leaves on a connection to SQLite does not reach the next request, of another tenant."""

import sqlite3
from contextlib import closing
from typing import Any

import pytest

from oncekey.core.errors import TransactionControlError
from sessions.ways import ON_SQLITE, Shop

TABLES = """
    CREATE TABLE accounts (id INTEGER PRIMARY KEY, balance INTEGER CHECK (balance >= 0));
"""
LEFT = {
    "no checks": ("PRAGMA ignore_check_constraints = ON", "PRAGMA ignore_check_constraints", [[0]]),
    "no checks, in a call": ("PRAGMA ignore_check_constraints(1)", "PRAGMA ignore_check_constraints", [[0]]),
    "another LIKE": ("PRAGMA case_sensitive_like = ON", "SELECT 'A' LIKE 'a'", [[1]]),
    "another order": ("/* */ pragma reverse_unordered_selects = ON", "PRAGMA reverse_unordered_selects", [[0]]),
    "no patience": ("PRAGMA busy_timeout = 1", "SELECT timeout > 1 FROM pragma_busy_timeout", [[1]]),
    "a temporary table": ("CREATE TEMP TABLE mine (x)", "SELECT count(*) FROM sqlite_temp_master", [[0]]),
    "a temporary view": (
        "CREATE TEMPORARY VIEW accounts AS SELECT 1 AS mine",
        "SELECT count(*) FROM sqlite_temp_master",
        [[0]],
    ),
}
REFUSED = (
    "ATTACH DATABASE ':memory:' AS mine",
    "PRAGMA query_only = ON",
    "PRAGMA main.max_page_count = 1",
    "PRAGMA hard_heap_limit = 1000000",
    "PRAGMA journal_mode = OFF",
)
ALLOWED = "INSERT INTO accounts (balance) VALUES (5)"


@pytest.fixture(params=ON_SQLITE)
def shop(request: pytest.FixtureRequest, tmp_path: Any) -> Shop:
    path = tmp_path / "shop.db"
    with closing(sqlite3.connect(path)) as connection:
        connection.executescript(TABLES)
    scheme = "sqlite+aiosqlite" if request.param == "sa-sqlite" else "sqlite"
    return Shop(request.param, f"{scheme}:///{path}")


async def test_connection_state_does_not_reach_the_next_request(shop: Shop) -> None:
    async with shop.open():
        for what, (statement, query, expected) in LEFT.items():
            assert (await shop.send(shop.saying(query), tenant="bolt")).json() == expected, what
            assert (await shop.send(shop.saying(statement), tenant="acme")).status == 200, what
            for _ in range(3):
                assert (await shop.send(shop.saying(query), tenant="bolt")).json() == expected, what


async def test_pragmas_that_prevent_storing_the_record_are_rejected(shop: Shop) -> None:
    said: list[str] = []

    async def tries(op: Any) -> None:
        for statement in REFUSED:
            with pytest.raises(TransactionControlError) as refused:
                await shop.say(op.connection, statement)
            said.append(str(refused.value))

    async with shop.open():
        assert (await shop.send(tries, tenant="acme")).status == 200
        assert len(said) == len(REFUSED)
        assert (await shop.send(shop.saying(ALLOWED), tenant="bolt")).status == 200
