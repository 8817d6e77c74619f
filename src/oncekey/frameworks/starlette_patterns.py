"""Enrolments by path in Starlette and FastAPI: the router decides which route a request takes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from starlette.routing import Host, Match, Mount

from oncekey.core.errors import ConfigurationError
from oncekey.frameworks.listing import NO_ROUTE, TWICE
from oncekey.frameworks.starlette import Routed, contexts, routes_of, unwrapped

if TYPE_CHECKING:
    from collections.abc import Iterable

    from oncekey.engine.enrolment import Enrolment
    from oncekey.engine.patterns import Pattern
    from oncekey.frameworks.asgi import Scope
    from oncekey.frameworks.asgi.installation import Installation


def enrol_routes(app: Any, installation: Installation) -> None:  # noqa: ANN401  (an application of any kind)
    """Enrol by the route that the router matches, if an application has one: a path has more than one spelling."""
    patterns, by_spelling = installation.patterns, installation.enrolled

    def enrolled(scope: Scope) -> Enrolment | None:
        if scope["method"] not in patterns.methods:
            return None
        path = _taken(app, {**scope, "root_path": str(scope.get("root_path", "")).rstrip("/")})
        return by_spelling(scope) if path is None else patterns.find(scope["method"], path)

    installation.enrolled = enrolled


def _taken(app: Any, scope: Scope, prefix: str = "") -> str | None:  # noqa: ANN401
    """The path template of the route that a request takes; "" for none, None for a mount without routes."""
    app, _ = unwrapped(app, ())
    routes = routes_of(app)
    if routes is None:
        return None
    if getattr(app, "root_path", ""):
        scope = {**scope, "root_path": app.root_path}  # as FastAPI does
    for context in contexts(routes):
        match, child = context.matches(scope)
        if match is not Match.FULL:
            continue
        route = getattr(context, "original_route", context)
        if isinstance(route, Mount | Host):
            return _taken(route.app, {**scope, **child}, prefix + (getattr(context, "path", None) or ""))
        return prefix + (getattr(context, "path_format", None) or getattr(context, "path", None) or "")
    return ""


def check_patterns(app: Any, served: Iterable[Routed], installation: Installation) -> None:  # noqa: ANN401
    """Raise for a handler that would wait for its own claim, and for a pattern that no route matches."""
    served = list(served)
    for route in served:
        for method in route.methods:
            if route.enrolment is not None and installation.patterns.find(method, route.path) is not None:
                raise ConfigurationError(TWICE.format(method=method, path=route.path))
    for pattern in installation.patterns.patterns:
        scope = {"type": "http", "method": pattern.method, "path": pattern.sample, "headers": []}
        if not any(_meant(pattern, route) for route in served) and _taken(app, scope) is not None:
            raise ConfigurationError(NO_ROUTE.format(pattern=pattern.text))


def _meant(pattern: Pattern, route: Routed) -> bool:
    methods = route.methods or {pattern.method}
    return any(pattern.matches(method, route.path) for method in methods)
