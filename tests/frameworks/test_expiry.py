"""What a key is after its time: a new one, or gone; and what never expires (P6, F2, F3, C15)."""

from __future__ import annotations

from typing import Any

import pytest

from frameworks.shop import KEY, Shop
from oncekey.core.model import HOUR, INLINE, LOCAL, MINUTE, SECOND
from oncekey.core.policy import OnExpired, Policy
from oncekey.engine.operation import Operation
from oncekey.testing.claims import ManualClock


def ordering(effects: Any = LOCAL, *, policy: Policy | None = None, **options: Any) -> Shop:
    shop = Shop(policy=policy, clock=ManualClock())

    @shop.post(effects=effects, status_code=201, **options)
    async def create(body: dict[str, int], op: Operation) -> dict[str, Any]:
        shop.runs.append(body["amount"])
        if body["amount"] < 0:
            raise RuntimeError
        return {"run": len(shop.runs), "downstream": op.downstream_key("charge")}

    return shop


def advance(shop: Shop, span: int) -> None:
    assert shop.clock is not None
    shop.clock.advance(span)


@pytest.mark.parametrize("effects", [LOCAL, INLINE])
async def test_an_expired_key_runs_the_handler_again(effects: Any) -> None:
    # R157, R161, R253
    shop = ordering(effects)
    first = await shop.send("/orders", {"amount": 1})
    advance(shop, 24 * HOUR - SECOND)
    assert (await shop.send("/orders", {"amount": 1})).replayed
    advance(shop, 2 * SECOND)
    late = await shop.send("/orders", {"amount": 1})
    assert (late.status, late.replayed, late.json()["run"]) == (201, False, 2)
    # D1, F38: the same request sends the provider the same key, also when we have forgotten it.
    assert late.json()["downstream"] == first.json()["downstream"]
    assert shop.ledger.record["fence"] == 2
    assert (await shop.send("/orders", {"amount": 1})).body == late.body


async def test_reusing_an_expired_key_creates_a_new_downstream_key() -> None:
    # C15, D1
    shop = ordering()
    first = await shop.send("/orders", {"amount": 1})
    advance(shop, 25 * HOUR)
    other = await shop.send("/orders", {"amount": 2})
    assert (other.status, other.replayed) == (201, False)
    assert other.json()["downstream"] != first.json()["downstream"]
    assert (await shop.send("/orders", {"amount": 1})).status == 422


async def test_on_expired_gone_returns_410() -> None:
    # R162, C15
    shop = ordering(policy=Policy(on_expired=OnExpired.GONE))
    await shop.send("/orders", {"amount": 1})
    advance(shop, 25 * HOUR)
    for amount in (1, 2):
        reply = await shop.send("/orders", {"amount": amount})
        assert (reply.status, reply.code) == (410, "idempotency_key_expired")
    assert shop.runs == [1]


async def test_a_short_ttl_requires_allow_short_ttl() -> None:
    # R160, C14
    shop = ordering(ttl=1, allow_short_ttl=True)
    await shop.send("/orders", {"amount": 1})
    assert (await shop.send("/orders", {"amount": 1})).replayed
    advance(shop, SECOND)
    assert not (await shop.send("/orders", {"amount": 1})).replayed


async def test_an_unknown_outcome_never_expires() -> None:
    # F3, P6
    shop = ordering(INLINE)
    await shop.send("/orders", {"amount": -1})
    advance(shop, 1000 * HOUR)
    reply = await shop.send("/orders", {"amount": -1})
    assert (reply.status, reply.code, shop.runs) == (409, "idempotency_outcome_unknown", [-1])
    assert (await shop.send(f"/idempotency-keys/{KEY}", method="GET", key=None)).json()["state"] == "unknown"


async def test_the_ttl_starts_when_the_response_is_stored() -> None:
    # R268, F2, P6: however long it took to get one
    shop = ordering(LOCAL)
    await shop.send("/orders", {"amount": 1})
    line = shop.ledger.record
    assert line["expires_at"] == line["finished_at"] + 24 * HOUR
    advance(shop, 23 * HOUR)
    line.update({name: None for name in line if name.startswith("response_")}, outcome=None, state="failed_retryable")
    await shop.send("/orders", {"amount": 1})
    advance(shop, 23 * HOUR + 59 * MINUTE)
    assert (await shop.send("/orders", {"amount": 1})).replayed
