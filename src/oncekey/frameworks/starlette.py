"""Starlette: where the middleware goes, the status resource, and the checks that find a mistake at start-up."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Awaitable, Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Mount, Route

from oncekey.core.errors import ConfigurationError
from oncekey.frameworks.asgi.documentation import documentation, is_served
from oncekey.frameworks.asgi.middleware import OncekeyMiddleware
from oncekey.frameworks.asgi.status import status_of

if TYPE_CHECKING:
    from starlette.applications import Starlette

    from oncekey.core.answers import Answer
    from oncekey.frameworks.asgi.installation import Installation
    from oncekey.frameworks.asgi.types import Resolver, Scope

log = logging.getLogger("oncekey")

Tenant = Callable[[Request], "str | Awaitable[str]"]


@dataclass(frozen=True, slots=True)
class Routed:
    """An endpoint and where it is served."""

    path: str
    methods: frozenset[str]
    endpoint: Callable[..., Any]


def place(app: Starlette, installation: Installation) -> None:
    """Put the middleware innermost: what is added later stays outside, and is fresh on every replay."""
    if app.middleware_stack is not None:
        raise ConfigurationError("once.install(app) must come before the application's first request")
    if any(_is_ours(middleware) for middleware in app.user_middleware):
        raise ConfigurationError("once.install(app) was called twice for one application")
    app.user_middleware.append(Middleware(OncekeyMiddleware, installation=installation))


def add_status(app: Starlette, installation: Installation) -> None:
    """Serve the status resource."""
    app.router.routes.append(Route(f"{installation.status_path}/{{key:path}}", status_endpoint(installation)))


def add_route(app: Starlette, path: str, endpoint: Callable[..., Any]) -> None:
    """Serve an ASGI endpoint of ours for POST, beside the application's own routes."""
    app.router.routes.append(Route(path, endpoint, methods=["POST"], include_in_schema=False))


def add_documentation(app: Starlette, installation: Installation) -> None:
    """Serve the page that refusals link to, unless the policy links to another place."""
    if not is_served(installation.policy):
        return

    async def idempotency_documentation(_: Request) -> Response:
        return respond(documentation(installation.policy))

    app.router.routes.append(Route(installation.policy.docs_url, idempotency_documentation, include_in_schema=False))


def status_endpoint(installation: Installation) -> Callable[[Request], Awaitable[Response]]:
    """What answers for the status resource."""

    async def idempotency_key_status(request: Request) -> Response:
        return respond(await status_of(installation, request.scope, request.path_params["key"]))

    return idempotency_key_status


def respond(answer: Answer) -> Response:
    """An answer as a response of the framework; headers as they are, with none added."""
    response = Response(answer.body, status_code=answer.status)
    response.raw_headers = list(answer.headers) or response.raw_headers
    return response


def by_request(resolver: Tenant, what: str) -> Resolver:
    """A resolver that takes the framework's request; one that finds nothing is named in the error."""

    async def resolve(scope: Scope) -> str:
        try:
            value = resolver(Request(scope))
            return await value if inspect.isawaitable(value) else value
        except AttributeError as error:
            raise ConfigurationError(
                f"the {what} resolver found no {error.name!r} on the request: the route's authentication has to set it "
                "before the handler is called, for example as a dependency of the route"
            ) from error

    return resolve


def routed(routes: Iterable[Any], prefix: str = "") -> Iterator[Routed]:
    """Every endpoint that the application serves, with mounts followed."""
    for route in routes:
        if isinstance(route, Mount):
            yield from routed(route.routes, prefix + route.path)
        elif getattr(route, "endpoint", None) is not None:
            endpoint = route.endpoint
            methods = frozenset(getattr(route, "methods", None) or ())
            yield Routed(prefix + route.path, methods, endpoint)
            if inspect.isclass(endpoint):
                for method in ("post", "patch", "put", "delete"):
                    if hasattr(endpoint, method):
                        yield Routed(prefix + route.path, frozenset({method.upper()}), getattr(endpoint, method))


def check(app: Starlette, served: Iterable[Routed], protected: Iterable[Callable[..., Any]]) -> None:
    """Refuse to start with a protection that does not protect."""
    placed = [_is_ours(middleware) for middleware in app.user_middleware]
    if placed.count(True) != 1 or not placed[-1]:
        raise ConfigurationError(
            "the middleware of oncekey must be there once and innermost: call once.install(app) and use "
            "app.add_middleware for everything else"
        )
    layers = {id(layer) for route in served for layer in _layers(route.endpoint)}
    for handler in protected:
        if id(handler) in layers:
            continue
        if id(inspect.unwrap(handler)) in layers:
            raise ConfigurationError(
                f"{handler.__qualname__} is served without its protection: put @once.protect(...) directly above "
                "the function and below the route decorator"
            )
        log.warning("oncekey: %s is protected, but no route serves it", handler.__qualname__)


def check_patterns(served: Iterable[Routed], installation: Installation) -> None:
    """Refuse a handler that would meet its own claim."""
    for route in served:
        enrolment = getattr(route.endpoint, "__oncekey__", None)
        if enrolment is None:
            continue
        for method in route.methods:
            if installation.patterns.find(method, route.path) is not None:
                raise ConfigurationError(
                    f"{method} {route.path} is enrolled twice, by its path and by @once.protect: leave one of them out"
                )


def _layers(endpoint: Callable[..., Any]) -> Iterator[Callable[..., Any]]:
    """The endpoint and what its decorators wrapped, from the outside in."""
    layer: Callable[..., Any] | None = endpoint
    while layer is not None:
        yield layer
        layer = getattr(layer, "__wrapped__", None)


def _is_ours(middleware: Middleware) -> bool:
    factory: object = middleware.cls
    return factory is OncekeyMiddleware
