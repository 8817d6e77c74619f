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
from oncekey.core.model import SECOND, Effects
from oncekey.core.policy import Policy, micros
from oncekey.drivers import own_connections
from oncekey.engine.fronts import check_fronts
from oncekey.engine.kept_request import check_sealing
from oncekey.engine.request import NO_OUTBOX as NO_PARCELS
from oncekey.engine.shell import UNSHARED, AsyncEngine, Engine
from oncekey.frameworks import limits
from oncekey.frameworks.asgi.nesting import layers
from oncekey.frameworks.blocking import Threads
from oncekey.frameworks.listing import check_handlers, listed
from oncekey.frameworks.taking import writes_apart
from oncekey.options import NO_LIFESPAN, NO_WSGI_APP, check_installing
from oncekey.ports import Borrowed, Store
from oncekey.stores.cells import CellStore
from oncekey.stores.cells_upkeep import NO_COUNT
from oncekey.stores.memory import MemoryStore
from oncekey.wire import abilities, has_threads
from oncekey.workers.tasks import NO_OUTBOX

if TYPE_CHECKING:
    from oncekey.engine.enrolment import Enrolment
    from oncekey.frameworks.asgi.installation import Installation
    from oncekey.once import Once

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
COARSE = "lease={lease} is too short for a store whose clock goes by steps of {step:g} s: make it ten times that"

log = logging.getLogger("oncekey")


class Installed(Protocol):
    """What is asked of a `Once` here."""

    @property
    def running(self) -> bool:
        """Whether it was started in this event loop."""

    @property
    def apps(self) -> tuple[Any, ...]:
        """The applications that it is installed in."""


def check_settings(owner: Once, engine: AsyncEngine | Engine, *, blocking: bool = False) -> None:
    """Refuse what the store, the driver or a missing package cannot do, before the first request asks for it."""
    enrolments = [handler.__oncekey__ for handler in owner.enrolled.values()]  # type: ignore[attr-defined]
    policies = owner.policies
    for enrolment in enrolments:
        awaits = not enrolment.blocking and enrolment.effects is not Effects.INLINE
        if awaits and owner.apps and isinstance(owner.store, Borrowed):
            raise ConfigurationError(NO_AWAITING.format(operation=enrolment.operation))
    check_effects(engine, enrolments, owner.blocking)
    check_parts(engine.store, policies, topics=bool(owner.topics.names), reconciles=owner.reconciles)
    limits.check(policies, blocking=blocking)
    check_fronts(policies, engine.identity)
    warn_of_memory(engine, os.environ, multiprocessing.parent_process())


def check_effects(
    engine: AsyncEngine | Engine, enrolments: Iterable[Enrolment], blocking: Callable[[], object]
) -> None:
    """Refuse handlers whose effects need what the store, its driver or this installation does not have."""
    able = abilities(engine.store, engine.driver)
    beyond_inline = [enrolment for enrolment in enrolments if enrolment.effects is not Effects.INLINE]
    for enrolment in beyond_inline:
        if enrolment.effects is Effects.OUTBOX and able.phase and not able.outbox:
            raise ConfigurationError(f"{enrolment.operation}: {NO_PARCELS}")
        if enrolment.effects.name not in able.effects:
            raise ConfigurationError(f"{enrolment.operation}: {UNSHARED.format(effects=enrolment.effects.name)}")
        if enrolment.completes:
            check_sealing(enrolment.policy.secret)
        if enrolment.effects is Effects.PHASED and not able.phase:
            log.warning("oncekey: %s: %s", enrolment.operation, NO_PHASE)
    if any(enrolment.blocking for enrolment in beyond_inline):
        blocking()  # a missing blocking driver is found now, and not at the first request


def check_parts(store: Store, policies: Sequence[Policy], *, topics: bool, reconciles: bool) -> None:
    """Refuse parts of an application that have nothing to work with on this store, and say what it lacks besides."""
    if topics and store.outbox is None:
        raise ConfigurationError(NO_OUTBOX)
    if reconciles and (store.reconcile is None or store.operate is None):
        raise ConfigurationError(NO_RECONCILING)
    shortest = min(policy.lease for policy in policies)
    if micros(shortest) < STEPS * store.resolution:
        raise ConfigurationError(COARSE.format(lease=shortest, step=store.resolution / SECOND))
    if not isinstance(getattr(store, "unsealed", store), CellStore):
        return
    if any(policy.max_live_keys is not None for policy in policies):
        raise ConfigurationError(NO_COUNT)
    if store.audit is None:
        log.warning("oncekey: this store keeps no audit: moves that no request made are lines of the log")


def warn_of_memory(engine: AsyncEngine | Engine, environ: Mapping[str, str], parent: object) -> None:
    """Say that a store in memory protects one process only, and louder where there are several.

    Servers with several processes say so by `WEB_CONCURRENCY`, or start them as children of one.
    """
    if not isinstance(getattr(engine.store, "unsealed", engine.store), MemoryStore):
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


def threads_for(owner: Once, called: str, kind: type, options: Mapping[str, Any]) -> Threads:
    """What the requests of an application in threads share, by the options of the method that installs it."""
    check_installing(options, kind, called)
    if not has_threads(owner.store):
        raise ConfigurationError(NO_WSGI_APP.format(called=called))
    given = dict(options)
    return Threads(owner, owner.policy, status_path=given.pop("status", None), **given)


def check_routes(
    owner: Installed,
    app: Any,  # noqa: ANN401  (an application of any kind)
    installation: Installation | None,
    enrolled: Iterable[Callable[..., Any]],
) -> None:
    """Refuse an application whose routes, enrolments and installations do not fit together."""
    if installation is not None and installation.check is not None:
        installation.check()
        check_handlers([route for one in owner.apps for route in listed(one) or ()], enrolled)
        return
    if "starlette" not in sys.modules or (not hasattr(app, "routes") and not hasattr(app, "app")):
        return  # what it serves cannot be seen
    from oncekey.frameworks import starlette  # noqa: PLC0415  (an optional package)

    served = list(starlette.routed(app))
    starlette.check_owners(served, lambda one: cast("Installed", one).apps)
    if installation is None:
        return
    starlette.check_patterns(app, served, installation)
    if installation.respond is None:
        return
    starlette.check_placing(app)
    if len(owner.apps) == 1:
        check_handlers(served, enrolled)
    else:
        check_handlers([route for one in owner.apps for route in starlette.routed(one)], enrolled)
    if hasattr(app, "openapi"):
        from oncekey.frameworks import fastapi  # noqa: PLC0415  (an optional package)

        fastapi.warn_of_late_commits(app)


def warn_of_own_sessions(owner: Once) -> None:
    """Name the handlers that take no transaction: rows that they write themselves do not commit with their key."""
    called: dict[int, list[Callable[..., Any]]] = {}
    for app in owner.served:
        for route in listed(app) or ():
            for layer in layers(route.endpoint):
                called.setdefault(id(layer), []).extend(route.dependencies)
    for operation, handler in owner.enrolled.items():
        enrolment: Enrolment = handler.__oncekey__  # type: ignore[attr-defined]  # every protected handler has one
        if writes_apart(handler, enrolment, called.get(id(handler), ())):
            own_connections.log.warning(APART, operation, enrolment.effects.name)


def log_protection(owner: Once) -> None:
    """Say once how much of the application is protected, and what a seal does not hide; `oncekey audit` says more."""
    if owner.seal is not None and owner.policy.secret is None:
        log.warning(
            "oncekey: content is sealed, but fingerprints are plain hashes without Policy(secret=...): who can guess a "
            "request can check the guess"
        )
    if not owner.survey or not owner.served or not log.isEnabledFor(logging.INFO):
        return
    from oncekey.surveying import summary, survey  # noqa: PLC0415  (read only where it is logged)

    owner.survey = False
    log.info("oncekey: %s", summary(survey([owner], owner.served)))


def check_running(owner: Installed, app: Any) -> None:  # noqa: ANN401
    """Refuse to serve before everything that protects a route of an application was started."""
    from oncekey.frameworks import starlette  # noqa: PLC0415  (an optional package)

    protecting = [route.enrolment.owner for route in starlette.routed(app) if route.enrolment is not None]
    if not all(cast("Installed", one).running for one in (owner, *protecting)):
        raise ConfigurationError(NO_LIFESPAN)


def serving(owner: object, handler: Callable[..., Any] | None, apps: Sequence[Any]) -> Any:  # noqa: ANN401
    """The application whose installation claims for a handler; the only one there is need not be asked."""
    if handler is None or not apps:
        return None
    if len(apps) == 1:
        return apps[0]
    for app in apps:
        if not hasattr(app, "user_middleware"):
            if any(route.serves(handler) for route in listed(app) or ()):
                return app
            continue
        from oncekey.frameworks import starlette  # noqa: PLC0415  (an optional package)

        # Where two installations of one Once are in each other, the inner one claims.
        ours = [route for route in starlette.routed(app) if route.serves(handler)]
        if any(sum(one.engines is owner for one in route.passed) == 1 for route in ours):
            return app
    return None


def serving_threads(handler: Callable[..., Any], apps: Sequence[Any]) -> Any:  # noqa: ANN401
    """The WSGI application that serves a handler: of several the one of Flask whose views say so."""
    if len(apps) == 1:
        return apps[0]
    for app in apps:
        for view in getattr(app, "view_functions", {}).values():
            methods = vars(getattr(view, "view_class", object)).values()
            if any(layer is handler for one in (view, *methods) for layer in layers(one)):
                return app
    return None
