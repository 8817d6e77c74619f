"""What all exchanges of one ASGI application share: engines, policy, tenants, threads, and open settlements.

`def` handlers run in threads of the installation, and the event loop ends their transactions in other threads of it.
"""

from __future__ import annotations

import asyncio
import contextvars
import functools
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol, TypeVar
from urllib.parse import unquote
from weakref import WeakKeyDictionary

from oncekey.frameworks.shared import ApplicationShared
from oncekey.runtimes.aio import AsyncRuntime, RunningWork, shielded
from oncekey.runtimes.threads import ThreadRuntime

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from concurrent.futures import Executor, Future

    from oncekey.core.answers import Answer
    from oncekey.core.policy import Policy
    from oncekey.engine.enrolment import Enrolment, Patterns
    from oncekey.engine.run import Site
    from oncekey.engine.shell import AsyncEngine
    from oncekey.flow import Body
    from oncekey.frameworks.asgi import App, Identify, Scope
    from oncekey.frameworks.shared import Engines
    from oncekey.ports import AsyncOpenTransaction, OpenTransaction


HANDLER_THREADS = 40
OPENING_THREADS = 16
SETTLE_THREADS = 16
"""Three pools, so that a request that holds a connection never queues behind requests that wait for one."""


PATIENT_PART = 0.8
"""The part of the shutdown time that PHASED handlers have before they are interrupted."""


class Interruptible(Protocol):
    """An operation with which a retry or the completer can go on."""

    def interrupt(self) -> None:
        """Cancel it, unless it has an open call."""


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
        super().__init__(engines, policy, status_path=status_path, enrol=enrol, keep_headers=keep_headers)
        self.respond = respond
        self.raised = raised
        """Answers an exception as the application's own error handlers do; raises it again if they have no answer."""
        self.direct: Callable[[Scope, object], bool] = _unknown
        """Whether nothing between the middleware and an endpoint could refuse a repeat of its request."""
        self.keyed_routes = KeyedRoutes()
        """Where a repeat may be answered without the application, by `direct`."""
        self.running_work = RunningWork()
        self.ready: Callable[[], None] = _nobody
        """Called when the application reports that it has started; raises if something that it needs has not."""
        self.check: Callable[[], None] | None = None
        """Called when the application starts; raises if its routes and enrolments do not fit together."""
        self.enrolled: Callable[[Scope], Enrolment | None] = functools.partial(by_spelling, self.patterns)
        """How a request is enrolled by path. An adapter replaces it where the framework's router can be asked."""
        self.interruptible: set[Interruptible] = set()
        self._pairs: WeakKeyDictionary[AsyncEngine, tuple[AsyncRuntime, Site]] = WeakKeyDictionary()
        self._last_pair: tuple[AsyncRuntime, Site] | None = None
        """What `runtime_and_site` returned last."""
        self._threads: ThreadRuntime | None = None
        self.tenant = tenant
        """Returns the tenant of the authenticated request, to whom the key belongs."""
        self.principal = principal
        """Returns the principal in the tenant, where keys are bound to principals."""
        self._handlers: ThreadPoolExecutor | None = None
        self._openings: ThreadPoolExecutor | None = None
        self._settles: ThreadPoolExecutor | None = None

    def runtime_and_site(self) -> tuple[AsyncRuntime, Site]:
        """The runtime for the operations of the running event loop, and the site that they share."""
        engine, pair = self.engines.asynchronous(), self._last_pair
        if pair is not None and pair[0].engine is engine:
            return pair
        pair = self._pairs.get(engine)
        if pair is None:
            threads = self.engines.blocking
            site = self.site_of(engine, lambda blocking: (threads() if blocking else engine).crowded)
            pair = self._pairs[engine] = (AsyncRuntime(engine, self.running_work, self._open_blocking), site)
        self._last_pair = pair
        return pair

    def threads(self) -> ThreadRuntime:
        """The runtime that performs the steps of `def` handlers."""
        engine = self.engines.blocking()
        if self._threads is None or self._threads.engine is not engine:
            self._threads = ThreadRuntime(engine)
        return self._threads

    async def _open_blocking(self, first: Body[Any] | None) -> tuple[AsyncOpenTransaction, Any]:
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
        """Wait for operations and settlements to end, then release the threads.

        PHASED handlers begin no further step. Those that still wait for something towards the end are interrupted, so
        that a retry or the completer can go on with them at once. An open call is never interrupted (P5, F10).
        """
        self.stopping = True
        late = asyncio.get_running_loop().call_later(seconds * PATIENT_PART, self._interrupt)
        try:
            await self.running_work.wait(seconds)
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


def by_spelling(patterns: Patterns, scope: Scope) -> Enrolment | None:
    """The enrolment of a request by its path, decoded as a whole and segment by segment: `%2F` may separate or not."""
    spellings = [route_path(scope)]
    raw = (scope.get("raw_path") or b"").partition(b"?")[0]
    if b"%" in raw:
        segments = (unquote(segment).replace("/", "_") for segment in raw.decode("latin-1").split("/"))
        spellings.append(route_path({**scope, "path": "/".join(segments)}))
    return patterns.find_spelled(scope["method"], *spellings)


def route_path(scope: Scope) -> str:
    """The path as the application's own routes know it: without the mount path, which some servers leave in front."""
    path, root = str(scope["path"]), str(scope.get("root_path", "")).rstrip("/")
    if root and (path == root or path.startswith(f"{root}/")):
        path = path[len(root) :]
    return path or "/"


def _nobody() -> None:
    """The default of `ready`: there is nothing to check."""


def _unknown(_: Scope, __: object) -> bool:
    return False


T = TypeVar("T")


async def in_thread(executor: Executor, run: Callable[[], T]) -> T:
    """Run a blocking handler in a thread, with the caller's context.

    A thread cannot be cancelled, so a cancellation waits for its end (P5). If the request settled earlier, its key
    would be free while the handler still runs, and two threads would use one connection.
    """
    job = executor.submit(contextvars.copy_context().run, run)
    try:
        return await asyncio.wrap_future(job)
    except asyncio.CancelledError:
        if not job.cancel():
            await shielded(_ended(job))
        raise


async def _ended(job: Future[Any]) -> None:
    with suppress(BaseException):
        await asyncio.wrap_future(job)


async def opened_in_thread(
    installation: Installation, first: Body[Any] | None = None
) -> tuple[ThreadedTransaction, Any]:
    """A business transaction for a `def` handler, and what its first steps found.

    A request that waits for its connection occupies no handler's thread. The thread that got the connection runs the
    first steps itself: in the queue they would wait behind the requests that wait for this very connection.
    """
    runtime = installation.threads()
    opened: list[tuple[OpenTransaction, Any]] = []
    try:
        await in_thread(installation.openings, lambda: opened.append(runtime.begin(first)))
    except asyncio.CancelledError:
        for tx, _ in opened:
            installation.settles.submit(tx.rollback)
        raise
    tx, found = opened[0]
    return ThreadedTransaction(tx, installation.settles), found


class ThreadedTransaction:
    """The transaction of a `def` handler, for the exchange, which ends it from the event loop.

    A call that is cancelled goes on in its thread, so the next one waits for it: one thread at a time has a connection.
    """

    def __init__(self, tx: OpenTransaction, executor: Executor) -> None:
        self._tx = tx
        self._executor = executor
        self._turn = threading.Lock()

    @property
    def connection(self) -> Any:  # noqa: ANN401  (whatever the driver's users know)
        """The connection that the handler got."""
        return self._tx.connection

    async def run(self, body: Body[T]) -> T:
        """Run statements inside the transaction."""
        return await self._do(lambda: self._tx.run(body))

    async def commit(self) -> None:
        """Commit."""
        await self._do(self._tx.commit)

    async def rollback(self) -> None:
        """Undo everything and give the connection back."""
        await self._do(self._tx.rollback)

    async def _do(self, job: Callable[[], T]) -> T:
        def in_turn() -> T:
            with self._turn:
                return job()

        return await asyncio.get_running_loop().run_in_executor(self._executor, in_turn)


MOST_ROUTES: Final = 10_000
_ROUTED: Final = ("endpoint", "path_params", "route")
"""What a framework's router writes into the scope. Outer middleware may read it there afterwards."""


class KeyedRoute(NamedTuple):
    """The route that a request with a key took."""

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
        """Write into the scope what the router would write."""
        scope.update(self.routed)
        if "path_params" in self.routed:
            scope["path_params"] = dict(self.routed["path_params"])

    def leave(self, scope: Scope) -> None:
        """Undo `enter`, because the application's router will run after all."""
        for name in self.routed:
            scope.pop(name, None)


class KeyedRoutes:
    """The routes of recently answered keys, by the header line that the client sent. The oldest is dropped first."""

    __slots__ = ("_last", "_most", "known")

    def __init__(self, most: int = MOST_ROUTES) -> None:
        self.known: dict[bytes | None, KeyedRoute] = {}
        self._last: tuple[object, KeyedRoute | None] = (None, None)
        """The route that was added last: requests with many keys share one route, and so one `KeyedRoute`."""
        self._most = most

    def add(self, line: bytes, scope: Scope, root_path: str, enrolment: Enrolment) -> None:
        """Remember the route of a request."""
        known = self.known
        if len(known) >= self._most and line not in known:
            del known[next(iter(known))]
        at, route = self._last
        here = (scope["method"], scope["path"], root_path, scope["endpoint"])
        if route is None or at != here:
            routed = {name: scope[name] for name in _ROUTED if name in scope}
            route = KeyedRoute(*here[:3], enrolment, routed)
            self._last = here, route
        known[line] = route
