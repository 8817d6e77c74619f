"""What only a real server does: connections that break, bodies on demand, header lines, and stopping."""

from __future__ import annotations

import asyncio
import threading
import time
from typing import Any

import pytest
from fastapi import FastAPI, Request
from fastapi.responses import StreamingResponse

from frameworks.shop import LedgerOnce, Shop, new_key, tenant_of
from harness.asgi import until
from harness.ledger import Ledger
from harness.patience import PATIENCE, wait_until
from harness.served import Served, Wire
from oncekey.core.model import INLINE, LOCAL
from oncekey.engine.operation import Operation, SyncOperation

HTTP = ["h11", "httptools"]


def real_shop(**shopping: Any) -> Shop:
    """A shop with its lifespan."""
    shop = Shop(app=None, install=False, **shopping)
    shop.app = FastAPI(lifespan=shop.once.lifespan)
    shop.once.install(shop.app, tenant=tenant_of)
    return shop


def post(wire: Wire, path: str, *lines: str, body: bytes = b"") -> tuple[int, dict[str, str], bytes]:
    wire.say(f"POST {path} HTTP/1.1", "Host: shop", f"Content-Length: {len(body)}", *lines, body=body)
    return wire.hear()


@pytest.mark.parametrize("http", HTTP)
def test_one_connection_serves_many_requests(http: str) -> None:
    # keep-alive: an answer of ours never leaves the connection in disorder
    shop = real_shop()

    @shop.post(effects=LOCAL, status_code=201, max_request_bytes=100)
    async def create(request: Request, op: Operation) -> dict[str, int]:
        op.connection.add("row")
        return {"size": len(await request.body())}

    with Served(shop.app, http=http) as server, server.connect() as wire:
        key = f"Idempotency-Key: {new_key()}"
        assert post(wire, "/orders", key, body=b"tea")[::2] == (201, b'{"size":3}')
        status, headers, body = post(wire, "/orders", key, body=b"tea")
        assert (status, headers["idempotent-replayed"], body) == (201, "true", b'{"size":3}')
        assert post(wire, "/orders", key, body=b"coffee")[0] == 422
        assert post(wire, "/orders", body=b"tea")[0] == 400
        assert post(wire, "/orders", key, "Idempotency-Key: another-key-0000001", body=b"tea")[0] == 400  # R7
        assert post(wire, "/orders", key, body=b"tea")[0] == 201
        assert post(wire, "/orders", f"Idempotency-Key: {new_key()}", body=b"x" * 101)[0] == 413
    with Served(real_shop().app, http=http) as server, server.connect() as wire:
        assert post(wire, "/nowhere", "Idempotency-Key: x", body=b"tea")[0] == 404
    assert shop.ledger.rows == ["row"]


@pytest.mark.parametrize("http", HTTP)
def test_expect_100_continue_is_sent_only_for_valid_requests(http: str) -> None:
    # apishape 1: Expect: 100-continue
    shop = real_shop()

    @shop.post(effects=INLINE, status_code=201)
    async def create(request: Request) -> int:
        return len(await request.body())

    expecting = ("POST /orders HTTP/1.1", "Host: shop", "Content-Length: 3", "Expect: 100-continue")
    with Served(shop.app, http=http) as server:
        for lines in (expecting, (*expecting, "Idempotency-Key: bad")):
            with server.connect() as wire:
                wire.say(*lines)
                assert wire.hear()[0] == 400
        with server.connect() as wire:
            wire.say(*expecting, f"Idempotency-Key: {new_key()}")
            assert wire.hear()[0] == 100
            wire.send(b"tea")
            assert wire.hear()[::2] == (201, b"3")


@pytest.mark.parametrize("http", HTTP)
def test_a_retry_receives_the_whole_stream_after_a_disconnect(http: str) -> None:
    # apishape 1, 9
    shop = real_shop()
    began, go_on = threading.Event(), threading.Event()

    @shop.post(effects=LOCAL, status_code=201)
    async def create(op: Operation) -> StreamingResponse:
        op.connection.add("row")

        async def pieces() -> Any:
            yield b"one "
            began.set()
            await until(go_on.is_set)
            yield b"two"

        return StreamingResponse(pieces(), 201)

    key = f"Idempotency-Key: {new_key()}"
    with Served(shop.app, http=http) as server:
        with server.connect() as wire:
            wire.say("POST /orders HTTP/1.1", "Host: shop", "Content-Length: 0", key)
            assert began.wait(PATIENCE)
        time.sleep(0.05)
        go_on.set()
        wait_until(lambda: shop.state == "completed")
        with server.connect() as wire:
            status, headers, body = post(wire, "/orders", key)
            assert (status, headers["idempotent-replayed"], body) == (201, "true", b"one two")
    assert shop.ledger.rows == ["row"]


@pytest.mark.parametrize("http", HTTP)
def test_a_client_that_disconnects_within_its_body_runs_nothing(http: str) -> None:
    # apishape 1, 9
    shop = real_shop()

    @shop.post(effects=INLINE)
    async def create() -> str:
        shop.runs.append(1)
        return "done"

    with Served(shop.app, http=http) as server:
        with server.connect() as wire:
            wire.say("POST /orders HTTP/1.1", "Host: shop", "Content-Length: 10", f"Idempotency-Key: {new_key()}")
            wire.send(b"half")
            time.sleep(0.05)
        time.sleep(0.1)
    assert (shop.runs, shop.ledger.records) == ([], [])


@pytest.mark.parametrize("http", HTTP)
def test_large_responses_arrive_complete(http: str) -> None:
    # A4
    shop = real_shop()

    @shop.post(effects=INLINE, status_code=201)
    async def create() -> StreamingResponse:
        async def pieces() -> Any:
            for _ in range(300):
                yield b"x" * 10_000

        return StreamingResponse(pieces(), 201)

    key = f"Idempotency-Key: {new_key()}"
    with Served(shop.app, http=http) as server, server.connect() as wire:
        status, _, body = post(wire, "/orders", key)
        assert (status, len(body)) == (201, 3_000_000)
        assert post(wire, "/orders", key)[0] == 409


# ----------------------------------------------------------------------------------------------------- stopping


class SlowLedger(Ledger):
    """A store whose settlements take a while."""

    def __init__(self) -> None:
        super().__init__()
        self.settling = threading.Event()

    async def meet(self, name: str, do: Any) -> Any:
        if name in ("settle", "step"):
            self.settling.set()
            await asyncio.sleep(0.6)
        return await super().meet(name, do)


def slow_shop(effects: Any) -> Shop:
    shop = real_shop()
    shop.ledger = SlowLedger()
    shop.once = LedgerOnce(shop.ledger)
    shop.app = FastAPI(lifespan=shop.once.lifespan)
    shop.once.install(shop.app, tenant=tenant_of)
    return shop


@pytest.mark.parametrize("effects", [LOCAL, INLINE])
def test_stopping_during_a_settlement_loses_nothing(effects: Any) -> None:
    # apishape 1, 9: the server cancels after its time-out and does not wait; the lifespan drains
    shop = slow_shop(effects)
    assert isinstance(shop.ledger, SlowLedger)

    @shop.post(effects=effects, status_code=201)
    async def create(op: Operation) -> str:
        shop.runs.append(1)
        if effects is LOCAL:
            op.connection.add("row")
        return "done"

    with Served(shop.app, timeout_graceful_shutdown=0.1) as server:
        wire = server.connect()
        wire.say("POST /orders HTTP/1.1", "Host: shop", "Content-Length: 0", f"Idempotency-Key: {new_key()}")
        assert shop.ledger.settling.wait(PATIENCE)
        server.stop()
        server.wait()
        wire.close()
    assert shop.ledger.open == 0
    if effects is INLINE:
        assert shop.state == "completed"
    else:
        # Cancelled before its commit: rolled back, and a retry runs.
        assert (shop.state, shop.ledger.rows) == ("failed_retryable", [])
    assert shop.ledger.log[-1] == "close"


@pytest.mark.parametrize(("effects", "state"), [(LOCAL, "failed_retryable"), (INLINE, "unknown")])
def test_stopping_during_a_handler_settles_its_record(effects: Any, state: str) -> None:
    # P5, F10: not after the lease, but now
    shop = real_shop()
    began = threading.Event()

    @shop.post(effects=effects)
    async def create(op: Operation) -> None:
        if effects is LOCAL:
            op.connection.add("row")
        began.set()
        await asyncio.sleep(60)

    with Served(shop.app, timeout_graceful_shutdown=0.1) as server:
        wire = server.connect()
        wire.say("POST /orders HTTP/1.1", "Host: shop", "Content-Length: 0", f"Idempotency-Key: {new_key()}")
        assert began.wait(PATIENCE)
        server.stop()
        server.wait()
        wire.close()
    assert (shop.state, shop.ledger.rows, shop.ledger.open) == (state, [], 0)
    assert shop.ledger.log[-1] == "close"


def test_a_stop_waits_for_a_blocking_handler() -> None:
    # P5: a thread cannot be cancelled, so its end is waited for and written down
    shop = real_shop()
    began, go_on = threading.Event(), threading.Event()

    @shop.post(effects=LOCAL)
    def create(op: SyncOperation) -> str:
        began.set()
        go_on.wait(PATIENCE)
        op.connection.add("row")
        return "done"

    requests: list[asyncio.Task[Any] | None] = []

    async def watched(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "http":
            requests.append(asyncio.current_task())
        await shop.app(scope, receive, send)

    with Served(watched, timeout_graceful_shutdown=0.1) as server:
        wire = server.connect()
        wire.say("POST /orders HTTP/1.1", "Host: shop", "Content-Length: 0", f"Idempotency-Key: {new_key()}")
        assert began.wait(PATIENCE)
        server.stop()
        (request,) = requests
        assert request is not None
        wait_until(request.cancelling)
        go_on.set()
        server.wait()
        wire.close()
    assert (shop.state, shop.ledger.rows, shop.ledger.open) == ("failed_retryable", [], 0)


def test_stopping_without_a_timeout_lets_handlers_finish() -> None:
    shop = real_shop()
    began = threading.Event()

    @shop.post(effects=LOCAL, status_code=201)
    async def create(op: Operation) -> str:
        op.connection.add("row")
        began.set()
        await asyncio.sleep(0.2)
        return "done"

    with Served(shop.app) as server, server.connect() as wire:
        wire.say("POST /orders HTTP/1.1", "Host: shop", "Content-Length: 0", f"Idempotency-Key: {new_key()}")
        assert began.wait(PATIENCE)
        server.stop()
        assert wire.hear()[0] == 201
    assert (shop.state, shop.ledger.rows) == ("completed", ["row"])


def test_an_unhandled_exception_returns_500_and_a_retry_runs() -> None:
    shop = real_shop()

    @shop.post(effects=LOCAL, status_code=201)
    async def create(op: Operation) -> str:
        shop.runs.append(1)
        if len(shop.runs) == 1:
            raise RuntimeError("boom")
        return "done"

    key = f"Idempotency-Key: {new_key()}"
    with Served(shop.app) as server:
        with server.connect() as wire:
            assert post(wire, "/orders", key)[0] == 500
        with server.connect() as wire:
            assert post(wire, "/orders", key)[0] == 201
