"""The client leaves: before the claim nothing runs, after it the operation comes to its end (P5, apishape 1)."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from fastapi import Request
from fastapi.responses import StreamingResponse
from starlette.middleware.base import BaseHTTPMiddleware

from frameworks.shop import Shop
from harness.asgi import Caller, until
from harness.ledger import Gate
from harness.patience import PATIENCE
from oncekey.core.model import INLINE, LOCAL
from oncekey.engine.operation import Operation
from oncekey.frameworks.asgi.requests import Intake


@pytest.mark.parametrize("spec_version", ["2.3", "2.4"])
@pytest.mark.parametrize("wrapped", [False, True])
async def test_a_stream_is_stored_if_the_client_disconnects(spec_version: str, wrapped: bool) -> None:
    # apishape 1, 9: Starlette would cancel the generator and return as if all were well
    shop = Shop()
    leave, go_on = asyncio.Event(), asyncio.Event()
    if wrapped:

        async def dispatch(request: Any, call_next: Any) -> Any:
            return await call_next(request)

        shop.app.add_middleware(BaseHTTPMiddleware, dispatch=dispatch)

    @shop.post(effects=LOCAL, status_code=201)
    async def create(op: Operation) -> StreamingResponse:
        shop.runs.append(1)
        op.connection.add("row")

        async def pieces() -> Any:
            yield b"one "
            leave.set()
            await go_on.wait()
            yield b"two"

        return StreamingResponse(pieces(), 201)

    caller = shop.caller("/orders", spec_version=spec_version)
    task = asyncio.create_task(caller.run())
    await leave.wait()
    caller.leave()
    await asyncio.sleep(0.01)
    go_on.set()
    await task
    again = await shop.send("/orders")
    assert (again.status, again.body, again.replayed) == (201, b"one two", True)
    assert (shop.runs, shop.ledger.rows) == ([1], ["row"])


async def test_is_disconnected_is_false_while_the_handler_runs() -> None:
    # apishape 1: is_disconnected() while the operation runs is False, or a handler would stop half-way
    shop = Shop()
    heard: list[bool] = []
    leave, go_on = asyncio.Event(), asyncio.Event()

    @shop.post(effects=INLINE)
    async def create(request: Request) -> str:
        heard.append(await request.is_disconnected())
        leave.set()
        await go_on.wait()
        heard.extend([await request.is_disconnected() for _ in range(3)])
        return "done"

    caller = shop.caller("/orders")
    task = asyncio.create_task(caller.run())
    await leave.wait()
    caller.leave()
    go_on.set()
    await task
    assert heard == [False] * 4
    assert (await shop.send("/orders")).replayed


async def test_a_disconnect_is_delivered_after_the_response() -> None:
    # a server may announce it only once, and a listener that was cancelled must not have swallowed it
    announced = [{"type": "http.request", "body": b"", "more_body": False}, {"type": "http.disconnect"}]

    async def receive() -> Any:
        if not announced:
            await asyncio.Event().wait()  # nothing ever comes again
        return announced.pop(0)

    intake = Intake(receive, 100)
    assert await intake.body() == b""
    assert (await intake.receive())["type"] == "http.request"
    intake.hold()
    listener = asyncio.create_task(intake.receive())
    await asyncio.sleep(0)
    assert not listener.done()
    listener.cancel()
    await asyncio.gather(listener, return_exceptions=True)
    intake.release()
    async with asyncio.timeout(PATIENCE):
        assert (await intake.receive())["type"] == "http.disconnect"


@pytest.mark.parametrize("effects", [LOCAL, INLINE])
async def test_a_disconnect_within_the_body_runs_no_handler(effects: Any) -> None:
    # apishape 1, 9: before the claim
    shop = Shop()

    @shop.post(effects=effects)
    async def create() -> str:
        shop.runs.append(1)
        return "done"

    caller = shop.caller("/orders", [b"half", b"more"])
    caller._chunks = [b"half"]
    received = caller.receive

    async def receive() -> Any:
        message = await received()
        if message["type"] == "http.request":
            message["more_body"] = True
        return message

    caller.leave()
    await caller.app(caller.scope, receive, caller.send)
    assert (caller.sent, shop.runs, shop.ledger.log, shop.ledger.open) == ([], [], [], 0)


async def test_an_operation_is_settled_after_the_client_disconnects() -> None:
    # peers 7: the disconnect does not cancel the bookkeeping write
    shop = Shop()
    gate = Gate()
    shop.ledger.faults["settle"].append(gate)

    @shop.post(effects=INLINE, status_code=201)
    async def create() -> str:
        shop.runs.append(1)
        return "done"

    caller = shop.caller("/orders")
    task = asyncio.create_task(caller.run())
    await gate.reached.wait()
    caller.leave()
    await asyncio.sleep(0.01)
    gate.open()
    await task
    assert (await shop.send("/orders")).replayed
    assert shop.runs == [1]


async def test_a_send_error_is_raised_after_the_record_is_settled() -> None:
    # ASGI 2.4: `send` raises an OSError when nobody is there
    shop = Shop()

    @shop.post(effects=LOCAL, status_code=201)
    async def create(op: Operation) -> str:
        op.connection.add("row")
        return "done"

    def gone(_: Any) -> None:
        raise OSError("nobody is there")

    caller = shop.caller("/orders", spec_version="2.4", on_send=gone)
    with pytest.raises(OSError, match="nobody"):
        await caller.app(caller.scope, caller.receive, caller.send)
    assert (shop.ledger.rows, shop.state, shop.ledger.open) == (["row"], "completed", 0)
    assert (await shop.send("/orders")).replayed


async def test_unprotected_routes_receive_the_disconnect() -> None:
    shop = Shop()

    @shop.app.post("/plain")
    async def plain(request: Request) -> None:
        await until_gone(request)
        shop.runs.append("gone")

    for key in (None, "key-000000000000009"):
        caller: Caller = shop.caller("/plain", key=key)
        task = asyncio.create_task(caller.run())
        await asyncio.sleep(0)
        caller.leave()
        async with asyncio.timeout(PATIENCE):
            await task
    assert shop.runs == ["gone", "gone"]


async def until_gone(request: Request) -> None:
    while not await request.is_disconnected():
        continue


async def test_withholding_a_disconnect_does_not_busy_wait() -> None:
    # apishape 1: an empty message again and again would cost a processor
    shop = Shop()
    leave, go_on = asyncio.Event(), asyncio.Event()

    @shop.post(effects=INLINE)
    async def create() -> StreamingResponse:
        async def pieces() -> Any:
            yield b"one"
            leave.set()
            await go_on.wait()

        return StreamingResponse(pieces())

    caller = shop.caller("/orders")
    task = asyncio.create_task(caller.run())
    await leave.wait()
    caller.leave()
    await asyncio.sleep(0.05)
    asked = caller.receives
    assert asked <= 3
    go_on.set()
    await task
    await until(lambda: shop.state == "completed")
