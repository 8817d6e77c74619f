"""`oncekey keys show` and GET /idempotency-keys/KEY say the same of a request on a real store."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from fastapi import Response

from cli.operating import oncekey
from frameworks.realshop import PostgresDatabase, RealShop, SqliteFile
from frameworks.shop import KEY
from harness.asgi import Caller
from oncekey import Operation, RejectedError
from oncekey.core.model import INLINE, LOCAL, PHASED

TENANT = "acme"
SAME = ("key", "state", "recovery_point", "attempts", "last_error", "expires_at", "outcome", "response", "last_run_at")


@pytest.fixture(params=["sqlite", "asyncpg"])
def database(request: pytest.FixtureRequest, tmp_path: Any) -> Any:
    if request.param == "sqlite":
        return SqliteFile(tmp_path / "shop.db")
    return PostgresDatabase(request.getfixturevalue("postgres_dsn"), "asyncpg", pool_size=3)


def shop_on(database: Any, gate: asyncio.Event) -> RealShop:
    shop = RealShop(database)

    @shop.app.post("/orders", status_code=201)
    @shop.once.protect(effects=LOCAL)
    async def order(op: Operation) -> dict[str, int]:
        await database.insert(op.connection, "tea")
        await gate.wait()
        return {"id": 1}

    @shop.app.post("/notifications", status_code=201)
    @shop.once.protect(effects=INLINE)
    async def notify(op: Operation) -> None:
        raise TimeoutError

    @shop.app.post("/payments", status_code=201)
    @shop.once.protect(effects=PHASED)
    async def pay(op: Operation) -> None:
        await op.phase("order_created", lambda _: None)
        raise RuntimeError("later")

    return shop


async def both(shop: RealShop, key: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """What the status resource and the command say."""
    reply = await Caller(shop.app, "GET", f"/idempotency-keys/{key}").run()
    assert reply.status == 200
    arguments = ("keys", "show", key, "--tenant", TENANT, "--store", shop.database.url, "--json")
    result = await asyncio.to_thread(oncekey, *arguments)
    return reply.json(), json.loads(result.stdout)


async def test_keys_show_and_status_resource_report_the_same_state(database: Any) -> None:
    # R84, R143
    gate = asyncio.Event()
    gate.set()
    shop = shop_on(database, gate)
    async with shop.open():
        for route, state, point in (
            ("/orders", "completed", "finished"),
            ("/notifications", "unknown", "started"),
            ("/payments", "failed_retryable", "order_created"),
        ):
            key = f"{KEY}{route.replace('/', '-')}"
            await shop.send(route, key=key)
            said, shown = await both(shop, key)
            assert {name: said[name] for name in SAME} == {name: shown[name] for name in SAME}
            assert (shown["state"], shown["recovery_point"]) == (state, point)


async def test_both_report_a_local_request_in_progress_then_completed(database: Any) -> None:
    # L8, F21: PostgreSQL has no row of it yet, only its lock
    gate = asyncio.Event()
    shop = shop_on(database, gate)
    async with shop.open():
        running = asyncio.create_task(shop.send("/orders"))
        try:
            for _ in range(500):
                arguments = ("keys", "show", KEY, "--tenant", TENANT, "--store", shop.database.url, "--json")
                result = await asyncio.to_thread(oncekey, *arguments)
                if result.exit_code == 0:
                    break
            said, shown = await both(shop, KEY)
            assert said["state"] == shown["state"] == "in_progress"
            assert shown["possible"] == []
        finally:
            gate.set()
            await running
        said, shown = await both(shop, KEY)
        assert said["state"] == shown["state"] == "completed"


async def test_busted_declined_payment_does_not_repeat_its_call(database: Any) -> None:
    # R106: what `keys show` says of it before is what happens
    shop, asked = RealShop(database), []

    @shop.app.post("/payments", status_code=201)
    @shop.once.protect(effects=PHASED)
    async def pay(op: Operation) -> Response:
        async def charge(key: str) -> None:
            asked.append(key)
            raise RejectedError({"reason": "insufficient_funds"})

        try:
            await op.call("charge", charge, repeatable=True)
        except RejectedError:
            return Response(status_code=402)
        return Response(status_code=201)

    where = ("--tenant", TENANT, "--store", shop.database.url)
    async with shop.open():
        assert (await shop.send("/payments", key=KEY)).status == 402
        shown = await asyncio.to_thread(oncekey, "keys", "show", KEY, *where)
        assert "a retry should compute the response from the finished steps" in shown.stdout
        assert "no provider is called again" in " ".join(shown.stdout.split())
        busted = await asyncio.to_thread(oncekey, "keys", "bust", KEY, *where, "--reason", "funds arrived")
        assert "finished steps are not repeated" in busted.stdout
        again = await shop.send("/payments", key=KEY)
        assert (again.status, again.replayed, len(asked)) == (402, False, 1)
        assert (await shop.send("/payments", key=f"{KEY}-new")).status == 402
        assert len(asked) == 2
