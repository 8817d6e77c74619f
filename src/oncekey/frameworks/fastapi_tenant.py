"""`tenant=Depends(...)` in FastAPI: a dependency of the application identifies the tenant or the principal.

The dependency that returns the tenant is resolved on demand, with its overrides. A separate application with one route
resolves it: so FastAPI's own rules apply to sub-dependencies, `yield`, security and `dependency_overrides`, and no
private function of FastAPI is called.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, NoReturn

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException

from oncekey.core.errors import ConfigurationError

if TYPE_CHECKING:
    from oncekey.frameworks.asgi import App, Identify, Message, Receive, Scope, Send

_FOUND: Final = "oncekey.found"
_METHODS: Final = ["GET", "HEAD", "OPTIONS", "POST", "PUT", "PATCH", "DELETE"]
NO_BODY: Final = (
    "the dependency of once.install(app, {what}=Depends(...)) reads the body: derive the {what} from the request's "
    "credentials"
)
NOT_REACHED: Final = "the dependency of once.install(app, {what}=Depends(...)) returned nothing"


def by_dependency(app: FastAPI, dependency: Any, what: str) -> Identify:  # noqa: ANN401  (what Depends(...) returns)
    """Identify callers with a dependency of the application; its exceptions are handled as on any route."""
    asking = _resolving_app(app, dependency)

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


def _resolving_app(app: FastAPI, dependency: Any) -> FastAPI:  # noqa: ANN401
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
    """Provides the application itself as `request.app`."""

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
    """Discard the response: only the dependency's value is used."""
