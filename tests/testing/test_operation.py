"""Operations for unit tests of handlers, without a server and without a store."""

from __future__ import annotations

import asyncio
import inspect

import pytest

from oncekey.core.errors import ConfigurationError
from oncekey.core.seed import downstream_key
from oncekey.effects import INLINE, LOCAL
from oncekey.frameworks.asgi.operation import Operation, SyncOperation
from oncekey.once import Once
from oncekey.testing import operation, sync_operation

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


async def test_a_handler_runs_with_an_operation_of_the_tests_own() -> None:
    rows: list[int] = []
    answer = await create_order(7, op=operation(connection=rows, attempt=2))
    assert (answer, rows) == ({"key": "test-key-0000000001", "scope": "test", "attempt": 2}, [7])


async def test_what_a_request_would_have_had_can_be_chosen() -> None:
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


async def test_a_connection_that_was_not_given_is_missed() -> None:
    with pytest.raises(ConfigurationError, match=r"op\.connection is for effects=LOCAL"):
        await create_order(7, op=operation())
