"""What is told besides the answer: the instance of a refusal, misuse of keys, outcomes that are unknown."""

from __future__ import annotations

import logging
import re
from pathlib import Path
from typing import Any

import pytest

from frameworks.realshop import PostgresDatabase, RealShop, SqliteFile
from frameworks.shop import new_key
from harness.asgi import Caller
from oncekey.core.keys import key_digest
from oncekey.core.model import INLINE, LOCAL, OUTBOX
from oncekey.core.policy import ErrorFormat, Policy
from oncekey.engine.operation import Operation

TENANT = "acme"
ID = re.compile(r"[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}|[0-9a-f]{32}")
INSTANCE = re.compile(r"urn:uuid:([0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12})")


@pytest.fixture(params=["sqlite", "asyncpg"])
def shop(request: pytest.FixtureRequest, tmp_path: Path) -> RealShop:
    if request.param == "sqlite":
        shop = RealShop(SqliteFile(tmp_path / "shop.db"))
    else:
        shop = RealShop(PostgresDatabase(request.getfixturevalue("tables_dsn"), request.param, pool_size=3))

    @shop.app.post("/orders")
    @shop.once.protect(effects=LOCAL, operation="create_order")
    async def create(op: Operation, item: str = "tea") -> dict[str, str]:
        return {"item": item}

    @shop.app.post("/calls")
    @shop.once.protect(effects=INLINE, operation="call_bank")
    async def call() -> None:
        raise TimeoutError("card 4111 1111")

    return shop


def lines(caplog: pytest.LogCaptureFixture, event: str) -> list[Any]:
    told = [record for record in caplog.records if getattr(record, "oncekey", {}).get("event") == event]
    return [(record.name, record.levelno, record.oncekey, record.getMessage()) for record in told]  # type: ignore[attr-defined]


async def test_key_reuse_is_logged_as_misuse(shop: RealShop, caplog: Any) -> None:  # R191, R195
    key = new_key()
    async with shop.open():
        await shop.send("/orders?item=tea", key=key)
        refused = await shop.send("/orders?item=gold", key=key)
    assert refused.status == 422
    ((name, level, known, message),) = lines(caplog, "key_misuse")
    (instance,) = INSTANCE.fullmatch(refused.json()["instance"]).groups()  # type: ignore[union-attr]
    assert (name, level) == ("oncekey.security", logging.WARNING)
    assert (known["operation"], known["key_digest"]) == ("create_order", key_digest(key))
    assert (known["tenant"], "scope" in known) == (TENANT, False)
    assert f"a key of {TENANT} was used for another request of create_order" in message
    assert known["instance"] == instance
    assert instance in message
    assert key not in caplog.text


async def test_every_refusal_has_a_unique_instance(shop: RealShop, caplog: Any) -> None:  # R99
    caplog.set_level(logging.INFO, "oncekey")
    async with shop.open():
        replies = [
            await Caller(shop.app, "POST", "/orders").run(),
            await shop.send(key="x"),
            await Caller(shop.app, "GET", "/idempotency-keys/nothing-is-here-at-all").run(),
        ]
    assert [reply.status for reply in replies] == [400, 400, 404]
    found = [INSTANCE.fullmatch(reply.json()["instance"]).group(1) for reply in replies]  # type: ignore[union-attr]
    assert len(set(found)) == len(found)
    assert all(instance in caplog.text for instance in found)


@pytest.mark.parametrize("error_format", list(ErrorFormat))
async def test_a_logged_instance_is_in_a_response(tmp_path: Path, caplog: Any, error_format: ErrorFormat) -> None:
    caplog.set_level(logging.INFO, "oncekey")
    shop = RealShop(SqliteFile(tmp_path / "shop.db"), policy=Policy(error_format=error_format))

    @shop.app.post("/orders")
    @shop.once.protect(effects=INLINE, max_response_bytes=0)
    async def create(item: str = "tea") -> str:
        return item

    async with shop.open():
        replies = [await shop.send("/orders", key=key) for key in ("x", new_key())]
        replies += [await shop.send(f"/orders?item={item}") for item in ("tea", "tea", "gold")]
    assert [reply.status for reply in replies] == [400, 200, 200, 409, 422]
    responses = b"".join(reply.body for reply in replies).decode()
    assert set(ID.findall(caplog.text)) == set(ID.findall(responses))
    assert len(set(ID.findall(responses))) == (0 if error_format is ErrorFormat.CODE else 3)
    assert caplog.text.count("refused with") == 3


async def test_an_accepted_request_is_not_logged_as_refused(tmp_path: Path, caplog: Any) -> None:
    caplog.set_level(logging.INFO, "oncekey")
    shop = RealShop(SqliteFile(tmp_path / "shop.db"))

    @shop.once.topic("ship", repeatable=True)
    async def ship(_: object) -> None: ...

    @shop.app.post("/orders")
    @shop.once.protect(effects=OUTBOX)
    async def create(op: Operation) -> None:
        op.defer("ship", {})

    async with shop.open():
        replies = [await shop.send() for _ in range(2)]
    assert [reply.status for reply in replies] == [202, 202]
    assert "refused with" not in caplog.text


async def test_an_unknown_outcome_is_logged_as_an_error(shop: RealShop, caplog: Any) -> None:  # R216
    key = new_key()
    async with shop.open():
        await Caller(shop.app, "POST", "/calls", headers=[("Idempotency-Key", key)]).run()
    ((_, level, known, message),) = lines(caplog, "unknown")
    assert (level, known["operation"], known["key_digest"]) == (logging.ERROR, "call_bank", key_digest(key))
    assert f"call_bank for {TENANT} is unknown" in message
    assert key not in message
    assert "4111 1111" not in message
