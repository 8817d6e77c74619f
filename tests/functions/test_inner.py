"""A protected function that calls another one: the inner one's errors say nothing about the outer call.

They go on to who called, as any other exception does: no receipt, no stored rejection and no proof is made of them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from mcp import Client
from mcp.server.mcpserver import MCPServer
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from functions.stage import Order, Stage
from oncekey import (
    INLINE,
    OUTBOX,
    SINGLE_TENANT,
    Handling,
    InProgressError,
    KeyReusedError,
    NotExecutedError,
    Operation,
    RejectedError,
    StoreError,
    SyncOperation,
)
from oncekey.mcp import tool
from phased.bank import ClockedOnce

TEA = Order("tea")


class Inner:
    """A function in which something goes wrong, by the class of the error that its caller gets."""

    def __init__(self, stage: Stage) -> None:
        self.stage = stage
        self.call = stage.function("inline", operation="inner")
        self.away = ClockedOnce(f"sqlite:///{Path('nowhere') / stage.name}/shop.db", stage.clock, stage.policy)
        self.deferred = stage.function("outbox", operation="deferring")
        stage.once.topic("charge")(_never)

    async def fails(self, error: type[Exception]) -> None:
        if error is InProgressError:
            await self.deferred("accepted", TEA)
        elif error is KeyReusedError:
            await self.call("used", TEA)
            await self.call("used", Order("coffee"))
        elif error is StoreError:
            await self.stage.function("inline", once=self.away, operation="away")("k", TEA)
        else:
            self.stage.faults["inline"] = error("no")
            await self.call(f"raises {error.__name__}", TEA)


async def _never(_: Any) -> None:
    raise AssertionError("there is no worker")


def outer(stage: Stage, inner: Inner, error: type[Exception], enrolled: Callable[..., Any]) -> Callable[..., Any]:
    """A function that does its own work, and then calls the inner one."""
    loop = asyncio.get_running_loop()

    def fails(op: SyncOperation, event: str) -> str:
        stage.charges.append("outer")
        asyncio.run_coroutine_threadsafe(inner.fails(error), loop).result()
        return "done"

    async def afails(op: Operation, event: str) -> str:
        stage.charges.append("outer")
        await inner.fails(error)
        return "done"

    function = enrolled(fails if stage.blocking else afails)

    async def call(*args: str) -> Any:
        return await (asyncio.to_thread(function, *args) if stage.blocking else function(*args))

    return call


ERRORS = [InProgressError, KeyReusedError, RejectedError, NotExecutedError, StoreError]


def state_of(stage: Stage, operation: str) -> str:
    ((state,),) = stage.database.execute(f"SELECT state FROM {stage.database.records} WHERE operation = '{operation}'")
    return str(state)


@pytest.mark.parametrize("error", ERRORS)
async def test_an_inner_error_does_not_become_the_outer_receipt(small_stage: Stage, error: type[Exception]) -> None:
    inner = Inner(small_stage)
    take = outer(small_stage, inner, error, small_stage.once.inbox(consumer="outer", effects=INLINE))
    async with small_stage.open():
        with pytest.raises(error):
            await take("m-1", "event")
        # The function did something and was cut off: nothing may do it again, and nobody calls it handled or dead.
        assert (await take("m-1", "event")).handling is Handling.UNKNOWN
    assert small_stage.charges.count("outer") == 1
    assert state_of(small_stage, "outer") == "unknown"


@pytest.mark.parametrize("error", ERRORS)
async def test_an_inner_error_leaves_the_outer_call_unknown(small_stage: Stage, error: type[Exception]) -> None:
    inner = Inner(small_stage)
    enrolled = small_stage.once.function(key="event", effects=INLINE, operation="outer")
    call = outer(small_stage, inner, error, enrolled)
    async with small_stage.open():
        with pytest.raises(error):
            await call("e-1")
    assert state_of(small_stage, "outer") == "unknown"


@pytest.mark.parametrize("error", [RejectedError, NotExecutedError])
async def test_errors_raised_by_the_outer_function_decide_its_outcome(
    small_stage: Stage, error: type[Exception]
) -> None:
    said, states = error("no"), {RejectedError: "completed", NotExecutedError: "failed_retryable"}

    def says(event: str) -> None:
        raise said  # the same object each time, as an application's constant is

    async def asays(event: str) -> None:
        raise said

    enrolled = small_stage.once.function(key="event", effects=INLINE, operation="outer")
    function = enrolled(says if small_stage.blocking else asays)
    async with small_stage.open():
        for event in ("e-1", "e-2"):
            with pytest.raises(error):
                await (asyncio.to_thread(function, event) if small_stage.blocking else function(event))
    found = small_stage.database.execute(f"SELECT state FROM {small_stage.database.records}")
    assert found == [(states[error],)] * 2


@pytest.mark.parametrize("error", ERRORS)
async def test_an_inner_error_does_not_become_the_http_response(small_stage: Stage, error: type[Exception]) -> None:
    inner, once = Inner(small_stage), small_stage.once

    @once.protect(effects=INLINE, operation="outer")
    async def handler(request: Request, op: Operation) -> Response:
        small_stage.charges.append("outer")
        await inner.fails(error)
        return JSONResponse({})

    app = Starlette(routes=[Route("/", handler, methods=["POST"])])
    once.install(app, tenant=SINGLE_TENANT)
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    async with small_stage.open(), httpx.AsyncClient(transport=transport, base_url="http://shop") as client:
        replies = [await client.post("/", json={}, headers={"Idempotency-Key": "key-of-a-request"}) for _ in range(2)]
    assert (replies[0].status_code, "idempotency" in replies[0].text) == (500, False)
    assert (replies[1].status_code, replies[1].json()["code"]) == (409, "idempotency_outcome_unknown")
    assert small_stage.charges.count("outer") == 1


async def test_an_inner_error_does_not_become_the_tool_message(small_stage: Stage) -> None:
    inner = Inner(small_stage)
    server = MCPServer("tools")
    enrolled = small_stage.once.function(key="event", effects=INLINE, operation="outer")

    @server.tool()
    @tool
    @enrolled
    async def pay(op: Operation, event: str) -> str:
        await inner.fails(InProgressError)
        return "done"

    async with small_stage.open(), Client(server) as client:
        said = await client.call_tool("pay", {"event": "e-1"})
    text = " ".join(part.text for part in said.content)  # type: ignore[union-attr]
    assert (said.is_error, "call it again with the same key" in text) == (True, False)
    assert state_of(small_stage, "outer") == "unknown"


async def test_an_accepted_message_returns_the_functions_result(small_stage: Stage) -> None:
    small_stage.once.topic("send")(_never)

    def take(op: SyncOperation, event: str) -> dict[str, str]:
        op.defer("send", {})
        return {"took": event}

    async def atake(op: Operation, event: str) -> dict[str, str]:
        return take(op, event)  # type: ignore[arg-type]

    consumer = small_stage.once.inbox(consumer="outer", effects=OUTBOX)(take if small_stage.blocking else atake)
    async with small_stage.open():
        for _ in range(2):
            receipt = await (asyncio.to_thread(consumer, "m-1", "e") if small_stage.blocking else consumer("m-1", "e"))
            assert (receipt.handling, receipt.result) == (Handling.HANDLED, {"took": "e"})
