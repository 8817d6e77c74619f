"""Operations for unit tests of handlers, without a server and without a store."""

from __future__ import annotations

import asyncio
import inspect
from decimal import Decimal
from typing import Any

import pytest

from oncekey.canonical.digests import downstream_key
from oncekey.core.errors import (
    CallUncertainError,
    ConfigurationError,
    NotExecutedError,
    RejectedError,
    ReplayDivergedError,
)
from oncekey.core.model import INLINE, LOCAL, OUTBOX, PHASED
from oncekey.engine.operation import Operation, SyncOperation
from oncekey.once import Once
from oncekey.testing import operation, sync_operation
from oncekey.testing.operations import MadeCall, SentMessage

once = Once("memory:")


@once.protect(effects=LOCAL, operation="test_operation.create_order")
async def create_order(amount: int, op: Operation[list[int]]) -> dict[str, object]:
    """Write a row through the operation."""
    op.connection.append(amount)
    return {"key": op.key, "scope": op.scope, "attempt": op.attempt}


@once.protect(effects=LOCAL, operation="test_operation.delete_order")
def delete_order(number: int, op: SyncOperation[list[int]]) -> bool:
    """Take a row away, and say if there was none."""
    if number not in op.connection:
        op.rollback()
        return False
    op.connection.remove(number)
    return True


@once.protect(effects=INLINE, operation="test_operation.charge")
async def charge(op: Operation) -> str:
    """What a provider would be sent."""
    return op.downstream_key("charge")


async def test_handler_runs_with_a_test_operation() -> None:
    rows: list[int] = []
    answer = await create_order(7, op=operation(connection=rows, attempt=2))
    assert (answer, rows) == ({"key": "test-key-0000000001", "scope": "test", "attempt": 2}, [7])


async def test_operation_attributes_can_be_chosen() -> None:
    answer = await create_order(7, operation(key=None, scope="acme", connection=[]))
    assert (answer["key"], answer["scope"]) == (None, "acme")


def test_a_blocking_handler_takes_a_blocking_operation() -> None:
    op = sync_operation(connection=[7])
    answer = delete_order(8, op=op)
    assert inspect.iscoroutine(answer)  # at run time every protected handler is awaited
    assert asyncio.run(answer) is False
    assert op.rolled_back
    assert not op.kept


async def test_downstream_keys_are_the_same_in_every_test() -> None:
    assert await charge(op=operation()) == downstream_key(bytes(32), "charge")
    assert await charge(op=operation(seed=b"another")) != downstream_key(bytes(32), "charge")


async def test_missing_connection_raises_configuration_error() -> None:
    with pytest.raises(ConfigurationError, match=r"op\.connection is for effects=LOCAL"):
        await create_order(7, op=operation())


@once.protect(effects=PHASED, operation="test_operation.pay")
async def pay(amount: int, provider: Any, op: Operation[list[Any]]) -> Any:
    """Order, charge, tell."""

    async def order(rows: list[Any]) -> tuple[int, ...]:
        rows.append(amount)
        op.emit("ordered", {"amount": amount}, order_by="orders")
        return (amount, 1)

    number = await op.value("number", lambda: 7)
    ordered = await op.phase("order", order)
    try:
        charge = await op.call("charge", provider, amount, repeatable=True, parameters={"amount": amount})
    except RejectedError as no:
        return {"declined": no.value}
    return {"number": number, "ordered": ordered, "charge": charge}


@once.protect(effects=PHASED, operation="test_operation.pay_blocking")
def pay_blocking(provider: Any, op: SyncOperation[list[Any]]) -> Any:
    """The same, blocking."""
    op.phase("order", list.append, 7)
    return {"charge": op.call("charge", provider, 7, repeatable=False), "number": op.value("number", lambda: 7)}


@once.protect(effects=OUTBOX, operation="test_operation.ship")
async def ship(op: Operation[list[Any]]) -> None:
    """Leave it to a worker."""
    op.connection.append("tea")
    op.emit("ordered", ["tea"])
    op.defer("ship", {"item": "tea"})


async def charges(amount: int, *, key: str) -> Any:
    return {"id": key[:4], "amount": Decimal(amount)}


async def test_steps_run_and_return_their_stored_values() -> None:
    rows: list[Any] = []
    op = operation(connection=rows)
    answer = await pay(7, charges, op=op)
    key = downstream_key(bytes(32), "charge")
    assert answer == {"number": 7, "ordered": [7, 1], "charge": {"id": key[:4], "amount": Decimal(7)}}
    assert (rows, list(op.steps)) == ([7], ["number", "order", "charge"])
    assert op.calls == [MadeCall("charge", key, (7,), repeatable=True, parameters={"amount": 7})]
    assert (op.emitted, op.deferred) == ([SentMessage("ordered", {"amount": 7}, "orders")], None)


async def test_a_resumed_handler_does_nothing_twice() -> None:
    rows: list[Any] = []
    op = operation(connection=rows)
    first = await pay(7, charges, op=op)
    again = op.resumed()
    assert await pay(7, None, op=again) == first
    assert (rows, again.calls, again.attempt) == ([7], [], 2)


async def test_rejected_and_not_executed_calls_resume_correctly() -> None:
    def declined(amount: int, *, key: str) -> None:
        raise RejectedError({"reason": "card"})

    def refused(amount: int, *, key: str) -> None:
        raise NotExecutedError

    op = operation(connection=[])
    assert await pay(7, declined, op=op) == {"declined": {"reason": "card"}}
    assert await pay(7, None, op=op.resumed()) == {"declined": {"reason": "card"}}
    op = operation(connection=[])
    with pytest.raises(NotExecutedError):
        await pay(7, refused, op=op)
    assert (await pay(7, charges, op=op.resumed()))["number"] == 7


async def test_uncertain_call_is_repeated_only_if_repeatable() -> None:
    # H3: as on a server, with the same key or not at all
    def breaks(amount: int, *, key: str) -> None:
        raise TimeoutError

    op = operation(connection=[])
    with pytest.raises(TimeoutError):
        await pay(7, breaks, op=op)
    resumed = op.resumed()
    assert (await pay(7, charges, op=resumed))["ordered"] == [7, 1]
    assert resumed.calls == op.calls
    op_blocking = sync_operation(connection=[])
    with pytest.raises(TimeoutError):
        await pay_blocking(breaks, op=op_blocking)
    with pytest.raises(CallUncertainError, match="cannot be resumed"):
        op_blocking.resumed()


async def test_handler_mistakes_raise_the_same_errors_as_the_server() -> None:
    op = operation(connection=[])
    await op.phase("order", lambda rows: None)
    with pytest.raises(ConfigurationError, match="the step name 'order' is used twice"):
        await op.phase("order", lambda rows: None)
    with pytest.raises(ConfigurationError, match=r"op\.emit writes a parcel"):
        op.emit("ordered", {})
    with pytest.raises(ConfigurationError, match="one step at a time"):
        await op.phase("outer", lambda rows: op.call("inner", charges, 7, repeatable=True))
    with pytest.raises(ReplayDivergedError):
        await op.resumed().phase("renamed", lambda rows: None)


async def test_a_phase_that_fails_emits_nothing() -> None:
    def fails(rows: list[Any]) -> None:
        op.emit("ordered", {})
        raise RuntimeError

    op = operation(connection=[])
    with pytest.raises(RuntimeError):
        await op.phase("order", fails)
    assert (op.emitted, op.steps) == ([], {})


def test_a_blocking_handler_has_steps_too() -> None:
    op = sync_operation(connection=[])
    answer = pay_blocking(lambda amount, key: amount + len(key), op=op)
    assert asyncio.run(answer) == {"charge": 43, "number": 7}
    assert asyncio.run(pay_blocking(None, op=op.resumed())) == {"charge": 43, "number": 7}
    assert list(op.steps) == ["order", "charge", "number"]


async def test_emitted_and_deferred_messages_can_be_inspected() -> None:
    rows: list[Any] = []
    op = operation(connection=rows)
    await ship(op=op)
    assert (rows, op.emitted, op.deferred) == (
        ["tea"],
        [SentMessage("ordered", ["tea"])],
        SentMessage("ship", {"item": "tea"}),
    )
    with pytest.raises(ConfigurationError, match="twice"):
        op.defer("ship", {})
