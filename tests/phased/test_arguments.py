"""Steps take arguments: the same in `def` and `async def`, in functions, consumers, tools and unit tests.

The frameworks are in `skins/test_skins.py`: each pays with functions that take arguments.
"""

from __future__ import annotations

import asyncio
import functools
import json
import sqlite3
from collections.abc import Awaitable, Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from mcp import Client
from mcp.server.mcpserver import MCPServer

from oncekey import PHASED, ConfigurationError, Once, Operation, SyncOperation
from oncekey.canonical.digests import downstream_key
from oncekey.mcp import tool
from oncekey.testing import operation, sync_operation

CALLS: list[tuple[Any, ...]] = []

ROW = "INSERT INTO payments (amount, note) VALUES (?, ?)"


def begin(tx: Any, amount: int, *, note: str = "") -> int:
    return int(tx.execute(ROW, (amount, note)).lastrowid)


async def abegin(tx: Any, amount: int, *, note: str = "") -> int:
    return int((await tx.execute(ROW, (amount, note))).lastrowid)


def charge(amount: int, currency: str = "EUR", *, key: str) -> list[Any]:
    CALLS.append((amount, currency, key))
    return [amount, currency, key]


async def acharge(amount: int, currency: str = "EUR", *, key: str) -> list[Any]:
    return charge(amount, currency, key=key)


def drawn(low: int, *, high: int) -> int:
    return low + high


async def adrawn(low: int, *, high: int) -> int:
    return low + high


def pay(op: SyncOperation, order: str) -> dict[str, Any]:
    value = op.value("drawn", drawn, 1, high=2)
    number = op.phase("payment_created", begin, 7, note="tea")
    made = op.call("charge_created", charge, 7, "USD", repeatable=True)
    return {"value": value, "number": number, "made": made, "key": op.downstream_key("charge_created")}


async def apay(op: Operation, order: str) -> dict[str, Any]:
    value = await op.value("drawn", adrawn, 1, high=2)
    number = await op.phase("payment_created", abegin, 7, note="tea")
    made = await op.call("charge_created", acharge, 7, "USD", repeatable=True)
    return {"value": value, "number": number, "made": made, "key": op.downstream_key("charge_created")}


def wrong(op: SyncOperation, order: str) -> None:
    op.call("charge_created", charge, 7, "USD", "surplus", repeatable=False)  # type: ignore[arg-type]


async def awrong(op: Operation, order: str) -> None:
    await op.call("charge_created", acharge, 7, "USD", "surplus", repeatable=False)  # type: ignore[arg-type]


Run = Callable[[Once, Callable[..., Any]], Awaitable[Any]]


async def _by_function(once: Once, handler: Callable[..., Any]) -> Any:
    protected = once.function(key="order", effects=PHASED, complete=False)(handler)
    async with once.lifespan():
        if asyncio.iscoroutinefunction(handler):
            return await protected("o-1")
        return await asyncio.to_thread(protected, "o-1")


async def _by_inbox(once: Once, handler: Callable[..., Any]) -> Any:
    received: Any = once.inbox(consumer="shop", effects=PHASED, complete=False)(handler)
    async with once.lifespan():
        if asyncio.iscoroutinefunction(handler):
            return (await received("m-1", "o-1")).result
        return (await asyncio.to_thread(received, "m-1", "o-1")).result


async def _by_tool(once: Once, handler: Callable[..., Any]) -> Any:
    server = MCPServer("payments", lifespan=once.lifespan)
    server.tool(name="pay")(tool(once.function(key="order", effects=PHASED, complete=False)(handler)))
    async with Client(server) as client:
        result = await client.call_tool("pay", {"order": "o-1"})
    (part,) = result.content
    return json.loads(part.text)


class _Awaited:
    """A connection whose `execute` is awaited."""

    def __init__(self, connection: sqlite3.Connection) -> None:
        self._connection = connection

    async def execute(self, sql: str, params: Any) -> Any:
        return self._connection.execute(sql, params)


async def _in_a_unit_test(once: Once, handler: Callable[..., Any]) -> Any:
    with closing(sqlite3.connect(str(once.store).removeprefix("sqlite:///"))) as connection, connection:
        if not asyncio.iscoroutinefunction(handler):
            return handler(sync_operation(connection=connection), "o-1")

        return await handler(operation(connection=_Awaited(connection)), "o-1")


RUNS: dict[str, Run] = {
    "function": _by_function,
    "inbox": _by_inbox,
    "mcp": _by_tool,
    "unit test": _in_a_unit_test,
}


@pytest.fixture
def once(tmp_path: Path) -> Once:
    CALLS.clear()
    with closing(sqlite3.connect(tmp_path / "shop.db")) as connection:
        connection.execute("CREATE TABLE payments (id INTEGER PRIMARY KEY, amount INTEGER, note TEXT)")
    return Once(f"sqlite:///{tmp_path}/shop.db", migrate=True)


@pytest.mark.parametrize("handler", [pay, apay])
@pytest.mark.parametrize("run", RUNS.values(), ids=RUNS)
async def test_steps_pass_arguments_to_their_functions(once: Once, tmp_path: Path, run: Run, handler: Any) -> None:
    answer = await run(once, handler)
    key = answer.pop("key")
    assert answer == {"value": 3, "number": 1, "made": [7, "USD", key]}
    assert [(7, "USD", key)] == CALLS
    with closing(sqlite3.connect(tmp_path / "shop.db")) as connection:
        assert connection.execute("SELECT amount, note FROM payments").fetchall() == [(7, "tea")]


@pytest.mark.parametrize("handler", [wrong, awrong])
@pytest.mark.parametrize("run", [_by_function, _by_inbox, _in_a_unit_test])
async def test_wrong_call_arguments_raise_before_the_call(once: Once, run: Run, handler: Any) -> None:
    # otherwise the outcome would be unknown, of a call that was never made
    with pytest.raises(ConfigurationError, match=r"the call 'charge_created' was not made.*too many positional"):
        await run(once, handler)
    assert CALLS == []


@pytest.mark.parametrize(
    ("fn", "args", "why"),
    [
        (charge, (), "missing a required argument: 'amount'"),
        (len, ("text",), "got an unexpected keyword argument 'key'"),
        (lambda amount: amount, (7,), "got an unexpected keyword argument 'key'"),
    ],
)
async def test_the_error_describes_the_wrong_argument(fn: Any, args: tuple[Any, ...], why: str) -> None:
    op = operation(connection=None)
    with pytest.raises(ConfigurationError, match=why):
        await op.call("charge_created", fn, *args, repeatable=False)
    assert op.calls == []
    # nothing was announced, so the handler may make the call after all
    assert (await op.call("charge_created", charge, 7, repeatable=False))[:2] == [7, "EUR"]


def test_keyword_arguments_can_be_bound_with_partial() -> None:
    op = sync_operation(connection=None)
    made = op.call("charge_created", functools.partial(charge, currency="SEK"), 7, repeatable=True)
    assert made == [7, "SEK", downstream_key(bytes(32), "charge_created")]


@pytest.mark.parametrize("step", ["phase", "call", "value"])
def test_an_async_step_in_a_def_handler_is_rejected(step: str) -> None:
    op: Any = sync_operation(connection=None)
    how = {"repeatable": False} if step == "call" else {}
    with pytest.raises(ConfigurationError, match="the step 'drawn' is `async def`, and its handler is `def`"):
        getattr(op, step)("drawn", acharge, 7, **how)
    assert op.steps == {}
