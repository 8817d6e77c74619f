"""Leases: heartbeats, deadlines, owners that lost theirs, and what the next request finds (P1 to P5, F9)."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from frameworks.shop import KEY, Shop
from harness.asgi import until
from harness.ledger import Gate, down
from harness.patience import PATIENCE
from oncekey.core.errors import LeaseLostError
from oncekey.core.model import INLINE, LOCAL, MINUTE, SECOND
from oncekey.engine.operation import Operation
from oncekey.testing.claims import ManualClock


def stolen(shop: Shop) -> None:
    """Somebody else takes the only record over."""
    line = shop.ledger.record
    line.update(fence=line["fence"] + 1, version=line["version"] + 1, owner="somebody else")


def answered_by_another(shop: Shop, body: bytes = b'{"by":"another"}') -> None:
    """The new owner completes the record."""
    line = shop.ledger.record
    line.update(
        state="completed",
        outcome="success",
        owner=None,
        lease_until=None,
        version=line["version"] + 1,
        response_status=201,
        response_headers='[["content-type","application/json"]]',
        response_body=body,
        response_schema=1,
    )


async def test_heartbeats_renew_the_lease_of_a_slow_handler() -> None:
    # R79, peers 12: a handler longer than its lease does not run twice
    clock = ManualClock()
    shop = Shop(clock=clock)
    done = asyncio.Event()

    @shop.post(effects=INLINE, lease=0.03, status_code=201)
    async def create() -> str:
        shop.runs.append(1)
        await done.wait()
        return "done"

    first = asyncio.create_task(shop.send("/orders"))
    await until(lambda: shop.runs)
    for _ in range(6):  # four leases' length
        beats = shop.ledger.log.count("renew")
        clock.advance(SECOND // 50)
        await until(lambda beats=beats: shop.ledger.log.count("renew") > beats)
    reply = await shop.send("/orders")
    assert (reply.status, reply.code) == (409, "idempotency_key_in_progress")
    done.set()
    assert (await first).status == 201
    assert (shop.runs, shop.state) == ([1], "completed")
    beats = shop.ledger.log.count("renew")
    await asyncio.sleep(0.05)
    assert shop.ledger.log.count("renew") == beats


async def test_a_heartbeat_stops_at_the_deadline() -> None:
    # F9, P5: a handler that hangs is not in progress for ever
    shop = Shop()
    hang = asyncio.Event()

    @shop.post(effects=INLINE, lease=0.1, deadline=0.2, call_timeout=0.1, status_code=201)
    async def create() -> str:
        shop.runs.append(1)
        await hang.wait()
        return "done"

    first = asyncio.create_task(shop.send("/orders"))
    async with asyncio.timeout(PATIENCE):
        while True:
            await asyncio.sleep(0.02)
            reply = await shop.send("/orders")
            if reply.code != "idempotency_key_in_progress":
                break
    assert (reply.status, reply.code, shop.state) == (409, "idempotency_outcome_unknown", "unknown")
    # U2: an owner that was only swept still is the best evidence there is.
    hang.set()
    assert (await first).status == 201
    assert (await shop.send("/orders")).replayed
    assert shop.runs == [1]


async def test_a_heartbeat_survives_an_outage_shorter_than_the_lease() -> None:
    shop = Shop()
    done = asyncio.Event()
    shop.ledger.faults["renew"].extend([down, down])

    @shop.post(effects=INLINE, lease=0.9)
    async def create() -> str:
        await done.wait()
        return "done"

    first = asyncio.create_task(shop.send("/orders"))
    await until(lambda: shop.ledger.log.count("renew") >= 4)
    done.set()
    assert (await first).status == 200


async def test_a_renewal_pending_at_the_end_logs_nothing(caplog: pytest.LogCaptureFixture) -> None:
    # The record is settled by then: it is not lost, it is done.
    shop = Shop()
    beating, done = Gate(), asyncio.Event()
    shop.ledger.faults["renew"].append(beating)

    @shop.post(effects=INLINE, lease=0.03)
    async def create() -> str:
        await done.wait()
        return "done"

    first = asyncio.create_task(shop.send("/orders"))
    await beating.reached.wait()
    done.set()
    assert (await first).status == 200
    beating.open()
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert "lost" not in caplog.text


async def test_a_lost_lease_raises_and_replays_the_new_owners_response() -> None:
    # P3
    shop = Shop()
    refused: list[BaseException] = []

    @shop.post(effects=LOCAL, lease=0.03, status_code=201)
    async def create(op: Operation) -> str:
        op.connection.add("row")
        stolen(shop)
        answered_by_another(shop)
        for use in (lambda: op.connection, lambda: op.downstream_key("x"), op.keep, op.rollback):
            async with asyncio.timeout(PATIENCE):
                while True:
                    try:
                        use()
                    except LeaseLostError as error:
                        refused.append(error)
                        break
                    await asyncio.sleep(0.005)
        return op.connection.add("another row")  # type: ignore[no-any-return]

    caller = shop.caller("/orders")
    reply = await caller.run(raising=True)  # not a bug of the application: the server has nothing to log
    assert len(refused) == 4
    assert (reply.status, reply.json(), reply.replayed) == (201, {"by": "another"}, True)
    assert (shop.ledger.rows, shop.ledger.open) == ([], 0)


@pytest.mark.parametrize("effects", [LOCAL, INLINE])
async def test_a_superseded_owner_writes_nothing(effects: Any) -> None:
    # P1, P3, F11; peers 13
    shop = Shop()

    @shop.post(effects=effects, status_code=201)
    async def create(op: Operation) -> dict[str, str]:
        if effects is LOCAL:
            op.connection.add("row")
        stolen(shop)
        return {"by": "the zombie"}

    reply = await shop.send("/orders")
    assert (reply.status, reply.code) == (409, "idempotency_key_in_progress")
    assert (shop.ledger.rows, shop.state, shop.ledger.open) == ([], "in_progress", 0)
    answered_by_another(shop)
    assert (await shop.send("/orders")).json() == {"by": "another"}


async def test_a_superseded_owner_that_crashes_replays_the_record() -> None:
    # P3, L2: also where the application's own answer would have been a 500
    shop = Shop()

    @shop.post(effects=LOCAL)
    async def create(op: Operation) -> None:
        stolen(shop)
        answered_by_another(shop)
        raise RuntimeError("boom")

    caller = shop.caller("/orders")
    with pytest.raises(RuntimeError, match="boom"):
        await caller.run(raising=True)
    assert (caller.reply.status, caller.reply.json(), caller.reply.replayed) == (201, {"by": "another"}, True)


async def test_an_owner_of_a_deleted_record_returns_503() -> None:
    # P3: no row is 503
    shop = Shop()

    @shop.post(effects=INLINE)
    async def create() -> str:
        shop.ledger.memory.table.clear()
        return "done"

    assert (await shop.send("/orders")).status == 503


async def test_an_owner_never_replays_another_incarnations_response() -> None:
    # F1, P1
    shop = Shop()

    @shop.post(effects=INLINE, status_code=201)
    async def create() -> str:
        shop.ledger.record["incarnation"] = "0" * 32
        answered_by_another(shop)
        return "done"

    reply = await shop.send("/orders")
    assert (reply.status, reply.code) == (409, "idempotency_outcome_unknown")
    assert b"another" not in reply.body


async def crashed(shop: Shop, target: str, body: Any = None) -> None:
    """A process dies while it runs the handler: nothing is settled, the lease goes on for a while."""
    gate = Gate()
    shop.ledger.faults["settle"].append(gate)
    shop.ledger.faults["step"].append(gate)
    task = asyncio.create_task(shop.send(target, body))
    await gate.reached.wait()
    # Only the record is left of a dead process.
    line = dict(shop.ledger.record)
    task.cancel()
    shop.ledger.faults["settle"].clear()
    shop.ledger.faults["step"].clear()
    gate.open()
    await asyncio.gather(task, return_exceptions=True)
    shop.ledger.memory.table.clear()
    shop.ledger.memory.table[line["scope"], line["key"]] = line


def two_amounts(effects: Any) -> Shop:
    shop = Shop(clock=ManualClock())

    @shop.post(effects=effects, status_code=201)
    async def create(body: dict[str, int], op: Operation) -> dict[str, int]:
        shop.runs.append(body["amount"])
        return {"amount": body["amount"], "attempt": op.attempt}

    return shop


@pytest.mark.parametrize(("effects", "status"), [(LOCAL, 201), (INLINE, 409)])
async def test_a_dead_owners_effects_decide_if_a_retry_runs(effects: Any, status: int, caplog: Any) -> None:
    # R86, R101, R216, C11: LOCAL runs again, INLINE is unknown
    shop = two_amounts(effects)
    await crashed(shop, "/orders", {"amount": 10})
    early = await shop.send("/orders", {"amount": 10})
    assert (early.status, early.code) == (409, "idempotency_key_in_progress")
    assert shop.clock is not None
    shop.clock.advance(5 * MINUTE + 1)
    late = await shop.send("/orders", {"amount": 10})
    assert late.status == status
    assert shop.runs == ([10, 10] if effects is LOCAL else [10])
    assert shop.state == ("completed" if effects is LOCAL else "unknown")
    if effects is LOCAL:
        assert late.json() == {"amount": 10, "attempt": 2}
    else:
        assert late.code == "idempotency_outcome_unknown"
        assert (await shop.send("/orders", {"amount": 10})).code == late.code
    errors = [record.getMessage() for record in caplog.records if record.levelname == "ERROR"]
    assert ["is unknown: in_progress_lock_expired" in error for error in errors] == [True] * (effects is INLINE)


@pytest.mark.parametrize("effects", [LOCAL, INLINE])
async def test_a_stale_lease_is_not_taken_over_by_another_request(effects: Any) -> None:
    # R38, C8; peers 12: a crashed charge of 10 cannot be retried as one of 20
    shop = two_amounts(effects)
    await crashed(shop, "/orders", {"amount": 10})
    assert shop.clock is not None
    shop.clock.advance(5 * MINUTE + 1)
    before = dict(shop.ledger.record)
    other = await shop.send("/orders", {"amount": 20})
    assert (other.status, other.code) == (422, "idempotency_key_reused_with_different_payload")
    assert (shop.runs, shop.ledger.record) == ([10], before)


async def test_every_attempt_uses_the_same_downstream_key() -> None:
    # peers 12; D1
    shop = Shop(clock=ManualClock())
    downstream: list[str] = []

    @shop.post(effects=LOCAL)
    async def create(op: Operation, fail: bool = False) -> str:
        downstream.append(op.downstream_key("charge"))
        if len(downstream) < 3:
            raise RuntimeError
        return "done"

    for _ in range(3):
        await shop.send("/orders")
    assert len(downstream) == 3
    assert len(set(downstream)) == 1
    assert shop.ledger.record["attempts"] == 3


@pytest.mark.parametrize(("running", "told"), [(0, 1), (1, 1), (7, 7), (45, 45), (200, 60), (298, 2)])
async def test_retry_after_grows_with_duration_up_to_the_lease(running: int, told: int) -> None:
    # R80
    shop = two_amounts(LOCAL)
    await crashed(shop, "/orders", {"amount": 10})
    assert shop.clock is not None
    shop.clock.advance(running * SECOND)
    reply = await shop.send("/orders", {"amount": 10})
    assert (reply.status, reply.header("retry-after")) == (409, str(told))
    assert reply.header("idempotency-key") == KEY
