"""Starlette: where the middleware goes, the status resource, and resolvers that are handed its requests."""

from __future__ import annotations

import sys
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn

from starlette import routing
from starlette.middleware import Middleware
from starlette.middleware.exceptions import ExceptionMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from oncekey.core.errors import ConfigurationError
from oncekey.frameworks.asgi.claiming import by_request, caller_of
from oncekey.frameworks.asgi.middleware import OncekeyMiddleware
from oncekey.frameworks.resources import documentation, is_served, status_of
from oncekey.frameworks.routes import installations_of
from oncekey.options import SINGLE_TENANT

if TYPE_CHECKING:
    from starlette.applications import Starlette

    from oncekey.core.answers import Answer
    from oncekey.frameworks.asgi.installation import Installation
    from oncekey.frameworks.asgi.types import App, Resolver, Scope

STATUS_TAKEN = (
    "another Once serves {path} of this application already: give this one another place, install(app, status=...), or "
    "none, status=None"
)
DOCS_TAKEN = "another Once serves {path} of this application already: give this one its own page, Policy(docs_url=...)"

NO_RESOLVER = (
    "once.install(app, {what}=...) takes a function of the request that returns a text, or, in FastAPI, Depends(...)"
)


def place(app: Starlette, installation: Installation) -> None:
    """Put the middleware innermost: what is added later stays outside, and is fresh on every replay."""
    if app.middleware_stack is not None:
        raise ConfigurationError("once.install(app) must come before the application's first request")
    others = installations_of(app)
    if any(other.engines is installation.engines for other in others):
        raise ConfigurationError("once.install(app) was called twice for one application")
    taken = {getattr(route, "path", None) for route in app.router.routes} if others else set()
    if installation.status_path is not None and _status_route(installation) in taken:
        raise ConfigurationError(STATUS_TAKEN.format(path=installation.status_path))
    if is_served(installation.policy) and installation.policy.docs_url in taken:
        raise ConfigurationError(DOCS_TAKEN.format(path=installation.policy.docs_url))
    app.user_middleware.append(Middleware(OncekeyMiddleware, installation=installation))
    installation.direct = Directness(app)


class Directness:
    """Whether no code between the middleware and an endpoint may refuse a repeat of its request.

    True only for what is known by its exact type. The route is the application's own and not a mounted one's; nothing
    before it in the list chooses by more than method and path; its function is the one that `protect` made, without a
    decorator above and without middleware of the route; and FastAPI resolves no dependency, header or cookie for it.
    """

    def __init__(self, app: Starlette) -> None:
        self._app = app
        self._known: dict[object, tuple[int, bool]] = {}

    def __call__(self, scope: Scope, endpoint: object) -> bool:
        """Judge an endpoint, once for as long as no route is added."""
        # Instrumentation that counts routes has to see this one, too.
        if scope.get("app") is not self._app or scope.get("fastapi.telemetry") is not None:
            return False
        routes = len(self._app.router.routes)
        count, judged = self._known.get(endpoint, (-1, False))
        if count != routes:
            judged = self._judged(endpoint)
            self._known[endpoint] = (routes, judged)
        return judged

    def _judged(self, endpoint: object) -> bool:
        router, kinds = self._app.router, _Kinds.known()
        places = [at for at, route in enumerate(router.routes) if getattr(route, "endpoint", None) is endpoint]
        return (
            bool(places)
            and type(router) in kinds.routers
            and router.middleware_stack == router.app
            and getattr(endpoint, "__oncekey_wrapper__", None) is endpoint
            and all(type(route) in kinds.routes for route in router.routes[: places[-1] + 1])
            and all(kinds.is_bare(router.routes[at]) for at in places)
        )


@dataclass(frozen=True, slots=True)
class _Kinds:
    """The classes whose behaviour is known, those of FastAPI if it is there."""

    routers: tuple[type, ...]
    routes: tuple[type, ...]
    codes: tuple[object, ...]
    """Of the functions that call an endpoint and do nothing else."""

    @classmethod
    def known(cls) -> _Kinds:
        found = [routing]
        if "fastapi.routing" in sys.modules:
            found.append(sys.modules["fastapi.routing"])

        def named(*names: str) -> tuple[type, ...]:
            return tuple(vars(module)[name] for module in found for name in names if name in vars(module))

        return cls(
            named("Router", "APIRouter"),
            named("Route", "WebSocketRoute", "Mount", "APIRoute", "APIWebSocketRoute"),
            tuple(module.request_response(_nobody).__code__ for module in found),
        )

    def is_bare(self, route: Any) -> bool:  # noqa: ANN401  (of one framework or the other)
        """Whether a route does nothing but to check path, query and body, and to call its endpoint."""
        if getattr(route.app, "__code__", None) not in self.codes:
            return False
        asks = getattr(route, "dependant", None)
        return asks is None or not (asks.dependencies or asks.header_params or asks.cookie_params)


async def _nobody(_: Request) -> Response:
    return Response()


def add_status(app: Starlette, installation: Installation) -> None:
    """Serve the status resource."""
    app.router.routes.append(Route(_status_route(installation), status_endpoint(installation)))


def _status_route(installation: Installation) -> str:
    return f"{installation.status_path}/{{key:path}}"


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
        caller = await caller_of(installation, installation.policy, request.scope)
        runtime, site = installation.life()
        return respond(await runtime.drive(status_of(installation, site.store, caller, request.path_params["key"])))

    return idempotency_key_status


def respond(answer: Answer) -> Response:
    """An answer as a response of the framework; headers as they are, with none added."""
    response = Response(answer.body, status_code=answer.status)
    response.raw_headers = list(answer.headers) or response.raw_headers
    return response


def raised(app: Starlette) -> Callable[[Exception], App]:
    """What answers for an exception by the application's own handlers, where it was raised outside of them."""

    def answering(error: Exception) -> App:
        async def again(*_: object) -> NoReturn:
            raise error

        # The handler of everything else is the server's error page, which is outside of us as well.
        handlers = {kind: one for kind, one in app.exception_handlers.items() if kind not in (500, Exception)}
        return ExceptionMiddleware(again, handlers=handlers)

    return answering


def resolver(app: Any, given: Any, what: str) -> Resolver:  # noqa: ANN401  (FastAPI's Depends(...) is nothing we import)
    """What names the tenant or the principal of a scope: a function of the request, or a dependency of FastAPI."""
    if given is SINGLE_TENANT:
        return given  # no request has to be made for what does not look at it
    if callable(given):
        return by_request(given, what, Request)
    if hasattr(app, "openapi") and hasattr(given, "dependency"):
        from oncekey.frameworks.fastapi import by_dependency  # noqa: PLC0415  (an optional package)

        return by_dependency(app, given, what)
    raise ConfigurationError(NO_RESOLVER.format(what=what))
