"""The checks at start-up, which find mistakes before the first request does, and the lifespans of a `Once`."""

from __future__ import annotations

import asyncio
import inspect
import logging
import multiprocessing
import os
import re
import sys
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext
from typing import TYPE_CHECKING, Any, Final, Protocol, cast
from weakref import WeakKeyDictionary

from oncekey.core.errors import ConfigurationError
from oncekey.core.lazy import Lazy, load
from oncekey.core.model import SECOND, Effects
from oncekey.core.policy import Policy, micros
from oncekey.core.scope import BindTo
from oncekey.databases import handler_sql
from oncekey.engine.enrolment import SAFE, Enrolment
from oncekey.engine.request import NO_OUTBOX as NO_PARCELS
from oncekey.engine.shell import UNSHARED, AsyncEngine
from oncekey.frameworks.asgi.protect import operation_parameter
from oncekey.frameworks.asgi.requests import layers
from oncekey.frameworks.options import NO_LIFESPAN, NO_WSGI_APP, check_installing
from oncekey.ports.driver import Borrowed
from oncekey.wire import has_threads, shares

if TYPE_CHECKING:
    from oncekey import flask
    from oncekey.engine import fronts, kept_request
    from oncekey.engine.blocking_shell import Engine
    from oncekey.frameworks import blocking as threaded
    from oncekey.frameworks import fastapi, limits, listing, starlette, starlette_patterns, taking
    from oncekey.frameworks.asgi.installation import Installation
    from oncekey.frameworks.shared import ApplicationShared
    from oncekey.observe import events
    from oncekey.observe.events import Notify, Observer
    from oncekey.once import Once, route_report
    from oncekey.ports.store import Store
    from oncekey.stores import cells_upkeep
    from oncekey.workers import tasks
else:
    cells_upkeep = Lazy("oncekey.stores.cells_upkeep")
    events = Lazy("oncekey.observe.events")
    fastapi = Lazy("oncekey.frameworks.fastapi")
    flask = Lazy("oncekey.flask")
    fronts = Lazy("oncekey.engine.fronts")
    kept_request = Lazy("oncekey.engine.kept_request")
    limits = Lazy("oncekey.frameworks.limits")
    listing = Lazy("oncekey.frameworks.listing")
    starlette = Lazy("oncekey.frameworks.starlette")
    starlette_patterns = Lazy("oncekey.frameworks.starlette_patterns")
    route_report = Lazy("oncekey.once.route_report")
    taking = Lazy("oncekey.frameworks.taking")
    tasks = Lazy("oncekey.workers.tasks")
    threaded = Lazy("oncekey.frameworks.blocking")

_OF_CLASSES = ("_update_method_wrapper.<locals>.dummy", "View.as_view.<locals>.view")  # made by Django and Flask
NO_AWAITING = (
    "{operation} is `async def`, and Once was given blocking connections: make the handler a plain `def`, or give Once "
    "a URL or an engine made by create_async_engine(...)"
)
ABOVE_A_LOGIN = (
    "{handler}: @once.protect(...) is above {decorator}, so every caller with the key would receive the stored "
    "response without its check: move @once.protect(...) directly above the function, below every other decorator"
)
LOGINS = (
    *("authlib", "flask_httpauth", "flask_jwt_extended", "flask_login", "flask_principal", "flask_security"),
    "starlette.authentication",
)
"""Packages and modules whose decorators authenticate or authorize the caller of a handler."""
_WHO = r"(?:login|auth\w*|jwt|token|permissions?|roles?|scopes?|fresh|admin|staff|superuser|users?|access)"
_LOGIN = re.compile(
    rf"(?:\w+_)?{_WHO}_(?:required|accepted|only)|(?:requires?|needs?|has|checks?|ensures?|verify)_(?:\w+_)?{_WHO}"
    r"|requires|authori[sz]ed?|authenticated?|user_passes_test"
)
_NAMELESS = (lambda: None).__code__

NO_PRINCIPAL: Final = (
    'Policy(bind_to="principal") needs a function that returns the user of a request: pass principal=... where you '
    "pass tenant=..."
)
NO_PHASE = "on this store a PHASED handler can use op.call and op.value but not op.phase: it has no transactions"
NO_RECONCILING = (
    "resolvers and webhooks need a store that lists unknown outcomes, which this one does not: see `oncekey stores`"
)

APART = (
    "oncekey: %s is %s and takes neither op nor once.session or once.connection: rows that it writes are not committed "
    "with its key, so a retry after a crash writes them again; write through op.connection or once.session; if it "
    "writes nothing, add the parameter op"
)

STEPS = 10
"""The minimum length of a lease, in steps of the store's clock: an error of one step must not matter."""
BARE = (
    "{handler} is served without its protection: move @once.protect(...) directly above the function and below the "
    "route decorator"
)
ONLY_SAFE = (
    "{operation} is served at {path} by {methods} only, where a key has no effect: remove @once.protect there, or "
    "serve it by POST, PUT, PATCH or DELETE"
)
COARSE = "lease={lease} is too short for a store whose clock has steps of {step:g} s: make it ten times that"

log = logging.getLogger("oncekey")


def notify_all(observers: tuple[Observer, ...]) -> Notify | None:
    """A function that calls all observers; None if there are none, and then no reporting module is imported."""
    if not observers:
        return None
    load("engine.notifying")
    return events.notify_all(observers)


def check_settings(owner: Once, engine: AsyncEngine | Engine, *, blocking: bool = False) -> None:
    """Reject settings that the store, the driver or the installed packages do not support."""
    enrolments = [handler.__oncekey__ for handler in owner.enrolled.values()]  # type: ignore[attr-defined]
    policies = owner.policies
    for enrolment in enrolments:
        awaits = not enrolment.blocking and enrolment.effects is not Effects.INLINE
        if awaits and owner.apps and isinstance(owner.store, Borrowed):
            raise ConfigurationError(NO_AWAITING.format(operation=enrolment.operation))
    check_effects(engine, enrolments, owner.blocking)
    topics = owner.has("topics") and bool(owner.topics.names)
    check_parts(engine.store, policies, topics=topics, reconciles=owner.reconciles)
    if any(policy.max_new_keys_per_second or policy.max_lookups_per_second for policy in policies):
        limits.check(policies, blocking=blocking)
    if any(policy.replay_cache or policy.lock_hint for policy in policies):
        fronts.check_fronts(policies, engine.identity)
    warn_of_memory(engine, os.environ, multiprocessing.parent_process())


def check_effects(
    engine: AsyncEngine | Engine, enrolments: Iterable[Enrolment], blocking: Callable[[], object]
) -> None:
    """Reject handlers whose effects the store, its driver or the installed packages do not support."""
    sharing = shares(engine.driver)
    beyond_inline = [enrolment for enrolment in enrolments if enrolment.effects is not Effects.INLINE]
    for enrolment in beyond_inline:
        if enrolment.effects is Effects.OUTBOX and sharing and engine.store.parcels is None:
            raise ConfigurationError(f"{enrolment.operation}: {NO_PARCELS}")
        if enrolment.transactional and not sharing:
            raise ConfigurationError(f"{enrolment.operation}: {UNSHARED.format(effects=enrolment.effects.name)}")
        if enrolment.completes:
            kept_request.check_sealing(enrolment.policy.secret)
        if enrolment.effects is Effects.PHASED and not sharing:
            log.warning("oncekey: %s: %s", enrolment.operation, NO_PHASE)
    in_thread = next((enrolment for enrolment in beyond_inline if enrolment.blocking), None)
    if in_thread is not None:
        try:
            blocking()  # raises now, and not at the first request, if the blocking driver is missing
        except ConfigurationError as error:
            raise ConfigurationError(f"{in_thread.operation} is `def`, so it runs in a thread: {error}") from None


def check_parts(store: Store, policies: Sequence[Policy], *, topics: bool, reconciles: bool) -> None:
    """Reject parts of the application that this store does not support, and warn about a missing audit."""
    if topics and store.outbox is None:
        raise ConfigurationError(tasks.NO_OUTBOX)
    if reconciles and (store.reconcile is None or store.operate is None):
        raise ConfigurationError(NO_RECONCILING)
    shortest = min(policy.lease for policy in policies)
    if micros(shortest) < STEPS * store.resolution:
        raise ConfigurationError(COARSE.format(lease=shortest, step=store.resolution / SECOND))
    if not getattr(store, "of_cells", False):
        return
    if any(policy.max_live_keys is not None for policy in policies):
        raise ConfigurationError(cells_upkeep.NO_COUNT)
    if store.audit is None:
        log.warning("oncekey: this store has no audit trail: transitions outside requests are only logged")


def warn_of_memory(engine: AsyncEngine | Engine, environ: Mapping[str, str], parent: object) -> None:
    """Warn that a store in memory protects one process only; log an error if there are several processes.

    A server with several processes sets `WEB_CONCURRENCY`, or starts them as children of one process.
    """
    if not getattr(engine.store, "of_one_process", False):
        return
    log.warning("oncekey: the store is memory: every key is lost when this process ends; use it for tests only")
    if parent is not None or environ.get("WEB_CONCURRENCY", "1") not in {"", "1"}:
        log.error(
            "oncekey: there seem to be several processes, each with its own memory: store: a request sent twice may "
            "be executed twice; use sqlite:///shop.db or postgresql://"
        )


def check_callers(policy: Policy, application: ApplicationShared) -> None:
    """Reject keys that are bound to users in an application that does not name them."""
    if policy.bind_to is BindTo.PRINCIPAL and not application.names_principals:
        raise ConfigurationError(NO_PRINCIPAL)


def check_handler(handler: Callable[..., Any]) -> None:
    """Reject a handler that is not a function, is already protected, or has a login below the protection."""
    if not inspect.isroutine(handler) or handler.__qualname__ in _OF_CLASSES:
        raise ConfigurationError(
            "@once.protect(...) goes above a function; in a class directly above the method, without method_decorator"
        )
    if hasattr(handler, "__oncekey_function__"):
        raise ConfigurationError(
            f"{handler.__qualname__} is already protected by @once.function: call it, or remove one of the decorators"
        )
    if any(hasattr(layer, "__oncekey__") for layer in layers(handler)):
        raise ConfigurationError(f"{handler.__qualname__} is protected twice: remove one @once.protect(...)")
    _check_order(handler)


def _check_order(handler: Callable[..., Any]) -> None:
    """Above a login, every caller with the key would receive the first caller's response."""
    for layer in layers(handler):
        if not hasattr(layer, "__wrapped__"):
            return  # the function itself
        module = getattr(layer, "__globals__", {}).get("__name__", "")
        package = next((one for one in LOGINS if f"{module}.".startswith(f"{one}.")), None)
        parts = getattr(layer, "__code__", _NAMELESS).co_qualname.split(".")
        named = [part for part in parts if _LOGIN.fullmatch(part.strip("_"))]
        if package is not None or named:
            decorator = named[0] if named else f"the decorator of {package}"
            raise ConfigurationError(ABOVE_A_LOGIN.format(handler=handler.__qualname__, decorator=decorator))


def threads_for(owner: Once, called: str, options: Mapping[str, Any]) -> threaded.Threads:
    """The installation of an application that runs in threads, with the options of `once.wsgi` or `once.flask`."""
    check_installing(options, threaded.WsgiOptions if called == "wsgi" else threaded.ThreadOptions, called)
    if not has_threads(owner.store):
        raise ConfigurationError(NO_WSGI_APP.format(called=called))
    given = dict(options)
    return threaded.Threads(owner, owner.policy, status_path=given.pop("status", None), **given)


def place_in_flask(owner: Once, app: Any, threads: threaded.Threads, *, shows_request: bool) -> None:  # noqa: ANN401
    """Protect the views of a Flask application, in place."""
    owner.adopt(app, threads)
    flask.place(app, threads, owner.enrolled, shows_request=shows_request)


def check_routes(
    owner: Once,
    app: Any,  # noqa: ANN401  (an application of any kind)
    installation: Installation | None,
    enrolled: Iterable[Callable[..., Any]],
) -> None:
    """Reject an application whose routes, enrolments and installations do not fit together."""
    if installation is not None and installation.check is not None:
        installation.check()
        check_handlers([route for one in owner.apps for route in listing.listed(one) or ()], enrolled)
        return
    if "starlette" not in sys.modules or (not hasattr(app, "routes") and not hasattr(app, "app")):
        return  # its routes cannot be listed
    served = list(starlette.routed(app))
    starlette.check_owners(served, lambda one: cast("Once", one).apps)
    if installation is None:
        return
    if installation.patterns.patterns:
        starlette_patterns.check_patterns(app, served, installation)
    if installation.respond is None:
        return
    starlette.check_placing(app)
    if len(owner.apps) == 1:
        check_handlers(served, enrolled)
    else:
        check_handlers([route for one in owner.apps for route in starlette.routed(one)], enrolled)
    if hasattr(app, "openapi"):
        fastapi.warn_of_late_commits(app)


def routes_of(app: Any) -> Iterable[listing.Served] | None:  # noqa: ANN401
    """The routes of an application of any framework; None if they cannot be listed."""
    return listing.listed(app)


def warn_of_own_sessions(owner: Once) -> None:
    """Warn about handlers that take no transaction: rows that they write do not commit with their key."""
    without = [one for one in owner.enrolled.values() if _takes_no_operation(one)]
    if not without:
        return
    called: dict[int, list[Callable[..., Any]]] = {}
    for app in owner.served:
        for route in listing.listed(app) or ():
            for layer in layers(route.endpoint):
                called.setdefault(id(layer), []).extend(route.dependencies)
    for handler in without:
        enrolment: Enrolment = handler.__oncekey__  # type: ignore[attr-defined]  # every protected handler has one
        if taking.writes_apart(handler, enrolment, called.get(id(handler), ())):
            handler_sql.log.warning(APART, enrolment.operation, enrolment.effects.name)


def _takes_no_operation(handler: Any) -> bool:  # noqa: ANN401  (a protected handler)
    enrolment: Enrolment = handler.__oncekey__
    bare = inspect.unwrap(handler)
    return enrolment.transactional and operation_parameter(bare, blocking=enrolment.blocking) is None


def log_protection(owner: Once) -> None:
    """Log once how many routes are protected, and warn about fingerprints that a seal does not hide."""
    if owner.seal is not None and owner.policy.secret is None:
        log.warning(
            "oncekey: content is sealed, but fingerprints are plain hashes, which allow a guess at a request to be "
            "verified: set Policy(secret=...)"
        )
    if not owner.survey or not owner.served or not log.isEnabledFor(logging.INFO):
        return
    owner.survey = False
    log.info("oncekey: %s", route_report.summary(route_report.route_lines([owner], owner.served)))


def check_running(owner: Once, app: Any) -> None:  # noqa: ANN401
    """Raise if a `Once` that protects a route of the application was not started."""
    protecting = [route.enrolment.owner for route in starlette.routed(app) if route.enrolment is not None]
    if not all(cast("Once", one).running for one in (owner, *protecting)):
        raise ConfigurationError(NO_LIFESPAN)


class ServedAt(Protocol):
    """A route."""

    @property
    def path(self) -> str:
        """The path."""

    @property
    def methods(self) -> frozenset[str]:
        """The methods; an empty set means all."""

    def serves(self, handler: Callable[..., Any]) -> bool:
        """Whether the route calls a handler."""


def check_handlers(served: Iterable[ServedAt], protected: Iterable[Callable[..., Any]]) -> None:
    """Raise if a protected handler is served without its protection, or only by safe methods."""
    served = list(served)
    for handler in protected:
        places = [route for route in served if route.serves(handler)]
        if not places:
            if any(route.serves(inspect.unwrap(handler)) for route in served):
                raise ConfigurationError(BARE.format(handler=handler.__qualname__))
            log.warning("oncekey: %s is protected, but no route serves it", handler.__qualname__)
            continue
        methods = {method for route in places for method in route.methods}
        if methods and methods <= SAFE and all(route.methods for route in places):
            named = ", ".join(sorted(methods))
            operation = handler.__oncekey__.operation  # type: ignore[attr-defined]  # every protected handler has one
            raise ConfigurationError(ONLY_SAFE.format(operation=operation, path=places[0].path, methods=named))


class Lifespans:
    """Counts the entries of `once.lifespan` in each event loop: the end of the outermost one stops the `Once`."""

    def __init__(self, owner: Once) -> None:
        self._owner = owner
        self._open: WeakKeyDictionary[asyncio.AbstractEventLoop, int] = WeakKeyDictionary()
        self._serving: WeakKeyDictionary[asyncio.AbstractEventLoop, int] = WeakKeyDictionary()

    def around(
        self, own: Callable[[Any], AbstractAsyncContextManager[Any]]
    ) -> Callable[[Any], AbstractAsyncContextManager[Any]]:
        """The lifespan of an application, with its own inside oncekey's.

        The store is open while the application starts and stops. Workers stop, and settlements end, before the
        application's own shutdown, so oncekey runs nothing when its resources are closed.
        """

        @asynccontextmanager
        async def both(app: Any) -> AsyncIterator[Any]:  # noqa: ANN401
            async with self.opened(app), own(app) as state, self.serving():
                yield state

        return both

    @asynccontextmanager
    async def opened(self, app: Any) -> AsyncIterator[None]:  # noqa: ANN401  (an application of any kind)
        """Check everything, and close the store at the end."""
        loop = asyncio.get_running_loop()
        self._open[loop] = self._open.get(loop, 0) + 1
        try:
            await self._owner.start(app)
            yield
        finally:
            self._open[loop] -= 1
            if not self._open[loop]:
                await self._owner.stop()

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[None]:
        """Run the workers, if configured, and wait for settlements at the end."""
        loop = asyncio.get_running_loop()
        others = self._serving.get(loop, 0)
        self._serving[loop] = others + 1
        try:
            async with nullcontext() if others else self._owner.working():
                yield
        finally:
            # The workers have ended by now; their operations are drained too.
            self._serving[loop] -= 1
            if not self._serving[loop]:
                await self._owner.drain()
