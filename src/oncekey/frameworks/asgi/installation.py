"""What one application was installed with: engines, resolvers, policy, and the settlements under way."""

from __future__ import annotations

import asyncio
import inspect
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, Protocol
from urllib.parse import quote
from weakref import WeakKeyDictionary

from oncekey.boottime import boottime
from oncekey.core.headers import field_name
from oncekey.engine.breaker import Breaker
from oncekey.engine.enrolment import Patterns
from oncekey.engine.recent import Answers, Hints
from oncekey.engine.run import Site
from oncekey.frameworks.asgi.limits import Limits
from oncekey.frameworks.asgi.threads import opened_in_thread
from oncekey.runtimes.aio import AsyncRuntime, Drain
from oncekey.runtimes.threads import ThreadRuntime

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping, Sequence

    from oncekey.core.answers import Answer
    from oncekey.core.policy import Policy
    from oncekey.engine.enrolment import Enrolment
    from oncekey.engine.shell import AsyncEngine, Engine
    from oncekey.flow import Steps
    from oncekey.frameworks.asgi.types import App, Resolver, Scope
    from oncekey.observe.events import Tell
    from oncekey.ports import AsyncOpenTransaction

HANDLER_THREADS = 40
OPENING_THREADS = 16
SETTLE_THREADS = 16
"""Neither settlements nor handlers queue behind openings: who holds a connection never waits for one who wants one."""


PATIENT_PART = 0.8
"""How much of a stop's time phased handlers are left alone."""


class Interruptible(Protocol):
    """An operation that can be gone on with by somebody else."""

    def interrupt(self) -> None:
        """End it, unless a call of its is open."""


class Engines(Protocol):
    """Gives the engines, made at the first use: one for asyncio, one for plain `def` handlers."""

    def asynchronous(self) -> AsyncEngine:
        """The engine of the running event loop."""

    def blocking(self) -> Engine:
        """The engine for threads."""


class Installation:
    """Shared by all exchanges of an application."""

    def __init__(
        self,
        engines: Engines,
        policy: Policy,
        *,
        tenant: Resolver,
        principal: Resolver | None = None,
        status_path: str | None = None,
        enrol: Mapping[str, Enrolment] | None = None,
        respond: Callable[[Answer], Any] | None = None,
        raised: Callable[[Exception], App] | None = None,
        keep_headers: Sequence[str] = (),
    ) -> None:
        self.engines = engines
        self.policy = policy
        self.status_path = status_path
        self.patterns = Patterns(enrol or {})
        self.respond = respond
        self.raised = raised
        """Answers as the application does when one of its handlers raises; it raises what it has no answer to."""
        self.kept_headers = frozenset(map(field_name, keep_headers))
        self.breaker = Breaker()
        self.limits = Limits()
        self.drain = Drain()
        self.stopping = False
        self.ready: Callable[[], None] = _nobody
        """Raises, when the application says that it has started, if something that it needs has not."""
        self.wake: Callable[[], None] = _nobody
        """Tells the workers of this process, if it has such, that parcels were committed."""
        self.inline_calls: Callable[[], Mapping[str, str]] = dict
        """By operation, the call of INLINE handlers whose provider is asked or reports by webhook."""
        self.tell: Tell | None = None
        """Tells those who observe."""
        self.interruptible: set[Interruptible] = set()
        self._lives: WeakKeyDictionary[AsyncEngine, tuple[AsyncRuntime, Site]] = WeakKeyDictionary()
        self._threads: ThreadRuntime | None = None
        self._hints = Hints()
        self._answers = Answers(boottime)
        self.max_request_bytes = policy.max_request_bytes
        self._tenant = tenant
        self._principal = principal
        self._handlers: ThreadPoolExecutor | None = None
        self._openings: ThreadPoolExecutor | None = None
        self._settles: ThreadPoolExecutor | None = None

    def admit(self, enrolment: Enrolment) -> None:
        """Make room for an enrolment whose own settings are wider than the installation's."""
        self.max_request_bytes = max(self.max_request_bytes, enrolment.policy.max_request_bytes)

    def life(self) -> tuple[AsyncRuntime, Site]:
        """What performs the operations of the running event loop, and what they share."""
        engine = self.engines.asynchronous()
        life = self._lives.get(engine)
        if life is None:
            life = self._lives[engine] = (AsyncRuntime(engine, self.drain, self._open_blocking), self._site(engine))
        return life

    def threads(self) -> ThreadRuntime:
        """What performs the steps of `def` handlers."""
        engine = self.engines.blocking()
        if self._threads is None or self._threads.engine is not engine:
            self._threads = ThreadRuntime(engine)
        return self._threads

    def _site(self, engine: AsyncEngine) -> Site:
        engines = self.engines
        return Site(
            engine.store,
            self.breaker,
            clock=time.monotonic,
            boot=boottime,
            stopping=lambda: self.stopping,
            crowded=lambda blocking: engines.blocking().crowded if blocking else engine.crowded,
            wake=lambda: self.wake(),  # noqa: PLW0108  (whoever is told later replaces it)
            inline_calls=lambda: self.inline_calls(),  # noqa: PLW0108
            hints=self._hints,
            tell=self.tell,
            answers=self._answers,
        )

    async def _open_blocking(self, first: Steps[Any] | None) -> tuple[AsyncOpenTransaction, Any]:
        return await opened_in_thread(self, first)

    async def tenant_of(self, scope: Scope) -> str:
        """Whose key it is, as the authenticated request says."""
        tenant = self._tenant(scope)
        return tenant if type(tenant) is str else await _resolved(tenant)

    async def principal_of(self, scope: Scope) -> str | None:
        """Who in the tenant, where keys are bound to principals."""
        return None if self._principal is None else await _resolved(self._principal(scope))

    def status_url(self, root_path: str, key: str) -> str | None:
        """Where the key's state can be read."""
        if self.status_path is None:
            return None
        return f"{root_path}{self.status_path}/{quote(key, safe='')}"

    @property
    def handlers(self) -> ThreadPoolExecutor:
        """Threads for `def` handlers."""
        self._handlers = self._handlers or ThreadPoolExecutor(HANDLER_THREADS, "oncekey-handler")
        return self._handlers

    @property
    def openings(self) -> ThreadPoolExecutor:
        """Threads that wait for the connections of `def` handlers."""
        self._openings = self._openings or ThreadPoolExecutor(OPENING_THREADS, "oncekey-opening")
        return self._openings

    @property
    def settles(self) -> ThreadPoolExecutor:
        """Threads for the settlements of `def` handlers."""
        self._settles = self._settles or ThreadPoolExecutor(SETTLE_THREADS, "oncekey-settle")
        return self._settles

    async def stop(self, seconds: float) -> None:
        """Let operations and settlements come to their end, then give the threads back.

        Phased handlers begin no further step; those that wait for something else are interrupted towards the end,
        so that somebody else can go on with them at once. A call that is open is never interrupted (P5, F10).
        """
        self.stopping = True
        late = asyncio.get_running_loop().call_later(seconds * PATIENT_PART, self._interrupt)
        try:
            await self.drain.wait(seconds)
        finally:
            late.cancel()
        for executor in (self._handlers, self._openings, self._settles):
            if executor is not None:
                executor.shutdown(wait=False)
        self._handlers = self._openings = self._settles = None

    def _interrupt(self) -> None:
        for running in tuple(self.interruptible):
            running.interrupt()


def _nobody() -> None:
    """Neither workers nor a check."""


async def _resolved(value: str | Awaitable[str]) -> str:
    return await value if inspect.isawaitable(value) else value
