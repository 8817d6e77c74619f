"""What all requests of one application share, on every server: settings, counters, and recent answers of the store."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Protocol
from urllib.parse import quote

from oncekey.core.headers import field_name
from oncekey.core.model import Code, Refuse
from oncekey.engine.admit import Breaker
from oncekey.engine.deciding import refusal
from oncekey.engine.enrolment import Enrolment, Patterns
from oncekey.engine.fronts import Fronts
from oncekey.engine.recent import SettledKeys
from oncekey.engine.run import Site
from oncekey.frameworks.limits import Limits
from oncekey.observe.events import Keyless, Notify, TurnedAway
from oncekey.runtimes import boottime
from oncekey.runtimes.aio import AsyncRuntime, RunningWork

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from oncekey.core.answers import Answer
    from oncekey.core.fronts import Front
    from oncekey.core.model import RecordId
    from oncekey.core.policy import Policy
    from oncekey.engine.actions import FrontConnection
    from oncekey.engine.shell import AsyncEngine, Engine
    from oncekey.frameworks.listing import Served


class Engines(Protocol):
    """Gives the engines, made at the first use: one for asyncio, one for threads."""

    def asynchronous(self) -> AsyncEngine:
        """The engine of the running event loop."""

    def blocking(self) -> Engine:
        """The engine of all threads of this process."""

    def start_blocking(self) -> None:
        """The checks before the first request of a process whose server does not report its start."""


class ApplicationShared:
    """What all requests of one application share. `Installation` (ASGI) and `Threads` extend it."""

    def __init__(
        self,
        engines: Engines,
        policy: Policy,
        *,
        status_path: str | None = None,
        enrol: Mapping[str, Enrolment] | None = None,
        keep_headers: Sequence[str] = (),
        blocking: bool = False,
    ) -> None:
        self.engines = engines
        self.policy = policy
        self.status_path = None if status_path is None else status_path.rstrip("/")
        self.patterns = Patterns(enrol or {})
        self.kept_headers = frozenset(map(field_name, keep_headers))
        self.breaker = Breaker()
        self.limits = Limits(blocking=blocking)
        self.stopping = False
        self.wake: Callable[[], None] = _nobody
        """Tells the workers of this process, if it has such, that parcels were committed."""
        self.inline_calls: Callable[[], Mapping[str, str]] = dict
        """By operation, the call of INLINE handlers whose provider is asked or reports by webhook."""
        self.routes: Callable[[], Iterable[Served] | None] = _unlisted
        """The routes of the application, if it lists them."""
        self.notify: Notify | None = None
        """Tells those who observe."""
        self.max_request_bytes = policy.max_request_bytes
        self._settled_keys = SettledKeys()
        self.fronts = fronts_here()

    def admit(self, enrolment: Enrolment) -> None:
        """Make room for an enrolment whose own settings are wider than the application's."""
        self.max_request_bytes = max(self.max_request_bytes, enrolment.policy.max_request_bytes)

    def status_url(self, root_path: str, key: str, operation: str) -> str | None:
        """Where the key's state can be read."""
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
        """The answer to a request that is refused before it could claim; the observers get an event of it."""
        if self.notify is not None:
            self.notify(TurnedAway("" if enrolment is None else enrolment.operation, refused.code))
        policy = self.policy if enrolment is None else enrolment.policy
        return refusal(refused, policy, echo=echo, status_url=status_url, trace_id=trace_id)

    def without_key(self, enrolment: Enrolment, trace_id: str) -> Answer | None:
        """The refusal of a request without a key; None if the route does not require one, and the handler runs."""
        if enrolment.policy.require_key:
            return self.turn_away(Refuse(Code.KEY_MISSING), enrolment, trace_id=trace_id)
        if self.notify is not None:
            self.notify(Keyless(enrolment.operation))
        return None

    def site_of(self, engine: AsyncEngine | Engine, crowded: Callable[[bool], bool]) -> Site:
        """What the operations of one event loop, or of all threads of a process, share."""
        self.fronts.identity, self.fronts.notify = engine.identity, self.notify
        return Site(
            engine.store,
            self.breaker,
            clock=time.monotonic,
            boot=boottime,
            stopping=lambda: self.stopping,
            crowded=crowded,
            wake=lambda: self.wake(),  # noqa: PLW0108  (replaced later)
            inline_calls=lambda: self.inline_calls(),  # noqa: PLW0108
            settled_keys=self._settled_keys,
            notify=self.notify,
            fronts=self.fronts,
        )


def fronts_here() -> Fronts:
    """Nothing yet; what a policy names is connected to when it is first needed."""
    return Fronts(boottime, _line)


async def forget(fronts: Fronts, policies: Iterable[Policy], engine: AsyncEngine, record_id: RecordId) -> bool:
    """Let no front give a stored answer any more, before an operator takes it away; whether that is certain."""
    if fronts.identity is None:
        fronts.identity = engine.identity
    return await AsyncRuntime(engine, RunningWork()).drive(fronts.forget(policies, record_id))


def _line(front: Front, breaker: Breaker) -> FrontConnection:
    from oncekey.drivers.redis_line import RedisLine  # noqa: PLC0415  (an optional package)

    return RedisLine(front.place, front.patience, breaker)


def _unlisted() -> None:
    """The routes are not known."""


def _nobody() -> None:
    """There are no workers."""
