"""The shop's own refusals, in the same form as oncekey's: `application/problem+json` with a `code`.

The shop refuses a body that is too large before it parses anything, and a caller without the token of a tenant.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from http import HTTPStatus
from typing import TYPE_CHECKING, Annotated, Any, Final

from fastapi import Depends, FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer
from starlette.exceptions import HTTPException
from starlette.responses import Response

from oncekey.core.errors import NotExecutedError, StoreError
from oncekey.frameworks.resuming import resumed_as
from oncekey_demo.charging import ProviderFailedError

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Receive, Scope, Send


log = logging.getLogger("oncekey_demo")

MEDIA_TYPE = "application/problem+json"
SHOWN_ERRORS = 20


class ProblemError(Exception):
    """A refusal of the demo; the handler below turns it into a response."""

    def __init__(self, status: HTTPStatus, code: str, detail: str, headers: Mapping[str, str] | None = None) -> None:
        super().__init__(code)
        self.answer = problem(status, code, detail, headers=headers)


def problem(
    status: int,
    code: str,
    detail: str,
    *,
    headers: Mapping[str, str] | None = None,
    errors: Sequence[Mapping[str, str]] | None = None,
) -> Response:
    """A problem as a response. It is ASCII: text from the client may be impossible to encode as UTF-8."""
    members: dict[str, Any] = {
        "type": "about:blank",
        "title": HTTPStatus(status).phrase,
        "status": int(status),
        "detail": detail,
        "code": code,
    }
    if errors is not None:
        members["errors"] = list(errors)
    body = json.dumps(members, separators=(",", ":"))
    return Response(body, status, {"cache-control": "no-store", **(headers or {})}, MEDIA_TYPE)


def unavailable() -> Response:
    """The response while the store is down; the client may safely retry with the same key."""
    detail = "The store cannot be reached right now. Retry later, with the same key if the request has one."
    return problem(HTTPStatus.SERVICE_UNAVAILABLE, "store_unavailable", detail, headers={"retry-after": "1"})


def add_problems(app: FastAPI) -> None:
    """Respond to every error with a problem, without a traceback or parts of the request."""
    app.add_exception_handler(ProblemError, _stated)
    app.add_exception_handler(RequestValidationError, _invalid)
    app.add_exception_handler(HTTPException, _http)
    app.add_exception_handler(StoreError, _store)
    app.add_exception_handler(ProviderFailedError, _provider)
    app.add_exception_handler(TimeoutError, _provider)  # a call that took too long
    app.add_exception_handler(NotExecutedError, _not_executed)
    app.add_exception_handler(Exception, _unexpected)


async def _stated(_: Request, error: Exception) -> Response:
    assert isinstance(error, ProblemError)
    return error.answer


async def _invalid(_: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    found = error.errors()
    if any(each["type"] == "json_invalid" for each in found):
        return problem(HTTPStatus.BAD_REQUEST, "malformed_json", "The body is not JSON.")
    shown = [{"where": _where(each["loc"]), "what": str(each["msg"])} for each in found[:SHOWN_ERRORS]]
    return problem(HTTPStatus.UNPROCESSABLE_ENTITY, "invalid_request", "The request is not valid.", errors=shown)


async def _http(_: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    status = HTTPStatus(error.status_code)
    if status is HTTPStatus.BAD_REQUEST:
        # Only the framework raises it here: for a body that is not UTF-8, or nested too deeply to be parsed.
        return problem(status, "malformed_json", "The body is not JSON.")
    return problem(status, status.name.lower(), str(error.detail), headers=error.headers)


async def _store(_: Request, error: Exception) -> Response:
    log.error("oncekey-demo: the store failed: %s", error)
    return unavailable()


async def _provider(_: Request, error: Exception) -> Response:
    log.warning("oncekey-demo: %s", str(error) or type(error).__name__)
    return problem(HTTPStatus.BAD_GATEWAY, "provider_failed", "The provider did not report its outcome.")


async def _not_executed(_: Request, error: Exception) -> Response:
    log.warning("oncekey-demo: %s", error)
    detail = "The provider cannot be reached; nothing was charged. Retry the request."
    return problem(HTTPStatus.SERVICE_UNAVAILABLE, "provider_unavailable", detail, headers={"retry-after": "1"})


async def _unexpected(_: Request, __: Exception) -> Response:
    return problem(HTTPStatus.INTERNAL_SERVER_ERROR, "internal_error", "The server failed unexpectedly.")


def _where(location: Sequence[str | int]) -> str:
    return ".".join(map(str, location))


_LENGTH: Final = b"content-length"


class BodyLimit:
    """Returns 413 for a body that is larger than `limit` bytes, with or without Content-Length."""

    def __init__(self, app: ASGIApp, limit: int) -> None:
        self._app = app
        self._limit = limit

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one connection."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        announced = next((value for name, value in scope["headers"] if name == _LENGTH), None)
        if announced is None:
            await self._counted(scope, receive, send)
        elif int(announced) > self._limit:
            await self._refuse(scope, receive, send)
        else:
            # The server reads no more than Content-Length, so there is nothing to count.
            await self._app(scope, receive, send)

    async def _counted(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve a chunked body. If it is too large, the application gets a disconnect, and its response is dropped."""
        size = 0

        def over() -> bool:
            return size > self._limit

        async def counted() -> Message:
            nonlocal size
            message = {"type": "http.disconnect"} if over() else await receive()
            size += len(message.get("body", b""))
            return {"type": "http.disconnect"} if over() else message

        async def send_counted(message: Message) -> None:
            if not over():
                await send(message)

        try:
            await self._app(scope, counted, send_counted)
        except Exception:
            if not over():
                raise
        if over():
            await self._refuse(scope, receive, send)

    async def _refuse(self, scope: Scope, receive: Receive, send: Send) -> None:
        detail = f"A request body may have at most {self._limit} bytes."
        await problem(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, "body_too_large", detail)(scope, receive, send)


TENANTS: Final = {"demo-alpha": "alpha", "demo-beta": "beta"}
"""Token -> tenant. A real service would look them up, and would not print them."""

_REALM: Final = 'Bearer realm="oncekey demo"'
_bearer = HTTPBearer(auto_error=False, description="`demo-alpha` or `demo-beta`")


async def authenticate(
    request: Request, credentials: Annotated[HTTPAuthorizationCredentials | None, Depends(_bearer)]
) -> str:
    """The caller's tenant. It is also stored on the request, where `tenant_of` reads it when the key is claimed."""
    resumed = resumed_as(request)
    if resumed is not None:
        # A completer has no token: it resumes a request of a tenant that was authenticated.
        request.state.tenant = resumed
        return resumed
    if credentials is None:
        raise _unauthorized("Send `Authorization: Bearer demo-alpha` or `Bearer demo-beta`.", _REALM)
    tenant = TENANTS.get(credentials.credentials)
    if tenant is None:
        raise _unauthorized("The token is invalid.", f'{_REALM}, error="invalid_token"')
    request.state.tenant = tenant
    return tenant


def tenant_of(request: Request) -> str:
    """The tenant of a request, for `once.install(tenant=...)`."""
    tenant: str = request.state.tenant
    return tenant


Tenant = Annotated[str, Depends(authenticate)]


def _unauthorized(detail: str, challenge: str) -> ProblemError:
    return ProblemError(HTTPStatus.UNAUTHORIZED, "unauthorized", detail, {"www-authenticate": challenge})
