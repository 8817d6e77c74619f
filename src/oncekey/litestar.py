"""Litestar: a plugin that protects route handlers and shares their transaction with Litestar's SQLAlchemy plugin.

    once = Once("sqlite:///shop.db", migrate=True)

    @post("/orders")
    @once.protect(effects=LOCAL)
    async def create_order(data: Order, op: Operation) -> Receipt: ...

    app = Litestar([create_order], plugins=[OncePlugin(once, tenant=lambda request: request.user.shop)])

The middleware is the innermost one of each route handler, so the middleware of the application, its routers and
controllers runs on every replay. Guards, dependencies and validation run before the claim, as usual in Litestar.
"""

from __future__ import annotations

import functools
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, cast
from urllib.parse import quote, unquote

from litestar import Litestar, Request, Response, get
from litestar.exceptions import LitestarException
from litestar.handlers import HTTPRouteHandler
from litestar.plugins import InitPlugin, ReceiveRoutePlugin
from litestar.response import ServerSentEvent
from litestar.routes import BaseRoute, HTTPRoute
from litestar.types import Empty, Guard
from litestar.utils.scope.state import ScopeState

from oncekey.core.errors import ConfigurationError
from oncekey.core.model import Code, Effects, Refuse
from oncekey.frameworks.asgi.installation import Installation
from oncekey.frameworks.asgi.middleware import KEY_FIELD, Exchange, OncekeyMiddleware
from oncekey.frameworks.asgi.requests import (
    ClientLeftError,
    TooSlowError,
    UnsettledError,
    by_request,
    caller_of,
    current,
    enrolment_of,
    layers,
    passage_of,
    request_of,
    send_answer,
    trace_of,
)
from oncekey.frameworks.asgi.transactions import transaction_of
from oncekey.frameworks.consumer_page import documentation
from oncekey.frameworks.listing import Served, check_served
from oncekey.frameworks.openapi import describe_one
from oncekey.frameworks.resources import status_of
from oncekey.frameworks.shared import is_served

if TYPE_CHECKING:
    from litestar.config.app import AppConfig

    from oncekey.core.answers import Answer
    from oncekey.engine.enrolment import Enrolment, Patterns
    from oncekey.frameworks.asgi import App, Receive, Scope, Send
    from oncekey.once import Once

    Named = Callable[[Request[Any, Any, Any]], str | Awaitable[str]]

__all__ = ["OncePlugin"]

NO_TENANT: Final = (
    "OncePlugin(once, tenant=...) is missing its tenant: pass a function that returns the tenant of an authenticated "
    "request, or tenant=oncekey.SINGLE_TENANT if all callers may share responses"
)
CACHED: Final = (
    "{operation} has cache=..., so Litestar would respond from its cache before the handler could claim: remove cache "
    "from a protected route"
)
STREAMS: Final = (
    "{operation} returns server-sent events, which cannot be stored before they are sent: remove @once.protect, or "
    "return the whole response"
)
OTHER_ENGINE: Final = (
    "{operation} depends on {session}, whose rows would not commit with the key: use Once(alchemy.get_engine()) with "
    "the SQLAlchemyAsyncConfig that provides {session}"
)


class OncePlugin(InitPlugin, ReceiveRoutePlugin):
    """Installs a `Once` in a Litestar application: its middleware, its lifespan, the status resource and OpenAPI.

    `tenant` and `principal` are functions that take the request. `status` is the path of the status resource, or None;
    `status_guards` authenticate it. `enrol` enrols by path handlers that cannot be decorated. `keep_headers` are
    request headers that a completer needs in addition to those of the body; never list one that authenticates.
    """

    def __init__(
        self,
        once: Once,
        *,
        tenant: Named,
        principal: Named | None = None,
        status: str | None = "/idempotency-keys",
        status_guards: Sequence[Guard] = (),
        enrol: Mapping[str, Enrolment] | None = None,
        keep_headers: Sequence[str] = (),
    ) -> None:
        if not callable(tenant):
            raise ConfigurationError(NO_TENANT)
        self.once = once
        self._status_guards = status_guards
        self.installation = Installation(
            once,
            once.policy,
            tenant=by_request(tenant, "tenant", _request),
            principal=None if principal is None else by_request(principal, "principal", _request),
            status_path=status,
            enrol=enrol,
            respond=respond,
            keep_headers=keep_headers,
        )
        self.installation.enrolled = functools.partial(_by_route, self.installation.patterns)
        self._app: Litestar | None = None
        self._placed: set[HTTPRouteHandler] = set()

    def on_app_init(self, app_config: AppConfig) -> AppConfig:
        """Join the application's lifespan inside all others: pools may close only after responses are stored."""
        last = len(app_config.plugins) - app_config.plugins[::-1].index(self)
        if not all(isinstance(later, OncePlugin) for later in app_config.plugins[last:]):
            app_config.plugins.append(self)  # Litestar calls it again after the other plugins
            return app_config
        app_config.lifespan.append(self.once.lifespan)
        recorder: Any = functools.partial(BodyRecorder, plugin=self)  # Litestar has its own types for messages
        app_config.middleware.insert(0, recorder)
        app_config.exception_handlers.update({AnsweredError: answered, TooSlowError: self._too_slow})
        app_config.after_exception.append(self._let_through)
        installation, policy = self.installation, self.once.policy
        if is_served(policy):
            page = get(policy.docs_url, include_in_schema=False)(_documentation_of(installation))
            app_config.route_handlers.append(page)
        if installation.status_path is not None:
            path, guards = f"{installation.status_path}/{{key:path}}", list(self._status_guards)
            served = get(path, guards=guards, summary="Status of a request", tags=["idempotency"])
            app_config.route_handlers.append(served(_status_of(installation)))
        return app_config

    def receive_route(self, route: BaseRoute) -> None:
        """Make the middleware the innermost one, and describe a protected operation in OpenAPI."""
        if not isinstance(route, HTTPRoute):
            return
        for handler in route.route_handlers:
            app = handler.ownership_layers[0]
            assert isinstance(app, Litestar)
            self._adopted_by(app)
            if handler in self._placed:
                continue  # one handler may serve several paths
            self._placed.add(handler)
            handler.middleware = [*(handler.middleware or ()), self._middleware_of(app, handler)]
            enrolment = enrolment_by(self.once, handler)
            if enrolment is not None:
                handler.operation_class = _described(handler.operation_class, enrolment)
                if enrolment.blocking:
                    _await(handler)

    def _middleware_of(self, app: Litestar, handler: HTTPRouteHandler) -> Any:  # noqa: ANN401  (Litestar's type for it)
        return functools.partial(
            HandlerMiddleware,
            installation=self.installation,
            handler=handler,
            sessions=self.sessions_of(app, handler),
            compresses=app.compression_config is not None,
        )

    def _adopted_by(self, app: Litestar) -> None:
        if self._app is None:
            self._app = app
            self.installation.check = functools.partial(self._check, app)
            self.once.adopt(app, self.installation)

    def _check(self, app: Litestar) -> None:
        owners = [installation.engines for installation in installations_of(app)]
        check_served(list(walk(app)), self.installation.patterns, owners)
        for handler in handlers_of(app):
            enrolment = enrolment_by(self.once, handler)
            if enrolment is None:
                continue
            if handler.cache:
                raise ConfigurationError(CACHED.format(operation=enrolment.operation))
            if handler.parsed_fn_signature.return_type.is_subclass_of(ServerSentEvent):
                raise ConfigurationError(STREAMS.format(operation=enrolment.operation))
            for config in databases_of(app):
                session = config.session_dependency_key
                if enrolment.transactional and not self._shares(config) and session in depends_on(handler):
                    raise ConfigurationError(OTHER_ENGINE.format(operation=enrolment.operation, session=session))

    def _shares(self, config: Any) -> bool:  # noqa: ANN401  (a class of advanced-alchemy's)
        return not isinstance(self.once.store, str) and config.get_engine() is self.once.store

    def sessions_of(self, app: Litestar, handler: HTTPRouteHandler) -> list[str]:
        """The scope keys under which the SQLAlchemy plugin looks for a handler's sessions."""
        enrolment = enrolment_by(self.once, handler)
        if enrolment is None or enrolment.effects is Effects.INLINE:
            return []
        used = [one for one in databases_of(app) if one.session_dependency_key in depends_on(handler)]
        return [config.session_scope_key for config in used if self._shares(config)]

    async def _let_through(self, error: Exception, _: Any) -> None:  # noqa: ANN401  (Litestar's scope is a TypedDict)
        """Raise an outage before the claim out of Litestar's inner error handling, so that the middleware responds."""
        request = request_of(self.once)
        if isinstance(request, Exchange) and request.is_early_outage(error):
            raise error

    def _too_slow(self, request: Request[Any, Any, Any], _: Exception) -> Response[Any]:
        scope: Any = request.scope  # Litestar's scope is a TypedDict
        refused, enrolment = Refuse(Code.BODY_TOO_SLOW), enrolment_of(scope, self.once)
        return AnswerResponse(self.installation.turn_away(refused, enrolment, trace_id=trace_of(scope)))


def _await(handler: HTTPRouteHandler) -> None:
    """Make Litestar call a protected `def` directly; the protection moves it to a thread after the claim."""
    handler.has_sync_callable = False
    handler._fn = getattr(handler.fn, "func", handler.fn)  # noqa: SLF001  (what `sync_to_thread=True` has wrapped)


def _by_route(patterns: Patterns, scope: Any) -> Enrolment | None:  # noqa: ANN401  (Litestar's scope is a TypedDict)
    """The enrolment by path of the route that Litestar has matched."""
    return patterns.find(scope["method"], scope["path_template"])


def _request(scope: Any) -> Request[Any, Any, Any]:  # noqa: ANN401  (Litestar's scope is a TypedDict)
    return Request(scope)


def _documentation_of(installation: Installation) -> Callable[..., Any]:
    async def idempotency_documentation() -> Response[bytes]:
        return AnswerResponse(documentation(installation))

    return idempotency_documentation


def _status_of(installation: Installation) -> Callable[..., Any]:
    async def idempotency_key_status(request: Request[Any, Any, Any]) -> Response[bytes]:
        scope: Any = request.scope
        caller = await caller_of(installation, installation.policy, scope)
        path = (scope.get("raw_path") or quote(scope["path"]).encode()).decode("latin-1")
        key = unquote(path.partition(f"{installation.status_path}/")[2])
        runtime, site = installation.runtime_and_site()
        query, trace_id = scope["query_string"].decode("latin-1"), trace_of(scope)
        asking = status_of(installation, site.store, caller, key, query=query, trace_id=trace_id)
        return AnswerResponse(await runtime.drive(asking))

    return idempotency_key_status


def _described(operation: type[Any], enrolment: Enrolment) -> type[Any]:
    def to_schema(self: Any) -> dict[str, Any]:  # noqa: ANN401  (Litestar's own operation, or the application's)
        about: dict[str, Any] = operation.to_schema(self)
        describe_one(about, enrolment)
        return about

    return type(operation.__name__, (operation,), {"to_schema": to_schema})


# The middleware of one route handler, and oncekey's responses as Litestar responses.


class BodyRecorder:
    """The outermost middleware: records the body, which Litestar's logging reads before oncekey's middleware can.

    A body that a middleware has read through `receive` is not received again, and Litestar caches it privately.
    """

    def __init__(self, app: App, plugin: OncePlugin) -> None:
        self._app = app
        self._plugin = plugin

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve a request; the installation's intake repeats the recorded body."""
        if scope["type"] == "http" and self._concerns(scope):
            receive = passage_of(scope).intake(receive, self._plugin.installation.max_request_bytes).receive
        await self._app(scope, receive, send)

    def _concerns(self, scope: Scope) -> bool:
        if any(name == KEY_FIELD for name, _ in scope["headers"]):
            return True
        handler = scope.get("route_handler")
        return isinstance(handler, HTTPRouteHandler) and enrolment_by(self._plugin.once, handler) is not None


class HandlerMiddleware(OncekeyMiddleware):
    """The middleware of one route handler."""

    def __init__(
        self,
        app: App,
        installation: Installation,
        handler: HTTPRouteHandler,
        *,
        sessions: Sequence[str],
        compresses: bool,
    ) -> None:
        super().__init__(self._lend if sessions else app, installation)
        self._endpoint: Any = protected_in(handler)
        self._inner = app
        self._sessions = sessions
        """The scope keys under which the SQLAlchemy plugin looks for the handler's sessions."""
        self._compresses = compresses

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request; Litestar wraps the exception that signals that a response was already sent."""
        scope["endpoint"] = self._endpoint
        if self._compresses and any(name == KEY_FIELD for name, _ in scope["headers"]):
            # Litestar compresses inside all middleware, but the stored response is for every client.
            scope["headers"] = [line for line in scope["headers"] if line[0] != b"accept-encoding"]
            ScopeState.from_scope(scope).headers = Empty  # type: ignore[arg-type]  # a copy that somebody has read
        try:
            await super().__call__(scope, receive, send)
        except LitestarException as error:
            # A stream raises an exception group.
            cause = BaseExceptionGroup("", [error.__cause__ or error])
            if cause.split((UnsettledError, ClientLeftError))[1] is not None:
                raise

    async def _lend(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Put oncekey's session where the SQLAlchemy plugin would put its own."""
        from advanced_alchemy.extensions.litestar._utils import set_aa_scope_state  # noqa: PLC0415  (optional)

        request = current.get()
        assert request is not None
        await request.read_ahead(self._endpoint.__oncekey__.policy)
        for key in self._sessions:
            set_aa_scope_state(scope, key, transaction_of(request).following())  # type: ignore[arg-type]
        await self._inner(scope, receive, send)


class AnswerResponse(Response[bytes]):
    """A response of oncekey's, with its headers unchanged."""

    def __init__(self, answer: Answer) -> None:
        super().__init__(answer.body, status_code=answer.status)
        self._answer = answer

    def to_asgi_response(self, *_: Any, **__: Any) -> Any:  # noqa: ANN401  (as its parent's)
        """Send it."""

        async def say(scope: Scope, receive: Receive, send: Send) -> None:  # noqa: ARG001
            await send_answer(send, self._answer)

        return say


class AnsweredError(Exception):
    """Carries a response that replaces the handler's, where Litestar would treat it as the handler's data."""

    def __init__(self, answer: Answer) -> None:
        super().__init__()
        self.answer = answer


def respond(answer: Answer) -> Response[bytes]:
    """Return a response from a handler, or raise it where a DTO would read it as the handler's data."""
    request = current.get()
    assert request is not None
    if request.scope["route_handler"].resolve_return_dto() is not None:
        raise AnsweredError(answer)
    return AnswerResponse(answer)


def answered(_: Request[Any, Any, Any], error: Exception) -> Response[Any]:
    """Return the response that was raised."""
    assert isinstance(error, AnsweredError)
    return AnswerResponse(error.answer)


# The routes, including controllers and routers, and the dependencies of their handlers.


def listed(app: Any) -> Iterator[Served] | None:  # noqa: ANN401  (an application of any kind)
    """Every route; None if it is not a Litestar application."""
    return walk(app) if isinstance(app, Litestar) else None


def walk(app: Litestar) -> Iterator[Served]:
    """Every route."""
    patterns = tuple(installation.patterns for installation in installations_of(app))
    for route in app.routes:
        if isinstance(route, HTTPRoute):
            for handler in route.route_handlers:
                methods = frozenset(map(str, handler.http_methods)) - {"OPTIONS"}
                if methods:
                    called = tuple(_called_for(app, handler))
                    yield Served(route.path_format, methods, function_of(handler), patterns, called)


def _called_for(app: Litestar, handler: HTTPRouteHandler) -> Iterator[Callable[..., Any]]:
    """Its dependencies, with `once.session` in place of a session of the SQLAlchemy plugin."""
    provided = handler.resolve_dependencies()
    for name in depends_on(handler):
        yield provided[name].dependency
    for plugin in app.plugins:
        if isinstance(plugin, OncePlugin) and plugin.sessions_of(app, handler):
            yield plugin.once.session


def installations_of(app: Litestar) -> list[Installation]:
    """The installations of the application's plugins."""
    found = {id(plugin): getattr(plugin, "installation", None) for plugin in app.plugins}
    return [one for one in found.values() if isinstance(one, Installation)]


def handlers_of(app: Litestar) -> Iterator[HTTPRouteHandler]:
    """The route handlers of the application."""
    for route in app.routes:
        if isinstance(route, HTTPRoute):
            yield from route.route_handlers


def function_of(handler: HTTPRouteHandler) -> Callable[..., Any]:
    """The function as written: Litestar calls a `def` in a thread, and binds a method to its controller."""
    function: Any = getattr(handler.fn, "func", handler.fn)
    return cast("Callable[..., Any]", getattr(function, "__func__", function))


def protected_in(handler: HTTPRouteHandler) -> Callable[..., Any]:
    """The function that `@once.protect` returned, below any decorators; otherwise the function itself."""
    function = function_of(handler)
    return next((layer for layer in layers(function) if hasattr(layer, "__oncekey__")), function)


def enrolment_by(owner: object, handler: HTTPRouteHandler) -> Enrolment | None:
    """The enrolment of a route handler with a `Once`; None if it has none."""
    enrolment: Enrolment | None = getattr(protected_in(handler), "__oncekey__", None)
    return enrolment if enrolment is not None and enrolment.owner is owner else None


def databases_of(app: Litestar) -> Iterator[Any]:
    """The configurations of the SQLAlchemy plugin, if it is installed."""
    for plugin in app.plugins:
        if type(plugin).__name__ == "SQLAlchemyInitPlugin":  # advanced-alchemy may not be installed
            yield from getattr(plugin, "config", ())


def depends_on(handler: HTTPRouteHandler) -> set[str]:
    """The names of a handler's dependencies, including nested ones."""
    provided, found = handler.resolve_dependencies(), set()
    wanted = [*handler.parsed_fn_signature.parameters]
    while wanted:
        name = wanted.pop()
        if name in provided and name not in found:
            found.add(name)
            wanted.extend(provided[name].parsed_fn_signature.parameters)
    return found
