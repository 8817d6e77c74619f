"""Starlette, and the code that FastAPI shares: the middleware's place, the status resource, callers, and routes.

`tenant` and `principal` take its requests. Its routes, also in mounts and included routers, are checked at start-up.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, NoReturn

from starlette import routing
from starlette.middleware import Middleware
from starlette.middleware.exceptions import ExceptionMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Host, Mount, Route

from oncekey.core.errors import ConfigurationError
from oncekey.core.lazy import Lazy, load
from oncekey.frameworks.asgi.installation import Installation
from oncekey.frameworks.asgi.middleware import OncekeyMiddleware
from oncekey.frameworks.asgi.requests import by_request, caller_of, layers, trace_of
from oncekey.frameworks.options import SINGLE_TENANT, Installing
from oncekey.frameworks.shared import Engines, is_served

if TYPE_CHECKING:
    from starlette.applications import Starlette

    from oncekey.core.answers import Answer
    from oncekey.core.policy import Policy
    from oncekey.engine.enrolment import Enrolment
    from oncekey.frameworks import consumer_page, fastapi, fastapi_tenant, listing, resources, starlette_patterns
    from oncekey.frameworks.asgi import App, Identify, Scope
else:
    consumer_page = Lazy("oncekey.frameworks.consumer_page")
    fastapi = Lazy("oncekey.frameworks.fastapi")
    fastapi_tenant = Lazy("oncekey.frameworks.fastapi_tenant")
    listing = Lazy("oncekey.frameworks.listing")
    resources = Lazy("oncekey.frameworks.resources")
    starlette_patterns = Lazy("oncekey.frameworks.starlette_patterns")

STATUS_TAKEN = (
    "another Once already serves {path} of this application: pass another path, install(app, status=...), or "
    "status=None"
)
DOCS_TAKEN = "another Once already serves {path} of this application: set Policy(docs_url=...) for this one"

TAKES_A_FUNCTION = (
    "once.install(app, {what}=...) takes a function of the request that returns a string, or, in FastAPI, Depends(...)"
)
NOT_PLACED: Final = (
    "oncekey's middleware must be installed once and be the innermost: call once.install(app), and use "
    "app.add_middleware for everything else"
)
NOT_INSTALLED: Final = (
    "{operation} is served at {path}, but the Once that protects it is not installed there: call install(app, "
    "tenant=...) of that Once on this application"
)
_UNWRAPPED: Final = 20


def installed(app: Any, engines: Engines, policy: Policy, options: Installing) -> Installation:  # noqa: ANN401
    """Install the middleware in a Starlette or FastAPI application, with the status resource and its pages."""
    principal, status = options.get("principal"), options.get("status", "/idempotency-keys")
    installation = Installation(
        engines,
        policy,
        tenant=identify_by(app, options["tenant"], "tenant"),
        principal=None if principal is None else identify_by(app, principal, "principal"),
        status_path=status,
        enrol=options.get("enrol"),
        respond=respond,
        raised=raised(app),
        keep_headers=options.get("keep_headers", ()),
    )
    place(app, installation)
    add_documentation(app, installation)
    if hasattr(app, "openapi"):
        if status is not None:
            fastapi.add_status(app, installation, options.get("status_dependencies", ()))
        fastapi.describe(app)
    elif status is not None:
        add_status(app, installation)
    return installation


def place(app: Starlette, installation: Installation) -> None:
    """Make the middleware the innermost one: middleware that is added later stays outside, and runs on every replay."""
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
    if installation.patterns.patterns:
        starlette_patterns.enrol_routes(app, installation)


class Directness:
    """Whether no code between the middleware and an endpoint could refuse a retry of its request.

    True only for code that is known by its exact type. The route belongs to the application itself, not to a mounted
    one; no route before it matches by more than method and path; its function is the one that `protect` returned,
    without a decorator above and without middleware of the route; and FastAPI resolves no dependency, header or cookie
    for it.
    """

    def __init__(self, app: Starlette) -> None:
        self._app = app
        self._known: dict[object, tuple[int, bool]] = {}

    def __call__(self, scope: Scope, endpoint: object) -> bool:
        """Judge an endpoint; the verdict is cached until a route is added."""
        # Instrumentation that counts routes must see this one, too.
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
    """The classes whose behaviour is known, including FastAPI's if it is installed."""

    routers: tuple[type, ...]
    routes: tuple[type, ...]
    codes: tuple[object, ...]
    """The code of functions that only call an endpoint."""

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
        """Whether a route only validates path, query and body, and calls its endpoint."""
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
    """Serve one of oncekey's ASGI endpoints for POST, next to the application's own routes."""
    app.router.routes.append(Route(path, endpoint, methods=["POST"], include_in_schema=False))


def add_documentation(app: Starlette, installation: Installation) -> None:
    """Serve the page that refusals link to, unless the policy links elsewhere."""
    if not is_served(installation.policy):
        return

    async def idempotency_documentation(_: Request) -> Response:
        return respond(consumer_page.documentation(installation))

    app.router.routes.append(Route(installation.policy.docs_url, idempotency_documentation, include_in_schema=False))


def status_endpoint(installation: Installation) -> Callable[[Request], Awaitable[Response]]:
    """The endpoint of the status resource."""
    load("frameworks.resources")

    async def idempotency_key_status(request: Request) -> Response:
        caller = await caller_of(installation, installation.policy, request.scope)
        runtime, site = installation.runtime_and_site()
        key, query, trace_id = request.path_params["key"], request.url.query, trace_of(request.scope)
        asking = resources.status_of(installation, site.store, caller, key, query=query, trace_id=trace_id)
        return respond(await runtime.drive(asking))

    return idempotency_key_status


def respond(answer: Answer) -> Response:
    """A response of oncekey's as a response of the framework, with its headers unchanged and none added."""
    response = Response(answer.body, status_code=answer.status)
    response.raw_headers = list(answer.headers) or response.raw_headers
    return response


def raised(app: Starlette) -> Callable[[Exception], App]:
    """Handles an exception with the application's own handlers, if it was raised outside them."""

    def answering(error: Exception) -> App:
        async def again(*_: object) -> NoReturn:
            raise error

        # The catch-all handler is the server's error page, which is also outside oncekey's middleware.
        handlers = {kind: one for kind, one in app.exception_handlers.items() if kind not in (500, Exception)}
        return ExceptionMiddleware(again, handlers=handlers)

    return answering


def identify_by(app: Any, given: Any, what: str) -> Identify:  # noqa: ANN401  (FastAPI's Depends(...) is not imported here)
    """The function that identifies the tenant or principal: one of the request, or a FastAPI dependency."""
    if given is SINGLE_TENANT:
        return given  # no request object is needed for a constant
    if callable(given):
        return by_request(given, what, Request)
    if hasattr(app, "openapi") and hasattr(given, "dependency"):
        return fastapi_tenant.by_dependency(app, given, what)
    raise ConfigurationError(TAKES_A_FUNCTION.format(what=what))


# The routes, and the start-up checks of them.


@dataclass(frozen=True, slots=True)
class Routed:
    """An endpoint, its path, and the installations that a request passes on its way, from the outside in."""

    path: str
    methods: frozenset[str]
    endpoint: Callable[..., Any]
    passed: tuple[Installation, ...]
    dependencies: tuple[Callable[..., Any], ...] = ()

    @property
    def enrolment(self) -> Enrolment | None:
        """Its enrolment, below any decorators."""
        return next((layer.__oncekey__ for layer in layers(self.endpoint) if hasattr(layer, "__oncekey__")), None)

    def claimed_by(self, owner: object) -> Installation | None:
        """The innermost installation of a `Once`, which claims here."""
        return next((one for one in reversed(self.passed) if one.engines is owner), None)

    @property
    def protected(self) -> bool:
        """Whether an enrolled endpoint is inside an installation of its own `Once`."""
        claiming = None if self.enrolment is None else self.claimed_by(self.enrolment.owner)
        return claiming is not None and claiming.respond is not None

    def serves(self, handler: Callable[..., Any]) -> bool:
        """Whether a handler is called here, below any decorators."""
        return any(layer is handler for layer in layers(self.endpoint))


def routed(app: Any) -> Iterator[Routed]:  # noqa: ANN401  (an application of any kind)
    """Every endpoint of an application, including mounts and included routers."""
    yield from _walk(app, "", ())


def installations_of(app: Any) -> tuple[Installation, ...]:  # noqa: ANN401
    """The installations in an application's own middleware."""
    placed = [one.kwargs.get("installation") for one in getattr(app, "user_middleware", ()) if _is_ours(one)]
    return tuple(installation for installation in placed if installation is not None)


def check_placing(app: Starlette) -> None:
    """Raise for middleware inside oncekey's: its changes would be stored."""
    placed = [_is_ours(middleware) for middleware in app.user_middleware]
    owners = {id(installation.engines) for installation in installations_of(app)}
    innermost = True in placed and all(placed[placed.index(True) :])
    if not innermost or len(owners) != placed.count(True):
        raise ConfigurationError(NOT_PLACED)


def check_owners(served: Iterable[Routed], around: Callable[[object], Iterable[Any]]) -> None:
    """Raise for a handler that no request reaches through its own `Once`; `around` names the outer applications."""
    for route in served:
        enrolment = route.enrolment
        if enrolment is None or route.protected:
            continue
        others = (other for app in around(enrolment.owner) for other in routed(app))
        if not any(other.endpoint is route.endpoint and other.protected for other in others):
            raise ConfigurationError(NOT_INSTALLED.format(operation=enrolment.operation, path=route.path))


def routes_of(app: Any) -> Sequence[BaseRoute] | None:  # noqa: ANN401
    """The routes of a Starlette application or router; None if it is of another kind."""
    routes = getattr(app, "routes", None)
    return routes if isinstance(routes, list) and all(isinstance(route, BaseRoute) for route in routes) else None


def _walk(app: Any, prefix: str, passed: tuple[Installation, ...]) -> Iterator[Routed]:  # noqa: ANN401
    app, passed = unwrapped(app, passed)
    passed = (*passed, *installations_of(app))
    for context in contexts(getattr(app, "routes", None) or ()):
        route = getattr(context, "original_route", context)
        if isinstance(route, Mount | Host):
            yield from _walk(route.app, prefix + (getattr(context, "path", None) or ""), passed)
            continue
        path = prefix + (getattr(context, "path_format", None) or getattr(context, "path", None) or "")
        endpoint = getattr(context, "endpoint", None) or getattr(route, "endpoint", None)
        if endpoint is None:
            continue
        methods = frozenset(getattr(context, "methods", None) or ())
        dependant = getattr(context, "dependant", None) or getattr(route, "dependant", None)
        yield Routed(path, methods, endpoint, passed, tuple(_called_for(dependant)))
        if inspect.isclass(endpoint):
            for method in ("post", "patch", "put", "delete"):
                if hasattr(endpoint, method):
                    yield Routed(path, frozenset({method.upper()}), getattr(endpoint, method), passed)


def _called_for(dependant: Any) -> Iterator[Callable[..., Any]]:  # noqa: ANN401  (FastAPI's, if it is one of its routes)
    """The dependencies of a route, including nested ones."""
    for inner in getattr(dependant, "dependencies", ()):
        yield inner.call
        yield from _called_for(inner)


def contexts(routes: Iterable[Any]) -> Iterable[Any]:
    """The routes with their full paths: FastAPI includes routers by reference, so a route has only its own part."""
    contexts = getattr(sys.modules.get("fastapi.routing"), "iter_route_contexts", None)
    found: Iterable[Any] = routes if contexts is None else contexts(list(routes))
    return found


def unwrapped(app: Any, passed: tuple[Installation, ...]) -> tuple[Any, tuple[Installation, ...]]:  # noqa: ANN401
    """The application inside manually applied middleware (`app` by convention), and the installations in it."""
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


def listed(app: Any) -> Iterator[listing.Served] | None:  # noqa: ANN401
    """Every route of a Starlette or FastAPI application, also of one inside other ASGI applications."""
    inner, _ = unwrapped(app, ())
    if not hasattr(inner, "routes"):
        return None
    return (
        listing.Served(
            route.path,
            route.methods,
            route.endpoint,
            tuple(one.patterns for one in route.passed),
            route.dependencies,
        )
        for route in routed(app)
    )
