"""What one application was installed with: engines, resolvers, policy, and the settlements under way."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, Protocol
from weakref import WeakKeyDictionary

from oncekey.frameworks.asgi.threads import opened_in_thread
from oncekey.frameworks.asgi.ways import Ways
from oncekey.frameworks.premises import Premises
from oncekey.runtimes.aio import AsyncRuntime, Drain
from oncekey.runtimes.threads import ThreadRuntime

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from oncekey.core.answers import Answer
    from oncekey.core.policy import Policy
    from oncekey.engine.enrolment import Enrolment
    from oncekey.engine.run import Site
    from oncekey.engine.shell import AsyncEngine
    from oncekey.flow import Steps
    from oncekey.frameworks.asgi.types import App, Resolver, Scope
    from oncekey.frameworks.premises import Engines
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


class Installation(Premises):
    """Shared by all exchanges of an ASGI application."""

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
        super().__init__(engines, policy, status_path=status_path, enrol=enrol, keep_headers=keep_headers)
        self.respond = respond
        self.raised = raised
        """Answers as the application does when one of its handlers raises; it raises what it has no answer to."""
        self.direct: Callable[[Scope, object], bool] = _unknown
        """Whether nobody between us and an endpoint may say no to a repeat of its request; see `ways`."""
        self.ways = Ways()
        self.drain = Drain()
        self.ready: Callable[[], None] = _nobody
        """Raises, when the application says that it has started, if something that it needs has not."""
        self.check: Callable[[], None] | None = None
        """Raises, when the application starts, if its routes and enrolments do not fit together."""
        self.door: App | None = None
        """Where a completer's request goes in, if the application itself is no ASGI one."""
        self.answers: tuple[type[Exception], ...] = ()
        """Successes that handlers of this framework may raise instead of returning them."""
        self.seen: Callable[[Any], Any] = _as_it_is
        """What says the status of a handler's response by `status_code`, or as Flask does, if that itself does not."""
        self.interruptible: set[Interruptible] = set()
        self._lives: WeakKeyDictionary[AsyncEngine, tuple[AsyncRuntime, Site]] = WeakKeyDictionary()
        self._life: tuple[AsyncRuntime, Site] | None = None
        """The one that was asked for last."""
        self._threads: ThreadRuntime | None = None
        self.tenant = tenant
        """Whose key it is, as the authenticated request says."""
        self.principal = principal
        """Who in the tenant, where keys are bound to principals."""
        self._handlers: ThreadPoolExecutor | None = None
        self._openings: ThreadPoolExecutor | None = None
        self._settles: ThreadPoolExecutor | None = None

    def life(self) -> tuple[AsyncRuntime, Site]:
        """What performs the operations of the running event loop, and what they share."""
        engine, life = self.engines.asynchronous(), self._life
        if life is not None and life[0].engine is engine:
            return life
        life = self._lives.get(engine)
        if life is None:
            threads = self.engines.blocking
            site = self.site_of(engine, lambda blocking: (threads() if blocking else engine).crowded)
            life = self._lives[engine] = (AsyncRuntime(engine, self.drain, self._open_blocking), site)
        self._life = life
        return life

    def threads(self) -> ThreadRuntime:
        """What performs the steps of `def` handlers."""
        engine = self.engines.blocking()
        if self._threads is None or self._threads.engine is not engine:
            self._threads = ThreadRuntime(engine)
        return self._threads

    async def _open_blocking(self, first: Steps[Any] | None) -> tuple[AsyncOpenTransaction, Any]:
        return await opened_in_thread(self, first)

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
            for line in self.fronts.lines.values():
                await line.close()
                line.close_blocking()
        for executor in (self._handlers, self._openings, self._settles):
            if executor is not None:
                executor.shutdown(wait=False)
        self._handlers = self._openings = self._settles = None

    def _interrupt(self) -> None:
        for running in tuple(self.interruptible):
            running.interrupt()


def _as_it_is(response: Any) -> Any:  # noqa: ANN401  (of any framework)
    return response


def _nobody() -> None:
    """There is no check."""


def _unknown(_: Scope, __: object) -> bool:
    return False
