"""State shared by all requests of one application, on every server: settings, counters, recent reads of the store."""

from __future__ import annotations

import time
from contextvars import ContextVar
from functools import cached_property
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, Protocol
from urllib.parse import quote

from oncekey.core.errors import ConfigurationError
from oncekey.core.headers import field_name
from oncekey.core.lazy import Lazy, load
from oncekey.core.model import Code, Effects, Refuse
from oncekey.engine.deciding import refusal
from oncekey.engine.enrolment import Enrolment, Patterns
from oncekey.engine.run import Breaker, SettledKeys, Site
from oncekey.runtimes import boottime

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from oncekey.core.answers import Answer
    from oncekey.core.policy import Policy
    from oncekey.engine import notifying
    from oncekey.engine.fronts import Fronts
    from oncekey.engine.shell import AsyncEngine, Engine
    from oncekey.frameworks import fronting
    from oncekey.frameworks import limits as limiting
    from oncekey.frameworks.blocking import BlockingExchange
    from oncekey.frameworks.listing import Served
    from oncekey.observe import events
    from oncekey.observe.events import Notify
    from oncekey.ports.store import FrontConnection
else:
    events = Lazy("oncekey.observe.events")
    fronting = Lazy("oncekey.frameworks.fronting")
    limiting = Lazy("oncekey.frameworks.limits")
    notifying = Lazy("oncekey.engine.notifying")

RESUMPTION: Final = "oncekey.resumption"
"""The key of a scope or an environ that marks a completer's request. Clients cannot set it: headers do not reach it."""
NO_FUNCTION: Final = (
    "{name} must be a function of the request, and is of type {kind}: for one tenant, pass tenant=SINGLE_TENANT"
)
NO_SLASH: Final = "status={status!r} is not a path: write status='/{status}'"
ONE_OPERATION: Final = "a protected handler was called by another one: one request is one operation"

thread_exchange: ContextVar[BlockingExchange | None] = ContextVar("oncekey_thread", default=None)
"""The request that this thread serves, under WSGI."""
_NEEDED: Final[Mapping[Effects, tuple[str, ...]]] = MappingProxyType(
    {
        Effects.LOCAL: (),
        Effects.OUTBOX: (),
        Effects.PHASED: ("engine.phases", "engine.steps", "stores.phases"),
        Effects.INLINE: ("engine.reconcile", "stores.reconcile"),
    }
)
"""The modules that requests of these effects need, in addition to those of LOCAL."""


class Engines(Protocol):
    """Provides the engines, created on first use: one for asyncio, one for threads."""

    def asynchronous(self) -> AsyncEngine:
        """The engine of the running event loop."""

    def blocking(self) -> Engine:
        """The engine of all threads of this process."""

    def start_blocking(self) -> None:
        """Run the checks before the first request of a process whose server does not report its start."""


def check_function(name: str, function: object) -> None:
    """Raise if what should identify callers is not a function."""
    if not callable(function):
        raise ConfigurationError(NO_FUNCTION.format(name=name, kind=type(function).__name__))


class ApplicationShared:
    """State shared by all requests of one application. `Installation` (ASGI) and `Threads` extend it."""

    in_threads = False
    """Whether each request has its own thread, from the claim to the response."""

    def __init__(
        self,
        engines: Engines,
        policy: Policy,
        *,
        tenant: Callable[..., Any],
        principal: Callable[..., Any] | None,
        status_path: str | None = None,
        enrol: Mapping[str, Enrolment] | None = None,
        keep_headers: Sequence[str] = (),
    ) -> None:
        check_function("tenant", tenant)
        check_function("principal", principal or tenant)
        if status_path is not None and not status_path.startswith("/"):
            raise ConfigurationError(NO_SLASH.format(status=status_path))
        self.engines = engines
        self.policy = policy
        self.names_principals = principal is not None
        """Whether the application names the user of a request."""
        self.status_path = None if status_path is None else status_path.rstrip("/")
        self.patterns = Patterns(enrol or {})
        self.kept_headers = frozenset(map(field_name, keep_headers))
        self.breaker = Breaker()
        self.stopping = False
        self.wake: Callable[[], None] = lambda: None
        """Wakes the workers of this process, if there are any, when parcels were committed."""
        self.runs_workers = False
        """Whether each process runs workers. Where the server reports no start, they start with the first request."""
        self.inline_calls: Callable[[], Mapping[str, str]] = dict
        """The calls of INLINE handlers by operation, if their provider has a resolver or sends webhooks."""
        self.routes: Callable[[], Iterable[Served] | None] = lambda: None
        """The routes of the application, if it lists them."""
        self.notify: Notify | None = None
        """Passes an event to the observers."""
        self.max_request_bytes = policy.max_request_bytes
        self._settled_keys = SettledKeys()
        if policy.max_lookups_per_second is not None:
            _ = self.limits

    @cached_property
    def limits(self) -> limiting.Limits:
        """The counters of routes with limits."""
        return limiting.Limits(blocking=self.in_threads)

    @cached_property
    def fronts(self) -> Fronts:
        """The fronts of routes that have one, connected on first use."""
        return fronting.fronts_here()

    @property
    def lines(self) -> Iterable[FrontConnection]:
        """The connections to its fronts."""
        return self.fronts.lines.values() if "fronts" in vars(self) else ()

    def admit(self, enrolment: Enrolment) -> None:
        """Prepare for the requests of an enrolment: import its modules, and allow for the size of their bodies."""
        load(*_NEEDED[enrolment.effects])
        if enrolment.completes:
            load("engine.kept_request")
        policy = enrolment.policy
        # Created here and not by a request: two threads that are first at the same time would create two.
        if enrolment.fronted:
            _ = self.fronts
        if any(front is not None and front.shared for front in (policy.replay_cache, policy.lock_hint)):
            load("databases.redis.line")
        if enrolment.limited:
            _ = self.limits
        if policy.max_live_keys is not None:
            load("stores.upkeep", "stores.audit")
        self.max_request_bytes = max(self.max_request_bytes, enrolment.policy.max_request_bytes)

    def status_url(self, root_path: str, key: str, operation: str) -> str | None:
        """The URL of the key's status."""
        if self.status_path is None:
            return None
        whose = f"?operation={quote(operation, safe='')}" if self.policy.separate_operations else ""
        return f"{root_path}{self.status_path}/{quote(key, safe='')}{whose}"

    def turn_away(
        self,
        refused: Refuse,
        enrolment: Enrolment | None,
        *,
        trace_id: str,
        echo: bytes | None = None,
        status_url: str | None = None,
    ) -> Answer:
        """The response to a request that is refused before it could claim; it is reported to the observers."""
        if self.notify is not None:
            self.notify(events.TurnedAway("" if enrolment is None else enrolment.operation, refused.code))
        policy = self.policy if enrolment is None else enrolment.policy
        return refusal(refused, policy, echo=echo, status_url=status_url, trace_id=trace_id)

    def failed(self, where: str, error: Exception) -> None:
        """Report to the observers that the store failed."""
        if self.notify is not None:
            notifying.notify_failure(self.notify, where, error)

    def without_key(self, enrolment: Enrolment, trace_id: str) -> Answer | None:
        """The refusal of a request without a key; None if the route does not require one, and the handler runs."""
        if enrolment.policy.require_key:
            return self.turn_away(Refuse(Code.KEY_MISSING), enrolment, trace_id=trace_id)
        if self.notify is not None:
            self.notify(events.Keyless(enrolment.operation))
        return None

    def site_of(self, engine: AsyncEngine | Engine, is_full: Callable[[bool], bool]) -> Site:
        """State shared by the operations of one event loop, or of all threads of a process."""

        def with_identity() -> Fronts:
            here = self.fronts
            here.identity, here.notify = engine.identity, self.notify
            return here

        return Site(
            engine.store,
            self.breaker,
            clock=time.monotonic,
            boot=boottime,
            stopping=lambda: self.stopping,
            is_full=is_full,
            wake=lambda: self.wake(),  # noqa: PLW0108  (replaced later)
            inline_calls=lambda: self.inline_calls(),  # noqa: PLW0108
            settled_keys=self._settled_keys,
            notify=self.notify,
            fronts=with_identity,
        )


def is_served(policy: Policy) -> bool:
    """Whether the policy's link leads to this application, and not to a page elsewhere."""
    return policy.docs_url.startswith("/") and not policy.docs_url.startswith("//")
