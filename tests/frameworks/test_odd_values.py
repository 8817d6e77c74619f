"""Values that a store cannot hold, and bodies that take long to compare: a clear answer, and no other request waits."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from typing import Any

import pytest
from fastapi import Request

from frameworks.realshop import PostgresDatabase, RealShop, SqliteFile
from frameworks.shop import new_key
from harness.asgi import Caller
from harness.patience import PATIENCE
from oncekey.core.errors import BodyInvalidError
from oncekey.core.model import INLINE, LOCAL
from oncekey.engine.operation import Operation
from oncekey.frameworks.asgi import requests


@pytest.fixture(params=["sqlite", "psycopg", "asyncpg"])
def database(request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    if request.param == "sqlite":
        return SqliteFile(tmp_path / "shop.db")
    return PostgresDatabase(request.getfixturevalue("tables_dsn"), request.param, pool_size=3)


@pytest.mark.parametrize("key", ["a%00b-and-some-more-letters", "%C3%A9-and-some-more-letters", "%F0%9F%94%91" * 8])
async def test_the_status_of_an_invalid_key_is_404(database: Any, key: str) -> None:  # R29, R84
    async with RealShop(database).open() as shop:
        reply = await Caller(shop.app, "GET", f"/idempotency-keys/{key}").run()
        assert (reply.status, reply.code) == (404, "idempotency_key_not_found")


@pytest.mark.parametrize(
    ("topic", "payload", "order_by"),
    [
        ("receipt", {"name": "\ud800"}, None),
        ("receipt", {"\udfff": 1}, None),
        ("receipt", {"ok": 1}, "\udc00"),
        ("receipt", {"ok": 1}, "a\0b"),
        ("re\0ceipt", {"ok": 1}, None),
        ("receipt\ud800", {"ok": 1}, None),
    ],
)
async def test_emitting_an_unstorable_message_returns_500(
    database: Any, topic: str, payload: Any, order_by: str | None
) -> None:  # R123: 500 at once, and not "store unavailable" for ever
    shop = RealShop(database)

    @shop.app.post("/orders")
    @shop.once.protect(effects=LOCAL)
    async def create(op: Operation) -> dict[str, str]:
        op.emit(topic, payload, order_by=order_by)
        return {}

    async with shop.open():
        reply = await Caller(shop.app, "POST", "/orders", headers=[("Idempotency-Key", new_key())]).run()
        assert (reply.status, reply.header("retry-after")) == (500, None)


async def test_a_large_body_is_fingerprinted_in_a_thread(database: Any, monkeypatch: Any) -> None:  # R34
    """A megabyte of short numbers takes a second: the loop goes on serving others meanwhile."""
    shop = RealShop(database)
    threads: list[int] = []
    compare = requests.fingerprint_for

    def watched(*args: Any, **kwargs: Any) -> Any:
        threads.append(threading.get_ident())
        return compare(*args, **kwargs)

    monkeypatch.setattr(requests, "fingerprint_for", watched)

    @shop.app.post("/orders")
    @shop.once.protect(effects=INLINE)
    async def create(request: Request) -> dict[str, int]:
        return {"bytes": len(await request.body())}

    async with shop.open():
        for body in (b"[0e0]", b"[" + b",".join([b"0e0"] * 100_000) + b"]"):
            headers = [("Idempotency-Key", new_key()), ("Content-Type", "application/json")]
            replies = [await Caller(shop.app, "POST", "/orders", headers=headers, body=body).run() for _ in range(2)]
            assert [(reply.status, reply.replayed) for reply in replies] == [(200, False), (200, True)]
            assert replies[0].json() == {"bytes": len(body)}
        odd = Caller(shop.app, "POST", "/orders", headers=headers, body=b"[" + b"1e5," * 50_000)
        assert (await odd.run()).code == "idempotency_body_invalid"
    small, large = threads[:2], threads[2:]
    assert set(small) == {threading.get_ident()}
    assert threading.get_ident() not in large


@pytest.mark.parametrize("size", [10, 100_000])
async def test_a_custom_fingerprint_runs_in_the_event_loop(size: int, tmp_path: Path) -> None:  # R39
    """It may touch what belongs to the loop; only the hashing of a large body goes elsewhere."""
    shop = RealShop(SqliteFile(tmp_path / "shop.db"))
    threads: list[int] = []

    def chosen(request: Any) -> dict[str, object]:
        threads.append(threading.get_ident())
        if request.body.startswith(b"!"):
            raise BodyInvalidError("It cannot be read.")
        return {"first": request.body[:1].decode()}

    @shop.app.post("/orders")
    @shop.once.protect(effects=INLINE, fingerprint=chosen)
    async def create() -> dict[str, str]:
        return {}

    async with shop.open():
        headers = [("Idempotency-Key", new_key())]
        bodies = [b"a" * size, b"a" + b"b" * size, b"b" * size, b"!" * size]
        replies = [await Caller(shop.app, "POST", "/orders", headers=headers, body=body).run() for body in bodies]
    assert [(reply.status, reply.replayed) for reply in replies[:2]] == [(200, False), (200, True)]
    assert replies[2].code == "idempotency_key_reused_with_different_payload"
    assert (replies[3].code, len(threads)) == ("idempotency_body_invalid", 4)
    assert set(threads) == {threading.get_ident()}


async def test_a_disconnect_during_fingerprinting_claims_nothing(tmp_path: Path, monkeypatch: Any) -> None:
    shop = RealShop(SqliteFile(tmp_path / "shop.db"))
    begun, go_on = threading.Event(), threading.Event()
    compare = requests.fingerprint_for

    def slow(*args: Any, **kwargs: Any) -> Any:
        begun.set()
        assert go_on.wait(PATIENCE)
        return compare(*args, **kwargs)

    monkeypatch.setattr(requests, "fingerprint_for", slow)

    @shop.app.post("/orders")
    @shop.once.protect(effects=INLINE)
    async def create() -> dict[str, str]:
        shop.runs.append("run")
        return {}

    async with shop.open():
        headers = [("Idempotency-Key", new_key()), ("Content-Type", "application/json")]
        body = b"[" + b"1," * 100_000 + b"1]"
        sending = asyncio.create_task(Caller(shop.app, "POST", "/orders", headers=headers, body=body).run())
        await asyncio.to_thread(begun.wait, 30)
        sending.cancel()
        await asyncio.wait({sending})
        go_on.set()
        assert (shop.runs, shop.states) == ([], [])
