"""State shared by all exchanges of one ASGI application: engines, policy, tenants, threads, and open settlements.

`def` handlers run in threads of the installation; the event loop ends their transactions in separate threads.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, Final, NamedTuple
from weakref import WeakKeyDictionary

from oncekey.core.lazy import Lazy, load
from oncekey.core.model import Effects
from oncekey.frameworks.shared import ApplicationShared, Engines
from oncekey.runtimes.aio import AsyncRuntime, RunningWork

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from oncekey.core.answers import Answer
    from oncekey.core.flow import Body
    from oncekey.core.policy import Policy
    from oncekey.engine.enrolment import Enrolment
    from oncekey.engine.run import Site
    from oncekey.engine.shell import AsyncEngine
    from oncekey.frameworks import threaded
    from oncekey.frameworks.asgi import App, Identify, Scope, spelling
    from oncekey.ports.store import AsyncOpenTransaction, Interruptible
    from oncekey.runtimes import threads as blocking
else:
    blocking = Lazy("oncekey.runtimes.threads")
    spelling = Lazy("oncekey.frameworks.asgi.spelling")
    threaded = Lazy("oncekey.frameworks.threaded")


HANDLER_THREADS = 40
OPENING_THREADS = 16
SETTLE_THREADS = 16
"""Three pools, so that a request that holds a connection never queues behind requests that wait for one."""


PATIENT_PART = 0.8
"""The part of the shutdown time that PHASED handlers have before they are interrupted."""


class Installation(ApplicationShared):
    """Shared by all exchanges of an ASGI application."""

    def __init__(
        self,
        engines: Engines,
        policy: Policy,
        *,
        tenant: Identify,
        principal: Identify | None = None,
        status_path: str | None = None,
        enrol: Mapping[str, Enrolment] | None = None,
        respond: Callable[[Answer], Any] | None = None,
        raised: Callable[[Exception], App] | None = None,
        keep_headers: Sequence[str] = (),
    ) -> None:
        super().__init__(
            engines,
            policy,
            tenant=tenant,
            principal=principal,
            status_path=status_path,
            enrol=enrol,
            keep_headers=keep_headers,
        )
        self.respond = respond
        self.raised = raised
        """Handles an exception with the application's own error handlers; re-raises it if none of them applies."""
        self.direct: Callable[[Scope, object], bool] = lambda _scope, _endpoint: False
        """Whether nothing between the middleware and an endpoint could refuse a retry."""
        self.keyed_routes = KeyedRoutes()
        """The routes on which a retry may be replayed without the application, according to `direct`."""
        self.running_work = RunningWork()
        self.ready: Callable[[], None] = lambda: None
        """Called when the application reports that it has started; raises if something that it needs has not."""
        self.check: Callable[[], None] | None = None
        """Called when the application starts; raises if its routes and enrolments do not fit together."""
        self.enrolled: Callable[[Scope], Enrolment | None] = self._by_spelling
        """Finds the enrolment of a request by path. An adapter replaces it if the framework's router can be queried."""
        self.interruptible: set[Interruptible] = set()
        self._pairs: WeakKeyDictionary[AsyncEngine, tuple[AsyncRuntime, Site]] = WeakKeyDictionary()
        self._last_pair: tuple[AsyncRuntime, Site] | None = None
        """The last result of `runtime_and_site`."""
        self._threads: blocking.ThreadRuntime | None = None
        self.tenant = tenant
        """Returns the tenant of the authenticated request, to whom the key belongs."""
        self.principal = principal
        """Returns the principal in the tenant, for keys that are bound to principals and for the completer."""
        self._handlers: ThreadPoolExecutor | None = None
        self._openings: ThreadPoolExecutor | None = None
        self._settles: ThreadPoolExecutor | None = None

        if self.patterns.patterns:
            load("frameworks.asgi.spelling")

    def _by_spelling(self, scope: Scope) -> Enrolment | None:
        return spelling.by_spelling(self.patterns, scope)

    def runtime_and_site(self) -> tuple[AsyncRuntime, Site]:
        """The runtime for the operations of the running event loop, and the site that they share."""
        engine, pair = self.engines.asynchronous(), self._last_pair
        if pair is not None and pair[0].engine is engine:
            return pair
        pair = self._pairs.get(engine)
        if pair is None:
            threads = self.engines.blocking
            site = self.site_of(engine, lambda blocking: (threads() if blocking else engine).is_full)
            pair = self._pairs[engine] = (AsyncRuntime(engine, self.running_work, self._open_blocking), site)
        self._last_pair = pair
        return pair

    def admit(self, enrolment: Enrolment) -> None:
        """Prepare for an enrolment; a `def` handler needs threads."""
        super().admit(enrolment)
        if enrolment.effects is Effects.PHASED:
            load("frameworks.asgi.transactions", "frameworks.asgi.following")
        if enrolment.blocking:
            load("frameworks.threaded", "runtimes.threads", "engine.sync_operation")

    def threads(self) -> blocking.ThreadRuntime:
        """The runtime that performs the steps of `def` handlers."""
        engine = self.engines.blocking()
        if self._threads is None or self._threads.engine is not engine:
            self._threads = blocking.ThreadRuntime(engine)
        return self._threads

    async def _open_blocking(self, first: Body[Any] | None) -> tuple[AsyncOpenTransaction, Any]:
        return await threaded.opened_in_thread(self, first)

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
        """Wait for operations and settlements to end, then release the threads.

        PHASED handlers begin no further step. Those that still wait near the end are interrupted, so that a retry or
        the completer can resume them at once. An open call is never interrupted.
        """
        self.stopping = True
        late = asyncio.get_running_loop().call_later(seconds * PATIENT_PART, self._interrupt)
        try:
            await self.running_work.wait(seconds)
        finally:
            late.cancel()
            for line in self.lines:
                await line.close()
                line.close_blocking()
        for executor in (self._handlers, self._openings, self._settles):
            if executor is not None:
                executor.shutdown(wait=False)
        self._handlers = self._openings = self._settles = None

    def _interrupt(self) -> None:
        for running in tuple(self.interruptible):
            running.interrupt()


MOST_ROUTES: Final = 10_000
LONGEST_LINE: Final = 1_000
"""Longer lines and paths are not remembered: a line may have parameters of any length after its key."""
_ROUTED: Final = ("endpoint", "path_params", "route")
"""The scope entries that a framework's router writes; outer middleware may read them afterwards."""


class KeyedRoute(NamedTuple):
    """The route of a request with a key."""

    method: str
    path: str
    root_path: str
    enrolment: Enrolment
    routed: dict[str, Any]

    @property
    def endpoint(self) -> object:
        """The function to which the request was routed."""
        return self.routed["endpoint"]

    def matches(self, scope: Scope, root_path: str) -> bool:
        """Whether a request has the same method and path."""
        return self.path == scope["path"] and self.method == scope["method"] and self.root_path == root_path

    def enter(self, scope: Scope) -> None:
        """Write the router's entries into the scope."""
        scope.update(self.routed)
        if "path_params" in self.routed:
            scope["path_params"] = dict(self.routed["path_params"])

    def leave(self, scope: Scope) -> None:
        """Undo `enter`, because the application's router will run after all."""
        for name in self.routed:
            scope.pop(name, None)


class KeyedRoutes:
    """The routes of recently settled keys, by the client's header line. The oldest is dropped first."""

    __slots__ = ("_last", "_most", "known")

    def __init__(self, most: int = MOST_ROUTES) -> None:
        self.known: OrderedDict[bytes | None, KeyedRoute] = OrderedDict()  # like `SettledKeys.known`
        self._last: tuple[object, KeyedRoute | None] = (None, None)
        """The route that was added last: requests with many keys share one route, and so one `KeyedRoute`."""
        self._most = most

    def add(self, line: bytes, scope: Scope, root_path: str, enrolment: Enrolment) -> None:
        """Remember the route of a request."""
        if len(line) + len(scope["path"]) > LONGEST_LINE:
            return
        known = self.known
        if len(known) >= self._most and line not in known:
            known.popitem(last=False)
        at, route = self._last
        here = (scope["method"], scope["path"], root_path, scope["endpoint"])
        if route is None or at != here:
            routed = {name: scope[name] for name in _ROUTED if name in scope}
            route = KeyedRoute(*here[:3], enrolment, routed)
            self._last = here, route
        known[line] = route
