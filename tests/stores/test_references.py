"""What an application's own tables may say about a record: the foreign key that the reference page offers."""

from __future__ import annotations

import re
from typing import Any

import pytest

from frameworks.realshop import PostgresDatabase, RealShop
from harness.pages import ROOT
from oncekey.core.model import LOCAL
from oncekey.engine.operation import Operation
from oncekey.workers.upkeep import Reaper

ORDERS = "CREATE TABLE bills (item text, key_scope text, key_text text)"
AGO = "(extract(epoch FROM now()) * 1000000)::bigint - 100 * 86400000000::bigint"


def offered() -> str:
    """The statement of the page, about this test's table."""
    page = (ROOT / "docs/reference/schema.md").read_text()
    (found,) = re.findall(r"```sql\n(ALTER TABLE orders ADD FOREIGN KEY.*?)```", page, re.DOTALL)
    return found.replace("ALTER TABLE orders", "ALTER TABLE bills")


@pytest.fixture(params=["asyncpg", "psycopg"])
def shop(request: pytest.FixtureRequest, postgres_dsn: str) -> RealShop:
    shop = RealShop(PostgresDatabase(postgres_dsn, request.param, pool_size=3))
    shop.database.execute(ORDERS)

    async def write(op: Operation) -> dict[str, str]:
        words = {"asyncpg": "$1, $2, $3", "psycopg": "%s, %s, %s"}[shop.database.package]
        given: Any = ("tea", op.scope, op.key)
        given = given if shop.database.package == "asyncpg" else (given,)
        await op.connection.execute(f"INSERT INTO bills VALUES ({words})", *given)
        return {"item": "tea"}

    shop.app.post("/orders", status_code=201)(shop.once.protect(effects=LOCAL)(write))
    return shop


async def test_foreign_key_is_nulled_when_the_key_is_reaped(shop: RealShop) -> None:  # R31
    async with shop.open():
        shop.database.execute(offered())
        assert [(await shop.send()).status for _ in range(2)] == [201, 201]
        ((scope, key),) = shop.database.execute("SELECT key_scope, key_text FROM bills")
        assert shop.database.execute("SELECT scope, key FROM oncekey.record") == [(scope, key)]
        # A hundred days later the reaper takes the key.
        shop.database.execute(f"UPDATE oncekey.record SET created_at = {AGO}, finished_at = {AGO}, expires_at = {AGO}")
        engine = shop.once.asynchronous()
        await Reaper(engine.store.upkeep, engine.store.audit, engine.driver.run, shop.once.policy).run_once()
        assert shop.states == []
        assert shop.database.execute("SELECT item, key_scope, key_text FROM bills") == [("tea", None, None)]
