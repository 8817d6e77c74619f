"""Finds the application that serves an operation, so that a completer can send a request through it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

from oncekey.core.lazy import Lazy
from oncekey.frameworks.asgi.requests import layers
from oncekey.frameworks.listing import listed

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from oncekey.frameworks import starlette
    from oncekey.frameworks.asgi import App
    from oncekey.frameworks.asgi.installation import Installation
    from oncekey.frameworks.blocking import Threads
else:
    starlette = Lazy("oncekey.frameworks.starlette")


def app_of(
    owner: object,
    handler: Callable[..., Any] | None,
    function: Any,  # noqa: ANN401  (a protected function, or None)
    installed: Mapping[Any, Installation],
    threaded: Mapping[Any, Threads],
) -> App | None:
    """The application that serves an operation: of several, the one with its route."""
    if function is not None:
        return cast("App", function.enter)
    if handler is not None and threaded and not installed:
        app = serving_threads(handler, tuple(threaded))
        return None if app is None else threaded[app].door(app)
    routed = [app for app, installation in installed.items() if installation.respond is not None]
    return cast("App | None", serving(owner, handler, routed))


def serving(owner: object, handler: Callable[..., Any] | None, apps: Sequence[Any]) -> Any:  # noqa: ANN401
    """The application whose installation claims for a handler; a single one is not checked."""
    if handler is None or not apps:
        return None
    if len(apps) == 1:
        return apps[0]
    for app in apps:
        if not hasattr(app, "user_middleware"):
            if any(route.serves(handler) for route in listed(app) or ()):
                return app
            continue
        # If two installations of one Once are nested, the inner one claims.
        ours = [route for route in starlette.routed(app) if route.serves(handler)]
        if any(sum(one.engines is owner for one in route.passed) == 1 for route in ours):
            return app
    return None


def serving_threads(handler: Callable[..., Any], apps: Sequence[Any]) -> Any:  # noqa: ANN401
    """The WSGI application that serves a handler: of several, the Flask application with its view."""
    if len(apps) == 1:
        return apps[0]
    for app in apps:
        for view in getattr(app, "view_functions", {}).values():
            methods = vars(getattr(view, "view_class", object)).values()
            if any(layer is handler for one in (view, *methods) for layer in layers(one)):
                return app
    return None
