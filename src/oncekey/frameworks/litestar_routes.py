"""The routes of a Litestar application, controllers and routers included, and what its handlers depend on."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, cast

from litestar import Litestar
from litestar.routes import HTTPRoute

from oncekey.frameworks.asgi.installation import Installation
from oncekey.frameworks.asgi.nesting import layers
from oncekey.frameworks.listing import Served

if TYPE_CHECKING:
    from litestar.handlers import HTTPRouteHandler

    from oncekey.engine.enrolment import Enrolment


def listed(app: Any) -> Iterator[Served] | None:  # noqa: ANN401  (an application of any kind)
    """Every route; None: it is no Litestar application."""
    return walk(app) if isinstance(app, Litestar) else None


def walk(app: Litestar) -> Iterator[Served]:
    """Every route."""
    patterns = tuple(installation.patterns for installation in installations_of(app))
    for route in app.routes:
        if isinstance(route, HTTPRoute):
            for handler in route.route_handlers:
                methods = frozenset(map(str, handler.http_methods)) - {"OPTIONS"}
                if methods:
                    yield Served(route.path_format, methods, function_of(handler), patterns)


def installations_of(app: Litestar) -> list[Installation]:
    """What our plugins have put into it."""
    found = {id(plugin): getattr(plugin, "installation", None) for plugin in app.plugins}
    return [one for one in found.values() if isinstance(one, Installation)]


def handlers_of(app: Litestar) -> Iterator[HTTPRouteHandler]:
    """Its route handlers."""
    for route in app.routes:
        if isinstance(route, HTTPRoute):
            yield from route.route_handlers


def function_of(handler: HTTPRouteHandler) -> Callable[..., Any]:
    """The function as it was written: Litestar calls a `def` in a thread, and binds a method to its controller."""
    function: Any = getattr(handler.fn, "func", handler.fn)
    return cast("Callable[..., Any]", getattr(function, "__func__", function))


def protected_in(handler: HTTPRouteHandler) -> Callable[..., Any]:
    """What `@once.protect` made, below whatever decorators; the function itself where there is no such."""
    function = function_of(handler)
    return next((layer for layer in layers(function) if hasattr(layer, "__oncekey__")), function)


def enrolment_by(owner: object, handler: HTTPRouteHandler) -> Enrolment | None:
    """How a `Once` protects a route handler, if it does."""
    enrolment: Enrolment | None = getattr(protected_in(handler), "__oncekey__", None)
    return enrolment if enrolment is not None and enrolment.owner is owner else None


def databases_of(app: Litestar) -> Iterator[Any]:
    """The configurations of the SQLAlchemy plugin, if it is there."""
    for plugin in app.plugins:
        if type(plugin).__name__ == "SQLAlchemyInitPlugin":  # of advanced-alchemy, which may not be there
            yield from getattr(plugin, "config", ())


def depends_on(handler: HTTPRouteHandler) -> set[str]:
    """The names of the dependencies of a handler, and of theirs."""
    provided, found = handler.resolve_dependencies(), set()
    wanted = [*handler.parsed_fn_signature.parameters]
    while wanted:
        name = wanted.pop()
        if name in provided and name not in found:
            found.add(name)
            wanted.extend(provided[name].parsed_fn_signature.parameters)
    return found
