"""What is checked before the first request: a mistake found now is not found by a client. And which one serves what."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol, cast

from oncekey.core.errors import ConfigurationError
from oncekey.core.model import Effects
from oncekey.engine.kept_request import check_sealing
from oncekey.engine.shell import UNSHARED
from oncekey.frameworks.asgi.nesting import layers
from oncekey.options import NO_LIFESPAN
from oncekey.ports import AsyncShares, Shares
from oncekey.stores.memory import MemoryStore

if TYPE_CHECKING:
    from oncekey.engine.enrolment import Enrolment
    from oncekey.engine.shell import AsyncEngine, Engine
    from oncekey.frameworks.asgi.installation import Installation

log = logging.getLogger("oncekey")


class Installed(Protocol):
    """What is asked of a `Once` here."""

    @property
    def running(self) -> bool:
        """Whether it was started in this event loop."""

    @property
    def apps(self) -> tuple[Any, ...]:
        """The applications that it is installed in."""


def check_effects(
    engine: AsyncEngine | Engine, enrolments: Iterable[Enrolment], blocking: Callable[[], object]
) -> None:
    """Refuse handlers whose effects need what the store, its driver or this installation does not have."""
    sharing = [enrolment for enrolment in enrolments if enrolment.effects is not Effects.INLINE]
    if sharing and not isinstance(engine.driver, AsyncShares | Shares):
        raise ConfigurationError(f"{sharing[0].operation}: {UNSHARED.format(effects=sharing[0].effects.name)}")
    if any(enrolment.blocking for enrolment in sharing):
        blocking()  # a missing blocking driver is found now, and not at the first request
    for enrolment in sharing:
        if enrolment.completes:
            check_sealing(enrolment.policy.secret)


def warn_of_memory(engine: AsyncEngine | Engine, environ: Mapping[str, str], parent: object) -> None:
    """Say that a store in memory protects one process only, and louder where there are several.

    Servers with several processes say so by `WEB_CONCURRENCY`, or start them as children of one.
    """
    if not isinstance(engine.store, MemoryStore):
        return
    log.warning("oncekey: the store is memory: it forgets every key when this process ends; it is meant for tests")
    if parent is not None or environ.get("WEB_CONCURRENCY", "1") not in {"", "1"}:
        log.error(
            "oncekey: this looks like one process of several, and each has a memory: store of its own: a request that "
            "is sent twice may be executed twice; use sqlite:///shop.db or postgresql://"
        )


def check_routes(
    owner: Installed,
    app: Any,  # noqa: ANN401  (an application of any kind)
    installation: Installation | None,
    enrolled: Iterable[Callable[..., Any]],
) -> None:
    """Refuse an application whose routes, enrolments and installations do not fit together."""
    if not hasattr(app, "routes") and not hasattr(app, "app"):
        return  # what it serves cannot be seen
    from oncekey.frameworks import routes  # noqa: PLC0415  (an optional package)

    served = list(routes.routed(app))
    routes.check_owners(served, lambda one: cast("Installed", one).apps)
    if installation is None:
        return
    routes.check_patterns(app, served, installation)
    if installation.respond is None:
        return
    routes.check_placing(app)
    if len(owner.apps) == 1:
        routes.check_handlers(served, enrolled)
    else:
        routes.check_handlers([route for one in owner.apps for route in routes.routed(one)], enrolled)
    if hasattr(app, "openapi"):
        from oncekey.frameworks import fastapi  # noqa: PLC0415  (an optional package)

        fastapi.warn_of_late_commits(app)


def check_running(owner: Installed, app: Any) -> None:  # noqa: ANN401
    """Refuse to serve before everything that protects a route of an application was started."""
    from oncekey.frameworks import routes  # noqa: PLC0415  (an optional package)

    protecting = [route.enrolment.owner for route in routes.routed(app) if route.enrolment is not None]
    if not all(cast("Installed", one).running for one in (owner, *protecting)):
        raise ConfigurationError(NO_LIFESPAN)


def serving(owner: object, handler: Callable[..., Any] | None, apps: Sequence[Any]) -> Any:  # noqa: ANN401
    """The application whose installation claims for a handler; the only one there is need not be asked."""
    if handler is None or not apps:
        return None
    if len(apps) == 1:
        return apps[0]
    from oncekey.frameworks import routes  # noqa: PLC0415  (an optional package)

    for app in apps:
        # Where two installations of one Once are in each other, the inner one claims.
        ours = [route for route in routes.routed(app) if route.serves(handler)]
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
