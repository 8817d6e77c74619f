"""The store is down, slow, or does not answer: before the claim, at the settlement, in the middle of a commit."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from frameworks.shop import KEY, Shop
from harness.ledger import Gate, down, reply_lost, request_lost
from harness.patience import PATIENCE
from oncekey.core.errors import StoreUnavailableError
from oncekey.core.model import INLINE, LOCAL
from oncekey.core.policy import Policy
from oncekey.engine.operation import Operation, SyncOperation
from oncekey.engine.run import FAILURES, PAUSE, Breaker
from oncekey.runtimes import aio


@pytest.fixture(autouse=True)
def hasty_settlements(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(aio, "FIRST_PAUSE", 0.001)
    monkeypatch.setattr(aio, "LONGEST_PAUSE", 0.002)


def ordering(effects: Any, **shopping: Any) -> Shop:
    shop = Shop(**shopping)

    @shop.post(effects=effects, status_code=201)
    async def create(op: Operation) -> dict[str, int]:
        shop.runs.append(op.attempt)
        if effects is LOCAL:
            op.connection.add("row")
        return {"runs": len(shop.runs)}

    return shop


async def background_settlements(shop: Shop) -> None:
    (installation,) = shop.once._installed.values()
    assert await installation.running_work.wait(PATIENCE)


# ------------------------------------------------------------------------------------------------ at the claim


@pytest.mark.parametrize("effects", [LOCAL, INLINE])
async def test_a_store_outage_returns_503_before_the_handler_runs(effects: Any) -> None:
    # R61, R110, R250
    shop = ordering(effects)
    shop.ledger.dead = True
    reply = await shop.send("/orders")
    assert (reply.status, reply.code, reply.header("retry-after")) == (503, "idempotency_store_unavailable", "1")
    assert reply.header("content-type") == "application/problem+json"
    assert (shop.runs, shop.ledger.rows) == ([], [])
    shop.ledger.dead = False
    assert (await shop.send("/orders")).status == 201


async def test_a_claim_survives_a_lost_store_reply() -> None:
    # F8, P7
    shop = ordering(LOCAL)
    shop.ledger.faults["claim"].append(reply_lost)
    assert (await shop.send("/orders")).status == 201
    assert (shop.runs, shop.ledger.rows, shop.state) == ([1], ["row"], "completed")


async def test_an_unverifiable_claim_is_released() -> None:
    # F8: otherwise it would look like a crash, and an INLINE key would be in doubt for nothing
    shop = ordering(INLINE)
    shop.ledger.faults["claim"].extend([reply_lost] * 1000)
    reply = await shop.send("/orders")
    assert (reply.status, shop.runs) == (503, [])
    shop.ledger.faults["claim"].clear()
    await background_settlements(shop)
    assert shop.ledger.records == []
    assert (await shop.send("/orders")).status == 201


async def test_a_failed_begin_releases_the_claim() -> None:
    # R61, R72: the handler was not entered, so the key was not used
    shop = ordering(LOCAL)
    shop.ledger.faults["begin"].append(down)
    reply = await shop.send("/orders")
    assert (reply.status, reply.code, reply.header("retry-after")) == (503, "idempotency_store_unavailable", "1")
    assert (shop.runs, shop.ledger.records) == ([], [])
    assert (await shop.send("/orders")).status == 201


async def test_a_failed_blocking_begin_releases_the_claim() -> None:
    shop = Shop()

    @shop.post(effects=LOCAL, status_code=201)
    def create(op: SyncOperation) -> str:
        op.connection.add("row")
        return "done"

    shop.once.threads.ledger.dead = False
    begin, shop.once.threads.begin = shop.once.threads.begin, _no_connection  # type: ignore[method-assign]
    reply = await shop.send("/orders")
    assert (reply.status, reply.code, shop.ledger.records) == (503, "idempotency_store_unavailable", [])
    shop.once.threads.begin = begin  # type: ignore[method-assign]
    assert (await shop.send("/orders")).status == 201


def _no_connection() -> Any:
    raise StoreUnavailableError("no connection")


# ---------------------------------------------------------------------------------------------------- fail open


async def test_fail_open_runs_the_handler_during_an_outage() -> None:
    # R110: only where running twice does no harm, and it is logged
    shop = Shop()

    @shop.post(effects=INLINE, on_store_error="fail_open", naturally_idempotent=True)
    async def create(op: Operation) -> dict[str, str | None]:
        shop.runs.append(1)
        return {"key": op.key, "downstream": op.downstream_key("charge")}

    shop.ledger.dead = True
    first, again = await shop.send("/orders"), await shop.send("/orders")
    assert (first.status, shop.runs) == (200, [1, 1])
    # D1: the provider's own idempotency is all that is left, so both runs must send it the same key.
    assert first.json() == again.json()
    assert first.json()["key"] == KEY
    shop.ledger.dead = False
    assert (await shop.send("/orders")).json()["downstream"] == first.json()["downstream"]


# ------------------------------------------------------------------------------------------------ at the settlement


async def test_an_inline_response_is_unknown_until_it_is_stored() -> None:
    # P7, peers 30: the success is not lost, the settlement goes on behind the caller's back
    shop = ordering(INLINE)
    shop.ledger.faults["settle"].extend([down] * 3)
    reply = await shop.send("/orders")
    assert (reply.status, reply.code) == (503, "idempotency_outcome_unknown")
    assert int(reply.header("retry-after") or 0) >= 1
    assert shop.state == "in_progress"
    await background_settlements(shop)
    again = await shop.send("/orders")
    assert (again.status, again.json(), again.replayed, shop.runs) == (201, {"runs": 1}, True, [1])


async def test_a_local_operation_rolls_back_if_settling_fails() -> None:
    # R71, L6, P7
    shop = ordering(LOCAL)
    shop.ledger.faults["step"].append(down)
    shop.ledger.faults["settle"].extend([down] * 3)
    reply = await shop.send("/orders")
    assert (reply.status, shop.ledger.rows) == (503, [])
    assert shop.ledger.open == 0
    await background_settlements(shop)
    assert shop.state == "failed_retryable"
    again = await shop.send("/orders")
    assert (again.status, shop.runs, shop.ledger.rows) == (201, [1, 2], ["row"])


async def test_an_inline_crash_that_cannot_be_stored_is_unknown() -> None:
    # P7: not as the application's own 500, after which clients take a new key
    shop = Shop()

    @shop.post(effects=INLINE)
    async def create() -> None:
        raise RuntimeError("boom")

    shop.ledger.faults["settle"].extend([down] * 3)
    caller = shop.caller("/orders")
    with pytest.raises(RuntimeError, match="boom"):
        await caller.run(raising=True)
    assert (caller.reply.status, caller.reply.code) == (503, "idempotency_outcome_unknown")
    await background_settlements(shop)
    assert shop.state == "unknown"


async def test_a_settlement_with_a_lost_reply_is_repeated() -> None:
    # P7
    shop = ordering(INLINE)
    shop.ledger.faults["settle"].append(reply_lost)
    reply = await shop.send("/orders")
    assert (reply.status, reply.json(), shop.state) == (201, {"runs": 1}, "completed")


async def test_a_background_settlement_gives_up_after_its_patience(caplog: pytest.LogCaptureFixture) -> None:
    running_work = aio.RunningWork()
    tries = []

    async def never() -> None:
        tries.append(1)
        raise StoreUnavailableError

    running_work.settle_later(never, patience=0.02)
    assert await running_work.wait(PATIENCE)
    assert len(tries) > 1
    assert "a settlement could not be written" in caplog.text


async def test_a_background_settlement_logs_unexpected_errors_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    running_work = aio.RunningWork()

    async def broken() -> None:
        raise KeyError("bug")

    running_work.settle_later(broken, patience=5)
    assert await running_work.wait(PATIENCE)
    assert "KeyError" in caplog.text


# --------------------------------------------------------------------------------------------------- lost commits


async def test_a_commit_with_a_lost_reply_returns_the_stored_response() -> None:
    # F8, P7, adr 0002
    shop = ordering(LOCAL)
    shop.ledger.faults["commit"].append(reply_lost)
    reply = await shop.send("/orders")
    assert (reply.status, reply.json()) == (201, {"runs": 1})
    assert (shop.ledger.rows, shop.state, shop.ledger.open) == (["row"], "completed", 0)
    again = await shop.send("/orders")
    assert (again.body, again.replayed, shop.runs) == (reply.body, True, [1])


async def test_a_commit_lost_before_the_store_runs_again() -> None:
    # F8, P7
    shop = ordering(LOCAL)
    shop.ledger.faults["commit"].append(request_lost)
    reply = await shop.send("/orders")
    assert (reply.status, reply.code, shop.state) == (503, "idempotency_store_unavailable", "failed_retryable")
    assert (shop.ledger.rows, shop.ledger.open) == ([], 0)
    again = await shop.send("/orders")
    assert (again.status, shop.ledger.rows, shop.runs) == (201, ["row"], [1, 2])


@pytest.mark.parametrize(("fault", "status", "runs"), [(reply_lost, 201, [1]), (request_lost, 201, [1, 2])])
async def test_a_lost_commit_is_verified_until_the_store_responds(fault: Any, status: int, runs: list[int]) -> None:
    # P7: 503 outcome-unknown for this caller, and the truth for the next
    shop = ordering(LOCAL)
    shop.ledger.faults["commit"].append(fault)
    shop.ledger.faults["settle"].extend([down] * 3)
    reply = await shop.send("/orders")
    assert (reply.status, reply.code) == (503, "idempotency_outcome_unknown")
    await background_settlements(shop)
    again = await shop.send("/orders")
    assert (again.status, shop.runs, shop.ledger.rows) == (status, runs, ["row"])


async def test_a_commit_after_a_takeover_replays_the_new_owners_response() -> None:
    # L2: any outcome but our own committed record reads again before it answers
    shop = Shop()
    gate = Gate()
    shop.ledger.faults["commit"].append(gate)

    @shop.post(effects=LOCAL, status_code=201, lease=0.02)
    async def create(op: Operation) -> dict[str, int]:
        shop.runs.append(op.attempt)
        op.connection.add(f"row of attempt {op.attempt}")
        return {"attempt": op.attempt}

    slow = asyncio.create_task(shop.send("/orders"))
    await gate.reached.wait()
    await asyncio.sleep(0.03)
    second = await shop.send("/orders")
    gate.open()
    first = await slow
    assert (second.status, second.json()) == (201, {"attempt": 2})
    assert (first.status, first.body, first.replayed) == (201, second.body, True)
    assert (shop.ledger.rows, shop.ledger.open) == (["row of attempt 2"], 0)


# ------------------------------------------------------------------------------------------------------ the breaker


async def test_an_open_breaker_returns_503_without_a_query() -> None:
    # R111
    shop = ordering(INLINE)
    shop.ledger.dead = True
    for _ in range(FAILURES):
        await shop.send("/orders")
    asked = len(shop.ledger.log)
    reply = await shop.send("/orders")
    assert (reply.status, reply.code) == (503, "idempotency_store_unavailable")
    assert len(shop.ledger.log) == asked
    assert shop.runs == []


async def test_a_probe_closes_the_breaker_again() -> None:
    # R111
    shop = ordering(INLINE)
    now = [100.0]
    (installation,) = shop.once._installed.values()
    installation.breaker = Breaker(clock=lambda: now[0])
    shop.ledger.dead = True
    for _ in range(FAILURES):
        await shop.send("/orders")
    shop.ledger.dead = False
    assert (await shop.send("/orders")).status == 503
    now[0] += PAUSE
    assert (await shop.send("/orders")).status == 201
    assert (await shop.send("/orders", key="another-key-0000001")).status == 201


def test_a_half_open_breaker_allows_one_probe_per_pause() -> None:
    # R111
    now = [0.0]
    breaker = Breaker(clock=lambda: now[0])
    for _ in range(FAILURES - 1):
        breaker.failed()
    assert breaker.allows()
    breaker.failed()
    assert not breaker.allows()
    now[0] = PAUSE
    assert [breaker.allows() for _ in range(3)] == [True, False, False]
    breaker.failed()
    now[0] = 2 * PAUSE
    assert breaker.allows()
    breaker.worked()
    assert all(breaker.allows() for _ in range(3))


# ---------------------------------------------------------------------------------------------- without a key


async def test_a_keyless_local_request_returns_503_during_an_outage() -> None:
    # R110: nothing was executed, so 503 and not the application's 500
    shop = Shop(policy=Policy(require_key=False))

    @shop.post(effects=LOCAL, require_key=False)
    async def create(op: Operation) -> str:
        shop.runs.append(1)
        return "done"

    shop.ledger.dead = True
    reply = await shop.send("/orders", key=None)
    assert (reply.status, reply.code, shop.runs) == (503, "idempotency_store_unavailable", [])
