"""Answers in pieces, from files, and too large ones: stored whole, or known to be done (A4, F42)."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from fastapi.responses import FileResponse, Response, StreamingResponse
from starlette.background import BackgroundTask
from starlette.middleware import Middleware
from starlette.middleware.base import BaseHTTPMiddleware
from starlette.routing import Route, Router

from frameworks.shop import KEY, Shop
from oncekey.core.errors import StoreUnavailableError
from oncekey.core.model import INLINE, LOCAL
from oncekey.core.policy import Policy
from oncekey.engine.operation import Operation

PATHSEND = {"http.response.pathsend": {}, "http.response.zerocopysend": {}, "http.response.trailers": {}}


async def passed_on(request: Any, call_next: Any) -> Any:
    response = await call_next(request)
    response.headers["x-passed"] = "on"
    return response


@pytest.mark.parametrize("spec_version", ["2.0", "2.3", "2.4"])
async def test_a_streamed_response_is_stored_whole(spec_version: str) -> None:
    # peers 12: an answer in many messages is an answer
    shop = Shop()

    @shop.post(effects=LOCAL)
    async def create(op: Operation) -> StreamingResponse:
        op.connection.add("row")

        async def pieces() -> Any:
            for number in range(5):
                yield f"{number}\n"
                await asyncio.sleep(0)

        return StreamingResponse(pieces(), media_type="text/plain")

    caller = shop.caller("/orders", spec_version=spec_version)
    first = await caller.run()
    again = await shop.send("/orders", spec_version=spec_version)
    assert first.body == b"0\n1\n2\n3\n4\n"
    assert [message["type"] for message in caller.sent] == ["http.response.start", "http.response.body"]
    assert (again.body, again.replayed, shop.ledger.rows) == (first.body, True, ["row"])
    assert "content-length" not in dict(first.lines)  # nothing is recomputed for the first caller


@pytest.mark.parametrize("layers", [1, 2])
async def test_outer_streaming_middleware_does_not_affect_replays(layers: int) -> None:
    # peers 12: BaseHTTPMiddleware sends every answer in pieces
    shop = Shop()
    for _ in range(layers):
        shop.app.add_middleware(BaseHTTPMiddleware, dispatch=passed_on)

    @shop.post(effects=INLINE, status_code=201)
    async def create() -> str:
        shop.runs.append(1)
        return "done"

    replies = [await shop.send("/orders") for _ in range(3)]
    assert [(reply.status, reply.body, reply.replayed) for reply in replies] == [
        (201, b'"done"', False),
        (201, b'"done"', True),
        (201, b'"done"', True),
    ]
    assert all(reply.header("x-passed") == "on" for reply in replies)
    assert shop.runs == [1]


@pytest.mark.parametrize("effects", [LOCAL, INLINE])
async def test_inner_streaming_middleware_does_not_affect_replays(effects: Any) -> None:
    # peers 12; apishape 1: the commit may happen in another task than the claim
    shop = Shop()

    @shop.once.protect(effects=effects)
    async def create(request: Any, op: Operation) -> Response:
        shop.runs.append(1)
        if effects is LOCAL:
            op.connection.add("row")
        return Response(b"done", status_code=201)

    inner = Router(
        [Route("/orders", create, methods=["POST"])], middleware=[Middleware(BaseHTTPMiddleware, dispatch=passed_on)]
    )
    shop.app.mount("/inner", inner)
    replies = [await shop.send("/inner/orders") for _ in range(3)]
    assert [(reply.status, reply.body, reply.replayed) for reply in replies] == [
        (201, b"done", False),
        (201, b"done", True),
        (201, b"done", True),
    ]
    assert (shop.runs, shop.ledger.open) == ([1], 0)
    assert len(shop.ledger.rows) == (1 if effects is LOCAL else 0)


async def test_no_stream_background_task_runs_after_a_failed_commit() -> None:
    # apishape 3: our exception gets through task groups
    shop = Shop()

    async def failing(_: Any) -> None:
        raise StoreUnavailableError

    shop.ledger.faults["commit"].append(failing)

    @shop.once.protect(effects=LOCAL)
    async def create(request: Any, op: Operation) -> Response:
        async def pieces() -> Any:
            yield b"done"

        return StreamingResponse(pieces(), background=BackgroundTask(shop.runs.append, "task"))

    inner = Router(
        [Route("/orders", create, methods=["POST"])], middleware=[Middleware(BaseHTTPMiddleware, dispatch=passed_on)]
    )
    shop.app.mount("/inner", inner)
    reply = await shop.caller("/inner/orders").run(raising=True)
    assert (reply.status, reply.code, shop.runs) == (503, "idempotency_store_unavailable", [])


async def test_a_stream_that_raises_is_not_stored() -> None:
    # F42: settled only when the last byte was produced
    for effects, state in ((LOCAL, "failed_retryable"), (INLINE, "unknown")):
        shop = Shop()

        @shop.post(effects=effects)
        async def create(op: Operation) -> StreamingResponse:
            async def pieces() -> Any:
                yield b"half"
                raise RuntimeError("the other half")

            return StreamingResponse(pieces())

        reply = await shop.send("/orders")
        assert (reply.status, reply.body, shop.state) == (500, b"Internal Server Error", state)


async def test_an_unfinished_response_is_not_stored() -> None:
    # apishape 1: Starlette does that when it believes that the client has left
    class Half:
        async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
            await send({"type": "http.response.start", "status": 200, "headers": []})
            await send({"type": "http.response.body", "body": b"half", "more_body": True})

    for effects, state in ((LOCAL, "failed_retryable"), (INLINE, "unknown")):
        shop = Shop()

        @shop.once.protect(effects=effects, operation="half")
        async def create(request: Any, op: Operation) -> Any:
            return Half()

        shop.app.router.routes.append(Route("/orders", create, methods=["POST"]))
        caller = shop.caller("/orders")
        await caller.app(caller.scope, caller.receive, caller.send)
        assert (caller.sent, shop.state, shop.ledger.open) == ([], state, 0)


async def test_headers_are_copied_when_they_are_sent() -> None:
    # apishape 1: lists are changed in place, also by applications
    class Sloppy:
        async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
            headers = [(b"content-type", b"text/plain")]
            await send({"type": "http.response.start", "status": 200, "headers": headers})
            headers.clear()
            await send({"type": "http.response.body", "body": b"done"})

    shop = Shop()

    @shop.once.protect(effects=INLINE)
    async def create(request: Any) -> Any:
        return Sloppy()

    shop.app.router.routes.append(Route("/orders", create, methods=["POST"]))
    for _ in range(2):
        assert (await shop.send("/orders")).header("content-type") == "text/plain"


# ------------------------------------------------------------------------------------------------------- files


async def test_a_file_response_is_stored_as_bytes(tmp_path: Path) -> None:
    # apishape 1, 9: a server that can send files by their path would get the path
    file = tmp_path / "receipt.txt"
    file.write_bytes(b"receipt " * 100)
    shop = Shop()

    @shop.post(effects=INLINE)
    async def create() -> FileResponse:
        return FileResponse(file)

    caller = shop.caller("/orders", extensions={**PATHSEND, "http.response.debug": {}})
    first = await caller.run()
    file.write_bytes(b"changed")
    again = await shop.send("/orders", extensions=dict(PATHSEND))
    assert {message["type"] for message in caller.sent} == {"http.response.start", "http.response.body"}
    assert first.body == again.body == b"receipt " * 100
    assert set(caller.scope["extensions"]) == {"http.response.debug"}


async def test_an_unprotected_file_is_sent_with_pathsend(tmp_path: Path) -> None:
    file = tmp_path / "receipt.txt"
    file.write_bytes(b"receipt")
    shop = Shop()

    @shop.app.post("/files")
    async def create() -> FileResponse:
        return FileResponse(file)

    caller = shop.caller("/files", key=None, extensions=dict(PATHSEND))
    await caller.app(caller.scope, caller.receive, caller.send)
    assert "http.response.pathsend" in [message["type"] for message in caller.sent]


async def test_early_hints_are_forwarded_and_not_stored() -> None:
    shop = Shop()

    class Hinting:
        async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
            await send({"type": "http.response.early_hint", "links": [b"</style.css>; rel=preload"]})
            await Response(b"done")(scope, receive, send)

    @shop.once.protect(effects=INLINE)
    async def create(request: Any) -> Any:
        return Hinting()

    shop.app.router.routes.append(Route("/orders", create, methods=["POST"]))
    caller = shop.caller("/orders")
    await caller.run()
    assert [message["type"].rpartition(".")[2] for message in caller.sent] == ["early_hint", "start", "body"]
    assert (await shop.send("/orders")).body == b"done"


# ----------------------------------------------------------------------------------------------------- too large


def large(size: int, effects: Any = LOCAL, *, streamed: bool = False, location: str | None = "/orders/7") -> Shop:
    shop = Shop(policy=Policy(max_response_bytes=1000, max_spool_bytes=100_000))

    @shop.post(effects=effects, status_code=201)
    async def create(op: Operation) -> Response:
        shop.runs.append(1)
        if effects is LOCAL:
            op.connection.add("row")
        headers = {} if location is None else {"location": location}
        if not streamed:
            return Response(b"x" * size, 201, headers)

        async def pieces() -> Any:
            for start in range(0, size, 300):
                yield b"x" * min(300, size - start)

        return StreamingResponse(pieces(), 201, headers)

    return shop


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("effects", [LOCAL, INLINE])
async def test_an_oversized_response_completes_without_a_stored_body(effects: Any, streamed: bool) -> None:
    # R97, A4, F42; peers 12: never a second run
    shop = large(50_000, effects, streamed=streamed)
    first = await shop.send("/orders")
    assert (first.status, first.body, shop.state) == (201, b"x" * 50_000, "completed")
    again = await shop.send("/orders")
    assert (again.status, again.code, again.replayed) == (409, "idempotency_response_not_stored", True)
    assert (again.header("location"), again.header("retry-after")) == ("/orders/7", None)
    assert shop.runs == [1]
    assert len(shop.ledger.rows) == (1 if effects is LOCAL else 0)
    assert shop.ledger.record["response_body"] is None


async def test_an_unstored_response_links_to_the_status_resource() -> None:
    shop = large(5000, location=None)
    await shop.send("/orders")
    assert (await shop.send("/orders")).header("location") == f"/idempotency-keys/{KEY}"


@pytest.mark.parametrize(("size", "stored"), [(1000, True), (1001, False)])
@pytest.mark.parametrize("streamed", [False, True])
async def test_a_response_of_exactly_the_limit_is_stored(size: int, stored: bool, streamed: bool) -> None:
    # R97
    shop = large(size, streamed=streamed)
    assert len((await shop.send("/orders")).body) == size
    assert (await shop.send("/orders")).status == (201 if stored else 409)


async def test_a_large_response_is_sent_after_it_is_settled() -> None:
    # A4
    shop = large(50_000)
    states: list[Any] = []
    await shop.caller("/orders", on_send=lambda _: states.append(shop.state)).run()
    assert set(states) == {"completed"}


@pytest.mark.parametrize(("effects", "state"), [(LOCAL, "failed_retryable"), (INLINE, "unknown")])
@pytest.mark.parametrize("streamed", [False, True])
async def test_a_response_larger_than_the_spool_returns_500(effects: Any, state: str, streamed: bool) -> None:
    # A4: above max_spool LOCAL rolls back, others are in doubt
    shop = large(100_001, effects, streamed=streamed)
    reply = await shop.send("/orders")
    assert (reply.status, reply.code, shop.state) == (500, "idempotency_execution_failed", state)
    assert shop.ledger.rows == []


async def test_an_empty_body_is_stored_with_a_zero_limit() -> None:
    shop = Shop(policy=Policy(max_response_bytes=0))

    @shop.post(effects=INLINE)
    async def create() -> Response:
        return Response(status_code=204)

    await shop.send("/orders")
    again = await shop.send("/orders")
    assert (again.status, again.body, again.replayed) == (204, b"", True)
