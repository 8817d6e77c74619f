"""A record that cannot be read: an answer with a code of its own, a log line that names it, and never a second run."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from fastapi.responses import JSONResponse

from frameworks.realshop import PostgresDatabase, RealShop, SqliteFile
from frameworks.shop import KEY
from harness.asgi import Caller
from oncekey.core.keys import key_digest
from oncekey.core.model import INLINE, LOCAL
from oncekey.core.policy import Policy
from oncekey.engine.operation import Operation

UNREADABLE = (500, "idempotency_record_unreadable")
SPOILT = {
    "headers that are no JSON": "response_headers = 'x'",
    "headers that are no lines": "response_headers = '{\"a\": 1}'",
    "headers that are no text": "response_headers = '[[1, 2]]'",
    "an answer from the future": "response_schema = 3",
    "a state from the future": "state = 'frozen'",
    "effects from the future": "effects = 'entangled'",
}
SPOILT_STEPS = "memo = 'x'"
"""The steps of a finished record are no part of its answer."""


def spoil(database: Any, change: str) -> None:
    """Write what only another version would write, past the constraints of this one."""
    sql = f"UPDATE {database.records} SET {change}"
    if isinstance(database, SqliteFile):
        with closing(sqlite3.connect(database.path)) as connection, connection:
            connection.execute("PRAGMA ignore_check_constraints = ON")
            connection.execute(sql)
        return
    if change.startswith("memo"):
        # A record that has no steps has no row of its own for them.
        database.execute(
            "INSERT INTO oncekey.work (incarnation, scope, key, memo_version, memo) "
            "SELECT incarnation, scope, key, version, 'x' FROM oncekey.record"
        )
        database.execute("UPDATE oncekey.record SET memo_version = version")
        return
    named = "SELECT conname FROM pg_constraint WHERE conrelid = 'oncekey.record'::regclass AND contype = 'c'"
    for (name,) in database.execute(named):
        database.execute(f"ALTER TABLE oncekey.record DROP CONSTRAINT {name}")
    database.execute(sql)


@pytest.fixture(params=["sqlite", "asyncpg", "psycopg"])
def database(request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    if request.param == "sqlite":
        return SqliteFile(tmp_path / "shop.db")
    return PostgresDatabase(request.getfixturevalue("tables_dsn"), request.param)


def shop_on(database: Any, **policy: Any) -> RealShop:
    shop = RealShop(database, policy=Policy(**policy))

    @shop.app.post("/orders")
    @shop.once.protect(effects=LOCAL)
    async def create(op: Operation, item: str = "tea") -> Any:
        shop.runs.append(item)
        await database.insert(op.connection, item)
        return JSONResponse({"item": item}, 201)

    @shop.app.post("/charges")
    @shop.once.protect(effects=INLINE)
    async def charge() -> Any:
        shop.runs.append("charge")
        return JSONResponse({}, 201)

    return shop


@pytest.mark.parametrize("target", ["/orders", "/charges"])
@pytest.mark.parametrize("way", SPOILT)
async def test_an_unreadable_record_returns_its_own_problem(
    database: Any, target: str, way: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with shop_on(database).open() as shop:
        assert (await shop.send(target)).status == 201
        spoil(database, SPOILT[way])
        replies = [await shop.send(target) for _ in range(7)]  # more than a breaker needs to open
        assert [(reply.status, reply.code) for reply in replies] == [UNREADABLE] * 7
        assert (len(shop.runs), len(shop.rows)) == (1, target == "/orders")
        assert key_digest(KEY) in caplog.text
        assert KEY not in caplog.text
        # Nobody else is disturbed, and no connection is lost.
        others = [await shop.send(f"/orders?item=i{n}", key=f"another-key-{n:06}") for n in range(12)]
        assert {reply.status for reply in others} == {201}


async def test_fail_open_does_not_run_an_unreadable_record(database: Any) -> None:
    # R110: there is a record, so there was a request
    shop = shop_on(database)

    @shop.app.post("/notes")
    @shop.once.protect(effects=INLINE, on_store_error="fail_open", naturally_idempotent=True)
    async def note() -> Any:
        shop.runs.append("note")
        return JSONResponse({}, 201)

    async with shop.open():
        await shop.send("/notes")
        spoil(database, "response_schema = 9")
        reply = await shop.send("/notes")
        assert ((reply.status, reply.code), shop.runs) == (UNREADABLE, ["note"])


async def test_an_unreadable_record_ignores_wait_and_fingerprint(database: Any) -> None:
    async with shop_on(database, on_in_progress="wait").open() as shop:
        await shop.send()
        spoil(database, "response_headers = 'x'")
        replies = [await shop.send(), await shop.send("/orders?item=coffee")]
        assert ([(reply.status, reply.code) for reply in replies], shop.runs) == ([UNREADABLE] * 2, ["tea"])


@pytest.mark.parametrize("change", ["response_schema = 3", SPOILT_STEPS])
async def test_the_status_resource_reports_an_unreadable_record(
    database: Any, change: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with shop_on(database).open() as shop:
        first = await shop.send()
        spoil(database, change)
        if change == SPOILT_STEPS:
            again = await shop.send()
            assert (again.replayed, again.body) == (True, first.body)
        reply = await Caller(shop.app, "GET", f"/idempotency-keys/{KEY}").run()
        assert (reply.status, reply.code) == UNREADABLE
        assert key_digest(KEY) in caplog.text


async def test_an_owner_of_an_unreadable_record_returns_an_error(database: Any) -> None:
    # P3: a later version took the key over while the handler ran
    async with shop_on(database).open() as shop:
        taken = "fence = fence + 1, version = version + 1, owner = 'later', effects = 'entangled'"

        @shop.app.post("/slow")
        @shop.once.protect(effects=INLINE)
        async def slow() -> Any:
            shop.runs.append("slow")
            spoil(database, taken)
            return JSONResponse({}, 201)

        reply = await shop.send("/slow")
        assert ((reply.status, reply.code), shop.runs) == (UNREADABLE, ["slow"])
