"""What is Litestar's own: where the claim comes, what is stored of an answer, and what is refused at start-up."""

from __future__ import annotations

import asyncio
import gzip
import json
import logging
import uuid
from collections.abc import AsyncIterator
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from litestar import Controller, Litestar, Request, Response, Router, get, post
from litestar.background_tasks import BackgroundTask
from litestar.config.compression import CompressionConfig
from litestar.di import Provide
from litestar.dto import DataclassDTO
from litestar.exceptions import HTTPException, NotAuthorizedException
from litestar.response import ServerSentEvent, Stream
from openapi_spec_validator import validate

from harness.asgi import Caller, Reply, call
from harness.served import Served
from oncekey import SINGLE_TENANT
from oncekey.core.errors import ConfigurationError
from oncekey.core.model import INLINE, LOCAL, PHASED
from oncekey.core.policy import Policy
from oncekey.engine.operation import Operation, SyncOperation
from oncekey.frameworks.openapi import document_of
from oncekey.frameworks.resuming import resumed_as
from oncekey.litestar import OncePlugin
from oncekey.once import Once
from oncekey.once.route_report import route_lines
from oncekey.workers.completer import Completer
from wsgi.shop import TABLE, execute, send


@dataclass
class Order:
    item: str


class Shop:
    """A small shop on SQLite; handlers are added to it, then it is opened."""

    def __init__(self, folder: Path, **policy: Any) -> None:
        self.url = f"sqlite:///{folder}/{uuid.uuid4().hex}.db"
        execute(self.url, TABLE)
        self.once = Once(self.url, policy=Policy(**policy), migrate=True)
        self.runs: list[Any] = []

    def app(
        self, *handlers: Any, tenant: Any = SINGLE_TENANT, plugin: dict[str, Any] | None = None, **more: Any
    ) -> Litestar:
        ours = OncePlugin(self.once, tenant=tenant, **(plugin or {}))
        return Litestar(handlers, plugins=[ours, *more.pop("plugins", ())], logging_config=None, **more)

    @property
    def sold(self) -> list[str]:
        return sorted(item for (item,) in execute(self.url, "SELECT item FROM sold"))

    @property
    def records(self) -> int:
        return int(execute(self.url, "SELECT count(*) FROM oncekey_record")[0][0])


@pytest.fixture
def shop(tmp_path: Path) -> Shop:
    return Shop(tmp_path)


def new_key() -> str:
    return str(uuid.uuid4())


async def sent(app: Litestar, path: str, order: Any, key: str | None = None, **headers: str) -> Reply:
    lines = {"content-type": "application/json", **{name.replace("_", "-"): value for name, value in headers.items()}}
    if key is not None:
        lines["idempotency-key"] = key
    return await call(app, "POST", path, headers=lines, body=json.dumps(order).encode())


async def test_the_claim_comes_after_guards_dependencies_and_validation(shop: Shop) -> None:
    # R198: who may not call a handler is not given its stored answer; an invalid request claims nothing
    seen: list[str] = []

    def guard(connection: Any, _: Any) -> None:
        seen.append("guard")
        if connection.headers.get("who") == "nobody":
            raise NotAuthorizedException

    async def dependency() -> AsyncIterator[str]:
        seen.append("dependency")
        yield "given"
        seen.append("its end")

    async def after_request(response: Response[Any]) -> Response[Any]:
        seen.append("after_request")
        return response

    async def after_response(_: Request[Any, Any, Any]) -> None:
        seen.append("after_response")

    @post(
        "/orders",
        guards=[guard],
        dependencies={"given": Provide(dependency)},
        after_request=after_request,
        after_response=after_response,
    )
    @shop.once.protect(effects=LOCAL)
    async def create(data: Order, given: str, op: Operation[Any]) -> dict[str, str]:
        seen.append("handler")
        return {"item": data.item}

    async def before_send(message: Any, _: Any) -> None:
        seen.append(message["type"])

    app = shop.app(create, before_send=[before_send])
    async with app.lifespan():
        key = new_key()
        invalid = await sent(app, "/orders", {"wrong": 1}, key)
        assert (invalid.status, shop.records) == (400, 0)
        assert seen == ["guard", "dependency", "http.response.start", "http.response.body"]
        seen.clear()
        first = await sent(app, "/orders", {"item": "tea"}, key)
        assert (first.status, first.replayed) == (201, False)
        assert seen == [
            "guard",
            "dependency",
            "handler",
            "after_request",
            "its end",
            "http.response.start",
            "http.response.body",
            "after_response",
        ]
        assert (await sent(app, "/orders", {"item": "tea"}, key)).body == first.body
        assert (await sent(app, "/orders", {"item": "tea"}, key, who="nobody")).status == 401
    assert seen.count("handler") == 1


@pytest.mark.parametrize("reads_first", [False, True])
async def test_the_stored_body_is_uncompressed(shop: Shop, reads_first: bool) -> None:
    # gzip bytes were replayed to a client that takes none; unprotected routes are compressed as before
    large = "tea" * 1000

    def reading(app: Any) -> Any:
        async def middleware(scope: Any, receive: Any, send: Any) -> None:
            assert Request[Any, Any, Any](scope).headers.get("accept-encoding") == "gzip" or not reads_first
            await app(scope, receive, send)

        return middleware

    @post("/orders")
    @shop.once.protect(effects=LOCAL)
    async def create(data: Order) -> dict[str, str]:
        return {"item": data.item}

    @post("/plain")
    async def plain(data: Order) -> dict[str, str]:
        return {"item": data.item}

    app = shop.app(
        create, plain, compression_config=CompressionConfig("gzip"), middleware=[reading] if reads_first else []
    )
    async with app.lifespan():
        key = new_key()
        first = await sent(app, "/orders", {"item": large}, key, accept_encoding="gzip")
        again = await sent(app, "/orders", {"item": large}, key, accept_encoding="gzip" if reads_first else "identity")
        open_ = await sent(app, "/plain", {"item": large}, accept_encoding="gzip")
    assert first.json() == again.json() == {"item": large}
    assert (first.header("content-encoding"), again.header("content-encoding"), again.replayed) == (None, None, True)
    assert (open_.header("content-encoding"), json.loads(gzip.decompress(open_.body))) == ("gzip", {"item": large})


async def test_middleware_runs_again_on_every_replay(shop: Shop) -> None:
    # of the application, of a router, of a controller and of the handler itself
    count = 0

    def adding(name: str) -> Any:
        def factory(app: Any) -> Any:
            async def middleware(scope: Any, receive: Any, send: Any) -> None:
                async def say(message: Any) -> None:
                    nonlocal count
                    if message["type"] == "http.response.start":
                        count += 1
                        message["headers"].append((name.encode(), str(count).encode()))
                    await send(message)

                await app(scope, receive, say)

            return middleware

        return factory

    once = shop.once

    class Orders(Controller):
        path = "/orders"
        middleware = (adding("x-controller"),)

        @post("/{number:int}", middleware=[adding("x-handler")])
        @once.protect(effects=LOCAL, operation="orders")
        async def create(self, number: int, data: Order) -> dict[str, int]:
            return {"number": number}

    app = shop.app(
        Router("/v1", route_handlers=[Orders], middleware=[adding("x-router")]), middleware=[adding("x-app")]
    )
    async with app.lifespan():
        key = new_key()
        first = await sent(app, "/v1/orders/7", {"item": "tea"}, key)
        again = await sent(app, "/v1/orders/7", {"item": "tea"}, key)
    assert (first.json(), again.body, again.replayed) == ({"number": 7}, first.body, True)
    for name in ("x-app", "x-router", "x-controller", "x-handler"):
        assert int(again.all(name)[0]) > int(first.all(name)[0])
        assert len(again.all(name)) == 1
    assert [line.path for line in route_lines([once], once.served)] == ["/v1/orders/{number}"]


@pytest.mark.filterwarnings("ignore:Use of a synchronous callable")
@pytest.mark.filterwarnings("ignore:Use of an asynchronous callable")
@pytest.mark.parametrize("way", [{}, {"sync_to_thread": True}, {"sync_to_thread": False}])
async def test_plain_def_handlers_run_in_threads(shop: Shop, way: Any) -> None:
    once = shop.once

    @post("/orders", **way)
    @once.protect(effects=LOCAL)
    def create(data: Order, op: SyncOperation[Any]) -> dict[str, str]:
        with pytest.raises(RuntimeError):
            asyncio.get_running_loop()
        op.connection.execute("INSERT INTO sold VALUES (?)", (data.item,))
        return {"item": data.item}

    class Payments(Controller):
        @post("/payments", **way)
        @once.protect(effects=PHASED)
        def pay(self, data: Order, op: SyncOperation[Any]) -> dict[str, Any]:
            shop.runs.append(op.attempt)
            number = op.phase("paid", lambda connection: len(shop.runs))
            if op.attempt == 1:
                raise ValueError("it stumbled")
            return {"number": number}

    app = shop.app(create, Payments)
    async with app.lifespan():
        key = new_key()
        first = await sent(app, "/orders", {"item": "tea"}, key)
        again = await sent(app, "/orders", {"item": "tea"}, key)
        assert (first.json(), again.body, again.replayed) == ({"item": "tea"}, first.body, True)
        assert (await sent(app, "/payments", {"item": "tea"}, key)).status == 422
        key = new_key()
        assert (await sent(app, "/payments", {"item": "tea"}, key)).status == 500
        assert (await sent(app, "/payments", {"item": "tea"}, key)).json() == {"number": 1}
    assert (shop.sold, shop.runs) == (["tea"], [1, 2])


def test_streams_are_captured_and_endless_ones_refused(shop: Shop, caplog: pytest.LogCaptureFixture) -> None:
    # A4: as on any ASGI application
    async def pieces() -> AsyncIterator[bytes]:
        for piece in (b"one ", b"two"):
            yield piece

    async def endless() -> AsyncIterator[bytes]:
        while True:
            yield b"data: 1"

    @post("/stream")
    @shop.once.protect(effects=LOCAL)
    async def stream() -> Stream:
        shop.runs.append("stream")
        return Stream(pieces())

    @post("/events")
    @shop.once.protect(effects=LOCAL)
    async def events() -> Stream:
        return Stream(endless(), media_type="text/event-stream")

    with Served(shop.app(stream, events)) as server:
        key = new_key()
        first, again = [send(server.port, "/stream", key=key) for _ in range(2)]
        refused = send(server.port, "/events", key=new_key())
        assert send(server.port, "/stream", key=key).replayed
    assert (first.body, again.body, again.replayed, shop.runs) == (b"one two", b"one two", True, ["stream"])
    assert (refused.status, refused.json()["code"]) == (500, "idempotency_execution_failed")
    assert "event_stream_cannot_be_enrolled" in caplog.text


async def test_exception_handler_responses_are_stored(shop: Shop) -> None:
    # L6: what is raised is rolled back, and a final no is stored; 500 runs again
    class OutOfStockError(Exception):
        pass

    def out_of_stock(_: Request[Any, Any, Any], error: OutOfStockError) -> Response[Any]:
        return Response({"no": str(error)}, status_code=409)

    @post("/orders", exception_handlers={OutOfStockError: out_of_stock})
    @shop.once.protect(effects=LOCAL)
    async def create(data: Order, op: Operation[Any]) -> dict[str, str]:
        shop.runs.append(data.item)
        await op.connection.execute("INSERT INTO sold VALUES (?)", (data.item,))
        match data.item:
            case "gone":
                raise OutOfStockError("it is gone")
            case "teapot":
                raise HTTPException("short and stout", status_code=418)
            case _:
                raise RuntimeError("oops")

    app = shop.app(create)
    async with app.lifespan():
        statuses = []
        for item in ("gone", "teapot", "oops"):
            key = new_key()
            first, again = [await sent(app, "/orders", {"item": item}, key) for _ in range(2)]
            statuses.append((first.status, again.status, again.replayed, first.body == again.body))
    assert statuses == [(409, 409, True, True), (418, 418, True, True), (500, 500, False, True)]
    assert (shop.runs, shop.sold) == (["gone", "teapot", "oops", "oops"], [])


async def test_oncekey_responses_bypass_the_return_dto(shop: Shop) -> None:
    # a DTO reads the fields of whatever a handler returns
    @post("/orders", dto=DataclassDTO[Order], return_dto=DataclassDTO[Order])
    @shop.once.protect(effects=LOCAL)
    async def create(data: Order) -> Order:
        return data

    app = shop.app(create)
    async with app.lifespan():
        key = new_key()
        missing = await sent(app, "/orders", {"item": "tea"})
        first, again = [await sent(app, "/orders", {"item": "tea"}, key) for _ in range(2)]
    assert (missing.status, missing.code) == (400, "idempotency_key_missing")
    assert (first.json(), again.body, again.replayed) == ({"item": "tea"}, first.body, True)


async def test_a_background_task_runs_once_and_only_after_success(shop: Shop) -> None:
    # what is not stored goes out as an answer of ours
    @post("/orders")
    @shop.once.protect(effects=INLINE)
    async def create(data: Order) -> Response[dict[str, str]]:
        if data.item == "lost":
            execute(shop.url, "DELETE FROM oncekey_record")
        return Response({"item": data.item}, background=BackgroundTask(shop.runs.append, data.item))

    app = shop.app(create)
    async with app.lifespan():
        key = new_key()
        for _ in range(2):
            assert (await sent(app, "/orders", {"item": "tea"}, key)).status == 201
        lost = await sent(app, "/orders", {"item": "lost"}, new_key())
    assert (lost.status >= 400, shop.runs) == (True, ["tea"])


@pytest.mark.parametrize("key", [None, "a-key-of-sixteen-letters"])
async def test_a_slow_litestar_body_returns_408(tmp_path: Path, key: str | None) -> None:
    shop = Shop(tmp_path, body_timeout=timedelta(milliseconds=1))

    @post("/orders")
    @shop.once.protect(effects=LOCAL, require_key=False)
    async def create(request: Request[Any, Any, Any]) -> int:
        shop.runs.append("ran")
        return len(await request.body())

    app = shop.app(create)
    async with app.lifespan():
        caller = Caller(app, "POST", "/orders", headers={} if key is None else {"idempotency-key": key}, body=[])
        caller._chunks = []
        reply = await caller.run()
    assert (reply.status, reply.code, shop.runs) == (408, "idempotency_body_too_slow", [])


async def test_litestar_openapi_describes_protected_routes(shop: Shop) -> None:
    # R228, R229; also where nothing is started, as `litestar schema openapi` writes it
    @post("/orders")
    @shop.once.protect(effects=LOCAL)
    async def create(data: Order) -> Order:
        return data

    @post("/plain")
    async def plain(data: Order) -> Order:
        return data

    app = shop.app(create, plain)
    document = app.openapi_schema.to_schema()
    assert (document_of(app), document_of(Litestar(openapi_config=None))) == (document, None)
    validate(document)
    protected, unprotected = (document["paths"][path]["post"] for path in ("/orders", "/plain"))
    assert protected["x-oncekey"] == {"effects": "local", "operation": create.fn.__oncekey__.operation}  # type: ignore[attr-defined]
    assert [one["name"] for one in protected["parameters"]] == ["Idempotency-Key"]
    assert {"400", "409", "422", "503"} <= set(protected["responses"])
    assert "Idempotent-Replayed" in protected["responses"]["201"]["headers"]
    assert "x-oncekey" not in unprotected
    assert "/idempotency-keys/{key}" in document["paths"]


async def test_a_completer_resumes_as_the_litestar_principal(shop: Shop) -> None:
    # H7, R120
    names: list[Any] = []

    @post("/pay")
    @shop.once.protect(effects=PHASED)
    async def pay(request: Request[Any, Any, Any], op: Operation[Any]) -> str:
        own, other = request.headers.get("x-own"), request.headers.get("x-other")
        names.append((resumed_as(request), own, other, request.url.scheme))
        drawn: str = await op.phase("drawn", lambda _: "paid")
        assert op.attempt > 1
        return drawn

    @get("/other")
    async def other() -> None: ...

    plugin = {
        "principal": lambda request: resumed_as(request) or request.headers.get("who", "nobody"),
        "keep_headers": ["X-Own"],
    }
    app = shop.app(pay, plugin=plugin)
    Litestar([other], plugins=[OncePlugin(shop.once, tenant=SINGLE_TENANT)], logging_config=None)
    async with app.lifespan():
        lines = {"who": "ann", "x_own": "mine", "x_other": "never kept"}
        assert (await sent(app, "/pay?a=%20b", {}, new_key(), **lines)).status == 500
        execute(shop.url, "UPDATE oncekey_record SET reconcile_after = 1")
        assert await Completer(shop.once).run_once() == 1
    assert names == [(None, "mine", "never kept", "http"), ("ann", "mine", None, "https")]


async def test_a_litestar_route_can_be_enrolled_by_path(shop: Shop) -> None:
    @post("/legacy/{number:int}")
    async def legacy(number: int) -> dict[str, int]:
        shop.runs.append(number)
        return {"number": number}

    enrol = {"POST /legacy/{number}": shop.once.by_path(effects=INLINE, operation="legacy")}
    app = shop.app(legacy, plugin={"enrol": enrol})
    async with app.lifespan():
        key = new_key()
        first, again = [await sent(app, "/legacy/3", {}, key) for _ in range(2)]
        assert (await sent(app, "/legacy/3", {})).status == 400
    assert (first.json(), again.replayed, shop.runs) == ({"number": 3}, True, [3])


async def test_two_once_instances_serve_one_litestar_application(tmp_path: Path) -> None:
    # each handler is claimed by its own
    one, two = Shop(tmp_path), Shop(tmp_path)

    @post("/one")
    @one.once.protect(effects=LOCAL)
    async def first() -> None: ...

    @post("/two")
    @two.once.protect(effects=LOCAL)
    async def second() -> None: ...

    other = OncePlugin(two.once, tenant=SINGLE_TENANT, status="/other-keys")
    two.once.policy = Policy(docs_url="/other-page")
    app = one.app(first, second, plugins=[other])
    async with app.lifespan():
        key = new_key()
        for path in ("/one", "/two"):
            replies = [await sent(app, path, {}, key) for _ in range(2)]
            assert [(reply.status, reply.replayed) for reply in replies] == [(201, False), (201, True)]
    assert (one.records, two.records) == (1, 1)


async def test_the_status_resource_has_guards(shop: Shop) -> None:
    # R198
    def guard(_: Any, __: Any) -> None:
        raise NotAuthorizedException

    @post("/orders")
    @shop.once.protect(effects=LOCAL)
    async def create() -> None: ...

    app = shop.app(create, plugin={"status_guards": [guard]})
    async with app.lifespan():
        key = new_key()
        assert (await sent(app, "/orders", {}, key)).status == 201
        assert (await call(app, "GET", f"/idempotency-keys/{key}")).status == 401


# What is refused at start-up


async def refused(app: Litestar, sentence: str) -> None:
    with pytest.raises(ExceptionGroup) as raised:
        async with app.lifespan():
            pass
    assert raised.group_contains(ConfigurationError, match=sentence)


async def test_a_cached_route_is_refused(shop: Shop) -> None:
    @get("/orders", cache=True)
    async def look() -> None: ...

    @post("/orders", cache=True)
    @shop.once.protect(effects=LOCAL)
    async def create() -> None: ...

    await refused(shop.app(look, create), r"create has cache=\.\.\., so Litestar would respond from its cache")


async def test_server_sent_events_are_refused(shop: Shop) -> None:
    @post("/events")
    @shop.once.protect(effects=LOCAL)
    async def events() -> ServerSentEvent:
        return ServerSentEvent("one")

    await refused(shop.app(events), r"events returns server-sent events, which cannot be stored")


async def test_an_unserved_protection_is_rejected_or_logged(shop: Shop, caplog: pytest.LogCaptureFixture) -> None:
    async def bare() -> None: ...

    shop.once.protect(effects=LOCAL)(bare)
    await refused(shop.app(post("/bare")(bare)), r"bare is served without its protection")
    other = Shop(Path(shop.url.removeprefix("sqlite:///")).parent)

    @post("/orders")
    @other.once.protect(effects=LOCAL)
    async def create() -> None: ...

    @shop.once.protect(effects=LOCAL)
    async def nowhere() -> None: ...

    await refused(shop.app(create), r"create is served at /orders, but the Once that protects it is not installed")
    lonely = Shop(Path(shop.url.removeprefix("sqlite:///")).parent)
    lonely.once.protect(effects=LOCAL)(nowhere.__wrapped__)  # type: ignore[attr-defined]
    with caplog.at_level(logging.WARNING):
        async with lonely.app().lifespan():
            pass
    assert "nowhere is protected, but no route serves it" in caplog.text


async def test_duplicate_and_unmatched_enrolments_are_rejected(shop: Shop) -> None:
    @post("/orders")
    @shop.once.protect(effects=LOCAL)
    async def create() -> None: ...

    by_path = shop.once.by_path(effects=INLINE, operation="by path")
    await refused(shop.app(create, plugin={"enrol": {"POST /orders": by_path}}), r"POST /orders is enrolled twice")
    await refused(shop.app(create, plugin={"enrol": {"POST /nowhere": by_path}}), r"protects nothing: no route")


def test_litestar_decoration_mistakes_are_rejected(shop: Shop) -> None:
    with pytest.raises(ConfigurationError, match=r"@once.protect\(...\) goes above a function"):

        @shop.once.protect(effects=LOCAL)
        @post("/orders")
        async def wrong() -> None: ...

    with pytest.raises(ConfigurationError, match="a generator streams its response piece by piece"):

        @shop.once.protect(effects=LOCAL)
        async def pieces() -> AsyncIterator[bytes]:
            yield b""

    with pytest.raises(ConfigurationError, match="is missing its tenant"):
        OncePlugin(shop.once, tenant=None)  # type: ignore[arg-type]


async def test_a_get_only_litestar_route_is_rejected(shop: Shop) -> None:
    @get("/orders")
    @shop.once.protect(effects=LOCAL)
    async def look() -> None: ...

    await refused(shop.app(look), r"look is served at /orders by GET.* only, where a key has no effect")
