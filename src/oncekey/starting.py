"""What is checked before the first request: a mistake found now is not found by a client. And which one serves what."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from oncekey.core.errors import ConfigurationError
from oncekey.core.model import Effects
from oncekey.engine.shell import UNSHARED
from oncekey.frameworks.asgi.kept_request import check_sealing
from oncekey.ports import AsyncShares
from oncekey.stores.memory import MemoryStore

if TYPE_CHECKING:
    from oncekey.engine.shell import AsyncEngine
    from oncekey.frameworks.asgi.enrolment import Enrolment
    from oncekey.frameworks.asgi.installation import Installation

log = logging.getLogger("oncekey")


def check_effects(engine: AsyncEngine, enrolments: Iterable[Enrolment], blocking: Callable[[], object]) -> None:
    """Refuse handlers whose effects need what the store, its driver or this installation does not have."""
    sharing = [enrolment for enrolment in enrolments if enrolment.effects is not Effects.INLINE]
    if sharing and not isinstance(engine.driver, AsyncShares):
        raise ConfigurationError(f"{sharing[0].operation}: {UNSHARED.format(effects=sharing[0].effects.name)}")
    if any(enrolment.blocking for enrolment in sharing):
        blocking()  # a missing blocking driver is found now, and not at the first request
    for enrolment in sharing:
        if enrolment.completes:
            check_sealing(enrolment.policy.secret)


def warn_of_memory(engine: AsyncEngine, environ: Mapping[str, str], parent: object) -> None:
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


def check_routes(app: Any, installation: Installation, enrolled: Iterable[Callable[..., Any]]) -> None:  # noqa: ANN401
    """Refuse an application whose routes and enrolments do not fit together."""
    from oncekey.frameworks import starlette  # noqa: PLC0415  (an optional package)

    if hasattr(app, "openapi"):
        from oncekey.frameworks import fastapi  # noqa: PLC0415  (an optional package)

        served = list(fastapi.served(app))
        fastapi.warn_of_late_commits(app)
    else:
        served = list(starlette.routed(app.routes))
    starlette.check(app, served, enrolled)
    starlette.check_patterns(served, installation)


def serving(handler: Callable[..., Any] | None, apps: Sequence[Any]) -> Any:  # noqa: ANN401  (an application)
    """The application with the route of a handler; the only one there is need not be asked."""
    if handler is None or not apps:
        return None
    if len(apps) == 1:
        return apps[0]
    from oncekey.frameworks import starlette  # noqa: PLC0415  (an optional package)

    for app in apps:
        if any(route.endpoint is handler for route in starlette.routed(app.routes)):
            return app
    return None
