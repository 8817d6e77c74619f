"""The requests of an application, with a key and without, and how the exchange of a request is found.

A request may pass through several installations, each of one `Once`. A context variable holds the exchange of the
innermost installation, because it reaches every kind of endpoint, child tasks and threads. Each exchange refers to the
one around it, so the innermost one of any `Once` can be found.
"""

from __future__ import annotations

import functools
import inspect
from contextlib import suppress
from contextvars import ContextVar
from enum import IntEnum
from typing import TYPE_CHECKING, Any, Final

from oncekey.frameworks.asgi.messages import Intake, TooLargeError
from oncekey.frameworks.shared import ONE_OPERATION

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from oncekey.core.policy import Policy
    from oncekey.engine.enrolment import Enrolment
    from oncekey.frameworks.asgi import Message, Receive, Scope
    from oncekey.frameworks.asgi.exchange import Exchange
    from oncekey.frameworks.asgi.installation import Installation
    from oncekey.frameworks.asgi.transactions import RequestTransaction
    from oncekey.ports.store import AsyncOpenTransaction

NOT_INSTALLED: Final = (
    "{operation} is protected by a Once that is not installed here: call install(app, tenant=...) of that Once, on the "
    "application that serves the handler or on one that it is mounted in"
)
NO_REQUEST: Final = (
    "once.install(app) is missing; in a unit test pass op=oncekey.testing.operation(...), or call "
    "handler.__wrapped__ if the handler takes no operation"
)
CALLED: Final = (
    "{operation} is protected and was called as a function by {caller}, which is not: nothing was executed. Move what "
    "both need into a function of its own, or call it by a request with a key of its own; a decorator above "
    "@once.protect has to use functools.wraps"
)

_MARK: Final = "oncekey"
_DEEPEST: Final = 50
_ASGI: Final = ["scope", "receive", "send"]

current: ContextVar[Exchange | UnkeyedRequest | None] = ContextVar("oncekey", default=None)
"""The request in the innermost installation that it has reached."""


class Passage:
    """What is kept of one ASGI scope for as long as it lives: middleware may send it to an application again."""

    __slots__ = ("_intakes", "claimed")

    def __init__(self) -> None:
        self._intakes: list[Intake] = []
        self.claimed = False
        """Whether an exchange of the request has begun a claim: from then on a handler may have run."""

    def intake(self, receive: Receive, limit: int) -> Intake:
        """An intake for an exchange. It repeats what an earlier one has read from the same `receive`, or recorded."""
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
    """The request in the installation around this one; None if the context is that of another request, the caller."""
    outer = current.get()
    return outer if outer is not None and outer.passage is passage else None


def request_of(owner: object) -> Exchange | UnkeyedRequest | None:
    """The request in the innermost installation of a `Once`, if it passed through one."""
    request = current.get()
    while request is not None and request.installation.engines is not owner:
        request = request.outer
    return request


def request_for(enrolment: Enrolment) -> Exchange | UnkeyedRequest:
    """The request in which an enrolled handler is being called; raises where it cannot be protected."""
    innermost = current.get()
    if innermost is None:
        raise RuntimeError(NO_REQUEST)
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
    """Refuse a second operation in one request, also under another `Once` (L7)."""
    request = current.get()
    while request is not None:
        if request.state is not ExchangeState.OPEN:
            raise RuntimeError(ONE_OPERATION)
        request = request.outer


def layers(endpoint: Any) -> Iterator[Any]:  # noqa: ANN401  (whatever a route was given)
    """An endpoint and what its decorators wrapped, from the outside in."""
    layer = endpoint
    for _ in range(_DEEPEST):
        if layer is None:
            return
        yield layer
        layer = layer.func if isinstance(layer, functools.partial) else getattr(layer, "__wrapped__", None)


def endpoint_of(scope: Scope) -> Any:  # noqa: ANN401
    """The function that a request was routed to, as far as the framework names it; a class answers by its methods."""
    endpoint = scope.get("endpoint")
    if not inspect.isclass(endpoint):
        return endpoint
    method = scope["method"].lower()
    return getattr(endpoint, "get" if method == "head" and not hasattr(endpoint, "head") else method, None)


def enrolment_of(scope: Scope, owner: object) -> Enrolment | None:
    """How the `Once` that is `owner` protects the endpoint; None if another one does, which then commits its rows."""
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
    """The state of an exchange, from its request to its answer."""

    OPEN = 0
    RUNNING = 1
    ANSWERED = 2
    SETTLING = 3
    DONE = 4


class UnsettledError(Exception):
    """Raised by `send` after we sent our own answer instead of the handler's: its background tasks must not run."""


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
        """Read the whole body before a dependency gets a connection. One that is too large is passed on as it comes."""
        if self._complete or self._intake is not None:
            return
        self._intake = self.passage.intake(self._receive, policy.max_request_bytes)
        with suppress(TooLargeError):
            await self._intake.body(policy.body_timeout.total_seconds())
