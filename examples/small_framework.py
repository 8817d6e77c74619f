"""A small web framework on the standard library's HTTP server, and the adapter that protects its handlers.

The upper half is the framework; it does not depend on oncekey. The lower half is the adapter: it reads requests,
captures and sends responses, resumes stored requests and lists the routes. oncekey does everything else.
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
from oncekey.frameworks.asgi import App as AsgiApp
from oncekey.frameworks.asgi import Receive, Scope, Send
from oncekey.frameworks.blocking import TOO_LARGE, BlockingExchange, Threads, current
from oncekey.frameworks.listing import Served
from oncekey.frameworks.resuming import RESUMPTION, Resumption

# The framework.


@dataclass
class Request:
    """A client's request; header names are in lower case."""

    method: str
    path: str
    query: str
    headers: dict[str, str]
    body: bytes
    scope: dict[str, Any] = field(default_factory=dict)
    """Values that hooks pass to handlers."""


@dataclass
class Response:
    """A response; its body consists of any number of chunks."""

    status: int
    headers: dict[str, str] = field(default_factory=dict)
    body: Iterable[bytes] = ()


Handler = Callable[[Request], Response]


class Small:
    """An application: routes, and a hook that may return a response before the handler runs."""

    def __init__(self, before: Callable[[Request], Response | None]) -> None:
        self.routes: dict[tuple[str, str], Handler] = {}
        self.before = before
        self.handle: Handler = self._dispatch

    def route(self, method: str, path: str) -> Callable[[Handler], Handler]:
        """Register a handler."""

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
        """Serve on a socket, each connection in its own thread."""
        app = self

        class Connection(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def respond(self) -> None:
                target = urlsplit(self.path)
                headers: dict[str, str] = {}
                for name, value in self.headers.items():  # join repeated headers, as HTTP allows
                    headers[name.lower()] = f"{headers[name.lower()]}, {value}" if name.lower() in headers else value
                chunked = headers.get("transfer-encoding", "").lower() == "chunked"
                body = self._chunks() if chunked else self.rfile.read(int(headers.get("content-length", 0)))
                try:
                    response = app.handle(Request(self.command, target.path, target.query, headers, body))
                except Exception as error:  # noqa: BLE001  (the client always gets a response)
                    self.log_error("%r", error)
                    response = Response(500)
                content = b"".join(response.body)
                self.send_response(response.status)
                for name, value in {**response.headers, "Content-Length": str(len(content))}.items():
                    self.send_header(name, value)
                self.end_headers()
                self.wfile.write(content)

            do_GET = do_HEAD = do_POST = do_PUT = do_PATCH = do_DELETE = respond  # noqa: N815

            def _chunks(self) -> bytes:
                body = b""
                while size := int(self.rfile.readline().partition(b";")[0], 16):
                    body += self.rfile.read(size)
                    self.rfile.readline()
                while self.rfile.readline().strip():
                    continue
                return body

            def log_request(self, code: object = "-", size: object = "-") -> None:
                """No-op: a URL may contain a key."""

        server = ThreadingHTTPServer(("127.0.0.1", 0), Connection, bind_and_activate=False)
        server.socket.close()
        server.socket = listening
        with suppress(KeyboardInterrupt):
            server.serve_forever(0.05)


# The adapter.


class AdaptedRequest:
    """Adapts a request to oncekey."""

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
        """The parts of the request that a retry must repeat."""
        request = self.shown
        if len(request.body) > self._limit:
            return TOO_LARGE
        headers = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in request.headers.items()]
        return Parts(
            method=request.method,
            path=request.path,
            query=request.query.encode("latin-1"),
            headers=headers,
            content_type=request.headers.get("content-type", "").encode("latin-1") or None,
            body=request.body,
            root_path="",
        )

    @staticmethod
    def instead(answer: Answer, _: tuple[Any, ...]) -> Response:
        """The response that replaces a handler's response if the handler is not called."""
        return to_response(answer.status, answer.headers, [answer.body])


def to_response(status: int, headers: Iterable[tuple[bytes, bytes]], body: Iterable[bytes]) -> Response:
    """Convert a response of oncekey to a response of the framework."""
    return Response(status, {name.decode("latin-1"): value.decode("latin-1") for name, value in headers}, body)


def protect(once: Once, app: Small, *, tenant: Callable[[Request], str]) -> None:
    """Protect the handlers of an application that are decorated with `@once.protect`."""
    threads = Threads(once, once.policy, tenant=tenant, door=door)
    once.adopt(app, threads)
    inner = app.handle

    def handle(request: Request) -> Response:
        threads.begin(threads.ready)
        keyed = "idempotency-key" in request.headers and request.method not in SAFE
        exchange = BlockingExchange(threads, AdaptedRequest(request, keyed=keyed, limit=threads.max_request_bytes))
        token = current.set(exchange)
        try:
            return _captured(exchange, inner, request)
        finally:
            current.reset(token)  # the thread serves other requests next
            exchange.close()

    app.handle = handle
    app.__oncekey_routes__ = lambda: _routes(app)  # type: ignore[attr-defined]


def _captured(exchange: BlockingExchange, inner: Handler, request: Request) -> Response:
    """Return the handler's response; if the request was claimed, settle it first."""
    try:
        response = inner(request)
        if exchange.capture is None and exchange.answer is None:
            return response
        if exchange.capture is not None:
            headers = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in response.headers.items()]
            exchange.capture.start(response.status, headers)
            for chunk in response.body:
                exchange.capture.body(chunk, more=True)
                if exchange.capture.refused is not None:
                    break
            exchange.finish(None)
    except BaseException as error:  # a server may end the thread with SystemExit; settle first
        if exchange.unsettled:
            exchange.finish(error)
        if exchange.answer is None or not isinstance(error, CONTROL_ERRORS):
            raise
    if exchange.answer is not None:
        return to_response(exchange.answer.status, exchange.answer.headers, [exchange.answer.body])
    capture, run = exchange.capture, exchange.run
    assert capture is not None
    assert capture.status is not None
    assert run is not None
    marked = marked_lines(capture.headers, run.policy, echo=exchange.echo, expires_at=run.expires_at)
    return to_response(capture.status, marked, capture.pieces() if capture.kept is None else [capture.kept])


def door(app: Small) -> AsgiApp:
    """Let workers resume requests: convert a stored request's ASGI scope to a request of the framework."""

    async def enter(scope: Scope, receive: Receive, send: Send) -> None:
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        body, query = (await receive())["body"], scope["query_string"].decode("latin-1")
        request = Request(scope["method"], scope["path"], query, headers, body, {RESUMPTION: scope[RESUMPTION]})
        response = await asyncio.to_thread(app.handle, request)
        await send({"type": "http.response.start", "status": response.status, "headers": []})

    return enter


def _routes(app: Small) -> Iterator[Served]:
    """List the routes for `oncekey audit`, `routes` and `openapi`."""
    for (method, path), handler in app.routes.items():
        yield Served(path, frozenset({method}), handler)
