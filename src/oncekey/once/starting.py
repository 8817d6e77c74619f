"""What is checked before the first request: a mistake found now is not found by a client. And which one serves what."""

from __future__ import annotations

import inspect
import logging
import multiprocessing
import os
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol, cast

from oncekey.core.errors import ConfigurationError
from oncekey.core.lazy import Lazy, load
from oncekey.core.model import SECOND, Effects
from oncekey.core.policy import Policy, micros
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
    from oncekey.observe import events
    from oncekey.observe.events import Notify, Observer
    from oncekey.once import Once, surveying
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
    surveying = Lazy("oncekey.once.surveying")
    taking = Lazy("oncekey.frameworks.taking")
    tasks = Lazy("oncekey.workers.tasks")
    threaded = Lazy("oncekey.frameworks.blocking")

NO_AWAITING = (
    "{operation} is `async def`, and Once was given blocking connections: make the handler a plain `def`, or give Once "
    "a URL or an engine made by create_async_engine(...)"
)
ABOVE_A_LOGIN = (
    "{handler}: @once.protect(...) is above {decorator}, so a stored answer would be given to every caller who has the "
    "key, without its check: put @once.protect directly above the function, below every other decorator"
)
LOGINS = (
    *("authlib", "flask_httpauth", "flask_jwt_extended", "flask_login", "flask_principal", "flask_security"),
    "starlette.authentication",
)
"""Packages and modules whose decorators decide who may call a handler."""
_WHO = r"(?:login|auth\w*|jwt|token|permissions?|roles?|scopes?|fresh|admin|staff|superuser|users?|access)"
_LOGIN = re.compile(
    rf"(?:\w+_)?{_WHO}_(?:required|accepted|only)|(?:requires?|needs?|has|checks?|ensures?|verify)_(?:\w+_)?{_WHO}"
    r"|requires|authori[sz]ed?|authenticated?|user_passes_test"
)
_NAMELESS = (lambda: None).__code__

NO_PHASE = "on this store a PHASED handler has op.call and op.value, and no op.phase: it shares no transaction"
NO_RECONCILING = (
    "resolvers and webhooks settle what is unknown, and have nothing to work with on this store: see `oncekey stores`"
)

APART = (
    "oncekey: %s is %s and takes neither op nor once.session or once.connection: what it writes by itself is not "
    "committed with its key, so a retry after a crash writes it again; write through op.connection or once.session; if "
    "it writes nothing, let it take op all the same"
)

STEPS = 10
"""How many steps of the store's clock a lease has at least: one more or less must not matter."""
BARE = (
    "{handler} is served without its protection: put @once.protect(...) directly above the function and below the "
    "route decorator"
)
ONLY_SAFE = (
    "{operation} is served at {path} by {methods} only, where a key has no effect: leave @once.protect out there, or "
    "serve it by POST, PUT, PATCH or DELETE"
)
COARSE = "lease={lease} is too short for a store whose clock goes by steps of {step:g} s: make it ten times that"

log = logging.getLogger("oncekey")


def notify_all(observers: tuple[Observer, ...]) -> Notify | None:
    """Calls all observers; None: there are none, and what reports to them is not imported."""
    if not observers:
        return None
    load("engine.notifying")
    return events.telling(observers)


def check_settings(owner: Once, engine: AsyncEngine | Engine, *, blocking: bool = False) -> None:
    """Refuse what the store, the driver or a missing package cannot do, before the first request asks for it."""
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
    """Refuse handlers whose effects need what the store, its driver or this installation does not have."""
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
    if any(enrolment.blocking for enrolment in beyond_inline):
        blocking()  # a missing blocking driver is found now, and not at the first request


def check_parts(store: Store, policies: Sequence[Policy], *, topics: bool, reconciles: bool) -> None:
    """Refuse parts of an application that have nothing to work with on this store, and say what it lacks besides."""
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
        log.warning("oncekey: this store keeps no audit: moves that no request made are lines of the log")


def warn_of_memory(engine: AsyncEngine | Engine, environ: Mapping[str, str], parent: object) -> None:
    """Say that a store in memory protects one process only, and louder where there are several.

    Servers with several processes say so by `WEB_CONCURRENCY`, or start them as children of one.
    """
    if not getattr(engine.store, "of_one_process", False):
        return
    log.warning("oncekey: the store is memory: it forgets every key when this process ends; it is meant for tests")
    if parent is not None or environ.get("WEB_CONCURRENCY", "1") not in {"", "1"}:
        log.error(
            "oncekey: this looks like one process of several, and each has a memory: store of its own: a request that "
            "is sent twice may be executed twice; use sqlite:///shop.db or postgresql://"
        )


def check_handler(handler: Callable[..., Any]) -> None:
    """Refuse to protect what is no function, what is protected already, and what has a login below the protection."""
    if not inspect.isroutine(handler):
        raise ConfigurationError(
            "@once.protect(...) goes above a function; in a class-based endpoint, above the method"
        )
    if hasattr(handler, "__oncekey_function__"):
        raise ConfigurationError(
            f"{handler.__qualname__} is protected by @once.function already: let the handler call it, or take one of "
            "the two away"
        )
    _check_order(handler)


def _check_order(handler: Callable[..., Any]) -> None:
    """Above a login, every caller who has a key would get the answer of the first one."""
    for layer in layers(handler):
        if not hasattr(layer, "__wrapped__"):
            return  # the function itself, whatever it is called
        module = getattr(layer, "__globals__", {}).get("__name__", "")
        package = next((one for one in LOGINS if f"{module}.".startswith(f"{one}.")), None)
        parts = getattr(layer, "__code__", _NAMELESS).co_qualname.split(".")
        named = [part for part in parts if _LOGIN.fullmatch(part.strip("_"))]
        if package is not None or named:
            decorator = named[0] if named else f"the decorator of {package}"
            raise ConfigurationError(ABOVE_A_LOGIN.format(handler=handler.__qualname__, decorator=decorator))


def threads_for(owner: Once, called: str, options: Mapping[str, Any]) -> threaded.Threads:
    """What the requests of an application in threads share, by the options of the method that installs it."""
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
    """Refuse an application whose routes, enrolments and installations do not fit together."""
    if installation is not None and installation.check is not None:
        installation.check()
        check_handlers([route for one in owner.apps for route in listing.listed(one) or ()], enrolled)
        return
    if "starlette" not in sys.modules or (not hasattr(app, "routes") and not hasattr(app, "app")):
        return  # what it serves cannot be seen
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
    """The routes of an application of any framework; None: they cannot be seen."""
    return listing.listed(app)


def warn_of_own_sessions(owner: Once) -> None:
    """Name the handlers that take no transaction: rows that they write themselves do not commit with their key."""
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
    """Say once how much of the application is protected, and what a seal does not hide; `oncekey audit` says more."""
    if owner.seal is not None and owner.policy.secret is None:
        log.warning(
            "oncekey: content is sealed, but fingerprints are plain hashes without Policy(secret=...): who can guess a "
            "request can check the guess"
        )
    if not owner.survey or not owner.served or not log.isEnabledFor(logging.INFO):
        return
    owner.survey = False
    log.info("oncekey: %s", surveying.summary(surveying.survey([owner], owner.served)))


def check_running(owner: Once, app: Any) -> None:  # noqa: ANN401
    """Refuse to serve before everything that protects a route of an application was started."""
    protecting = [route.enrolment.owner for route in starlette.routed(app) if route.enrolment is not None]
    if not all(cast("Once", one).running for one in (owner, *protecting)):
        raise ConfigurationError(NO_LIFESPAN)


class ServedAt(Protocol):
    """Where an endpoint is served."""

    @property
    def path(self) -> str:
        """The path."""

    @property
    def methods(self) -> frozenset[str]:
        """The methods; none are all."""

    def serves(self, handler: Callable[..., Any]) -> bool:
        """Whether a handler is called here."""


def check_handlers(served: Iterable[ServedAt], protected: Iterable[Callable[..., Any]]) -> None:
    """Refuse to start with a protection that does not protect."""
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
