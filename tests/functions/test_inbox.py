"""Messages that arrive at least once: five answers, and what they mean."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from functions.stage import STAGES, Order, Stage, deliver
from oncekey import INLINE, LOCAL, OUTBOX, Handling, Once, Operation, Receipt, RejectedError, SyncOperation
from oncekey.core.policy import Policy
from oncekey.workers.tasks import tasks_for

HANDLED, DUPLICATE, BUSY = Handling.HANDLED, Handling.DUPLICATE, Handling.BUSY
UNKNOWN, DEAD = Handling.UNKNOWN, Handling.DEAD


def consumer(stage: Stage, name: str = "stock", effects: Any = LOCAL, **options: Any) -> Callable[..., Any]:
    def take(op: SyncOperation, event: Order) -> dict[str, str]:
        if effects is not INLINE:
            stage.database.insert_blocking(op.connection, f"{name} {event.item}")
        if effects is OUTBOX:
            op.defer("charge", {"stage": stage.name, "item": event.item})
        stage.act("take")
        return {"item": event.item}

    async def atake(op: Operation, event: Order) -> dict[str, str]:
        if effects is not INLINE:
            await stage.database.insert(op.connection, f"{name} {event.item}")
        if effects is OUTBOX:
            op.defer("charge", {"stage": stage.name, "item": event.item})
        happens = stage.act("take")
        if happens is not None:
            await happens
        return {"item": event.item}

    received: Any = stage.once.inbox(consumer=name, effects=effects, **options)(take if stage.blocking else atake)

    async def receive(message_id: Any, event: Any) -> Receipt:
        if stage.blocking:
            return await asyncio.to_thread(received, message_id, event)  # type: ignore[no-any-return]
        return await received(message_id, event)  # type: ignore[no-any-return]

    return receive


TEA = Order("tea")


async def test_each_consumer_handles_a_message_once(stage: Stage) -> None:
    stock, mail = consumer(stage), consumer(stage, "mail")
    async with stage.open():
        receipts = [await receive("m-1", TEA) for receive in (stock, stock, mail, stock, mail)]
    assert [one.handling for one in receipts] == [HANDLED, DUPLICATE, HANDLED, DUPLICATE, DUPLICATE]
    assert all(one.acknowledge and one.result == {"item": "tea"} for one in receipts)
    assert stage.rows == ["mail tea", "stock tea"]


async def test_a_message_in_progress_is_redelivered(stage: Stage) -> None:
    stock = consumer(stage)
    stage.faults["take"] = stage.wait
    async with stage.open():
        first = asyncio.create_task(stock("m-1", TEA))
        await stage.is_entered()
        busy = await stock("m-1", TEA)
        assert (busy.handling, busy.acknowledge, busy.retry_after >= 1) == (BUSY, False, True)
        stage.go_on.set()
        assert ((await first).handling, (await stock("m-1", TEA)).handling) == (HANDLED, DUPLICATE)


async def test_consumer_exceptions_reach_the_broker(stage: Stage) -> None:
    stock = consumer(stage)
    stage.faults["take"] = ValueError("not now")
    async with stage.open():
        with pytest.raises(ValueError, match="not now"):
            await stock("m-1", TEA)
        assert stage.rows == []
        assert (await stock("m-1", TEA)).handling is HANDLED


async def test_an_unprocessable_message_is_reported_as_dead(small_stage: Stage) -> None:
    stock = consumer(small_stage)
    small_stage.faults["take"] = RejectedError({"why": "no such product"})
    async with small_stage.open():
        for _ in range(2):
            dead = await stock("m-1", TEA)
            assert (dead.handling, dead.acknowledge, dead.result) == (DEAD, False, {"why": "no such product"})
        await stock("m-2", TEA)
        other = await stock("m-2", Order("coffee"))
        unreadable = await stock("m-3", {TEA})
        nameless = await stock("", TEA)
        assert [one.handling for one in (other, unreadable, nameless)] == [DEAD] * 3
        assert nameless.reason == "stock: the message ID must not be empty"
        assert other.reason == "stock: its key belongs to a call with other arguments"
    assert small_stage.rows == ["stock tea"]


async def test_a_message_of_unknown_outcome_is_acknowledged(small_stage: Stage) -> None:
    stock = consumer(small_stage, effects=INLINE)
    small_stage.faults["take"] = ConnectionError("reset")
    async with small_stage.open():
        with pytest.raises(ConnectionError):
            await stock("m-1", TEA)
        doubt = await stock("m-1", TEA)
    assert (doubt.handling, doubt.acknowledge, doubt.retry_after >= 1) == (UNKNOWN, True, True)


async def test_a_deferred_message_is_reported_as_handled(small_stage: Stage) -> None:
    stock = consumer(small_stage, effects=OUTBOX)
    small_stage.once.topic("charge")(deliver)
    async with small_stage.open():
        assert [(await stock("m-1", TEA)).handling for _ in range(2)] == [HANDLED, HANDLED]
        (relay,) = [task for task in tasks_for(small_stage.once) if task.name == "relay"]
        await relay.run_once()
        await relay.shut_down()
        assert (await stock("m-1", TEA)).handling is DUPLICATE
    assert len(STAGES[small_stage.name].charges) == 1


def test_a_store_outage_causes_a_redelivery(tmp_path: Any) -> None:
    away = Once(f"sqlite:///{tmp_path}/nowhere/shop.db", migrate=True, policy=Policy())

    @away.inbox(consumer="stock", effects=LOCAL)
    def stock(event: str) -> None:
        raise AssertionError

    assert stock("m-1", "tea") == Receipt(BUSY, retry_after=1, reason="stock: the store is unavailable")


async def test_a_message_with_an_unstored_result_is_a_duplicate(small_stage: Stage) -> None:
    stock = consumer(small_stage, max_response_bytes=1)
    async with small_stage.open():
        assert [(await stock("m-1", TEA)).handling for _ in range(2)] == [HANDLED, DUPLICATE]
