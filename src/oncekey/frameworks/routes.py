"""The routes of a Starlette or FastAPI application, and the checks that find a mistake in them at start-up."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, cast

from starlette.routing import BaseRoute, Host, Match, Mount

from oncekey.core.errors import ConfigurationError
from oncekey.frameworks.asgi.middleware import OncekeyMiddleware
from oncekey.frameworks.asgi.nesting import layers
from oncekey.frameworks.listing import NO_ROUTE, TWICE, Served

if TYPE_CHECKING:
    from starlette.applications import Starlette
    from starlette.middleware import Middleware

    from oncekey.engine.enrolment import Enrolment, Pattern
    from oncekey.frameworks.asgi.installation import Installation

NOT_PLACED: Final = (
    "the middleware of oncekey must be there once and innermost: call once.install(app) and use "
    "app.add_middleware for everything else"
)
NOT_INSTALLED: Final = (
    "{operation} is served at {path}, and the Once that protects it is not installed there: call "
    "install(app, tenant=...) of that Once on this application"
)
_UNWRAPPED: Final = 20


@dataclass(frozen=True, slots=True)
class Routed:
    """An endpoint, where it is served, and the installations that a request passes on its way, from the outside in."""

    path: str
    methods: frozenset[str]
    endpoint: Callable[..., Any]
    passed: tuple[Installation, ...]

    @property
    def enrolment(self) -> Enrolment | None:
        """How it is protected, below whatever decorators."""
        return next((layer.__oncekey__ for layer in layers(self.endpoint) if hasattr(layer, "__oncekey__")), None)

    def claimed_by(self, owner: object) -> Installation | None:
        """The installation of a `Once` that claims here: its innermost one."""
        return next((one for one in reversed(self.passed) if one.engines is owner), None)

    @property
    def protected(self) -> bool:
        """Whether an enrolled endpoint meets its own `Once`, installed so that it can answer for the handler."""
        claiming = None if self.enrolment is None else self.claimed_by(self.enrolment.owner)
        return claiming is not None and claiming.respond is not None

    def serves(self, handler: Callable[..., Any]) -> bool:
        """Whether a handler is called here, below whatever decorators."""
        return any(layer is handler for layer in layers(self.endpoint))


def routed(app: Any) -> Iterator[Routed]:  # noqa: ANN401  (an application of any kind)
    """Every endpoint that an application serves, with mounts and included routers followed."""
    yield from _walk(app, "", ())


def installations_of(app: Any) -> tuple[Installation, ...]:  # noqa: ANN401
    """The installations in an application's own middleware."""
    placed = [_installation(one) for one in getattr(app, "user_middleware", ()) if _is_ours(one)]
    return tuple(installation for installation in placed if installation is not None)


def check_placing(app: Starlette) -> None:
    """Refuse middleware inside of ours: what it changes would be stored."""
    placed = [_is_ours(middleware) for middleware in app.user_middleware]
    owners = {id(installation.engines) for installation in installations_of(app)}
    innermost = True in placed and all(placed[placed.index(True) :])
    if not innermost or len(owners) != placed.count(True):
        raise ConfigurationError(NOT_PLACED)


def check_owners(served: Iterable[Routed], around: Callable[[object], Iterable[Any]]) -> None:
    """Refuse a handler whose own `Once` no request meets; `around` names the applications that one is installed in."""
    for route in served:
        enrolment = route.enrolment
        if enrolment is None or route.protected:
            continue
        others = (other for app in around(enrolment.owner) for other in routed(app))
        if not any(other.endpoint is route.endpoint and other.protected for other in others):
            raise ConfigurationError(NOT_INSTALLED.format(operation=enrolment.operation, path=route.path))


def check_patterns(app: Any, served: Iterable[Routed], installation: Installation) -> None:  # noqa: ANN401
    """Refuse a handler that would meet its own claim, and a pattern that no route matches."""
    served = list(served)
    for route in served:
        for method in route.methods:
            if route.enrolment is not None and installation.patterns.find(method, route.path) is not None:
                raise ConfigurationError(TWICE.format(method=method, path=route.path))
    for pattern in installation.patterns.patterns:
        known = any(_meant(pattern, route) for route in served)
        if not known and not _leads(app, pattern.method, pattern.sample):
            raise ConfigurationError(NO_ROUTE.format(pattern=pattern.text))


def _meant(pattern: Pattern, route: Routed) -> bool:
    methods = route.methods or {pattern.method}
    return any(pattern.matches(method, route.path) for method in methods)


def _leads(app: Any, method: str, path: str) -> bool:  # noqa: ANN401
    """Whether a request would be routed, as far as can be seen: what is mounted and has no routes may take it."""
    app, _ = _unwrapped(app, ())
    routes = getattr(app, "routes", None)
    if routes is None:
        return True
    scope = {"type": "http", "method": method, "path": path, "root_path": "", "headers": [], "path_params": {}}
    for route in routes:
        if not isinstance(route, BaseRoute):
            return True
        match, child = route.matches(scope)
        if match is not Match.FULL:
            continue
        if not isinstance(route, Mount | Host):
            return True
        inner = path.removeprefix(child.get("root_path", ""))
        if _leads(route.app, method, inner):
            return True
    return False


def _walk(app: Any, prefix: str, passed: tuple[Installation, ...]) -> Iterator[Routed]:  # noqa: ANN401
    app, passed = _unwrapped(app, passed)
    passed = (*passed, *installations_of(app))
    for context in _contexts(getattr(app, "routes", None) or ()):
        route = getattr(context, "original_route", context)
        if isinstance(route, Mount | Host):
            yield from _walk(route.app, prefix + (getattr(context, "path", None) or ""), passed)
            continue
        path = prefix + (getattr(context, "path_format", None) or getattr(context, "path", None) or "")
        endpoint = getattr(context, "endpoint", None) or getattr(route, "endpoint", None)
        if endpoint is None:
            continue
        yield Routed(path, frozenset(getattr(context, "methods", None) or ()), endpoint, passed)
        if inspect.isclass(endpoint):
            for method in ("post", "patch", "put", "delete"):
                if hasattr(endpoint, method):
                    yield Routed(path, frozenset({method.upper()}), getattr(endpoint, method), passed)


def _contexts(routes: Iterable[Any]) -> Iterable[Any]:
    """FastAPI includes routers by reference, so a route alone knows only its own part of the path."""
    contexts = getattr(sys.modules.get("fastapi.routing"), "iter_route_contexts", None)
    found: Iterable[Any] = routes if contexts is None else contexts(list(routes))
    return found


def _unwrapped(app: Any, passed: tuple[Installation, ...]) -> tuple[Any, tuple[Installation, ...]]:  # noqa: ANN401
    """What middleware was put around by hand, and the installations in it; `app` is its name by convention."""
    for _ in range(_UNWRAPPED):
        if isinstance(app, OncekeyMiddleware):
            passed = (*passed, app.installation)
        elif hasattr(app, "routes") or not hasattr(app, "app"):
            break
        app = app.app
    return app, passed


def _is_ours(middleware: Middleware) -> bool:
    factory: object = middleware.cls
    return factory is OncekeyMiddleware


def _installation(middleware: Middleware) -> Installation | None:
    return cast("Installation | None", middleware.kwargs.get("installation"))


def listed(app: Any) -> Iterator[Served] | None:  # noqa: ANN401
    """Every route of a Starlette or FastAPI application, also of one inside of other ASGI applications."""
    inner, _ = _unwrapped(app, ())
    if not hasattr(inner, "routes"):
        return None
    return (
        Served(route.path, route.methods, route.endpoint, tuple(one.patterns for one in route.passed))
        for route in routed(app)
    )
