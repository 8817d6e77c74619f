"""ASGI requests: their messages, the input of their claims, and how to find their exchanges.

`Intake` stores the chunks of the body, and withholds a disconnect from the handler. `read_claim_input` reads key, body,
fingerprint and caller.

A request may pass through several installations, each of one `Once`. A context variable holds the exchange of the
innermost installation, because it is visible in every kind of endpoint, child task and thread. Each exchange refers to
the one around it, so the innermost one of any `Once` can be found.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
from collections import deque
from contextlib import suppress
from contextvars import ContextVar
from enum import IntEnum
from typing import TYPE_CHECKING, Any, Final, cast

from oncekey.core.answers import Answer, marked_lines
from oncekey.core.errors import ConfigurationError
from oncekey.core.headers import TRACE_PARENT, first, trace_id_of
from oncekey.core.model import Code, Instant, Refuse
from oncekey.core.scope import BindTo
from oncekey.engine.claiming import Caller, ClaimInput, Parts, chosen_of, claim_input_of, fingerprint_for, key_of
from oncekey.frameworks.shared import ONE_OPERATION, check_function

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Generator, Iterator

    from oncekey.core.policy import Policy
    from oncekey.engine.capture import Capture
    from oncekey.engine.enrolment import Enrolment
    from oncekey.frameworks.asgi import Identify, Message, Receive, Scope, Send
    from oncekey.frameworks.asgi.installation import Installation
    from oncekey.frameworks.asgi.middleware import Exchange
    from oncekey.frameworks.asgi.transactions import RequestTransaction
    from oncekey.ports.store import AsyncOpenTransaction


READ_BEFORE: Final = (
    "middleware around oncekey has consumed the body of a request with a key, so it cannot be compared with that of a "
    "repeat: let the middleware pass on what it reads, as `await request.body()` does in BaseHTTPMiddleware"
)
SMALL_BODY: Final = 32 * 1024
"""Larger bodies are hashed in a thread: a megabyte of short numbers takes a second of Python."""


class ClientLeftError(Exception):
    """The client disconnected before its request was complete: nothing is executed."""


class TooLargeError(Exception):
    """The body is larger than a keyed request may be."""


class TooSlowError(Exception):
    """The body did not arrive within the policy's `body_timeout`."""


class Intake:
    """The `receive` that the application gets instead of the server's.

    While the handler runs, the intake withholds a disconnect until the response was sent: frameworks cancel a streaming
    response when the client disconnects, but the operation must run to its end.
    """

    __slots__ = (
        "_chunks",
        "_complete",
        "_hold",
        "_left",
        "_limit",
        "_queued",
        "_receive",
        "_released",
        "_size",
        "_too_large",
        "_too_slow",
        "_waited",
    )

    def __init__(self, receive: Receive, limit: int, *, again: Intake | None = None) -> None:
        self._receive = receive
        self._limit = limit
        self._chunks: list[bytes] = []
        self._size = 0
        self._complete = False
        self._too_large = False
        self._too_slow = False
        self._waited = 0.0
        self._queued: deque[Message] = deque()
        self._hold = False
        self._left: Message | None = None
        self._released: asyncio.Event | None = None
        if again is not None:
            self._repeat(again)

    @property
    def source(self) -> Receive:
        """The server's `receive`, from which the intake reads."""
        return self._receive

    async def receive(self, patience: float | None = None) -> Message:
        """The next message for the application; `patience` is how many seconds the body may take in all."""
        if self._queued:
            return self._queued.popleft()
        # A server may announce a disconnect only once, and the task that received it may have been cancelled since.
        message = self._left or await (self._receive() if self._complete else self._next(patience))
        if message["type"] == "http.request":
            self._keep(message)
            return message
        self._left = message
        if self._hold:
            self._released = self._released or asyncio.Event()
            await self._released.wait()
        return message

    async def body(self, patience: float | None = None) -> bytes:
        """The whole body, within `patience` seconds. The messages that it reads are queued for the application."""
        while not self._complete and not self._too_large:
            message = self._left or await self._next(patience)
            if message["type"] != "http.request":
                self._left = message
                raise ClientLeftError
            self._keep(message)
            self._queued.append(message)
        if self._too_large:
            raise TooLargeError
        return self._chunks[0] if len(self._chunks) == 1 else b"".join(self._chunks)

    def hold(self) -> None:
        """Withhold a disconnect from now on."""
        self._hold = True

    def release(self) -> None:
        """Pass a disconnect on to the application: the response was sent."""
        self._hold = False
        if self._released is not None:
            self._released.set()

    def _repeat(self, again: Intake) -> None:
        """Queue the chunks that an earlier intake of the same request has read: a server sends each one only once."""
        self._left = again._left
        self._too_large = again._too_large
        self._too_slow = again._too_slow
        if not again._chunks and not again._complete:
            return
        chunks = again._chunks or [b""]
        for number, chunk in enumerate(chunks, 1):
            more = number < len(chunks) or not again._complete
            message: Message = {"type": "http.request", "body": chunk, "more_body": more}
            self._keep(message)
            self._queued.append(message)

    async def _next(self, patience: float | None) -> Message:
        """The next message of the body. Only the time spent waiting for it counts towards `patience`."""
        if self._too_slow:
            raise TooSlowError
        if patience is None:
            return await self._receive()
        waiting = self._receive().__await__()
        try:
            first = next(waiting)
        except StopIteration as arrived:
            return cast("Message", arrived.value)  # the message was there already, so no timer was needed
        clock = asyncio.get_running_loop().time
        began = clock()
        try:
            async with asyncio.timeout(max(0.0, patience - self._waited)) as limit:
                return await _Begun(waiting, first)
        except TimeoutError:
            if not limit.expired():
                raise
            self._too_slow = True
            raise TooSlowError from None
        finally:
            self._waited += clock() - began

    def _keep(self, message: Message) -> None:
        chunk = message.get("body", b"")
        self._complete = not message.get("more_body", False)
        if self._too_large or not chunk:
            return
        self._size += len(chunk)
        if self._size > self._limit:
            self._too_large = True
            self._chunks.clear()
        else:
            self._chunks.append(chunk)


class _Begun:
    """Awaits a coroutine that `_next` has advanced once: yields the result of that step, then the rest."""

    __slots__ = ("_first", "_waiting")

    def __init__(self, waiting: Generator[Any, Any, Message], first: object) -> None:
        self._waiting = waiting
        self._first = first

    def __await__(self) -> Generator[Any, Any, Message]:
        awaited = self._first
        while True:
            try:
                yield awaited
            except BaseException as error:  # noqa: BLE001  (mostly a cancellation: passed on unchanged)
                try:
                    awaited = self._waiting.throw(error)
                except StopIteration as ended:
                    return cast("Message", ended.value)
            else:
                return (yield from self._waiting)


async def read_claim_input(
    installation: Installation,
    enrolment: Enrolment,
    scope: Scope,
    lines: list[bytes],
    intake: Intake,
    *,
    root_path: str,
) -> ClaimInput | Refuse:
    """The input of the claim, or a refusal. `root_path` is the application's: a mount inside it changes the scope's."""
    key = key_of(lines, enrolment)
    if isinstance(key, Refuse):
        return key
    try:
        body = await intake.body(enrolment.body_patience)
    except TooLargeError:
        return Refuse(Code.BODY_TOO_LARGE)
    except TooSlowError:
        return Refuse(Code.BODY_TOO_SLOW)
    headers = scope["headers"]
    if not body:
        for name, value in headers:
            if name == b"content-length" and value.lstrip(b"0"):
                raise ConfigurationError(READ_BEFORE)
    content_type = _field(headers, b"content-type") or None
    parts = Parts(
        scope["method"], scope["path"], scope.get("query_string", b""), headers, content_type, body, root_path
    )
    small = len(body) <= SMALL_BODY
    fingerprint = fingerprint_for(parts, enrolment) if small else await _fingerprint_aside(parts, enrolment)
    if isinstance(fingerprint, Refuse):
        return fingerprint
    if enrolment.completes or enrolment.policy.bind_to is not BindTo.TENANT:
        caller = await caller_of(installation, enrolment.policy, scope, named=enrolment.completes)
    else:
        tenant = installation.tenant(scope)
        caller = Caller(tenant if type(tenant) is str else await identified(tenant))
    return claim_input_of(key, fingerprint, parts, enrolment, caller)


async def caller_of(installation: Installation, policy: Policy, scope: Scope, *, named: bool = False) -> Caller:
    """The caller, as far as keys are bound to it. `named`: include the principal, which the completer needs."""
    tenant = await identified(installation.tenant(scope))
    bind_to = policy.bind_to
    if bind_to is BindTo.TENANT and not named:
        return Caller(tenant)
    token = _field(scope["headers"], b"authorization").decode("latin-1") if bind_to is BindTo.TOKEN else None
    principal = None
    if installation.principal is not None and (named or bind_to is BindTo.PRINCIPAL):
        principal = await identified(installation.principal(scope))
    return Caller(tenant, principal, token)


async def _fingerprint_aside(parts: Parts, enrolment: Enrolment) -> str | Refuse:
    """The fingerprint of a large body, in a thread; the route's own function runs in the loop, like its handler."""
    chosen = chosen_of(parts, enrolment)
    if isinstance(chosen, Refuse):
        return chosen
    return await asyncio.to_thread(fingerprint_for, parts, enrolment, chosen)


async def identified(named: str | Awaitable[str]) -> str:
    """The result of an `Identify`, awaited if necessary."""
    return await named if inspect.isawaitable(named) else named


def by_request(
    identify: Callable[[Any], str | Awaitable[str]], what: str, request_of: Callable[[Scope], Any]
) -> Identify:
    """Turn a function of the framework's request into one of the scope; its error names a missing attribute."""
    check_function(what, identify)

    def by_scope(scope: Scope) -> str | Awaitable[str]:
        try:
            value = identify(request_of(scope))
        except AttributeError as error:
            raise _not_there(error, what, scope) from error
        return value if type(value) is str else later(value, scope)

    async def later(value: str | Awaitable[str], scope: Scope) -> str:
        try:
            return await identified(value)
        except AttributeError as error:
            raise _not_there(error, what, scope) from error

    return by_scope


STATUS_ENDPOINT: Final = "idempotency_key_status"
"""The name of the function that serves the status resource."""
SET_BY_ROUTE: Final = (
    "the route's authentication has to set it before the handler is called, for example as a dependency of the route"
)
SET_FOR_STATUS: Final = (
    "the status resource has to be authenticated like the routes: pass once.install(app, "
    "status_dependencies=[Depends(authenticate)]) in FastAPI or OncePlugin(once, status_guards=[...]) in Litestar, or "
    "authenticate in a middleware"
)


def _not_there(error: AttributeError, what: str, scope: Scope) -> ConfigurationError:
    is_status = getattr(scope.get("endpoint"), "__name__", "") == STATUS_ENDPOINT
    fix = SET_FOR_STATUS if is_status else SET_BY_ROUTE
    return ConfigurationError(f"the {what} function found no {error.name!r} on the request: {fix}")


def _field(headers: list[tuple[bytes, bytes]], name: bytes) -> bytes:
    for found, value in headers:
        if found == name:
            return bytes(value)
    return b""


def trace_of(scope: Scope) -> str:
    """The trace id in the `traceparent` of a request; empty without one."""
    return trace_id_of(first(scope["headers"], TRACE_PARENT))


async def send_answer(send: Send, answer: Answer) -> None:
    """Send a response of oncekey's. The list of headers is a copy, because outer middleware changes it in place."""
    await send({"type": "http.response.start", "status": answer.status, "headers": list(answer.headers)})
    await send({"type": "http.response.body", "body": answer.body, "more_body": False})


async def send_captured(
    send: Send, capture: Capture, policy: Policy, *, echo: bytes | None, expires_at: Instant | None
) -> None:
    """Send the application's response with oncekey's header lines, in one piece unless it was spooled."""
    headers = marked_lines(capture.headers, policy, echo=echo, expires_at=expires_at)
    await send({"type": "http.response.start", "status": capture.status, "headers": headers})
    whole = capture.kept
    if whole is not None:
        await send({"type": "http.response.body", "body": whole, "more_body": False})
        return
    pieces = iter(capture.pieces())
    piece = next(pieces, b"")
    for following in pieces:
        await send({"type": "http.response.body", "body": piece, "more_body": True})
        piece = following
    await send({"type": "http.response.body", "body": piece, "more_body": False})


NOT_INSTALLED: Final = (
    "{operation} is protected by a Once that is not installed here: call install(app, tenant=...) of that Once, on the "
    "application that serves the handler or on one that it is mounted in"
)
NO_REQUEST: Final = (
    "{operation} is protected, and was called outside of a request, or once.install(app) is missing (once.flask(app) "
    "in Flask, the plugin in Litestar): in a unit test pass op=oncekey.testing.operation(...), or call "
    "handler.__wrapped__ if the handler takes no operation"
)
CALLED: Final = (
    "{operation} is protected and was called as a function by {caller}, which is not: nothing was executed. Move their "
    "shared code into a third function, or send {operation} a request with its own key; a decorator above "
    "@once.protect has to use functools.wraps"
)

_MARK: Final = "oncekey"
_DEEPEST: Final = 50
_ASGI: Final = ["scope", "receive", "send"]

current: ContextVar[Exchange | UnkeyedRequest | None] = ContextVar("oncekey", default=None)
"""The request in the innermost installation that it has reached."""


class Passage:
    """State of one ASGI scope for as long as it lives: middleware may pass the scope to an application again."""

    __slots__ = ("_intakes", "claimed")

    def __init__(self) -> None:
        self._intakes: list[Intake] = []
        self.claimed = False
        """Whether an exchange of the request has begun a claim: from then on a handler may have run."""

    def intake(self, receive: Receive, limit: int) -> Intake:
        """An intake for an exchange, which repeats the messages that an earlier one read from the same `receive`."""
        earlier = None
        for one in self._intakes:
            if receive in (one.source, one.receive):  # bound methods of one object are equal without being identical
                earlier = one
        intake = Intake(receive if earlier is None else earlier.source, limit, again=earlier)
        if earlier is not None:
            self._intakes.remove(earlier)
        self._intakes.append(intake)
        return intake


def passage_of(scope: Scope) -> Passage:
    """The passage of a scope; a copy of the scope is the same request."""
    found = scope.get(_MARK)
    if not isinstance(found, Passage):
        found = scope[_MARK] = Passage()
    return found


def enclosing(passage: Passage) -> Exchange | UnkeyedRequest | None:
    """The request in the installation around this one; None if the context belongs to another request, the caller."""
    outer = current.get()
    return outer if outer is not None and outer.passage is passage else None


def request_of(owner: object) -> Exchange | UnkeyedRequest | None:
    """The request in the innermost installation of a `Once`, if it passed through one."""
    request = current.get()
    while request is not None and request.installation.engines is not owner:
        request = request.outer
    return request


def request_for(enrolment: Enrolment) -> Exchange | UnkeyedRequest:
    """The request in which an enrolled handler is being called; raises if it cannot be protected."""
    innermost = current.get()
    if innermost is None:
        raise RuntimeError(NO_REQUEST.format(operation=enrolment.operation))
    owner, alone = enrolment.owner, True
    request: Exchange | UnkeyedRequest | None = None
    each: Exchange | UnkeyedRequest | None = innermost
    while each is not None:
        alone = alone and each.state is ExchangeState.OPEN
        if request is None and each.installation.engines is owner:
            request = each
        each = each.outer
    if request is None:
        raise RuntimeError(NOT_INSTALLED.format(operation=enrolment.operation))
    if not alone:
        raise RuntimeError(ONE_OPERATION)
    scope = innermost.scope
    if getattr(scope.get("endpoint"), "__oncekey__", None) is not enrolment:
        caller = _other_endpoint(scope, enrolment)
        if caller is not None:
            raise RuntimeError(CALLED.format(operation=enrolment.operation, caller=caller))
    return request


def check_alone() -> None:
    """Refuse a second operation in one request, even under another `Once`."""
    request = current.get()
    while request is not None:
        if request.state is not ExchangeState.OPEN:
            raise RuntimeError(ONE_OPERATION)
        request = request.outer


def layers(endpoint: Any) -> Iterator[Any]:  # noqa: ANN401  (of any kind)
    """An endpoint and the functions that its decorators wrap, from the outside in."""
    layer = endpoint
    for _ in range(_DEEPEST):
        if layer is None:
            return
        yield layer
        layer = layer.func if isinstance(layer, functools.partial) else getattr(layer, "__wrapped__", None)


def endpoint_of(scope: Scope) -> Any:  # noqa: ANN401
    """The function that a request was routed to, if the framework names it; for a class, the method that is called."""
    endpoint = scope.get("endpoint")
    if not inspect.isclass(endpoint):
        return endpoint
    method = scope["method"].lower()
    return getattr(endpoint, "get" if method == "head" and not hasattr(endpoint, "head") else method, None)


def enrolment_of(scope: Scope, owner: object) -> Enrolment | None:
    """The endpoint's enrolment by the `Once` that is `owner`; None if another one protects it, and commits its rows."""
    endpoint = scope.get("endpoint")
    enrolment: Enrolment | None = getattr(endpoint, "__oncekey__", None)
    if enrolment is None and endpoint is not None:
        enrolment = getattr(endpoint_of(scope), "__oncekey__", None)
    return enrolment if enrolment is not None and enrolment.owner is owner else None


def _other_endpoint(scope: Scope, enrolment: Enrolment) -> str | None:
    """The name of the endpoint that was routed to, if that is certainly not the enrolled handler."""
    endpoint = endpoint_of(scope)
    if any(getattr(layer, "__oncekey__", None) is enrolment for layer in layers(endpoint)):
        return None
    if not _is_handler(endpoint):
        return None  # a framework that names no endpoint, or a mounted application that has a copy of the scope
    return str(getattr(endpoint, "__qualname__", endpoint))


def _is_handler(endpoint: Callable[..., Any] | None) -> bool:
    if isinstance(endpoint, functools.partial):
        return True
    return inspect.isroutine(endpoint) and list(inspect.signature(endpoint).parameters) != _ASGI


class ExchangeState(IntEnum):
    """The state of an exchange, from its request to its response."""

    OPEN = 0
    RUNNING = 1
    ANSWERED = 2
    SETTLING = 3
    DONE = 4


class UnsettledError(Exception):
    """Raised by `send` after oncekey's response replaced the handler's, whose background tasks must not run."""


class UnkeyedRequest:
    """A request without a key: the middleware captures nothing, and stores nothing."""

    __slots__ = (
        "_complete",
        "_intake",
        "_receive",
        "installation",
        "outer",
        "passage",
        "scope",
        "state",
        "transaction",
        "unkeyed_tx",
    )

    def __init__(
        self,
        installation: Installation,
        scope: Scope,
        receive: Receive,
        passage: Passage,
        outer: Exchange | UnkeyedRequest | None,
    ) -> None:
        self.installation = installation
        self.scope = scope
        self.passage = passage
        self.outer = outer
        self.state = ExchangeState.OPEN
        self.transaction: RequestTransaction | None = None
        self.unkeyed_tx: AsyncOpenTransaction | None = None
        """The transaction of a LOCAL handler, which runs without a record."""
        self._receive = receive
        self._intake: Intake | None = None
        self._complete = False

    @property
    def tx(self) -> AsyncOpenTransaction | None:
        """The business transaction of the handler that is running."""
        return self.unkeyed_tx

    @property
    def enrolment(self) -> None:
        """Always None: a request without a key claims nothing."""

    async def receive(self) -> Message:
        """The next message of the request."""
        message = await (self._receive() if self._intake is None else self._intake.receive())
        self._complete = not message.get("more_body", False)
        return message

    async def read_ahead(self, policy: Policy) -> None:
        """Read the whole body before a dependency gets a connection; pass one that is too large on as it arrives."""
        if self._complete or self._intake is not None:
            return
        self._intake = self.passage.intake(self._receive, policy.max_request_bytes)
        with suppress(TooLargeError):
            await self._intake.body(policy.body_timeout.total_seconds())
