"""Every way in which an outside call can end, and what may be made of it (H2, H3, P4, U2)."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import suppress
from datetime import timedelta
from typing import Any

import pytest

from oncekey.core.errors import CallUncertainError, NotExecutedError, RejectedError
from oncekey.core.model import HOUR, MINUTE
from oncekey.core.policy import Policy
from phased.bank import LEASE, Bank, Call, Here, Phase, paying

REFUSED = (ConnectionRefusedError(),)
"""A fault of the provider's before anything was sent."""
RESET = ConnectionResetError()
"""A fault after the money was taken."""


def hook(error: BaseException) -> bool:
    return isinstance(error, ConnectionRefusedError)


def only_call(**call: Any) -> Any:
    def script(op: Any) -> Generator[Any, Any, Any]:
        charge = yield Call(**call)
        return {"charge": charge["id"]}

    return script


async def test_a_rejected_call_is_stored_and_raised_on_resume(bank: Bank) -> None:
    # H2: the provider's word about this key, for whoever goes on
    def script(op: Any) -> Generator[Any, Any, Any]:
        try:
            yield Call(repeatable=False)
        except RejectedError as no:
            heard.append(no.value)
            yield Here("heard")
            yield Phase("declined")
            return 402, no.value
        return 201

    heard: list[Any] = []
    bank.provider.faults.append(RejectedError({"reason": "card_declined", "codes": (51,)}))
    async with bank.process(script) as dead, bank.process(script) as alive:
        await dead.send_and_freeze("heard")
        bank.lease_over()
        reply = await alive.send()
        again = await alive.send()
    assert (reply.status, again.status, again.replayed, again.body) == (402, 402, True, reply.body)
    assert heard == [{"reason": "card_declined", "codes": [51]}] * 2
    assert (bank.state, bank.effects, len(bank.provider.keys)) == ("completed", ["declined"], 1)


@pytest.mark.parametrize("repeatable", [True, False])
@pytest.mark.parametrize("by_hook", [True, False])
async def test_a_call_that_was_not_executed_is_withdrawn(mixed_bank: Bank, repeatable: bool, by_hook: bool) -> None:
    # R100, R102: connection refused; nothing was stored before, so it is as if nothing had happened
    bank = mixed_bank
    error = REFUSED if by_hook else (NotExecutedError(),)
    bank.provider.faults.append(error)
    async with bank.process(only_call(repeatable=repeatable), is_definitely_not_executed=hook) as process:
        first = await process.send()
        record = await bank.record()
        assert (first.status, record.state.value, record.intent, record.memo) == (500, "failed_retryable", None, ())
        assert (await process.send()).status == 201
    assert (bank.provider.charges, len(bank.provider.keys)) == (1, 1)


async def test_a_withdrawn_call_after_a_step_can_be_retried(bank: Bank) -> None:
    # H2, F5: the order is kept, and the retry goes on at once
    bank.provider.faults.append((NotExecutedError(),))
    async with bank.process(paying(repeatable=False)) as process:
        first = await process.send()
        record = await bank.record()
        assert (first.status, record.state.value, record.intent) == (500, "failed_retryable", None)
        assert [entry.name for entry in record.memo][:1] == ["order"]
        assert (await process.send()).status == 201
    assert (bank.effects, bank.provider.charges) == (["order", "paid"], 1)


async def test_a_handler_may_repeat_a_withdrawn_call(small_bank: Bank) -> None:
    def script(op: Any) -> Generator[Any, Any, Any]:
        with suppress(NotExecutedError):
            yield Call(repeatable=False)
        charge = yield Call(repeatable=False)
        return {"charge": charge["id"]}

    small_bank.provider.faults.append((NotExecutedError(),))
    async with small_bank.process(script) as process:
        assert (await process.send()).status == 201
    assert small_bank.provider.charges == 1


async def test_a_withdrawn_second_send_keeps_the_first_uncertain(bank: Bank) -> None:
    # F24: drop-after, then refused: the money was taken, and nobody may say that it was not
    bank.provider.faults.extend([RESET, REFUSED])
    async with bank.process(only_call(repeatable=True), is_definitely_not_executed=hook) as process:
        assert (await process.send()).status == 500
        first = await bank.record()
        assert (await process.send()).status == 500
        second = await bank.record()
        assert [record.intent.sends for record in (first, second) if record.intent] == [1, 2]
        assert second.state.value == "failed_retryable"
        assert (await process.send()).status == 201
    assert (bank.provider.charges, len(set(bank.provider.keys))) == (1, 1)


UNCERTAIN = [RESET, TimeoutError(), RuntimeError("a bug"), {"not": object()}]


@pytest.mark.parametrize("fault", UNCERTAIN, ids=["reset", "time-out", "exception", "not storable"])
async def test_an_uncertain_call_that_is_not_repeatable_is_made_once(mixed_bank: Bank, fault: Any) -> None:
    # R101, H2, F26: unknown, and no retry calls again
    bank = mixed_bank
    bank.provider.dedup = False
    bank.provider.faults.append(fault)
    async with bank.process(only_call(repeatable=False)) as process:
        first = await process.send()
        replies = [await process.send() for _ in range(2)]
    unstorable = isinstance(fault, dict)
    assert (first.status, first.code) == (
        (500, "idempotency_execution_failed") if unstorable else (409, "idempotency_outcome_unknown")
    )
    assert {(reply.status, reply.code) for reply in replies} == {(409, "idempotency_outcome_unknown")}
    record = await bank.record()
    assert (record.state.value, record.last_error) == (
        "unknown",
        "result_not_storable" if unstorable else "call_uncertain",
    )
    assert (bank.provider.charges, process.runs) == (1, 1)


@pytest.mark.parametrize("fault", UNCERTAIN[:3], ids=["reset", "time-out", "exception"])
async def test_an_uncertain_call_that_is_repeatable_is_made_again(mixed_bank: Bank, fault: Any) -> None:
    # R117, H2, F27
    bank = mixed_bank
    bank.provider.faults.append(fault)
    async with bank.process(paying(repeatable=True)) as process:
        first = await process.send()
        record = await bank.record()
        assert (first.status, record.state.value, record.last_error) == (500, "failed_retryable", "call_uncertain")
        assert (await process.send()).status == 201
    assert (bank.provider.charges, len(bank.provider.keys), len(set(bank.provider.keys))) == (1, 2, 1)
    assert bank.effects == ["order", "paid"]


async def test_a_call_that_exceeds_its_timeout_is_unknown(small_bank: Bank) -> None:
    # U1: `op.call` enforces it, whatever the client library does
    async with small_bank.process(only_call(repeatable=False), call_timeout=0.05) as process:
        process.freezes_at = "after charge"
        reply = await process.send()
    assert (reply.status, reply.code, small_bank.state) == (409, "idempotency_outcome_unknown", "unknown")


@pytest.mark.parametrize("repeatable", [True, False])
async def test_a_cancelled_call_is_uncertain(async_bank: Bank, repeatable: bool) -> None:
    async with async_bank.process(only_call(repeatable=repeatable)) as process:
        await process.send_and_freeze("after charge")
        await process.thaw()
        record = await async_bank.record()
        assert record.state.value == ("failed_retryable" if repeatable else "unknown")
        process.freezes_at = None
        assert (await process.send()).status == (201 if repeatable else 409)
    assert async_bank.provider.charges == 1


@pytest.mark.parametrize(("window", "charges"), [(timedelta(hours=2), 1), (True, 1)])
async def test_after_its_window_a_call_is_not_repeated(mixed_bank: Bank, window: Any, charges: int) -> None:
    # H3, F23: a provider that forgot the key would charge twice
    bank = mixed_bank
    bank.provider.faults.append(RESET)
    async with bank.process(paying(repeatable=window)) as process:
        assert (await process.send()).status == 500
        bank.clock.advance(3 * HOUR if window is not True else 21 * HOUR)
        bank.provider.ledger.clear()  # it has forgotten
        reply = await process.send()
        record = await bank.record()
    assert (reply.status, reply.code, record.state.value) == (409, "idempotency_outcome_unknown", "unknown")
    assert (bank.provider.charges, len(bank.provider.keys)) == (charges, 1)


async def test_a_call_is_repeated_within_its_window(mixed_bank: Bank) -> None:
    bank = mixed_bank
    bank.provider.faults.append(RESET)
    async with bank.process(paying(repeatable=timedelta(hours=2))) as process:
        assert (await process.send()).status == 500
        bank.clock.advance(HOUR)
        assert (await process.send()).status == 201
    assert bank.provider.charges == 1


async def test_a_crash_during_a_nonrepeatable_call_is_unknown(mixed_bank: Bank) -> None:
    # row 15: the lease is over, and the call may have been made
    bank = mixed_bank
    bank.provider.dedup = False
    async with bank.process(paying(repeatable=False)) as dead, bank.process(paying(repeatable=False)) as alive:
        await dead.send_and_freeze("after charge")
        bank.lease_over()
        reply = await alive.send()
        assert (reply.status, reply.code) == (409, "idempotency_outcome_unknown")
        assert (bank.state, bank.provider.charges, alive.runs) == ("unknown", 1, 0)


async def test_changed_call_parameters_park_the_record(mixed_bank: Bank, caplog: pytest.LogCaptureFixture) -> None:
    # H2: a provider may take the first parameters for the second's
    bank = mixed_bank
    bank.provider.faults.append(RESET)
    amounts = iter([7, 8])

    def script(op: Any) -> Generator[Any, Any, Any]:
        amount = next(amounts)
        yield Call(given={"amount": amount}, amount=amount)
        return 201

    async with bank.process(script) as process:
        assert (await process.send()).status == 500
        reply = await process.send()
    record = await bank.record()
    assert (reply.status, record.state.value, record.last_error) == (500, "unknown", "call_parameters_changed")
    assert len(bank.provider.keys) == 1
    assert "waits for an operator: call_parameters_changed" in caplog.text


@pytest.mark.parametrize("status", [201, 402, 429, 503])
@pytest.mark.parametrize("repeatable", [True, False])
async def test_a_swallowed_uncertain_call_overrides_the_status(async_bank: Bank, status: int, repeatable: bool) -> None:
    # F6, P4: with an open intent the handler's answer is not used
    def script(op: Any) -> Generator[Any, Any, Any]:
        try:
            yield Call(repeatable=repeatable)
        except ConnectionResetError:
            return status
        return 200

    async_bank.provider.faults.append(RESET)
    async with async_bank.process(script) as process:
        first = await process.send()
        again = await process.send()
    if repeatable:
        assert (first.status, first.code, again.status) == (500, "idempotency_execution_failed", 200)
    else:
        assert [(reply.status, reply.code) for reply in (first, again)] == [(409, "idempotency_outcome_unknown")] * 2
        assert async_bank.state == "unknown"
    assert async_bank.provider.charges == 1


@pytest.mark.parametrize("step", [Phase("after"), Call("another")])
async def test_a_step_after_an_uncertain_call_raises(small_bank: Bank, step: Any) -> None:
    refused: list[BaseException] = []

    def script(op: Any) -> Generator[Any, Any, Any]:
        with suppress(ConnectionResetError):
            yield Call(repeatable=False)
        try:
            yield step
        except CallUncertainError as error:
            refused.append(error)
        return 201

    small_bank.provider.faults.append(RESET)
    async with small_bank.process(script) as process:
        assert (await process.send()).code == "idempotency_outcome_unknown"
    assert (len(refused), small_bank.effects, small_bank.provider.charges) == (1, [], 1)


async def test_not_executed_is_ignored_while_a_call_is_open(small_bank: Bank) -> None:
    # P4: the handler cannot know better than its announcement
    def script(op: Any) -> Generator[Any, Any, Any]:
        try:
            yield Call(repeatable=False)
        except ConnectionResetError:
            raise NotExecutedError from None

    small_bank.provider.faults.append(RESET)
    async with small_bank.process(script) as process:
        reply = await process.send()
    assert (reply.status, reply.code, small_bank.state) == (409, "idempotency_outcome_unknown", "unknown")


async def test_a_swept_owner_may_store_a_late_result(bank: Bank) -> None:
    # U2, row 6: nobody else has it, so its word is the best there is
    async with bank.process(paying(repeatable=False)) as process, bank.process() as other:
        await process.send_and_freeze("after charge")
        bank.lease_over()
        assert (await other.send()).code == "idempotency_outcome_unknown"  # the retry sweeps it
        assert bank.state == "unknown"
        reply = await process.wake()
        assert (reply.status, bank.state, bank.effects) == (201, "completed", ["order", "paid"])
        assert (await other.send()).body == reply.body
    assert bank.provider.charges == 1


async def test_a_late_result_after_a_takeover_becomes_evidence(bank: Bank, caplog: pytest.LogCaptureFixture) -> None:
    # U2, P1, P3: it was executed, and somebody has to hear of it; its client hears what the record says
    async with bank.process() as dead, bank.process() as alive:
        await dead.send_and_freeze("before charge")
        bank.lease_over()
        reply = await alive.send()
        finished = await bank.record()
        late = await dead.wake()
        assert (late.status, late.body, late.replayed) == (201, reply.body, True)
        assert await bank.record() == finished
    assert "charge was executed by an owner that had lost its key" in caplog.text
    table = "oncekey.evidence" if "postgresql" in bank.database.url else "oncekey_evidence"
    mine = f"'{finished.incarnation}/%'"
    kept = bank.execute(f"SELECT source, event_id, downstream_key, verdict FROM {table} WHERE event_id LIKE {mine}")
    (key,) = set(bank.provider.keys)
    assert kept == [("owner", f"{finished.incarnation}/1/charge", key, "agrees")]
    assert (bank.provider.charges, len(bank.provider.keys), bank.effects) == (1, 2, ["order", "paid"])


async def test_max_attempts_parks_a_failing_record(mixed_bank: Bank) -> None:
    # H6: then a person looks at it
    bank = mixed_bank
    policy = Policy(lease=LEASE, max_attempts=3)
    bank.provider.faults.extend([RESET] * 5)
    async with bank.process(paying(), policy=policy) as process:
        replies = [await process.send() for _ in range(5)]
        bank.clock.advance(MINUTE)
    record = await bank.record()
    assert [reply.status for reply in replies] == [500, 500, 409, 409, 409]
    assert (record.state.value, record.last_error, record.attempts, process.runs) == (
        "unknown",
        "attempts_exhausted",
        3,
        3,
    )
    assert record.reconcile_after is not None


async def test_a_call_is_not_made_after_its_send_window(small_bank: Bank) -> None:
    # U1: others count on its being over by then
    from oncekey.engine import phases

    process_clock = iter(range(0, 10**9, 10))
    async with small_bank.process(only_call(repeatable=False)) as process:
        original = phases.PhasedRun.of

        def slow(*args: Any, **options: Any) -> Any:
            phased_run = original(*args, **options)
            phased_run.clock = lambda: float(next(process_clock))
            return phased_run

        phases.PhasedRun.of = slow  # type: ignore[method-assign,assignment]
        try:
            assert (await process.send()).status == 500
        finally:
            phases.PhasedRun.of = original  # type: ignore[method-assign]
        record = await small_bank.record()
        assert (record.state.value, record.intent, small_bank.provider.keys) == ("failed_retryable", None, [])
        assert (await process.send()).status == 201


async def test_a_fallback_after_a_withdrawn_call_resumes_the_same_way(mixed_bank: Bank) -> None:
    # ADR 0011, H4: a second provider is asked, and whoever goes on does not ask the first one again
    bank = mixed_bank

    def script(op: Any) -> Generator[Any, Any, Any]:
        try:
            charge = yield Call("first", repeatable=False)
        except NotExecutedError:
            charge = yield Call("second", repeatable=False)
        yield Here("charged")
        return {"charge": charge["id"]}

    bank.provider.faults.append(REFUSED)
    async with (
        bank.process(script, is_definitely_not_executed=hook) as dead,
        bank.process(script, is_definitely_not_executed=hook) as alive,
    ):
        await dead.send_and_freeze("charged")
        bank.lease_over()
        assert (await alive.send()).status == 201
    assert [entry.name for entry in (await bank.record()).memo] == ["first", "second"]
    assert (bank.provider.charges, len(bank.provider.keys)) == (1, 1)
