"""How a handler ended, and what that makes of its rows, of its record and of the answer (P4, L6, F17)."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from fastapi import BackgroundTasks, HTTPException, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse
from pydantic import BaseModel

from frameworks.shop import Shop
from harness.patience import PATIENCE
from oncekey.core.errors import NotExecutedError, StoreUnavailableError
from oncekey.core.model import INLINE, LOCAL
from oncekey.core.policy import On5xx
from oncekey.engine.operation import Operation


class DeclinedError(Exception):
    """What a domain raises."""


def declining_shop(effects: Any, **options: Any) -> Shop:
    """A shop whose handler writes a row and ends as the request says."""
    shop = Shop()

    @shop.app.exception_handler(DeclinedError)
    async def declined(_: Request, error: DeclinedError) -> JSONResponse:
        return JSONResponse({"error": "declined"}, status_code=int(str(error)))

    @shop.post(effects=effects, **options)
    async def create(op: Operation, status: int, way: str, wish: str = "") -> Any:
        shop.runs.append(status)
        if effects is LOCAL:
            op.connection.add("row")
        if wish == "keep":
            op.keep()
        if wish == "rollback":
            op.rollback()
        match way:
            case "raised":
                raise HTTPException(status, "no")
            case "mapped":
                raise DeclinedError(status)
            case "crashed":
                raise RuntimeError("the card of alice")
            case _:
                return JSONResponse({"n": len(shop.runs)}, status_code=status)

    return shop


@pytest.mark.parametrize(
    ("status", "way", "rows", "state"),
    [
        # returned: business and record commit together
        (200, "returned", 1, "completed"),
        (201, "returned", 1, "completed"),
        (303, "returned", 1, "completed"),
        (400, "returned", 1, "completed"),
        (402, "returned", 1, "completed"),
        (404, "returned", 1, "completed"),
        (409, "returned", 1, "completed"),
        (422, "returned", 1, "completed"),
        # raised, by the framework's exception or by one that a handler of the application maps: rolled back, stored
        (402, "raised", 0, "completed"),
        (404, "raised", 0, "completed"),
        (409, "raised", 0, "completed"),
        (402, "mapped", 0, "completed"),
        (422, "mapped", 0, "completed"),
        # about the caller or the moment: never a key's result (R113)
        *[
            (status, way, 0, "failed_retryable")
            for status in (401, 403, 408, 425, 429)
            for way in ("returned", "raised", "mapped")
        ],
        # server errors: rolled back, and a retry runs (R104, R251)
        (500, "returned", 0, "failed_retryable"),
        (503, "raised", 0, "failed_retryable"),
        (502, "mapped", 0, "failed_retryable"),
        (500, "crashed", 0, "failed_retryable"),
    ],
)
async def test_local_status_decides_commit_and_record_state(status: int, way: str, rows: int, state: str) -> None:
    # L6, F17, R46, R47, R91, R104, R113
    shop = declining_shop(LOCAL)
    target = f"/orders?status={status}&way={way}"
    first = await shop.send(target)
    assert (first.status, len(shop.ledger.rows), shop.state) == (status, rows, state)
    assert shop.ledger.open == 0
    again = await shop.send(target)
    assert again.status == status
    assert again.replayed is (state == "completed")
    assert len(shop.runs) == (1 if state == "completed" else 2)
    if again.replayed:
        assert again.body == first.body


@pytest.mark.parametrize(
    ("status", "way", "state"),
    [
        (201, "returned", "completed"),
        (402, "returned", "completed"),
        (402, "raised", "completed"),
        (404, "mapped", "completed"),
        # whether something was sent cannot be seen from a status (F5)
        *[
            (status, way, "unknown")
            for status in (401, 403, 408, 425, 429, 500, 502, 503)
            for way in ("returned", "raised", "mapped")
        ],
        (500, "crashed", "unknown"),
    ],
)
async def test_inline_status_decides_the_record_state(status: int, way: str, state: str) -> None:
    # R48, R101, R102, R103 in part, F5; peers 15: an exception after a side effect never runs it again
    shop = declining_shop(INLINE)
    target = f"/orders?status={status}&way={way}"
    first = await shop.send(target)
    assert shop.state == state
    if state == "unknown" and status < 500:
        # Clients take these for a proof that nothing was executed (R113, R221).
        assert (first.status, first.code) == (409, "idempotency_outcome_unknown")
        assert int(first.header("retry-after") or 0) >= 1
    else:
        assert first.status == status
    again = await shop.send(target)
    assert len(shop.runs) == 1
    if state == "completed":
        assert (again.status, again.body, again.replayed) == (status, first.body, True)
    else:
        assert (again.status, again.code, again.replayed) == (409, "idempotency_outcome_unknown", False)
        assert int(again.header("retry-after") or 0) >= 1


@pytest.mark.parametrize(
    ("status", "way", "wish", "rows", "state"),
    [
        (402, "raised", "keep", 1, "completed"),
        (402, "mapped", "keep", 1, "completed"),
        (201, "returned", "rollback", 0, "completed"),
        (402, "returned", "rollback", 0, "completed"),
        # Neither wish can make a result of what is none.
        (429, "raised", "keep", 0, "failed_retryable"),
        (500, "crashed", "keep", 0, "failed_retryable"),
    ],
)
async def test_keep_and_rollback_override_the_status_rule(
    status: int, way: str, wish: str, rows: int, state: str
) -> None:
    # L6, F17
    shop = declining_shop(LOCAL)
    reply = await shop.send(f"/orders?status={status}&way={way}&wish={wish}")
    assert (reply.status, len(shop.ledger.rows), shop.state) == (status, rows, state)


async def test_a_status_outside_the_http_range_rolls_back() -> None:
    shop = Shop()

    @shop.post(effects=LOCAL)
    async def create(op: Operation) -> Response:
        op.connection.add("row")
        return Response(status_code=600)

    await shop.send("/orders")
    assert (shop.ledger.rows, shop.state) == ([], "failed_retryable")


async def test_not_executed_lets_the_same_key_run_again() -> None:
    # R72, R100, R102
    shop = Shop()

    @shop.post(effects=INLINE, status_code=201)
    async def create() -> str:
        shop.runs.append(1)
        if len(shop.runs) == 1:
            raise NotExecutedError("connection refused: secret-host")
        return "done"

    first = await shop.send("/orders")
    assert (first.status, first.code, shop.state) == (500, "idempotency_execution_failed", "failed_retryable")
    assert b"secret-host" not in first.body
    again = await shop.send("/orders")
    assert (again.status, shop.runs, shop.state) == (201, [1, 1], "completed")


async def test_the_not_executed_hook_decides_if_a_retry_may_run() -> None:
    # R102: True only if provably nothing went out
    shop = Shop()

    @shop.post(effects=INLINE, is_definitely_not_executed=lambda error: isinstance(error, ConnectionRefusedError))
    async def create(refused: bool) -> str:
        shop.runs.append(1)
        raise ConnectionRefusedError if refused else TimeoutError

    await shop.send("/orders?refused=true")
    assert shop.state == "failed_retryable"
    await shop.send("/orders?refused=false", key="another-key-0000001")
    assert [record["state"] for record in shop.ledger.records] == ["failed_retryable", "unknown"]


async def test_a_failing_not_executed_hook_leaves_an_unknown_outcome() -> None:
    # R102: pessimistic, also about the hook itself
    shop = Shop()

    def broken(error: BaseException) -> bool:
        raise KeyError(error)

    @shop.post(effects=INLINE, is_definitely_not_executed=broken)
    async def create() -> str:
        raise TimeoutError

    reply = await shop.send("/orders")
    assert (reply.status, shop.state) == (500, "unknown")


async def test_on_5xx_store_keeps_a_returned_error() -> None:
    # R105
    shop = declining_shop(INLINE, on_5xx="store")
    first = await shop.send("/orders?status=502&way=returned")
    again = await shop.send("/orders?status=502&way=returned")
    assert (first.status, again.status, again.body, again.replayed) == (502, 502, first.body, True)
    assert shop.runs == [502]


async def test_on_5xx_store_hides_the_text_of_the_exception() -> None:
    # R105; peers 27
    shop = declining_shop(INLINE, on_5xx=On5xx.STORE)
    shop.app.debug = True  # the framework would answer with a page that quotes the exception
    caller = shop.caller("/orders?status=500&way=crashed")
    with pytest.raises(RuntimeError, match="alice"):  # the server still logs it
        await caller.run(raising=True)
    first = caller.reply
    again = await shop.send("/orders?status=500&way=crashed")
    assert (first.status, first.code) == (500, "idempotency_execution_failed")
    assert (again.status, again.body, again.replayed) == (500, first.body, True)
    assert json.loads(first.body)["retryable"] is False  # it is stored
    assert b"alice" not in first.body
    assert "alice" not in str(shop.ledger.records)
    assert len(shop.runs) == 1


async def test_no_text_of_an_exception_is_stored_or_replayed() -> None:
    # R143; peers 27
    for effects in (LOCAL, INLINE):
        shop = declining_shop(effects)
        await shop.send("/orders?status=500&way=crashed")
        again = await shop.send("/orders?status=500&way=crashed")
        assert "alice" not in str(shop.ledger.records)
        assert b"alice" not in again.body


async def test_a_crash_returns_500_and_reaches_the_server() -> None:
    shop = declining_shop(LOCAL)
    caller = shop.caller("/orders?status=500&way=crashed")
    with pytest.raises(RuntimeError, match="alice"):
        await caller.run(raising=True)
    assert (caller.reply.status, caller.reply.body) == (500, b"Internal Server Error")


async def test_a_store_error_raised_by_the_handler_rolls_back() -> None:
    # L6: raised rolls back, also where an exception handler maps it
    shop = Shop()

    @shop.app.exception_handler(StoreUnavailableError)
    async def mapped(_: Request, __: Exception) -> JSONResponse:
        return JSONResponse({}, status_code=409)

    @shop.post(effects=LOCAL)
    async def create(op: Operation) -> None:
        op.connection.add("row")
        raise StoreUnavailableError("another store, of the handler's own")

    reply = await shop.send("/orders")
    assert (reply.status, shop.ledger.rows, shop.state) == (409, [], "completed")


class Order(BaseModel):
    """What is shown of an order."""

    id: int


async def test_the_response_model_filters_the_stored_body() -> None:
    # peers 26: response_model is respected, and the status is the real one
    shop = Shop()

    @shop.post(effects=LOCAL, status_code=201, response_model=Order)
    async def create(op: Operation) -> Any:
        return {"id": 7, "margin": 0.4}

    first = await shop.send("/orders")
    again = await shop.send("/orders")
    assert (first.status, first.json()) == (201, {"id": 7})
    assert (again.status, again.body, again.replayed) == (201, first.body, True)
    assert b"margin" not in shop.ledger.record["response_body"]


@pytest.mark.parametrize(("effects", "state"), [(LOCAL, "failed_retryable"), (INLINE, "unknown")])
async def test_a_response_that_fails_its_model_rolls_back(effects: Any, state: str) -> None:
    # L6: the response is part of the operation
    shop = Shop()

    @shop.post(effects=effects, response_model=Order)
    async def create(op: Operation) -> Any:
        if effects is LOCAL:
            op.connection.add("row")
        return {"id": "not a number"}

    reply = await shop.send("/orders")
    assert (reply.status, shop.ledger.rows, shop.state) == (500, [], state)


# ------------------------------------------------------------------------------------------ background tasks


async def test_a_background_task_runs_after_the_response_was_sent() -> None:
    # peers 12: the answer is durable before its first byte goes out, and tasks come after it
    shop = Shop()
    events: list[str] = []

    @shop.post(effects=LOCAL)
    async def create(op: Operation, tasks: BackgroundTasks) -> str:
        tasks.add_task(lambda: events.append(f"task {shop.state}"))
        return "done"

    caller = shop.caller("/orders", on_send=lambda message: events.append(f"{message['type']} {shop.state}"))
    await caller.run()
    assert events == ["http.response.start completed", "http.response.body completed", "task completed"]


async def test_a_failing_background_task_keeps_the_stored_response() -> None:
    # peers 12; apishape 9
    shop = Shop()

    @shop.post(effects=LOCAL, status_code=201)
    async def create(op: Operation, tasks: BackgroundTasks) -> str:
        shop.runs.append(1)
        op.connection.add("row")

        def fail() -> None:
            raise RuntimeError("the mail server is down")

        tasks.add_task(fail)
        return "done"

    caller = shop.caller("/orders")
    with pytest.raises(RuntimeError, match="mail"):
        await caller.run(raising=True)
    again = await shop.send("/orders")
    assert (caller.reply.status, again.status, again.replayed) == (201, 201, True)
    assert (shop.runs, shop.ledger.rows, shop.state) == ([1], ["row"], "completed")


async def test_no_background_task_runs_after_a_failed_commit() -> None:
    # apishape 3, 9: the task would act on a success that is none
    shop = Shop()

    async def failing(_: Any) -> None:
        raise StoreUnavailableError("deferred constraint")

    shop.ledger.faults["commit"].append(failing)

    @shop.post(effects=LOCAL, status_code=201)
    async def create(op: Operation, tasks: BackgroundTasks) -> str:
        op.connection.add("row")
        tasks.add_task(shop.runs.append, "task")
        return "done"

    caller = shop.caller("/orders")
    await caller.run(raising=True)  # and nobody hears of our own exception
    assert (caller.reply.status, caller.reply.code) == (503, "idempotency_store_unavailable")
    assert (shop.runs, shop.ledger.rows, shop.state) == ([], [], "failed_retryable")
    assert (await shop.send("/orders")).status == 201
    assert (shop.runs, shop.ledger.rows) == (["task"], ["row"])


async def test_no_background_task_runs_for_an_unstorable_response() -> None:
    # A4: the rows were rolled back, so nothing may act on them
    shop = Shop()

    @shop.post(effects=LOCAL)
    async def create(op: Operation, tasks: BackgroundTasks) -> Response:
        op.connection.add("row")
        tasks.add_task(shop.runs.append, "task")
        return Response(b"data: 1\n\n", media_type="text/event-stream")

    reply = await shop.send("/orders")
    assert (reply.status, reply.code) == (500, "idempotency_execution_failed")
    assert (shop.ledger.rows, shop.state, shop.runs) == ([], "failed_retryable", [])


async def test_an_endless_stream_ends_when_it_is_refused() -> None:
    # A4: text/event-stream cannot be enrolled; its generator must not go on for nobody
    shop = Shop()

    @shop.post(effects=INLINE)
    async def create() -> StreamingResponse:
        async def forever() -> Any:
            while True:
                yield b"data: tick\n\n"
                await asyncio.sleep(0)

        return StreamingResponse(forever(), media_type="text/event-stream")

    async with asyncio.timeout(PATIENCE):
        reply = await shop.send("/orders")
    assert (reply.status, shop.state) == (500, "unknown")
