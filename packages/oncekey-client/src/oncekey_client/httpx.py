"""Transports for httpx and httpx2, which have the same interface.

    client = httpx.Client(transport=OncekeyTransport())

The first request shows which of the two is in use, so this module imports neither before.
"""

from __future__ import annotations

import asyncio
import ssl
import sys
import time
from collections.abc import Awaitable, Callable, Container, Mapping
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType, TracebackType
from typing import TYPE_CHECKING, Any, Final, Self

from oncekey_client.attempts import KeyedCall, RetryRules, RetrySession, adrive, drive
from oncekey_client.exchange import (
    Call,
    ClientConfigurationError,
    Failure,
    Loss,
    Reply,
    RequestOutcomeUnknownError,
    fields,
)
from oncekey_client.journal import Journal, JournalEntry

if TYPE_CHECKING:
    from httpx import AsyncBaseTransport, BaseTransport, Request, Response
else:
    # Clients call the methods, and do not check the class; the class is for type checkers.
    BaseTransport = AsyncBaseTransport = object

PATIENCE: Final = 30.0
"""Timeout in seconds for each attempt of `ask_again` and `resume`, which do not use a client's timeout."""

_LOSSES: Final[Mapping[str, Loss]] = {
    "ConnectError": Loss.NOT_SENT,
    "ConnectTimeout": Loss.NOT_SENT,
    "PoolTimeout": Loss.NOT_SENT,
    "ProxyError": Loss.NOT_SENT,
    "UnsupportedProtocol": Loss.HOPELESS,
    "LocalProtocolError": Loss.HOPELESS,
}
"""The transport errors that prove that nothing was sent; after any other error the request may have been sent."""


class OncekeyTransport(BaseTransport):
    """Sends state-changing requests so that they execute once; other methods are passed through.

    Each request is one operation with one key: the caller's if it has one, otherwise a new one. `timeout` (seconds) is
    for `ask_again` and `resume`; other requests use their client's.
    """

    def __init__(
        self,
        inner: BaseTransport | None = None,
        *,
        rules: RetryRules | None = None,
        journal: Journal | None = None,
        session: RetrySession | None = None,
        sleep: Callable[[float], object] = time.sleep,
        timeout: float = PATIENCE,
    ) -> None:
        self._inner: BaseTransport = inner if inner is not None else _package().HTTPTransport()
        self.session = session or RetrySession(rules=rules or RetryRules(), journal=journal)
        self._sleep = sleep
        self._timeout = timeout

    def handle_request(self, request: Request) -> Response:
        """Send a request, and return its response.

        Raises:
            RequestKeyReusedError: The key belongs to another request.
            RequestOutcomeUnknownError: It may have happened; `ask_again` takes the error.
        """
        if not self.session.enrols(request.method):
            return self._inner.handle_request(request)
        request.read()
        call = _call(request)
        begun = self.session.begin(call)
        if isinstance(begun, Reply):
            return _response(request, begun)
        return self._finish(begun, request)

    def ask_again(self, error: RequestOutcomeUnknownError) -> Response:
        """Resume an operation whose outcome was unknown, with its key."""
        return self._finish(
            KeyedCall(error.key, error.call), _request(error.call, _package_of(self._inner), self._timeout)
        )

    def resume(
        self, headers: Callable[[JournalEntry], Mapping[str, str]] | None = None, *, only: Container[str] | None = None
    ) -> list[tuple[JournalEntry, Response | Exception]]:
        """Resend the journal's entries without a response, with the same keys.

        `headers` adds headers that the journal does not store, such as `Authorization`; `only` limits it to these keys.
        Each result is a response, or the exception that `handle_request` would have raised.
        """
        done: list[tuple[JournalEntry, Response | Exception]] = []
        for entry in self.session.unfinished(only):
            try:
                call = entry.completed({} if headers is None else headers(entry))
                operation = self.session.take_up(entry, call)
                done.append((entry, self._finish(operation, _request(call, _package_of(self._inner), self._timeout))))
            except Exception as error:  # noqa: BLE001  (one that fails must not keep the others from being sent)
                done.append((entry, error))
        return done

    def close(self) -> None:
        """Close the inner transport."""
        self._inner.close()

    def __enter__(self) -> Self:
        self._inner.__enter__()
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None = None,
        exc_value: BaseException | None = None,
        traceback: TracebackType | None = None,
    ) -> None:
        self._inner.__exit__(exc_type, exc_value, traceback)

    def _finish(self, operation: KeyedCall, request: Request) -> Response:
        last: list[Response] = []
        outcome = drive(self.session.tries(operation), lambda call: self._exchange(call, request, last), self._sleep)
        return _concluded(self.session.conclude(operation, outcome), last)

    def _exchange(self, call: Call, request: Request, last: list[Response]) -> Reply | Failure:
        package = _package_of(request)
        try:
            response = self._inner.handle_request(_sent(call, request))
            try:
                raw = b"".join(response.stream)  # type: ignore[arg-type]  # a blocking transport has blocking streams
            finally:
                response.close()
        except package.TransportError as error:
            return _failure(error)
        last[:] = [_whole(response, raw, package)]
        return _reply(response, raw, package)


class AsyncOncekeyTransport(AsyncBaseTransport):
    """`OncekeyTransport` for async clients. With a journal it needs asyncio; without, `sleep` may be any library's.

    A request that is cancelled is not sent again; with a journal it stays open there.
    """

    def __init__(
        self,
        inner: AsyncBaseTransport | None = None,
        *,
        rules: RetryRules | None = None,
        journal: Journal | None = None,
        session: RetrySession | None = None,
        sleep: Callable[[float], Awaitable[object]] = asyncio.sleep,
        timeout: float = PATIENCE,
    ) -> None:
        self._inner: AsyncBaseTransport = inner if inner is not None else _package().AsyncHTTPTransport()
        self.session = session or RetrySession(rules=rules or RetryRules(), journal=journal)
        self._sleep = sleep
        self._timeout = timeout

    async def handle_async_request(self, request: Request) -> Response:
        """Send a request, and return its response; see `OncekeyTransport.handle_request`."""
        if not self.session.enrols(request.method):
            return await self._inner.handle_async_request(request)
        await request.aread()
        call = _call(request)
        begun = await self._aside(self.session.begin, call)
        if isinstance(begun, Reply):
            return _response(request, begun)
        return await self._finish(begun, request)

    async def ask_again(self, error: RequestOutcomeUnknownError) -> Response:
        """Resume an operation whose outcome was unknown, with its key."""
        return await self._finish(
            KeyedCall(error.key, error.call), _request(error.call, _package_of(self._inner), self._timeout)
        )

    async def resume(
        self, headers: Callable[[JournalEntry], Mapping[str, str]] | None = None, *, only: Container[str] | None = None
    ) -> list[tuple[JournalEntry, Response | Exception]]:
        """Resend the journal's entries without a response, with the same keys; see `OncekeyTransport.resume`."""
        done: list[tuple[JournalEntry, Response | Exception]] = []
        for entry in await self._aside(self.session.unfinished, only):
            try:
                call = entry.completed({} if headers is None else headers(entry))
                operation = await self._aside(self.session.take_up, entry, call)
                done.append(
                    (entry, await self._finish(operation, _request(call, _package_of(self._inner), self._timeout)))
                )
            except Exception as error:  # noqa: BLE001  (one that fails must not keep the others from being sent)
                done.append((entry, error))
        return done

    async def aclose(self) -> None:
        """Close the inner transport."""
        await self._inner.aclose()

    async def __aenter__(self) -> Self:
        await self._inner.__aenter__()
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None = None,
        exc_value: BaseException | None = None,
        traceback: TracebackType | None = None,
    ) -> None:
        await self._inner.__aexit__(exc_type, exc_value, traceback)

    async def _finish(self, operation: KeyedCall, request: Request) -> Response:
        last: list[Response] = []
        flow = self.session.tries(operation)
        outcome = await adrive(flow, lambda call: self._exchange(call, request, last), self._sleep)
        return _concluded(await self._aside(self.session.conclude, operation, outcome), last)

    async def _exchange(self, call: Call, request: Request, last: list[Response]) -> Reply | Failure:
        package = _package_of(request)
        try:
            response = await self._inner.handle_async_request(_sent(call, request))
            try:
                raw = b"".join([part async for part in response.stream])  # type: ignore[union-attr]  # an async one
            finally:
                await response.aclose()
        except package.TransportError as error:
            return _failure(error)
        last[:] = [_whole(response, raw, package)]
        return _reply(response, raw, package)

    async def _aside(self, do: Callable[..., Any], *arguments: Any) -> Any:  # noqa: ANN401  (whatever it returns)
        """Run code that writes to the journal without blocking the event loop."""
        return do(*arguments) if self.session.journal is None else await asyncio.to_thread(do, *arguments)


def _package() -> ModuleType:
    for name in ("httpx", "httpx2"):
        if find_spec(name) is not None:
            return import_module(name)
    raise ClientConfigurationError("the client needs another package: pip install 'oncekey[client]'")


def _package_of(thing: object) -> ModuleType:
    """The package, httpx or httpx2, by the class of an object or of its base."""
    for kind in type(thing).__mro__:
        root = kind.__module__.partition(".")[0]
        if root in ("httpx", "httpx2"):
            return sys.modules[root]
    return _package()


def _call(request: Request) -> Call:
    call = Call(request.method, str(request.url), fields(request.headers.multi_items()))
    # The streamed body is complete now, and has a length.
    return call.with_body(request.content)


def _sent(call: Call, request: Request) -> Request:
    """A new request for one attempt: httpx does not send one twice. Timeouts and the like are in its extensions."""
    kind = type(request)
    sent = kind(call.method, call.url, headers=list(call.headers), content=call.body, extensions=request.extensions)
    if not call.body and call.method in {"GET", "HEAD"}:
        sent.headers.pop("Content-Length", None)
    return sent


def _request(call: Call, package: ModuleType, timeout: float) -> Request:
    limits = {"timeout": dict.fromkeys(("connect", "read", "write", "pool"), timeout)}
    made: Request = package.Request(
        call.method, call.url, headers=list(call.headers), content=call.body, extensions=limits
    )
    return made


def _whole(response: Response, raw: bytes, package: ModuleType) -> Response:
    """The response with its complete body, still in its content coding."""
    kept = {name: value for name, value in response.extensions.items() if name != "network_stream"}
    return type(response)(
        response.status_code, headers=response.headers, stream=package.ByteStream(raw), extensions=kept
    )


def _reply(response: Response, raw: bytes, package: ModuleType) -> Reply:
    copy = _whole(response, raw, package)
    try:
        body = copy.read()
    except package.DecodingError:
        body = b""  # the caller gets the error when it reads; only the status matters here
    return Reply(response.status_code, fields(response.headers.multi_items()), body)


def _response(request: Request, reply: Reply) -> Response:
    made: Response = _package_of(request).Response(reply.status, headers=list(reply.headers), content=reply.body)
    return made


def _concluded(found: Reply | Failure, last: list[Response]) -> Response:
    if isinstance(found, Failure):
        raise found.error
    return last[0]


def _failure(error: Exception) -> Failure:
    cause: BaseException | None = error
    while cause is not None:
        # A retry does not fix a wrong certificate.
        if isinstance(cause, ssl.SSLCertVerificationError):
            return Failure(Loss.HOPELESS, error)
        cause = cause.__cause__ or cause.__context__
    known = (_LOSSES[kind.__name__] for kind in type(error).__mro__ if kind.__name__ in _LOSSES)
    return Failure(next(known, Loss.LOST), error)
