"""FastAPI: the status resource, OpenAPI, one more start-up check, and `tenant=Depends(...)`.

The dependency that names the tenant is resolved when the tenant is asked for, also by its override. It is resolved by
an application of its own, of one route that depends on it: so FastAPI's own rules hold, for sub-dependencies, `yield`,
security and `dependency_overrides`, and nothing that is private to FastAPI is called.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Final, NoReturn

from fastapi import FastAPI, Request, Response, routing
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException

from oncekey.core.errors import ConfigurationError
from oncekey.core.model import Effects
from oncekey.frameworks import openapi as documents
from oncekey.frameworks.starlette import listed, status_endpoint

if TYPE_CHECKING:
    from oncekey.engine.enrolment import Enrolment
    from oncekey.frameworks.asgi import App, Identify, Message, Receive, Scope, Send
    from oncekey.frameworks.asgi.installation import Installation


log = logging.getLogger("oncekey")


_KEY: Final = {
    "name": "key",
    "in": "path",
    "required": True,
    "description": "The key, without quotes.",
    "schema": {"type": "string"},
}


def add_status(app: FastAPI, installation: Installation, dependencies: Sequence[Any]) -> None:
    """Serve the status resource, authenticated like the application's other routes."""
    app.add_api_route(
        f"{installation.status_path}/{{key:path}}",
        status_endpoint(installation),
        methods=["GET"],
        dependencies=list(dependencies),
        response_model=None,
        summary="What became of a request",
        openapi_extra={"parameters": [_KEY]},
        tags=["idempotency"],
    )


def describe(app: FastAPI) -> None:
    """Wrap `app.openapi`, late and repeatable: routes may still be added after the installation."""
    original = app.openapi

    def openapi() -> dict[str, Any]:
        schema = original()
        documents.describe(schema, listed(app) or ())
        return schema

    app.openapi = openapi  # type: ignore[method-assign]


def warn_of_late_commits(app: FastAPI) -> None:
    """Name the dependencies that end after the answer was stored and sent: a commit there comes too late."""
    for route in getattr(app, "routes", ()):
        for path, endpoint, dependant in _dependants(route):
            enrolment: Enrolment | None = getattr(endpoint, "__oncekey__", None)
            if enrolment is None or enrolment.effects is not Effects.LOCAL:
                continue
            for call in _late(dependant):
                log.warning(
                    "oncekey: %s (%s) depends on %s, which ends after the answer was stored and sent; if it commits, "
                    "its rows can be lost behind a stored success: write through op.connection or once.session, or "
                    'use Depends(..., scope="function")',
                    enrolment.operation,
                    path,
                    getattr(call, "__qualname__", call),
                )


def _dependants(route: Any) -> Iterator[tuple[str, Any, Any]]:  # noqa: ANN401
    contexts = getattr(routing, "iter_route_contexts", None)
    for context in contexts([route]) if contexts else [route]:
        dependant = getattr(context, "dependant", None)
        if dependant is None:
            dependant = getattr(getattr(context, "original_route", None), "dependant", None)
        if dependant is not None:
            yield getattr(context, "path_format", ""), getattr(context, "endpoint", None), dependant


def _late(dependant: Any) -> Iterator[Callable[..., Any]]:  # noqa: ANN401
    for inner in dependant.dependencies:
        streams = inspect.isgeneratorfunction(inner.call) or inspect.isasyncgenfunction(inner.call)
        if streams and getattr(inner, "scope", None) != "function":
            yield inner.call
        yield from _late(inner)


_FOUND: Final = "oncekey.found"
_METHODS: Final = ["GET", "HEAD", "OPTIONS", "POST", "PUT", "PATCH", "DELETE"]
NO_BODY: Final = (
    "the dependency of once.install(app, {what}=Depends(...)) reads the body: whose request it is comes from what "
    "authenticates it"
)
NOT_REACHED: Final = "the dependency of once.install(app, {what}=Depends(...)) gave nothing"


def by_dependency(app: FastAPI, dependency: Any, what: str) -> Identify:  # noqa: ANN401  (what Depends(...) returns)
    """Identify by a dependency of the application; what it raises is answered as on any route of it."""
    asking = _asking(app, dependency)

    async def identify(scope: Scope) -> str:
        asking.dependency_overrides = app.dependency_overrides
        found: dict[str, Any] = {}
        await asking({**scope, "root_path": "", _FOUND: found}, _receiver(what), _nowhere)
        if "error" in found:
            raise found["error"]
        if "value" not in found:
            raise ConfigurationError(NOT_REACHED.format(what=what))
        value: str = found["value"]
        return value

    return identify


def _asking(app: FastAPI, dependency: Any) -> FastAPI:  # noqa: ANN401
    async def failed(request: Request, error: Exception) -> Response:
        request.scope[_FOUND]["error"] = error
        return Response()

    handlers = {HTTPException: failed, RequestValidationError: failed}
    asking = FastAPI(openapi_url=None, exception_handlers=handlers)  # type: ignore[arg-type]  # of any exception

    async def ask(request: Request, value: Any = dependency) -> Response:  # noqa: ANN401
        request.scope[_FOUND]["value"] = value
        return Response()

    asking.add_api_route("/{oncekey_path:path}", ask, methods=_METHODS)
    asking.add_middleware(_In, shown=app)
    return asking


class _In:
    """Shows the application itself to what asks for `request.app`."""

    def __init__(self, app: App, shown: FastAPI) -> None:
        self._app = app
        self._shown = shown

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        scope["app"] = self._shown
        await self._app(scope, receive, send)


def _receiver(what: str) -> Receive:
    async def receive() -> NoReturn:
        raise ConfigurationError(NO_BODY.format(what=what))

    return receive


async def _nowhere(_: Message) -> None:
    """The response of the one route is not used."""
