"""A web framework of a few lines, on the standard library's server, and the skin that protects its handlers.

The upper half is the framework: it knows nothing of keys. The lower half is the skin: how it reads a request, captures
an answer and sends it, how a completer comes in, and which routes there are. Everything else is oncekey's.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import urlsplit

from oncekey import Once
from oncekey.core.answers import Answer, marked_lines
from oncekey.core.errors import CONTROL_ERRORS
from oncekey.core.headers import trace_id_of
from oncekey.core.model import Refuse
from oncekey.engine.claiming import Parts
from oncekey.engine.enrolment import SAFE
from oncekey.frameworks.asgi import App as Door
from oncekey.frameworks.asgi import Receive, Scope, Send
from oncekey.frameworks.blocking import TOO_LARGE, BlockingExchange, Threads, current
from oncekey.frameworks.listing import Served
from oncekey.frameworks.resuming import RESUMPTION, Resumption

# The framework.


@dataclass
class Request:
    """What a client has sent; names of headers are in lower case."""

    method: str
    path: str
    query: str
    headers: dict[str, str]
    body: bytes
    scope: dict[str, Any] = field(default_factory=dict)
    """What hooks leave for handlers."""


@dataclass
class Response:
    """What it is answered: a body in as many pieces as one likes."""

    status: int
    headers: dict[str, str] = field(default_factory=dict)
    body: Iterable[bytes] = ()


Handler = Callable[[Request], Response]


class Small:
    """An application: routes, and a hook that may answer first."""

    def __init__(self, before: Callable[[Request], Response | None]) -> None:
        self.routes: dict[tuple[str, str], Handler] = {}
        self.before = before
        self.handle: Handler = self._dispatch

    def route(self, method: str, path: str) -> Callable[[Handler], Handler]:
        """Serve a handler."""

        def decorate(handler: Handler) -> Handler:
            self.routes[method, path] = handler
            return handler

        return decorate

    def _dispatch(self, request: Request) -> Response:
        handler = self.routes.get((request.method, request.path))
        if handler is None:
            return Response(405 if request.path in {path for _, path in self.routes} else 404)
        return self.before(request) or handler(request)

    def serve(self, listening: socket.socket) -> None:
        """Serve on a socket, each connection in a thread of its own."""
        app = self

        class Line(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def answer(self) -> None:
                target = urlsplit(self.path)
                lines: dict[str, str] = {}
                for name, value in self.headers.items():  # two lines of one name are joined, as HTTP allows
                    lines[name.lower()] = f"{lines[name.lower()]}, {value}" if name.lower() in lines else value
                chunked = lines.get("transfer-encoding", "").lower() == "chunked"
                body = self._chunks() if chunked else self.rfile.read(int(lines.get("content-length", 0)))
                try:
                    response = app.handle(Request(self.command, target.path, target.query, lines, body))
                except Exception as error:  # noqa: BLE001  (a server answers whatever happens)
                    self.log_error("%r", error)
                    response = Response(500)
                content = b"".join(response.body)
                self.send_response(response.status)
                for name, value in {**response.headers, "Content-Length": str(len(content))}.items():
                    self.send_header(name, value)
                self.end_headers()
                self.wfile.write(content)

            do_GET = do_HEAD = do_POST = do_PUT = do_PATCH = do_DELETE = answer  # noqa: N815

            def _chunks(self) -> bytes:
                body = b""
                while size := int(self.rfile.readline().partition(b";")[0], 16):
                    body += self.rfile.read(size)
                    self.rfile.readline()
                while self.rfile.readline().strip():
                    continue
                return body

            def log_request(self, code: object = "-", size: object = "-") -> None:
                """Nothing: an address may have a key in it."""

        server = ThreadingHTTPServer(("127.0.0.1", 0), Line, bind_and_activate=False)
        server.socket.close()
        server.socket = listening
        with suppress(KeyboardInterrupt):
            server.serve_forever(0.05)


# The skin.


class Asked:
    """A request, as oncekey reads it."""

    def __init__(self, request: Request, *, keyed: bool, limit: int) -> None:
        self.shown = request
        self.method = request.method
        self.echo = request.headers["idempotency-key"].encode("latin-1") if keyed else None
        self.token = request.headers.get("authorization", "")
        self.query = request.query
        self.trace_id = trace_id_of(request.headers.get("traceparent"))
        self.resumption: Resumption | None = request.scope.get(RESUMPTION)
        self._limit = limit

    def parts(self) -> Parts | Refuse:
        """What is compared with the first request of the key."""
        request = self.shown
        if len(request.body) > self._limit:
            return TOO_LARGE
        lines = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in request.headers.items()]
        return Parts(
            method=request.method,
            path=request.path,
            query=request.query.encode("latin-1"),
            headers=lines,
            content_type=request.headers.get("content-type", "").encode("latin-1") or None,
            body=request.body,
            root_path="",
        )

    @staticmethod
    def instead(answer: Answer, _: tuple[Any, ...]) -> Response:
        """What a handler returns that is not called."""
        return said(answer.status, answer.headers, [answer.body])


def said(status: int, lines: Iterable[tuple[bytes, bytes]], body: Iterable[bytes]) -> Response:
    """An answer of oncekey's in the framework's own terms."""
    return Response(status, {name.decode("latin-1"): value.decode("latin-1") for name, value in lines}, body)


def protect(once: Once, app: Small, *, tenant: Callable[[Request], str]) -> None:
    """Protect the handlers of an application that are decorated by `@once.protect`."""
    threads = Threads(once, once.policy, tenant=tenant, door=door)
    once.adopt(app, threads)
    inner = app.handle

    def handle(request: Request) -> Response:
        keyed = "idempotency-key" in request.headers and request.method not in SAFE
        exchange = BlockingExchange(threads, Asked(request, keyed=keyed, limit=threads.max_request_bytes))
        token = current.set(exchange)
        try:
            return _captured(exchange, inner, request)
        finally:
            current.reset(token)  # the thread serves others next
            exchange.close()

    app.handle = handle
    app.__oncekey_routes__ = lambda: _routes(app)  # type: ignore[attr-defined]


def _captured(exchange: BlockingExchange, inner: Handler, request: Request) -> Response:
    """The framework's own answer; of a request that was claimed it is settled before it is sent."""
    try:
        response = inner(request)
        if exchange.capture is None and exchange.answer is None:
            return response
        if exchange.capture is not None:
            lines = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in response.headers.items()]
            exchange.capture.start(response.status, lines)
            for piece in response.body:
                exchange.capture.body(piece, more=True)
                if exchange.capture.refused is not None:
                    break
            exchange.finish(None)
    except BaseException as error:  # a server may end a thread by any exception: it is settled, and goes on
        if exchange.unsettled:
            exchange.finish(error)
        if exchange.answer is None or not isinstance(error, CONTROL_ERRORS):
            raise
    if exchange.answer is not None:
        return said(exchange.answer.status, exchange.answer.headers, [exchange.answer.body])
    capture, run = exchange.capture, exchange.run
    assert capture is not None
    assert capture.status is not None
    assert run is not None
    marked = marked_lines(capture.headers, run.policy, echo=exchange.echo, expires_at=run.expires_at)
    return said(capture.status, marked, capture.pieces() if capture.kept is None else [capture.kept])


def door(app: Small) -> Door:
    """How a worker goes on with a request: its scope, as ASGI has it, becomes a request of the framework."""

    async def enter(scope: Scope, receive: Receive, send: Send) -> None:
        lines = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        body, query = (await receive())["body"], scope["query_string"].decode("latin-1")
        request = Request(scope["method"], scope["path"], query, lines, body, {RESUMPTION: scope[RESUMPTION]})
        response = await asyncio.to_thread(app.handle, request)
        await send({"type": "http.response.start", "status": response.status, "headers": []})

    return enter


def _routes(app: Small) -> Iterator[Served]:
    """For `oncekey audit`, `routes` and `openapi`."""
    for (method, path), handler in app.routes.items():
        yield Served(path, frozenset({method}), handler)
