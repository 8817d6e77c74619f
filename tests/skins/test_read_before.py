"""Middleware may read the body before oncekey does: the request is compared by its body, and never hangs."""

from __future__ import annotations

import io
import json
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import flask as flasks
import pytest
from fastapi import FastAPI
from litestar import Litestar, Request, post
from litestar.logging import LoggingConfig
from litestar.middleware import ASGIMiddleware
from litestar.middleware.logging import LoggingMiddlewareConfig
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.base import BaseHTTPMiddleware
from starlette.requests import Request as StarletteRequest
from starlette.responses import PlainTextResponse
from starlette.routing import Route

from harness.served import Served, Wire
from oncekey import INLINE, LOCAL, SINGLE_TENANT, Once
from oncekey.litestar import OncePlugin
from wsgi.shop import served as wsgi_served

JSON = ("application/json", b'{"amount": 1}', b'{"amount": 2}')
FORM = ("application/x-www-form-urlencoded", b"amount=1", b"amount=2")
_PARTS = b'--b\r\nContent-Disposition: form-data; name="amount"\r\n\r\n%d\r\n--b--\r\n'
MULTIPART = ("multipart/form-data; boundary=b", _PARTS % 1, _PARTS % 2)


class Reads(ASGIMiddleware):
    """Middleware of Litestar's that reads the body as one may."""

    def __init__(self, way: str) -> None:
        self._way = way

    async def handle(self, scope: Any, receive: Any, send: Any, next_app: Any) -> None:
        request: Request[Any, Any, Any] = Request(scope, receive)
        if self._way == "stream":
            async for _ in request.stream():
                pass
        else:
            await getattr(request, self._way)()
        await next_app(scope, receive, send)


def litestar(once: Once, runs: list[int], effects: Any, *ways: Any) -> Litestar:
    async def run() -> str:
        runs.append(1)
        return str(len(runs))

    keyed = post("/protected")(once.protect(effects=effects, operation="protected")(run))
    either = post("/optional")(once.protect(effects=LOCAL, operation="optional", require_key=False)(run))
    middleware: list[Any] = [LoggingMiddlewareConfig().middleware if way == "logged" else Reads(way) for way in ways]
    plugin = OncePlugin(once, tenant=SINGLE_TENANT)
    return Litestar([keyed, either], plugins=[plugin], middleware=middleware, logging_config=LoggingConfig())


async def reads(request: StarletteRequest, call_next: Callable[..., Any]) -> Any:
    """Middleware of Starlette's that reads the body, and lets what is inside read it again."""
    await request.body()
    return await call_next(request)


async def consumes(request: StarletteRequest, call_next: Callable[..., Any]) -> Any:
    """The same, which leaves nothing of it."""
    async for _ in request.stream():
        pass
    return await call_next(request)


def starlette(once: Once, runs: list[int], effects: Any, *ways: Any) -> Starlette:
    @once.protect(effects=effects, operation="protected")
    async def run(_: StarletteRequest) -> PlainTextResponse:
        runs.append(1)
        return PlainTextResponse(str(len(runs)), 201)

    middleware = [Middleware(BaseHTTPMiddleware, dispatch=way) for way in ways]
    app = Starlette(routes=[Route("/protected", run, methods=["POST"])], middleware=middleware, lifespan=once.lifespan)
    once.install(app, tenant=SINGLE_TENANT)
    return app


def fastapi(once: Once, runs: list[int], effects: Any, *ways: Any) -> FastAPI:
    app = FastAPI(lifespan=once.lifespan)

    @app.post("/protected", status_code=201)
    @once.protect(effects=effects, operation="protected")
    async def run() -> str:
        runs.append(1)
        return str(len(runs))

    for way in ways:
        app.add_middleware(BaseHTTPMiddleware, dispatch=way)
    once.install(app, tenant=SINGLE_TENANT)
    return app


def passed_on(app: Any) -> Any:
    """WSGI middleware that reads the body, and lets what is inside read it again."""

    def reading(environ: Any, start_response: Any) -> Any:
        body = environ["wsgi.input"].read(int(environ["CONTENT_LENGTH"]))
        return app({**environ, "wsgi.input": io.BytesIO(body)}, start_response)

    return reading


def swallowed(app: Any) -> Any:
    """The same, which leaves nothing of it."""

    def reading(environ: Any, start_response: Any) -> Any:
        environ["wsgi.input"].read(int(environ["CONTENT_LENGTH"]))
        return app({**environ, "wsgi.input": io.BytesIO()}, start_response)

    return reading


def flask(once: Once, runs: list[int], effects: Any, *ways: Any) -> Any:
    app = flasks.Flask("read")

    def read() -> None:
        assert flasks.request.data or flasks.request.form

    if not ways:
        app.before_request(read)

    @app.post("/protected")
    @once.protect(effects=effects, operation="protected")
    def run() -> Any:
        runs.append(1)
        return str(len(runs)), 201

    once.flask(app, tenant=lambda _: "acme")
    for way in ways:
        app.wsgi_app = way(app.wsgi_app)  # type: ignore[method-assign]
    return app


@contextmanager
def serving(app: Any) -> Iterator[int]:
    if isinstance(app, flasks.Flask):
        with wsgi_served(app) as port:
            yield port
    else:
        with Served(app) as server:
            yield server.port


def sent(
    port: int, kind: str, body: bytes, key: str | None, path: str = "/protected", *, chunked: bool = False
) -> tuple[int, bool]:
    with Wire(port) as wire:
        keys = () if key is None else (f"Idempotency-Key: {key}",)
        size = "Transfer-Encoding: chunked" if chunked else f"Content-Length: {len(body)}"
        lines = (f"Content-Type: {kind}", size, "Connection: close")
        body = b"%x\r\n%s\r\n0\r\n\r\n" % (len(body), body) if chunked else body
        wire.say(f"POST {path} HTTP/1.1", "Host: shop", *keys, *lines, body=body)
        status, headers, _ = wire.hear()
    return status, "idempotent-replayed" in {name.lower() for name in headers}


READING = [
    *((litestar, (way,)) for way in ("logged", "body", "form", "stream")),
    (litestar, ("logged", "body")),
    (starlette, (reads,)),
    (starlette, (reads, reads)),
    (fastapi, (reads,)),
    (flask, (passed_on,)),
    (flask, ()),
]


@pytest.mark.parametrize("content", [JSON, FORM, MULTIPART], ids=["json", "form", "multipart"])
@pytest.mark.parametrize(
    ("make", "ways", "chunked"),
    [
        *((*one, False) for one in READING),
        *((*one, True) for one in READING if one[1] != (passed_on,)),  # Django: tests/django_shop/test_servers.py
    ],
)
def test_a_body_read_by_middleware_is_fingerprinted(
    make: Callable[..., Any], ways: tuple[Any, ...], chunked: bool, content: tuple[str, bytes, bytes], tmp_path: Any
) -> None:
    # R41
    kind, body, other = content
    runs: list[int] = []
    once = Once(f"sqlite:///{tmp_path}/read.db", migrate=True)
    with serving(make(once, runs, LOCAL, *ways)) as port:
        key = uuid.uuid4().hex
        replies = [sent(port, kind, one, key, chunked=chunked) for one in (body, body, other)]
    assert (replies, len(runs)) == ([(201, False), (201, True), (422, False)], 1)


@pytest.mark.parametrize("way", ["logged", "body", "form", "stream"])
def test_a_keyless_request_does_not_wait_for_a_consumed_body(way: str, tmp_path: Any) -> None:
    runs: list[int] = []
    once = Once(f"sqlite:///{tmp_path}/read.db", migrate=True)
    with serving(litestar(once, runs, LOCAL, way)) as port:
        kind, body, _ = JSON
        assert [sent(port, kind, body, None, "/optional")[0] for _ in range(2)] == [201, 201]
    assert len(runs) == 2


@pytest.mark.parametrize(
    ("make", "way", "status"), [(starlette, consumes, 500), (fastapi, consumes, 500), (flask, swallowed, 400)]
)
def test_a_body_consumed_by_middleware_is_rejected(
    make: Callable[..., Any], way: Any, status: int, tmp_path: Any
) -> None:
    # two requests that differ in their bodies only would have one fingerprint
    runs: list[int] = []
    once = Once(f"sqlite:///{tmp_path}/read.db", migrate=True)
    with serving(make(once, runs, INLINE, way)) as port:
        key = uuid.uuid4().hex
        kind, body, other = JSON
        assert [sent(port, kind, one, key)[0] for one in (body, other)] == [status, status]
    assert (runs, json.loads(body)) == ([], {"amount": 1})
