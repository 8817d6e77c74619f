"""What is aiohttp's own: views, responses that are raised, streams, files, middleware, refusals at start-up."""

from __future__ import annotations

import asyncio
import gzip
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import closing
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from async_skins.shop import Runner, served
from harness.patience import wait_until
from harness.served import Wire
from oncekey import SINGLE_TENANT
from oncekey.aiohttp import install, middleware
from oncekey.core.errors import ConfigurationError
from oncekey.core.model import INLINE, LOCAL, PHASED
from oncekey.core.policy import Policy
from oncekey.engine.operation import Operation, SyncOperation
from oncekey.frameworks.resuming import resumed_as
from oncekey.once import Once
from oncekey.surveying import survey
from oncekey.workers.completer import Completer
from wsgi.shop import TABLE, execute, send

Next = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Shop:
    """A small shop on SQLite; handlers are added to its application, then it is served."""

    def __init__(self, folder: Path, **policy: Any) -> None:
        self.url = f"sqlite:///{folder}/{uuid.uuid4().hex}.db"
        execute(self.url, TABLE)
        self.once = Once(self.url, policy=Policy(**policy), migrate=True)
        self.app = web.Application()
        self.runs: list[Any] = []

    def add(self, path: str, *, effects: Any = LOCAL, **options: Any) -> Callable[[Any], Any]:
        def decorate(handler: Any) -> Any:
            protected = self.once.protect(effects=effects, operation=path, **options)(handler)
            self.app.router.add_post(path, protected)
            return protected

        return decorate

    def install(self, **options: Any) -> web.Application:
        install(self.once, self.app, **{"tenant": SINGLE_TENANT, **options})
        return self.app

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


async def sells(op: Operation[Any], item: str) -> None:
    await op.connection.execute("INSERT INTO sold VALUES (?)", (item,))


def test_views_and_methods_are_handlers_too(shop: Shop) -> None:
    once = shop.once

    class Orders(web.View):
        @once.protect(effects=LOCAL, operation="a view")
        async def post(self, op: Operation[Any]) -> web.Response:
            await sells(op, (await self.request.json())["item"])
            return web.json_response({"by": "view", "name": self.request.match_info["name"]}, status=201)

        async def get(self) -> web.Response:
            return web.Response(text="looked")

    class Desk:
        @once.protect(effects=LOCAL, operation="a method")
        async def create(self, request: web.Request, op: Operation[Any]) -> web.Response:
            await sells(op, (await request.json())["item"])
            return web.json_response({"by": "method"}, status=201)

    shop.app.router.add_view(r"/orders/{name:\w{1,9}}", Orders)
    desk: Any = Desk()
    shop.app.router.add_post("/desk", desk.create)
    sub = web.Application()

    @once.protect(effects=LOCAL, operation="inside")
    async def inside(request: web.Request) -> web.Response:
        return web.json_response({"path": request.path})

    sub.router.add_post("/inside", inside)
    shop.app.add_subapp("/sub", sub)
    shop.install()
    with served(shop.app) as port:
        for path in ("/orders/ann", "/desk", "/sub/inside"):
            key = new_key()
            first, again = [send(port, path, {"item": path}, key=key) for _ in range(2)]
            assert (first.status, again.body, again.replayed) == (first.status, first.body, True)
        assert send(port, "/orders/ann", key=None, method="GET").body == b"looked"
        assert send(port, "/orders/ann", {"item": "x"}, key=None).status == 400
    assert shop.sold == ["/desk", "/orders/ann"]
    lines = {(one.line.method, one.line.path, one.line.operation) for one in survey([once], once.served)}
    assert lines == {
        ("POST", "/orders/{name}", "a view"),
        ("POST", "/desk", "a method"),
        ("POST", "/sub/inside", "inside"),
    }


def test_a_response_that_is_raised_is_an_answer(shop: Shop) -> None:
    # L6: a no is stored without its rows, a yes with them
    @shop.add("/raises")
    async def raises(request: web.Request, op: Operation[Any]) -> web.Response:
        kind = (await request.json())["item"]
        shop.runs.append(kind)
        await sells(op, kind)
        match kind:
            case "conflict":
                raise web.HTTPConflict(text="no", headers={"X-Why": "sold out"})
            case "created":
                raise web.HTTPCreated(text="yes")
            case "seen":
                raise web.HTTPSeeOther("/elsewhere")
            case _:
                raise web.HTTPInternalServerError(text="oops")

    shop.install()
    with served(shop.app) as port:
        answers = {}
        for kind in ("conflict", "created", "seen", "oops"):
            key = new_key()
            first, again = [send(port, "/raises", {"item": kind}, key=key) for _ in range(2)]
            answers[kind] = (first.status, again.status, again.replayed, first.body == again.body)
            assert first.headers.get("location") == ("/elsewhere" if kind == "seen" else None)
    assert answers == {
        "conflict": (409, 409, True, True),
        "created": (201, 201, True, True),
        "seen": (303, 303, True, True),
        "oops": (500, 500, False, True),
    }
    assert (shop.sold, shop.runs) == (["created", "seen"], ["conflict", "created", "seen", "oops", "oops"])


def test_without_a_key_rows_follow_the_answer(shop: Shop) -> None:
    @shop.add("/raises", require_key=False)
    async def raises(request: web.Request, op: Operation[Any]) -> web.Response:
        status = (await request.json())["status"]
        await sells(op, f"{status}")
        if status == 201:
            raise web.HTTPCreated
        if status == 409:
            raise web.HTTPConflict
        return web.Response(status=status)

    shop.install()
    with served(shop.app) as port:
        statuses = [send(port, "/raises", {"status": status}, key=None).status for status in (200, 201, 409, 500)]
    assert (statuses, shop.sold) == ([200, 201, 409, 500], ["200", "201"])


def test_a_stream_is_refused_before_its_first_byte(shop: Shop) -> None:
    # it would be on the wire before it is stored; where something was done outside, its outcome is in doubt
    async def streams(request: web.Request) -> web.StreamResponse:
        shop.runs.append(request.path)
        response = web.StreamResponse(status=201)
        if request.path == "/local":
            response.enable_compression(web.ContentCoding.gzip)
        await response.prepare(request)
        await response.write(b"too early")
        return response

    @shop.add("/local")
    async def local(request: web.Request, op: Operation[Any]) -> web.StreamResponse:
        await sells(op, "tea")
        return await streams(request)

    shop.add("/inline", effects=INLINE)(streams)
    shop.app.router.add_post("/plain", streams)
    shop.install()
    with served(shop.app) as port:
        key = new_key()
        local_, again = [send(port, "/local", key=key) for _ in range(2)]
        inline, unknown = [send(port, "/inline", key=key + "-inline") for _ in range(2)]
        plain = send(port, "/plain", key=key)
    assert [reply.status for reply in (local_, again, inline, unknown)] == [500, 500, 500, 409]
    assert unknown.json()["code"] == "idempotency_outcome_unknown"
    error_page = b"500 Internal Server Error\n\nServer got itself in trouble"  # not in chunks, nor compressed
    assert [reply.body for reply in (local_, again, inline)] == [error_page] * 3
    assert (plain.status, plain.body) == (201, b"too early")
    assert (shop.sold, shop.runs) == ([], ["/local", "/local", "/inline", "/plain"])


def test_without_a_claim_any_response_will_do(shop: Shop, tmp_path: Path) -> None:
    # a key that is optional, and methods on which it has no effect
    (tmp_path / "list.txt").write_text("tea, milk")

    async def streams(request: web.Request) -> web.StreamResponse:
        if request.method == "GET":
            return web.FileResponse(tmp_path / "list.txt")
        response = web.StreamResponse(status=201)
        await response.prepare(request)
        await response.write(b"piece")
        return response

    protected = shop.add("/stream", require_key=False)(streams)
    shop.app.router.add_get("/stream", protected)
    shop.install()
    with served(shop.app) as port:
        sent = send(port, "/stream", key=None)
        part = send(port, "/stream", key=new_key(), method="GET", Range="bytes=0-2")
    assert (sent.status, sent.body, part.status, part.body, shop.records) == (201, b"piece", 206, b"tea", 0)


def test_bytes_that_no_key_may_have_are_answered(shop: Shop) -> None:
    shop.add("/orders")(_echoes)
    shop.install()
    with served(shop.app) as port, closing(Wire(port)) as wire:
        wire.say(
            "POST /orders HTTP/1.1", "Host: shop", "Idempotency-Key: caf\u00e9-caf\u00e9-caf\u00e9", "Content-Length: 0"
        )
        assert wire.hear()[0] == 400
        wire.say("POST /orders HTTP/1.1", "Host: shop", f"Idempotency-Key: {new_key()}", "Content-Length: 0")
        assert wire.hear()[0] == 200


def test_files_iterators_and_large_bodies_are_read(shop: Shop, tmp_path: Path) -> None:
    # A4: what is too large to be stored is sent, and a repeat is told so
    (tmp_path / "list.txt").write_text("tea, milk")
    large = b"x" * 3_000_000

    async def pieces() -> AsyncIterator[bytes]:
        yield b"one "
        yield b"two"

    @shop.add("/{kind}")
    async def answers(request: web.Request) -> web.StreamResponse:
        shop.runs.append(request.match_info["kind"])
        match request.match_info["kind"]:
            case "file":
                return web.FileResponse(tmp_path / "list.txt")
            case "opened":
                return web.Response(body=(tmp_path / "list.txt").open("rb"))
            case "iterator":
                return web.Response(body=pieces())
            case "large":
                return web.Response(body=large)
            case "nothing":
                return web.Response(status=204)
            case _:
                return None  # type: ignore[return-value]

    shop.install()
    with served(shop.app) as port:
        found = {}
        for kind in ("file", "opened", "iterator", "nothing"):
            key = new_key()
            first, again = [send(port, f"/{kind}", key=key) for _ in range(2)]
            found[kind] = first.body
            assert (again.body, again.replayed) == (first.body, True)
            assert first.headers.get("content-type") == again.headers.get("content-type")
        key = new_key()
        sent, repeat = [send(port, "/large", key=key) for _ in range(2)]
        assert send(port, "/none", key=new_key()).status == 500
    assert found == {"file": b"tea, milk", "opened": b"tea, milk", "iterator": b"one two", "nothing": b""}
    assert (sent.status, sent.body, repeat.body == large) == (200, large, False)
    assert shop.runs.count("large") == 1


def test_cookies_compression_and_signals_are_fresh(shop: Shop) -> None:
    # R60: ours is what the handler returned, and everything else is made for each answer
    count = 0

    async def on_prepare(_: web.Request, response: web.StreamResponse) -> None:
        nonlocal count
        count += 1
        response.headers["X-Count"] = str(count)

    @web.middleware
    async def compressing(request: web.Request, handler: Next) -> web.StreamResponse:
        response = await handler(request)
        response.enable_compression()
        return response

    shop.app.middlewares.append(compressing)
    shop.app.on_response_prepare.append(on_prepare)

    @shop.add("/orders")
    async def create(request: web.Request) -> web.Response:
        response = web.Response(text="tea" * 1000, headers={"X-Made": "once"})
        response.set_cookie("session", "secret", httponly=True)
        return response

    shop.install()
    with served(shop.app) as port:
        key = new_key()
        first = send(port, "/orders", key=key, **{"Accept-Encoding": "gzip"})
        again = send(port, "/orders", key=key, **{"Accept-Encoding": "identity"})
    assert gzip.decompress(first.body) == again.body == b"tea" * 1000
    assert (first.headers["content-encoding"], again.headers.get("content-encoding")) == ("gzip", None)
    assert (first.headers["set-cookie"], again.headers.get("set-cookie")) == ("session=secret; HttpOnly; Path=/", None)
    assert (first.headers["x-count"], again.headers["x-count"], again.replayed) == ("1", "2", True)


def test_who_may_not_call_a_handler_is_not_given_its_answer(shop: Shop) -> None:
    # R198: middleware comes before the claim
    @web.middleware
    async def authenticates(request: web.Request, handler: Next) -> web.StreamResponse:
        if request.headers.get("Who") == "nobody":
            raise web.HTTPUnauthorized
        return await handler(request)

    shop.app.middlewares.append(authenticates)

    @shop.add("/orders")
    async def create(request: web.Request) -> web.Response:
        return web.Response(text="secret")

    shop.install()
    with served(shop.app) as port:
        key = new_key()
        assert send(port, "/orders", key=key).body == b"secret"
        stranger = send(port, "/orders", key=key, Who="nobody")
        assert send(port, f"/idempotency-keys/{key}", key=None, method="GET", Who="nobody").status == 401
    assert (stranger.status, b"secret" in stranger.body) == (401, False)


class OutOfStockError(Exception):
    """An error of the domain."""


@web.middleware
async def maps_errors(request: web.Request, handler: Next) -> web.StreamResponse:
    try:
        return await handler(request)
    except OutOfStockError as error:
        return web.json_response({"no": str(error)}, status=409)


@pytest.mark.parametrize("around", [False, True])
def test_errors_that_middleware_makes_answers_of(shop: Shop, around: bool) -> None:
    # only what stands around that middleware sees the answer, and can store it
    shop.app.middlewares.extend([middleware(shop.once), maps_errors] if around else [maps_errors])

    @shop.add("/orders")
    async def create(request: web.Request, op: Operation[Any]) -> web.Response:
        shop.runs.append("ran")
        await sells(op, "tea")
        raise OutOfStockError("sold out")

    shop.app.router.add_post("/plain", _echoes)
    shop.install()
    with served(shop.app) as port:
        key = new_key()
        first, again = [send(port, "/orders", key=key) for _ in range(2)]
        assert send(port, "/plain", {"a": 1}, key=key).body == b'{"a": 1}'
    assert (first.status, first.json(), again.body) == (409, {"no": "sold out"}, first.body)
    assert (again.replayed, len(shop.runs), shop.sold) == (around, 1 if around else 2, [])


async def _echoes(request: web.Request) -> web.Response:
    return web.Response(body=await request.read())


def test_enrolled_by_path(shop: Shop) -> None:
    async def legacy(request: web.Request) -> web.Response:
        shop.runs.append(request.match_info["number"])
        return await _echoes(request)

    shop.app.router.add_post("/legacy/{number}", legacy)
    shop.install(enrol={"POST /legacy/{number}": shop.once.by_path(effects=INLINE, operation="legacy")})
    with served(shop.app) as port:
        key = new_key()
        first, again = [send(port, "/legacy/3", {"a": 1}, key=key) for _ in range(2)]
        assert send(port, "/legacy/3", {"a": 1}, key=None).status == 400
    assert (first.body, again.body, again.replayed, shop.runs) == (b'{"a": 1}', b'{"a": 1}', True, ["3"])


def test_bodies_that_are_too_large(tmp_path: Path) -> None:
    # R101: ours is the smaller limit, or aiohttp's own
    shop = Shop(tmp_path, max_request_bytes=1000)
    shop.add("/orders")(_echoes)
    shop.install()
    with served(shop.app) as port:
        assert send(port, "/orders", "x" * 900, key=new_key()).status == 200
        large = send(port, "/orders", "x" * 2000, key=new_key())
        larger = send(port, "/orders", "x" * 2_000_000, key=new_key())
    assert (large.status, large.json()["code"], larger.status) == (413, "idempotency_body_too_large", 413)
    assert shop.records == 1


def test_a_body_that_takes_too_long(tmp_path: Path) -> None:
    # R101
    shop = Shop(tmp_path, body_timeout=timedelta(milliseconds=1))
    shop.add("/orders")(_echoes)
    shop.install()
    with served(shop.app) as port, closing(Wire(port)) as wire:
        wire.say("POST /orders HTTP/1.1", "Host: shop", f"Idempotency-Key: {new_key()}", "Content-Length: 5")
        assert wire.hear()[0] == 408
    assert shop.records == 0


def test_a_client_that_leaves_in_the_middle_of_its_body(shop: Shop) -> None:
    # nothing is executed, and its key is free
    @shop.add("/orders")
    async def create(request: web.Request) -> web.Response:
        shop.runs.append("ran")
        return await _echoes(request)

    shop.install()
    with served(shop.app) as port:
        key = new_key()
        with closing(Wire(port)) as wire:
            wire.say("POST /orders HTTP/1.1", "Host: shop", f"Idempotency-Key: {key}", "Content-Length: 5", body=b"{}")
        assert send(port, "/orders", {}, key=key).status == 200
    assert shop.runs == ["ran"]


def test_a_session_of_the_handlers_transaction(shop: Shop) -> None:
    # once.connection is what op.connection is
    @shop.add("/orders")
    async def create(request: web.Request) -> web.Response:
        connection = await shop.once.connection()
        await connection.execute("INSERT INTO sold VALUES (?)", ((await request.json())["item"],))
        if (await request.json())["item"] == "undone":
            raise ValueError
        return web.Response()

    shop.install()
    with served(shop.app) as port:
        assert send(port, "/orders", {"item": "tea"}, key=new_key()).status == 200
        assert send(port, "/orders", {"item": "undone"}, key=new_key()).status == 500
    assert shop.sold == ["tea"]


async def test_in_whose_name_a_completer_goes_on(shop: Shop) -> None:
    # H7, R120: through all middleware, and through the application that serves it, of several
    names: list[Any] = []

    @web.middleware
    async def authenticates(request: web.Request, handler: Next) -> web.StreamResponse:
        if resumed_as(request) is None and "Who" not in request.headers:
            raise web.HTTPUnauthorized
        return await handler(request)

    shop.app.middlewares.append(authenticates)

    @shop.add("/pay/{number}", effects=PHASED)
    async def pay(request: web.Request, op: Operation[Any]) -> web.Response:
        names.append((resumed_as(request), request.headers.get("X-Own"), request.query["a"], await request.json()))
        drawn = await op.phase("drawn", lambda _: request.match_info["number"])
        assert op.attempt > 1
        raise web.HTTPOk(text=drawn)

    other = web.Application()
    install(shop.once, other, tenant=SINGLE_TENANT)
    shop.install(principal=lambda request: request.headers["Who"], keep_headers=["X-Own"])
    lines = {"Who": "ann", "X-Own": "mine", "X-Other": "never kept"}
    key = new_key()
    with served(shop.app) as port:
        reply = await asyncio.to_thread(send, port, "/pay/7?a=%20b", {"item": "t\u00e4a"}, key=key, **lines)
        assert reply.status == 500
        execute(shop.url, "UPDATE oncekey_record SET reconcile_after = 1")
        await shop.once.start()
        try:
            assert await Completer(shop.once).run_once() == 1
        finally:
            await shop.once.stop()
        again = await asyncio.to_thread(send, port, "/pay/7?a=%20b", {"item": "t\u00e4a"}, key=key, **lines)
    assert names == [(None, "mine", " b", {"item": "t\u00e4a"}), ("ann", "mine", " b", {"item": "t\u00e4a"})]
    assert (again.status, again.body, again.replayed) == (200, b"7", True)


def test_a_stop_interrupts_what_others_can_go_on_with(shop: Shop) -> None:
    # P5: a phased handler begins no further step when the server is told to stop, and its client is told to come again
    begun, stopping = [], asyncio.Event()

    async def stops(_: web.Application) -> None:
        stopping.set()

    @shop.add("/pay", effects=PHASED)
    async def pay(request: web.Request, op: Operation[Any]) -> web.Response:
        await op.phase("one", lambda _: 1)
        begun.append(op.attempt)
        await stopping.wait()
        await op.phase("two", lambda _: 2)
        return web.Response(text="done")

    shop.install()
    shop.app.on_shutdown.append(stops)
    with Runner(shop.app) as server, closing(Wire(server.port)) as wire:
        wire.say("POST /pay HTTP/1.1", "Host: shop", f"Idempotency-Key: {new_key()}", "Content-Length: 2", body=b"{}")
        wait_until(lambda: begun)
        server.stop()
        status, headers, _ = wire.hear()
    assert (status, headers["retry-after"]) == (409, "1")
    assert execute(shop.url, "SELECT state FROM oncekey_record") == [("failed_retryable",)]


# What is refused at start-up


def refused(app: web.Application, sentence: str) -> None:
    with pytest.raises(ConfigurationError, match=sentence), served(app):
        pass


def test_what_install_refuses(shop: Shop) -> None:
    with pytest.raises(ConfigurationError, match="needs to know whose key it is"):
        install(shop.once, shop.app, tenant=None)  # type: ignore[arg-type]
    shop.install()
    with pytest.raises(ConfigurationError, match="was called twice for one application"):
        shop.install()
    late = web.Application()
    late.freeze()
    with pytest.raises(ConfigurationError, match="must come before the application is started"):
        install(shop.once, late, tenant=SINGLE_TENANT)


def test_a_plain_def_is_refused(shop: Shop) -> None:
    @shop.add("/orders")
    def create(request: web.Request, op: SyncOperation[Any]) -> web.Response:
        return web.Response()

    refused(shop.install(), r"/orders is a plain `def`, and handlers of aiohttp are coroutines")


def test_a_protection_that_does_not_protect_is_refused(shop: Shop, tmp_path: Path) -> None:
    async def bare(request: web.Request) -> web.Response:
        return web.Response()

    shop.once.protect(effects=LOCAL)(bare)
    shop.app.router.add_post("/bare", bare)
    refused(shop.install(), r"bare is served without its protection")
    safe = Shop(tmp_path)
    safe.app.router.add_get("/look", safe.once.protect(effects=LOCAL)(bare))
    refused(safe.install(), r"bare is served at /look by GET.* only, where a key has no effect")
    strange = Shop(tmp_path)
    strange.app.router.add_post("/orders", Shop(tmp_path).once.protect(effects=LOCAL)(bare))
    refused(strange.install(), r"bare is served at /orders, and the Once that protects it is not installed")
    twice = Shop(tmp_path)
    twice.add("/orders")(bare)
    refused(
        twice.install(enrol={"POST /orders": twice.once.by_path(effects=INLINE, operation="other")}),
        r"POST /orders is enrolled twice",
    )
    nowhere = Shop(tmp_path)
    refused(
        nowhere.install(enrol={"POST /nowhere": nowhere.once.by_path(effects=INLINE, operation="other")}),
        r"protects nothing: no route of the application matches it",
    )


def test_a_handler_without_an_installation_says_so(shop: Shop) -> None:
    @shop.add("/orders")
    async def create(request: web.Request) -> web.Response:
        return web.Response()

    with served(shop.app) as port:
        assert send(port, "/orders", key=new_key()).status == 500
