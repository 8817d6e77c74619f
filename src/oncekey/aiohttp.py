"""aiohttp's server: `install` protects the handlers of a `web.Application`, and the methods of its views.

    once = Once("sqlite:///shop.db", migrate=True)

    @once.protect(effects=LOCAL)
    async def create_order(request: web.Request, op: Operation) -> web.Response: ...

    app = web.Application()
    app.router.add_post("/orders", create_order)
    install(once, app, tenant=lambda request: request[SHOP])

A protected handler lets its request in by itself, so that all middleware comes before the claim, and compression and
`on_response_prepare` after the answer. Where middleware makes answers of domain errors, put `middleware(once)` around
that one.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import mimetypes
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final

from aiohttp import ClientError, hdrs, payload, web
from aiohttp.abc import AbstractStreamWriter
from aiohttp.http import HttpVersion11, RawRequestMessage, StreamWriter
from aiohttp.streams import StreamReader
from multidict import CIMultiDict, CIMultiDictProxy
from yarl import URL

from oncekey.core.errors import ConfigurationError
from oncekey.frameworks.asgi.claiming import by_request, caller_of
from oncekey.frameworks.asgi.exchange import Exchange
from oncekey.frameworks.asgi.installation import Installation
from oncekey.frameworks.asgi.middleware import OncekeyMiddleware
from oncekey.frameworks.asgi.nesting import ExchangeState, current, endpoint_of, layers, request_finders
from oncekey.frameworks.consumer_page import documentation, is_served
from oncekey.frameworks.listing import Served, check_served
from oncekey.frameworks.resources import status_of
from oncekey.frameworks.resuming import RESUMPTION
from oncekey.runtimes.aio import shielded

if TYPE_CHECKING:
    from oncekey.core.answers import Answer
    from oncekey.core.model import Headers
    from oncekey.engine.enrolment import Enrolment
    from oncekey.frameworks.asgi import App, Message, Receive, Scope, Send
    from oncekey.once import Once

    Named = Callable[[web.Request], str | Awaitable[str]]

    Call = Callable[[], Awaitable[Any]]

__all__ = ["install", "middleware"]

NO_TENANT: Final = (
    "oncekey.aiohttp.install(once, app, tenant=...) needs to know whose key it is: pass a function that names the "
    "tenant of an authenticated request, or tenant=oncekey.SINGLE_TENANT if all callers may share each other's answers"
)
TOO_LATE: Final = "oncekey.aiohttp.install(once, app) must come before the application is started or added to another"
TWICE: Final = "oncekey.aiohttp.install(once, app) was called twice for one application"
BLOCKING: Final = "{operation} is a plain `def`, and handlers of aiohttp are coroutines: make it `async def`"
STREAMS: Final = (
    "a protected handler began to stream its answer, which has to be stored before it is sent: return a web.Response "
    "or a web.FileResponse instead"
)
NO_RESPONSE: Final = "a protected handler has to return a web.Response or a web.FileResponse, and returned {kind}"
INSTALLED: Final = web.AppKey("oncekey", list[Installation])
"""Where an application has what was installed in it."""
_HERE: Final = "oncekey.aiohttp"
_METHODS: Final = frozenset({"GET", "HEAD", "OPTIONS", "POST", "PUT", "PATCH", "DELETE"})
_PART: Final = re.compile(r"\{([^{}:]+)(?::[^{}]+(?:\{[^{}]*\}[^{}]*)*)?\}")


def install(
    once: Once,
    app: web.Application,
    *,
    tenant: Named,
    principal: Named | None = None,
    status: str | None = "/idempotency-keys",
    enrol: Mapping[str, Enrolment] | None = None,
    keep_headers: Sequence[str] = (),
) -> None:
    """Put a `Once` into an application: the checks at its start, the drain at its end, the status resource.

    `tenant` and `principal` are functions that are handed the request. `status` is the path of the status resource, or
    None. `enrol` enrols by path what cannot be decorated. `keep_headers` are request headers that a completer needs
    besides those that describe the body, so never one that authenticates.
    """
    if not callable(tenant):
        raise ConfigurationError(NO_TENANT)
    if app.frozen:
        raise ConfigurationError(TOO_LATE)
    present = app.setdefault(INSTALLED, [])
    if any(other.engines is once for other in present):
        raise ConfigurationError(TWICE)
    installation = Installation(
        once,
        once.policy,
        tenant=by_request(tenant, "tenant", request_of),
        principal=None if principal is None else by_request(principal, "principal", request_of),
        status_path=status,
        enrol=enrol,
        respond=respond,
        keep_headers=keep_headers,
    )
    installation.answers = (web.HTTPSuccessful, web.HTTPRedirection)
    installation.seen = seen
    installation.check = functools.partial(_check, app, installation)
    installation.door = door_of(app)
    present.append(installation)
    if _entrance not in request_finders:
        request_finders.append(_entrance)
    if installation.patterns.patterns:
        app.middlewares.append(middleware(once))
    app.on_response_prepare.append(refuse_to_stream)
    app.cleanup_ctx.append(functools.partial(_lifespan, once))
    app.on_shutdown.append(functools.partial(_quiesce, once))
    _add_resources(app, installation)
    once.adopt(app, installation)


def middleware(once: Once) -> Any:  # noqa: ANN401  (of a type that aiohttp does not name in all its versions)
    """What answers for protected handlers, put around the middleware that makes answers of their domain errors.

    Without it such an error is no answer to us: it is rolled back, not stored, and a repeat runs again.
    """

    @web.middleware
    async def oncekey(request: web.Request, handler: Callable[[web.Request], Awaitable[Any]]) -> Any:  # noqa: ANN401
        if current.get() is None:
            installation = _installation(once, request)
            if installation is not None and _concerns(once, installation, request):
                return await let_in(installation, request, lambda: handler(request))
        return await handler(request)

    return oncekey


def _entrance(enrolment: Enrolment, args: tuple[Any, ...]) -> Callable[[Call], Awaitable[Any]] | None:
    """Where the request of a handler is let in: its last argument, or what its view has."""
    request = args[-1] if args else None
    if isinstance(request, web.View):
        request = request.request
    if not isinstance(request, web.Request):
        return None
    installation = _installation(enrolment.owner, request)
    return None if installation is None else functools.partial(let_in, installation, request)


def _installation(owner: object, request: web.Request) -> Installation | None:
    """That of the innermost application that a `Once` is installed in."""
    placed = (one for app in reversed(request.match_info.apps) for one in app.get(INSTALLED, ()))
    return next((one for one in placed if one.engines is owner), None)


def _concerns(once: Once, installation: Installation, request: web.Request) -> bool:
    """Whether a request is for a handler that a `Once` protects, by its decorator or by its path."""
    endpoint = endpoint_of({"endpoint": request.match_info.handler, "method": request.method})
    enrolled = (layer.__oncekey__ for layer in layers(endpoint) if hasattr(layer, "__oncekey__"))
    if any(enrolment.owner is once for enrolment in enrolled):
        return True
    return installation.patterns.find(request.method, request.path) is not None


# What an application gets.


async def _lifespan(once: Once, app: web.Application) -> AsyncIterator[None]:
    async with once.lifespan(app):
        yield


async def _quiesce(once: Once, _: web.Application) -> None:
    once.quiesce()


def _check(app: web.Application, installation: Installation) -> None:
    served = list(walk(app))
    check_served(served, installation.patterns, [one.engines for one in app[INSTALLED]])
    for enrolment in (route.enrolment(method) for route in served for method in route.methods):
        if enrolment is not None and enrolment.blocking:
            raise ConfigurationError(BLOCKING.format(operation=enrolment.operation))


def _add_resources(app: web.Application, installation: Installation) -> None:
    """The status of a key, and the page that refusals link to."""

    async def idempotency_key_status(request: web.Request) -> web.Response:
        passing = Passing(request, _nothing)
        caller = await caller_of(installation, installation.policy, passing.scope)
        runtime, site = installation.runtime_and_site()
        return respond(await runtime.drive(status_of(installation, site.store, caller, request.match_info["key"])))

    async def idempotency_documentation(_: web.Request) -> web.Response:
        return respond(documentation(installation))

    if installation.status_path is not None:
        app.router.add_get(f"{installation.status_path}/{{key:.+}}", idempotency_key_status)
    if is_served(installation.policy):
        app.router.add_get(installation.policy.docs_url, idempotency_documentation)


async def _nothing() -> None:
    """No handler is called for the status of a key."""


# One request as ASGI would tell of it, and its answer as aiohttp sends it. A handler returns its whole response, so
# there is one message of each kind, unless a body is larger than what is stored; what begins to stream by itself is
# refused before its first byte is out.


async def let_in(installation: Installation, request: web.Request, call: Call) -> web.StreamResponse:
    """Let a request in. A client that leaves does not end what it began: the server may cancel its task only."""
    passing = Passing(request, call)
    exchange = OncekeyMiddleware(passing.serve, installation)
    task = asyncio.ensure_future(exchange(passing.scope, passing.receive, passing.send))
    try:
        await asyncio.shield(task)
    except asyncio.CancelledError:
        if not task.done():
            await shielded(_over(task))
        raise
    return passing.response


async def _over(task: asyncio.Future[None]) -> None:
    with suppress(asyncio.CancelledError, Exception):
        await task


class Passing:
    """One request as ASGI would tell of it, and its answer as aiohttp sends it."""

    def __init__(self, request: web.Request, call: Call) -> None:
        self.request = request
        self._call = call
        self._read = False
        self._status: int | None = None
        self._headers: Headers = ()
        self._body = b""
        self._stream: web.StreamResponse | None = None
        self._untouched: web.StreamResponse | None = None
        """What a handler answered without a claim: any response will do."""
        self.scope: Scope = {
            "type": "http",
            "http_version": "1.1",
            "method": request.method,
            "path": request.path,
            "query_string": request.rel_url.raw_query_string.encode("latin-1"),
            "root_path": "",
            "headers": [(name.lower(), value) for name, value in request.raw_headers],
            "endpoint": request.match_info.handler,
            _HERE: self,
        }
        if RESUMPTION in request:
            self.scope[RESUMPTION] = request[RESUMPTION]

    async def receive(self) -> Message:
        """The body, which aiohttp keeps for the handler. That a client leaves is not handled here."""
        if self._read:
            await asyncio.Event().wait()
        self._read = True
        try:
            return {"type": "http.request", "body": await self.request.read(), "more_body": False}
        except (ClientError, OSError, web.RequestPayloadError):
            return {"type": "http.disconnect"}

    async def serve(self, _: Scope, __: Receive, send: Send) -> None:
        """The application: call the handler, and say what it answered. What it raises as a response is one, too."""
        try:
            response = await self._call()
        except web.HTTPException as raised:
            response = raised
        exchange = current.get()
        if isinstance(exchange, Exchange) and exchange.state is not ExchangeState.OPEN:
            await _say(response, send)
        elif isinstance(response, web.HTTPException):
            raise response
        else:
            self._untouched = response

    async def send(self, message: Message) -> None:
        """The answer, when it is final: kept whole, or passed on piece by piece if it is that large."""
        if message["type"] == "http.response.start":
            self._status, self._headers = message["status"], message["headers"]
            return
        if self._stream is None and not message.get("more_body", False):
            self._body = message["body"]
            return
        if self._stream is None:
            assert self._status is not None
            self._stream = web.StreamResponse(status=self._status, headers=_decoded(self._headers))
            await self._stream.prepare(self.request)
        await self._stream.write(message["body"])
        if not message["more_body"]:
            await self._stream.write_eof()

    @property
    def response(self) -> web.StreamResponse:
        """What the server sends; who left gets nothing that it would see."""
        if self._untouched is not None:
            return self._untouched
        if self._stream is not None:
            return self._stream
        return web.Response(status=self._status or 400, headers=_decoded(self._headers), body=self._body)


async def _say(response: Any, send: Send) -> None:  # noqa: ANN401  (whatever a handler returns)
    if not isinstance(response, web.Response | web.FileResponse):
        raise TypeError(NO_RESPONSE.format(kind=type(response).__name__))
    if response.prepared:
        raise TypeError(STREAMS)
    headers = [(name.lower().encode("latin-1"), value.encode("utf-8")) for name, value in response.headers.items()]
    headers += [(b"set-cookie", one.OutputString().encode("latin-1")) for one in response.cookies.values()]
    if isinstance(response, web.FileResponse):
        path = response._path  # noqa: SLF001  (it says it nowhere else)
        body: Any = await asyncio.to_thread(path.read_bytes)
        if not any(name == b"content-type" for name, _ in headers):
            kind = mimetypes.guess_type(path)[0] or "application/octet-stream"
            headers.append((b"content-type", kind.encode("latin-1")))
    else:
        body = response.body or b""
    await send({"type": "http.response.start", "status": response.status, "headers": headers})
    if isinstance(body, payload.Payload):
        try:
            await body.write(_Pieces(send))
        finally:
            await body.close()
        body = b""
    await send({"type": "http.response.body", "body": bytes(body), "more_body": False})


class _Pieces(AbstractStreamWriter):
    """Where a body that is a file, a form or an iterator writes itself to."""

    def __init__(self, send: Send) -> None:
        self._send = send

    async def write(self, chunk: bytes | bytearray | memoryview) -> None:
        """One more piece."""
        await self._send({"type": "http.response.body", "body": bytes(chunk), "more_body": True})

    async def write_eof(self, chunk: bytes = b"") -> None:
        """The end is said by who has begun."""

    async def drain(self) -> None:
        """There is nothing to wait for."""

    def enable_compression(self, encoding: str = "deflate", strategy: int | None = None) -> None:
        """What is stored is not compressed."""

    def enable_chunking(self) -> None:
        """Pieces are pieces."""

    async def write_headers(self, status_line: str, headers: CIMultiDict[str]) -> None:
        """They were said."""


def respond(answer: Answer) -> web.Response:
    """An answer as a response, with its header lines as they are."""
    return web.Response(status=answer.status, headers=_decoded(answer.headers), body=answer.body)


def _decoded(headers: Headers) -> CIMultiDict[str]:
    return CIMultiDict((name.decode("latin-1"), value.decode("utf-8", "surrogateescape")) for name, value in headers)


def seen(response: Any) -> Any:  # noqa: ANN401  (whatever a handler returns)
    """The status of a response, in words that others know."""
    return (None, response.status) if isinstance(response, web.StreamResponse) else response


def request_of(scope: Scope) -> web.Request:
    """The request that a scope tells of."""
    passing: Passing = scope[_HERE]
    return passing.request


async def refuse_to_stream(request: web.Request, _: web.StreamResponse) -> None:
    """Before the first byte is out: what a protected handler sends by itself cannot be stored first."""
    exchange = current.get()
    if (
        isinstance(exchange, Exchange)
        and exchange.state is ExchangeState.RUNNING
        and request_of(exchange.scope) is request
    ):
        writer: Any = request.writer  # the error page's, too, which is neither in chunks nor compressed
        writer.chunked, writer.length, writer._compress = False, None, None  # noqa: SLF001  (nothing else takes it back)
        raise ConfigurationError(STREAMS)


# The routes, views and sub-applications included, and a completer's way into an application.


def listed(app: Any) -> Iterator[Served] | None:  # noqa: ANN401  (an application of any kind)
    """Every route; None: it is no application of aiohttp's."""
    return walk(app) if isinstance(app, web.Application) else None


def walk(app: web.Application) -> Iterator[Served]:
    """Every route."""
    patterns = tuple(installation.patterns for installation in app.get(INSTALLED, ()))
    for route in app.router.routes():
        resource = route.resource
        if resource is None:
            continue
        path, handler = _PART.sub(r"{\1}", resource.canonical), route.handler
        if inspect.isclass(handler):
            for method in sorted(hdrs.METH_ALL):
                answering = getattr(handler, method.lower(), None)
                if answering is not None:
                    yield Served(path, frozenset({method}), answering, patterns)
        else:
            methods = _METHODS if route.method == hdrs.METH_ANY else frozenset({route.method})
            yield Served(path, methods, getattr(handler, "__func__", handler), patterns)


def door_of(app: web.Application) -> App:
    """An application as `resume` sends a request through it: all of its middleware, and no connection."""

    async def enter(scope: Scope, receive: Receive, send: Send) -> None:
        if not app.frozen:
            app.freeze()
        request = _request(scope, (await receive())["body"])
        try:
            response = await app._handle(request)  # noqa: SLF001  (what its own server calls)
        except web.HTTPException as raised:
            response = raised
        await send({"type": "http.response.start", "status": response.status, "headers": []})

    return enter


def _request(scope: Scope, body: bytes) -> web.Request:
    lines = (*scope["headers"], (b"content-length", b"%d" % len(body)))
    headers = CIMultiDict((name.decode("latin-1"), value.decode("latin-1")) for name, value in lines)
    target = scope["raw_path"].decode("ascii") + ("?" + scope["query_string"].decode("latin-1")).rstrip("?")
    loop = asyncio.get_running_loop()
    protocol = web.RequestHandler(web.Server(_unconnected), loop=loop)
    content = StreamReader(protocol, len(body) + 1, loop=loop)
    content.feed_data(body)
    content.feed_eof()
    message = RawRequestMessage(
        scope["method"],
        target,
        HttpVersion11,
        CIMultiDictProxy(headers),
        lines,
        should_close=False,
        compression=None,
        upgrade=False,
        chunked=False,
        url=URL(target, encoded=True),
    )
    task: Any = asyncio.current_task()
    state: Any = {RESUMPTION: scope[RESUMPTION]}
    writer = StreamWriter(protocol, loop)
    return web.Request(message, content, protocol, writer, task, loop, client_max_size=0, state=state)


async def _unconnected(_: web.BaseRequest) -> web.StreamResponse:
    raise AssertionError("nothing is received here")
