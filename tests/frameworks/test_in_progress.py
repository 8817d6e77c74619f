"""What a duplicate hears while the first request runs: 409, 202, or the first one's answer (R79 to R86)."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from frameworks.shop import KEY, Shop, new_key
from harness.asgi import until
from harness.ledger import Gate
from harness.patience import PATIENCE
from oncekey.core.model import INLINE, LOCAL
from oncekey.core.policy import Policy
from oncekey.engine.operation import Operation


class Slow:
    """A shop whose handler waits to be let go."""

    def __init__(self, effects: Any = LOCAL, *, policy: Policy | None = None, **options: Any) -> None:
        self.shop = shop = Shop(policy=policy)
        self.go_on = asyncio.Event()

        @shop.post(effects=effects, status_code=201, **options)
        async def create(body: dict[str, int], op: Operation) -> dict[str, int]:
            shop.runs.append(body["amount"])
            if effects is LOCAL:
                op.connection.add("row")
            await self.go_on.wait()
            if body["amount"] < 0:
                raise RuntimeError
            return {"amount": body["amount"], "run": len(shop.runs)}

    async def started(self, amount: int = 1) -> asyncio.Task[Any]:
        """The first request, when its handler has begun."""
        task = asyncio.create_task(self.shop.send("/orders", {"amount": amount}))
        await until(lambda: self.shop.runs)
        return task


@pytest.mark.parametrize("effects", [LOCAL, INLINE])
async def test_a_duplicate_of_a_running_request_receives_409(effects: Any) -> None:
    # R69, R70, R79, R80, R247, R259: at once, and not behind the first one's lock
    slow = Slow(effects)
    first = await slow.started()
    async with asyncio.timeout(PATIENCE):
        replies = await asyncio.gather(*[slow.shop.send("/orders", {"amount": 1}) for _ in range(5)])
    assert {(reply.status, reply.code) for reply in replies} == {(409, "idempotency_key_in_progress")}
    assert {reply.header("retry-after") for reply in replies} == {"1"}
    assert {reply.header("idempotency-key") for reply in replies} == {KEY}
    slow.go_on.set()
    assert (await first).status == 201
    assert slow.shop.runs == [1]


async def test_one_of_many_simultaneous_requests_runs() -> None:
    # R62, R79, R241
    slow = Slow()
    tasks = [asyncio.create_task(slow.shop.send("/orders", {"amount": 1})) for _ in range(20)]
    await until(lambda: slow.shop.runs)
    slow.go_on.set()
    replies = await asyncio.gather(*tasks)
    statuses = sorted(reply.status for reply in replies)
    assert statuses == [201] + [409] * 19
    again = await slow.shop.send("/orders", {"amount": 1})
    assert (again.status, again.replayed, slow.shop.ledger.rows) == (201, True, ["row"])


async def test_a_different_request_with_a_running_key_receives_422() -> None:
    # R38: in every mode
    for mode in ("conflict", "accepted", "wait"):
        slow = Slow(on_in_progress=mode, wait_max=60)
        first = await slow.started()
        async with asyncio.timeout(PATIENCE):
            reply = await slow.shop.send("/orders", {"amount": 2})
        assert (reply.status, reply.code) == (422, "idempotency_key_reused_with_different_payload")
        slow.go_on.set()
        await first
        assert slow.shop.runs == [1]


async def test_accepted_returns_202_with_the_status_location() -> None:
    # R81, R83
    slow = Slow(on_in_progress="accepted")
    first = await slow.started()
    reply = await slow.shop.send("/orders", {"amount": 1})
    assert (reply.status, reply.header("retry-after")) == (202, "1")
    place = reply.header("location")
    assert place == f"/idempotency-keys/{KEY}"
    status = await slow.shop.send(place, method="GET", key=None)
    assert (status.status, status.json()["state"]) == (200, "in_progress")
    slow.go_on.set()
    await first
    status = await slow.shop.send(place, method="GET", key=None)
    assert (status.json()["state"], status.json()["response"]["status"]) == ("completed", 201)


@pytest.mark.parametrize("effects", [LOCAL, INLINE])
async def test_waiting_duplicates_receive_the_first_response(effects: Any) -> None:
    # R82, R241
    slow = Slow(effects, on_in_progress="wait", wait_max=60)
    tasks = [asyncio.create_task(slow.shop.send("/orders", {"amount": 1})) for _ in range(4)]
    await until(lambda: slow.shop.runs)
    await asyncio.sleep(0.05)
    slow.go_on.set()
    replies = await asyncio.gather(*tasks)
    assert {(reply.status, reply.body) for reply in replies} == {(201, b'{"amount":1,"run":1}')}
    assert sorted(reply.replayed for reply in replies) == [False, True, True, True]
    assert slow.shop.runs == [1]


async def test_a_waiting_duplicate_retries_a_failed_request() -> None:
    # R82, R72
    slow = Slow(LOCAL, on_in_progress="wait", wait_max=60)
    first = await slow.started(-1)
    second = asyncio.create_task(slow.shop.send("/orders", {"amount": -1}))
    await asyncio.sleep(0.03)
    slow.go_on.set()
    assert (await first).status == 500
    assert (await second).status == 500
    assert (slow.shop.runs, slow.shop.ledger.record["attempts"]) == ([-1, -1], 2)


async def test_a_wait_that_times_out_returns_409() -> None:
    # peers 6: it never deletes the owner's claim; R70
    slow = Slow(LOCAL, on_in_progress="wait", wait_max=0.05)
    first = await slow.started()
    before = dict(slow.shop.ledger.record)
    reply = await slow.shop.send("/orders", {"amount": 1})
    assert (reply.status, reply.code, reply.header("retry-after")) == (409, "idempotency_key_in_progress", "1")
    assert slow.shop.ledger.record == before
    slow.go_on.set()
    assert (await first).status == 201
    assert slow.shop.runs == [1]


async def test_waiting_duplicates_poll_the_store_rarely() -> None:
    # L8: they poll, slower and slower, and hold no connection
    slow = Slow(LOCAL, on_in_progress="wait", wait_max=0.4)
    first = await slow.started()
    asked = slow.shop.ledger.log.count("claim")
    await slow.shop.send("/orders", {"amount": 1})
    assert slow.shop.ledger.log.count("claim") - asked < 12
    assert slow.shop.ledger.open == 1  # the owner's
    slow.go_on.set()
    await first


@pytest.mark.parametrize("status", [409, 202, 503])
async def test_on_unknown_sets_the_status_of_the_response(status: Any) -> None:
    # R85
    slow = Slow(INLINE, on_unknown=status)
    slow.go_on.set()
    await slow.shop.send("/orders", {"amount": -1})
    reply = await slow.shop.send("/orders", {"amount": -1})
    assert (reply.status, reply.code) == (status, "idempotency_outcome_unknown")
    assert int(reply.header("retry-after") or 0) >= 1
    assert reply.header("location") == f"/idempotency-keys/{KEY}"
    assert slow.shop.runs == [-1]


async def test_an_unknown_outcome_is_not_waited_for() -> None:
    slow = Slow(INLINE, on_in_progress="wait", wait_max=30)
    slow.go_on.set()
    await slow.shop.send("/orders", {"amount": -1})
    async with asyncio.timeout(PATIENCE):
        assert (await slow.shop.send("/orders", {"amount": -1})).code == "idempotency_outcome_unknown"


async def test_the_response_is_sent_after_it_is_stored() -> None:
    # peers 12: recorded before the first byte; a duplicate in between is still told to wait
    shop = Shop()
    gate = Gate()
    shop.ledger.faults["settle"].append(gate)

    @shop.post(effects=INLINE, status_code=201)
    async def create() -> str:
        return "done"

    caller = shop.caller("/orders")
    task = asyncio.create_task(caller.run())
    await gate.reached.wait()
    assert caller.sent == []
    assert (await shop.send("/orders")).status == 409
    gate.open()
    await task
    assert caller.reply.status == 201


async def test_concurrent_requests_with_many_keys_run_once_each() -> None:
    # R27, R62
    slow = Slow(LOCAL)
    slow.go_on.set()
    keys = [new_key() for _ in range(20)]
    replies = await asyncio.gather(
        *[slow.shop.send("/orders", {"amount": number % 20}, key=keys[number % 20]) for number in range(60)]
    )
    assert {reply.status for reply in replies} <= {201, 409}
    for number, key in enumerate(keys):
        reply = await slow.shop.send("/orders", {"amount": number}, key=key)
        assert (reply.status, reply.replayed, reply.json()["amount"]) == (201, True, number)
    assert len(slow.shop.runs) == len(slow.shop.ledger.rows) == 20
