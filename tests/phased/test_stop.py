"""A stop: what has no open call is handed back and its attempt given back, an open call drains (P5, F10)."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

import pytest

from oncekey.core.errors import StoppingError
from phased.bank import Bank, Phase, paying


async def test_a_stopping_process_starts_no_further_step(bank: Bank) -> None:
    async with bank.process() as stopping, bank.process() as other:
        await stopping.send_and_freeze("order")
        stopping.once.quiesce()
        reply = await stopping.wake()
        assert (reply.status, reply.code, reply.header("retry-after")) == (409, "idempotency_key_in_progress", "1")
        record = await bank.record()
        assert (record.state.value, record.last_error, record.attempts) == ("failed_retryable", "stopped", 0)
        assert bank.provider.keys == []
        assert (await other.send()).status == 201
    assert (bank.effects, bank.provider.charges) == (["order", "paid"], 1)


async def test_stopping_waits_for_an_open_call(bank: Bank) -> None:
    # F10: handed back before that, somebody else would call at once
    async with bank.process(paying(repeatable=False)) as stopping, bank.process(paying(repeatable=False)) as other:
        await stopping.send_and_freeze("before charge")
        stopping.once.quiesce()
        assert (await other.send()).status == 409
        assert (await stopping.wake()).status == 409
        record = await bank.record()
        assert (record.state.value, record.recovery_point, record.intent) == ("failed_retryable", "charge", None)
        assert (await other.send()).status == 201
    assert (bank.effects, bank.provider.charges, len(bank.provider.keys)) == (["order", "paid"], 1, 1)


async def test_swallowing_the_stop_error_does_not_succeed(small_bank: Bank) -> None:
    def script(op: Any) -> Generator[Any, Any, Any]:
        for name in ("order", "paid"):
            try:
                yield Phase(name)
            except StoppingError:
                continue
            process.once.quiesce()
        return 201

    async with small_bank.process(script) as process, small_bank.process(script) as other:
        assert (await process.send()).status == 409
        assert small_bank.state == "failed_retryable"
        process = other
        process.once.quiesce = lambda: None  # type: ignore[method-assign]
        assert (await other.send()).status == 201
    assert small_bank.effects == ["order", "paid"]


async def test_stopping_cancels_a_handler_between_steps(async_bank: Bank, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("oncekey.once.DRAIN_SECONDS", 0.2)
    async with async_bank.process() as stopping, async_bank.process() as other:
        await stopping.send_and_freeze("order")
        await stopping.once.stop()
        record = await async_bank.record()
        assert (record.state.value, record.last_error, record.attempts) == ("failed_retryable", "stopped", 0)
        assert (await other.send()).status == 201
    assert async_bank.effects == ["order", "paid"]


async def test_a_stop_never_interrupts_an_open_call(async_bank: Bank, monkeypatch: pytest.MonkeyPatch) -> None:
    # F10: its lease runs out
    monkeypatch.setattr("oncekey.once.DRAIN_SECONDS", 0.2)
    script = paying(repeatable=False)
    async with async_bank.process(script) as stopping, async_bank.process(script) as other:
        await stopping.send_and_freeze("after charge")
        await stopping.once.stop()
        record = await async_bank.record()
        assert (record.state.value, record.attempts) == ("in_progress", 1)
        assert (await other.send()).status == 409
        async_bank.lease_over()
        assert (await other.send()).code == "idempotency_outcome_unknown"
    assert async_bank.provider.charges == 1


async def test_a_restarted_process_runs_handlers_again(small_bank: Bank) -> None:
    async with small_bank.process() as process:
        process.once.quiesce()
        assert (await process.send()).status == 409
        await process.once.start(process.app)
        assert (await process.send()).status == 201


@pytest.mark.parametrize(("stopping", "attempts"), [(False, 1), (True, 0)])
async def test_a_cancellation_counts_as_an_attempt_unless_stopping(
    async_bank: Bank, stopping: bool, attempts: int
) -> None:
    # H6, P5: a time-out that cancels each run must not go on for ever
    async with async_bank.process() as process:
        await process.send_and_freeze("order")
        if stopping:
            process.once.quiesce()
        await process.thaw()
        record = await async_bank.record()
        assert (record.state.value, record.attempts) == ("failed_retryable", attempts)
