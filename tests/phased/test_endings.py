"""How a phased handler's answer is taken: by how far it came, not by its status alone (P4, F5)."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import suppress
from typing import Any

import pytest
from fastapi import Depends, HTTPException

from frameworks.shop import new_key
from oncekey.core.errors import ConfigurationError
from phased.bank import Bank, Call, Phase, Value

STATUSES = (201, 302, 402, 404, 401, 403, 408, 425, 429, 500, 503)
STORED = (201, 302, 402, 404)

# Status -> state of the record, by how far the handler came.
AFTER = {
    "entered": {status: "completed" if status in STORED else "failed_retryable" for status in STATUSES},
    "after a phase": {status: "completed" if status in STORED else "failed_retryable" for status in STATUSES},
    "open, repeatable": dict.fromkeys(STATUSES, "failed_retryable"),
    "open": dict.fromkeys(STATUSES, "unknown"),
}


def ending(how_far: str, status: int, *, raising: bool) -> Any:
    def script(op: Any) -> Generator[Any, Any, Any]:
        if how_far == "after a phase":
            yield Phase("order")
        if how_far.startswith("open"):
            with suppress(ConnectionResetError):
                yield Call(repeatable=how_far == "open, repeatable")
        if raising:
            raise HTTPException(status)
        return status
        yield

    return script


@pytest.mark.parametrize("raising", [False, True], ids=["returned", "raised"])
@pytest.mark.parametrize("how_far", AFTER)
async def test_progress_and_status_decide_the_record_state(small_bank: Bank, how_far: str, raising: bool) -> None:
    # P4, F5, F6, R104, R113: what was done is never evicted, whatever is answered
    bank = small_bank
    async with bank.process(ending(how_far, 201, raising=False)) as process:
        for status in STATUSES:
            key = new_key()
            if how_far.startswith("open"):
                bank.provider.faults.append(ConnectionResetError())
            process.script = ending(how_far, status, raising=raising)
            reply = await process.send(key=key)
            record = await bank.record(key)
            assert (status, record.state.value) == (status, AFTER[how_far][status])
            assert bool(record.memo) is (how_far == "after a phase")
            if not how_far.startswith("open"):
                assert reply.status == status
            if record.state.value == "failed_retryable":
                process.script = ending(how_far, 201, raising=False)
                assert (await process.send(key=key)).status == 201
    rows = len(STATUSES) if how_far == "after a phase" else 0
    assert bank.effects == ["order"] * rows


async def test_a_failing_dependency_leaves_no_record(small_bank: Bank) -> None:
    # P4, R198: authentication and validation come before the claim
    def refuse() -> None:
        raise HTTPException(401)

    async with small_bank.process(route={"dependencies": [Depends(refuse)]}) as process:
        assert (await process.send()).status == 401
    assert (small_bank.state, process.runs) == (None, 0)


async def test_a_failure_before_the_first_step_can_be_retried(mixed_bank: Bank) -> None:
    # H4, P4: only an answer that would be the last word has to have used everything
    bank = mixed_bank
    answers = iter([503, 500, 201])

    def script(op: Any) -> Generator[Any, Any, Any]:
        status = next(answers)
        if status == 500:
            return status
        yield Phase("order")
        return status

    async with bank.process(script) as process:
        assert [(await process.send()).status for _ in range(3)] == [503, 500, 201]
    assert (bank.effects, bank.state) == (["order"], "completed")


async def test_a_failed_phase_rolls_back_and_can_be_retried(bank: Bank) -> None:
    # R115: its rows and its recovery point commit together, or not at all
    fails = iter([RuntimeError("once"), None])

    def script(op: Any) -> Generator[Any, Any, Any]:
        yield Phase("order")
        yield Phase("stock", fails=next(fails))
        return 201

    async with bank.process(script) as process:
        assert (await process.send()).status == 500
        record = await bank.record()
        assert (record.state.value, [entry.name for entry in record.memo]) == ("failed_retryable", ["order"])
        assert bank.effects == ["order"]
        assert (await process.send()).status == 201
    assert bank.effects == ["order", "stock"]


async def test_a_failed_phase_can_be_repeated_within_one_run(small_bank: Bank) -> None:
    def script(op: Any) -> Generator[Any, Any, Any]:
        with suppress(RuntimeError):
            yield Phase("order", fails=RuntimeError())
        yield Phase("order")
        return 201

    async with small_bank.process(script) as process:
        assert (await process.send()).status == 201
    assert small_bank.effects == ["order"]


async def test_a_failed_step_cannot_be_replaced_by_another(small_bank: Bank) -> None:
    # H4: its failure is not stored, so a resumed run would do the failed one, and diverge
    refused: list[str] = []

    def script(op: Any) -> Generator[Any, Any, Any]:
        with suppress(RuntimeError):
            yield Phase("order", fails=RuntimeError())
        try:
            yield Phase("waiting list")
        except ConfigurationError as error:
            refused.append(str(error))
            raise

    async with small_bank.process(script) as process:
        assert (await process.send()).status == 500
    assert "'order', which failed: the failure is not stored" in refused[0]
    assert small_bank.effects == []


async def test_unstorable_results_fail_their_step(mixed_bank: Bank) -> None:
    # H1, F26: before the commit of a phase nothing has happened; after a call nobody may do it again
    bank = mixed_bank
    async with bank.process(lambda op: iter([Phase("order", object())]), max_result_bytes=2000) as process:
        for result in (object(), "x" * 2001, float("nan"), {1: "one"}):
            key = new_key()
            process.script = _one(Phase("order", result))
            assert (await process.send(key=key)).status == 500
            assert (await bank.record(key)).state.value == "failed_retryable"
            process.script = _one(Phase("order", "fine"))
            assert (await process.send(key=key)).status == 201
        key = new_key()
        bank.provider.faults.append({"answer": "x" * 2001})
        process.script = _one(Call(repeatable=True))
        assert (await process.send(key=key)).status == 500
        record = await bank.record(key)
        assert (record.state.value, record.last_error) == ("unknown", "result_not_storable")
        process.script = _one(Value("drawn", object))
        assert (await process.send(key=new_key())).status == 500
    assert bank.effects == ["order"] * 4


def _one(step: Any) -> Any:
    def script(op: Any) -> Generator[Any, Any, Any]:
        yield step
        return 201

    return script


async def test_phased_steps_raise_in_an_inline_handler(small_bank: Bank) -> None:
    from oncekey.core.model import INLINE

    said: list[str] = []

    def script(op: Any) -> Generator[Any, Any, Any]:
        for step in (Phase("order"), Call(), Value("drawn", int)):
            try:
                yield step
            except ConfigurationError as error:
                said.append(str(error))
        return 201

    async with small_bank.process(script, effects=INLINE) as process:
        assert (await process.send()).status == 201
    assert [one.split(":")[0] for one in said] == [
        f"op.{what} is for effects=PHASED" for what in ("phase", "call", "value")
    ]
