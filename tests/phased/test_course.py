"""The way of a phased handler from `started` to `finished`, and what a crash after each step leaves to do."""

from __future__ import annotations

from collections.abc import Generator
from decimal import Decimal
from typing import Any

import pytest

from oncekey.core.memo import decode
from oncekey.core.model import HOUR
from oncekey.workers.completer import Completer
from phased.bank import KEY, POINTS, Bank, Here, Phase, Value


async def test_each_step_runs_once_and_in_order(bank: Bank) -> None:
    # R114, R116, H1, F26
    async with bank.process() as process:
        first = await process.send()
        again = await process.send()
    record = await bank.record()
    assert (first.status, again.status, again.body, again.replayed) == (201, 201, first.body, True)
    assert (bank.effects, bank.provider.charges, process.runs) == (["order", "paid"], 1, 1)
    assert [(entry.name, entry.kind.value) for entry in record.memo] == [
        ("order", "phase"),
        ("drawn", "value"),
        ("charge", "call"),
        ("paid", "phase"),
    ]
    assert (record.state.value, record.recovery_point, record.intent, record.request) == (
        "completed",
        "finished",
        None,
        None,
    )
    # What the first run saw is what a resumed one would see: the stored form, a list for a tuple.
    given = [seen for seen in process.seen if seen is not None]
    assert given == [decode(entry.result) for entry in record.memo]
    assert given[0]["items"] == ["tea"]
    assert given[2]["amount"] == Decimal(7)


@pytest.mark.parametrize("point", POINTS)
async def test_a_retry_resumes_after_a_crash_at_every_step(bank: Bank, point: str) -> None:
    # R116, R117, R120, R126, R130, D1: each phase's effect once, and one charge under one key wherever it stops
    async with bank.process() as dead, bank.process() as alive:
        await dead.send_and_freeze(point)
        stopped = await bank.record()
        assert (await alive.send()).status == 409  # the lease still runs
        bank.lease_over()
        reply = await alive.send()
        assert (reply.status, bank.effects, bank.provider.charges) == (201, ["order", "paid"], 1)
        assert len(set(bank.provider.keys)) == 1
        assert len(bank.provider.keys) == (2 if point == "after charge" else 1)
        # The zombie wakes up, and nothing of what it does is written.
        finished = await bank.record()
        await dead.thaw()
        assert await bank.record() == finished
        assert (bank.effects, bank.provider.charges) == (["order", "paid"], 1)
        assert (await alive.send()).body == reply.body
    steps = ["started", "order", "order", "order", "charge", "paid"]
    assert stopped.recovery_point == steps[POINTS.index(point)] or stopped.recovery_point == "drawn"
    assert finished.attempts == 2


@pytest.mark.parametrize("point", POINTS)
async def test_a_completer_resumes_after_a_crash_at_every_step(mixed_bank: Bank, point: str) -> None:
    # H7, F28, R116
    bank = mixed_bank
    async with bank.process() as dead, bank.process() as alive:
        completer = Completer(alive.once)
        await dead.send_and_freeze(point)
        assert await completer.run_once() == 0  # the lease still runs
        bank.lease_over()
        assert await completer.run_once() == 1
        assert await completer.run_once() == 0
        assert (bank.state, bank.effects, bank.provider.charges) == ("completed", ["order", "paid"], 1)
        assert len(set(bank.provider.keys)) == 1
        reply = await alive.send()
        assert (reply.status, reply.replayed, alive.runs) == (201, True, 1)
    assert (await bank.record()).request is None


async def test_downstream_keys_survive_record_loss_and_expiry(bank: Bank) -> None:
    # D1, F38: a record that was lost and one that expired; another body is another payment
    async with bank.process() as process:
        await process.send()
        bank.execute("DELETE FROM {record}")
        await process.send()
        bank.clock.advance(25 * HOUR)
        await process.send()
        assert (bank.provider.charges, len(bank.provider.keys), len(set(bank.provider.keys))) == (1, 3, 1)
        bank.clock.advance(25 * HOUR)
        await process.send(body={"other": "body"})
    assert (bank.provider.charges, len(set(bank.provider.keys))) == (2, 2)


async def test_a_value_is_stored_with_the_next_step(bank: Bank) -> None:
    # H4: time, random numbers and ids are the same for everybody who goes on
    drawn: list[int] = []

    def draw() -> int:
        drawn.append(len(drawn) + 1)
        return drawn[-1]

    def script(op: Any) -> Generator[Any, Any, Any]:
        number = yield Value("number", draw)
        yield Here("drawn")
        yield Phase("order")
        yield Here("ordered")
        return {"number": number}

    async with bank.process(script) as dead, bank.process(script) as alive, bank.process(script) as last:
        await dead.send_and_freeze("drawn")
        assert (await bank.record()).memo == ()
        bank.lease_over()
        await alive.send_and_freeze("ordered")
        assert [entry.name for entry in (await bank.record()).memo] == ["number", "order"]
        bank.lease_over()
        assert (await last.send()).json() == {"number": 2}
    assert (drawn, bank.effects) == ([1, 2], ["order"])


async def test_the_status_shows_the_recovery_point(async_bank: Bank) -> None:
    # R114
    async with async_bank.process() as process:
        await process.send_and_freeze("charge")
        caller = process.caller()
        caller.scope.update(method="GET", path=f"/idempotency-keys/{KEY}", raw_path=f"/idempotency-keys/{KEY}".encode())
        shown = (await caller.run()).json()
        assert (shown["state"], shown["recovery_point"]) == ("in_progress", "charge")


async def test_no_transaction_is_open_during_a_call(bank: Bank) -> None:
    # R115, R131
    async with bank.process() as process:
        await process.send_and_freeze("before charge")
        if bank.database.records == "oncekey.record":
            idle = (
                "SELECT count(*) FROM pg_stat_activity "
                "WHERE state LIKE 'idle in transaction%' AND datname = current_database()"
            )
            assert bank.execute(idle) == [(0,)]
        bank.execute("INSERT INTO effect VALUES ('another writer')")  # SQLite has one writer, and it is free
        assert [entry.name for entry in (await bank.record()).memo] == ["order", "drawn"]
