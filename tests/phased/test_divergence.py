"""A resumed handler asks for the same steps in the same order, or nothing runs at all (H1, H4, R115, R121)."""

from __future__ import annotations

import asyncio
from collections.abc import Generator
from typing import Any

import pytest

from oncekey.core.errors import ConfigurationError
from oncekey.core.model import HOUR
from oncekey.workers.completer import Completer
from phased.bank import Bank, Call, Here, Phase, Value, paying


def steps(*wanted: Any) -> Any:
    def script(op: Any) -> Generator[Any, Any, Any]:
        for step in wanted:  # noqa: UP028  (a tuple takes no results)
            yield step
        return 201

    return script


A, B, C = Phase("a"), Phase("b"), Phase("c")
STOP = Here("stop")

DIVERGENT = {
    "renamed": steps(Phase("renamed"), B, C),
    "reordered": steps(B, A, C),
    "removed": steps(B, C),
    "another kind": steps(Call("a"), B, C),
    "a new one in front": steps(Phase("new"), A, B, C),
    "a value in front": steps(Value("now", int), A, B, C),
    "the code of before": steps(A),
    "nothing at all": steps(),
}


@pytest.mark.parametrize("case", DIVERGENT)
async def test_a_diverged_handler_runs_no_further_step(
    small_bank: Bank, case: str, caplog: pytest.LogCaptureFixture
) -> None:
    # H4, F25: renamed, reordered, removed; the code of version N-1 that knows nothing of the second step
    bank = small_bank
    async with bank.process(steps(A, B, STOP, C)) as dead, bank.process(DIVERGENT[case]) as other:
        await dead.send_and_freeze("stop")
        bank.lease_over()
        reply = await other.send()
        record = await bank.record()
        assert (reply.status, reply.code) == (500, "idempotency_execution_failed")
        assert (record.state.value, record.last_error) == ("unknown", "replay_diverged")
        assert [entry.name for entry in record.memo] == ["a", "b"]
        assert (await other.send()).code == "idempotency_outcome_unknown"
    assert (bank.effects, bank.provider.keys) == (["a", "b"], [])
    missing = "'b'" if case == "the code of before" else "'a'"
    (parked,) = [line for line in caplog.messages if "waits for an operator: replay_diverged: " in line]
    assert f"stored phase {missing}" in parked or f"stored step is the phase {missing}" in parked
    assert parked.endswith("then run `oncekey keys release`")


async def test_a_swallowed_divergence_still_parks_the_record(mixed_bank: Bank) -> None:
    bank = mixed_bank

    def swallowing(op: Any) -> Generator[Any, Any, Any]:
        for name in ("x", "a", "b"):
            try:
                yield Phase(name)
            except Exception:
                continue
        return 201

    async with bank.process(steps(A, STOP)) as dead, bank.process(swallowing) as other:
        await dead.send_and_freeze("stop")
        bank.lease_over()
        assert (await other.send()).status == 500
    assert (bank.state, bank.effects) == ("unknown", ["a"])


@pytest.mark.parametrize("changed", [Phase("x"), Value("x", int), Call("x")])
async def test_a_resumed_handler_must_repeat_its_open_call(small_bank: Bank, changed: Any) -> None:
    bank = small_bank
    async with bank.process(steps(A, Call())) as dead, bank.process(steps(A, changed, Call())) as other:
        await dead.send_and_freeze("after charge")
        bank.lease_over()
        assert (await other.send()).status == 500
    assert (bank.state, bank.effects, bank.provider.charges) == ("unknown", ["a"], 1)


async def test_an_unknown_recovery_point_parks_the_record(mixed_bank: Bank, caplog: pytest.LogCaptureFixture) -> None:
    # R121: a bug or a restored backup; the handler is not even entered
    bank = mixed_bank
    async with bank.process() as dead, bank.process() as alive:
        await dead.send_and_freeze("charge")
        bank.execute("UPDATE {record} SET recovery_point = 'no such step'")
        bank.lease_over()
        reply = await alive.send()
        record = await bank.record()
        assert (reply.status, reply.code) == (500, "idempotency_execution_failed")
        assert (record.state.value, record.last_error) == ("unknown", "unknown_recovery_point")
        assert await Completer(alive.once).run_once() == 0
        assert (bank.effects, bank.provider.charges, alive.runs) == (["order"], 1, 0)
    assert "waits for an operator: unknown_recovery_point" in caplog.text


REFUSED = {
    "the same name twice": (
        steps(A, A),
        "the step name 'a' is used twice in this operation: give each step",
    ),
    "a call inside a phase": (steps(Phase("a", inside=lambda op: Call())), "one step at a time"),
    "a phase inside a phase": (steps(Phase("a", inside=lambda op: B)), "one step at a time"),
    "no name": (steps(Phase("")), "a step's name has 1 to"),
    "a reserved name": (steps(Phase("finished")), "choose another name"),
}


@pytest.mark.parametrize("case", REFUSED)
async def test_step_misuse_raises_and_rolls_back(small_bank: Bank, case: str) -> None:
    # H1, R115: at most one foreign call in a step, and none inside a transaction
    script, sentence = REFUSED[case]
    said: list[str] = []

    def listening(op: Any) -> Generator[Any, Any, Any]:
        try:
            return (yield from script(op))
        except ConfigurationError as error:
            said.append(str(error))
            raise

    async with small_bank.process(listening) as process:
        assert (await process.send()).status == 500
    assert sentence in said[0]
    assert small_bank.effects == (["a"] if case == "the same name twice" else [])
    assert (small_bank.state, small_bank.provider.keys) == ("failed_retryable", [])


async def test_two_concurrent_calls_in_one_handler_raise(async_bank: Bank) -> None:
    # H1, F28: the second is refused before anything is announced; the first one's result is not lost
    bank = async_bank
    async with bank.process() as process:
        outcomes: list[Any] = []

        def script(op: Any) -> Generator[Any, Any, Any]:
            async def both() -> None:
                charge = bank.provider.charge
                outcomes.extend(
                    await asyncio.gather(
                        op.call("one", lambda key: charge(key), repeatable=False),
                        op.call("two", lambda key: charge(key), repeatable=False),
                        return_exceptions=True,
                    )
                )

            yield _Do(both)
            return 201

        process.script = script
        step = process._step

        async def extended(op: Any, wanted: Any) -> Any:
            return await wanted.what() if isinstance(wanted, _Do) else await step(op, wanted)

        process._step = extended  # type: ignore[method-assign]
        assert (await process.send()).status == 201
    assert isinstance(outcomes[1], ConfigurationError)
    assert (outcomes[0]["id"], bank.provider.charges) == (f"ch_{bank.provider.keys[0][:8]}", 1)


class _Do:
    def __init__(self, what: Any) -> None:
        self.what = what


async def test_unfinished_work_does_not_expire(mixed_bank: Bank) -> None:
    # P6, F2, F3: resumed on the second day, and replayed for a day after that
    bank = mixed_bank
    async with bank.process() as dead, bank.process() as alive:
        await dead.send_and_freeze("order")
        bank.clock.advance(30 * HOUR)
        assert (await alive.send()).status == 201
        assert (await alive.send()).replayed
    assert (bank.effects, bank.provider.charges) == (["order", "paid"], 1)


async def test_another_request_never_resumes(mixed_bank: Bank) -> None:
    # C8: the fingerprint is compared before anything else
    bank = mixed_bank
    async with bank.process() as dead, bank.process() as alive:
        await dead.send_and_freeze("order")
        bank.lease_over()
        assert (await alive.send(body={"amount": 8})).status == 422
        assert (bank.effects, alive.runs) == (["order"], 0)
        assert (await alive.send()).status == 201


async def test_a_route_changed_to_local_does_not_run_stored_steps(async_bank: Bank) -> None:
    # F4, L3: a deploy while a payment was half-way
    from oncekey.core.model import LOCAL

    bank = async_bank
    async with bank.process() as dead, bank.process(steps(), effects=LOCAL) as alive:
        await dead.send_and_freeze("order")
        bank.lease_over()
        reply = await alive.send()
        assert (reply.status, bank.state) == (500, "unknown")
    assert bank.effects == ["order"]


async def test_a_failed_local_record_may_become_phased(async_bank: Bank) -> None:
    # and a request that had done nothing yet goes on under the new effects
    from oncekey.core.model import LOCAL

    bank = async_bank

    def failing(op: Any) -> Generator[Any, Any, Any]:
        return 503
        yield

    async with bank.process(failing, effects=LOCAL) as old, bank.process(paying()) as new:
        assert (await old.send()).status == 503
        assert (await new.send()).status == 201
        assert (await new.send()).replayed
    assert (bank.effects, bank.provider.charges) == (["order", "paid"], 1)


async def test_a_route_changed_to_inline_is_unknown_after_a_crash(async_bank: Bank) -> None:
    # F4, P2, ADR 0015: what a crash means is what the handler that crashed does to the world
    from oncekey.core.model import INLINE, LOCAL

    bank = async_bank

    def failing(op: Any) -> Generator[Any, Any, Any]:
        return 503
        yield

    def charging(op: Any) -> Generator[Any, Any, Any]:
        bank.provider.charge(op.downstream_key("charge"))
        yield Here("charged")
        return 201

    bank.provider.dedup = False
    async with (
        bank.process(failing, effects=LOCAL) as old,
        bank.process(charging, effects=INLINE) as dead,
        bank.process(charging, effects=INLINE) as alive,
    ):
        assert (await old.send()).status == 503
        await dead.send_and_freeze("charged")
        bank.lease_over()
        assert (await alive.send()).code == "idempotency_outcome_unknown"
    assert (bank.provider.charges, alive.runs) == (1, 0)
