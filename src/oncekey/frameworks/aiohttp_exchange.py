"""One request of aiohttp's server as ASGI would tell of it, and its answer as aiohttp sends it.

The exchange is that of ASGI. A handler of aiohttp returns its whole response, so there is one message of each kind,
unless a body is larger than what is stored; what begins to stream by itself is refused before its first byte is out.
"""

from __future__ import annotations

import asyncio
import mimetypes
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final

from aiohttp import ClientError, payload, web
from aiohttp.abc import AbstractStreamWriter
from multidict import CIMultiDict

from oncekey.core.errors import ConfigurationError
from oncekey.frameworks.asgi.exchange import Exchange
from oncekey.frameworks.asgi.exchange_state import ExchangeState
from oncekey.frameworks.asgi.middleware import OncekeyMiddleware
from oncekey.frameworks.asgi.nesting import current
from oncekey.frameworks.resuming import RESUMPTION
from oncekey.runtimes.aio import shielded

if TYPE_CHECKING:
    from oncekey.core.answers import Answer
    from oncekey.core.model import Headers
    from oncekey.frameworks.asgi.installation import Installation
    from oncekey.frameworks.asgi.types import Message, Receive, Scope, Send

    Call = Callable[[], Awaitable[Any]]

STREAMS: Final = (
    "a protected handler began to stream its answer, which has to be stored before it is sent: return a web.Response "
    "or a web.FileResponse instead"
)
NO_RESPONSE: Final = "a protected handler has to return a web.Response or a web.FileResponse, and returned {kind}"
_HERE: Final = "oncekey.aiohttp"


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
