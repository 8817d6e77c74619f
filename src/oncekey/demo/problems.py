"""The demo's own errors, in the shape that oncekey's refusals have: `application/problem+json` with a `code`."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from http import HTTPStatus
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import Response

from oncekey.core.errors import NotExecuted, StoreError
from oncekey.demo.provider_errors import ProviderFailedError

log = logging.getLogger("oncekey.demo")

MEDIA_TYPE = "application/problem+json"
SHOWN_ERRORS = 20


class ProblemError(Exception):
    """A refusal of the demo; the handler below makes it an answer."""

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
    """A problem as a response. It is written in ASCII: what a client sent may not have a UTF-8 form."""
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
    """The store cannot be asked now; whoever comes back with the same key is safe."""
    detail = "The store cannot be reached right now. Retry later, with the same key where there is one."
    return problem(HTTPStatus.SERVICE_UNAVAILABLE, "store_unavailable", detail, headers={"retry-after": "1"})


def add_problems(app: FastAPI) -> None:
    """Answer every error with a problem, and none with a traceback or an echo of what was sent."""
    app.add_exception_handler(ProblemError, _stated)
    app.add_exception_handler(RequestValidationError, _invalid)
    app.add_exception_handler(HTTPException, _http)
    app.add_exception_handler(StoreError, _store)
    app.add_exception_handler(ProviderFailedError, _provider)
    app.add_exception_handler(TimeoutError, _provider)  # a call that took too long
    app.add_exception_handler(NotExecuted, _not_executed)
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
    log.error("oncekey demo: the store failed: %s", error)
    return unavailable()


async def _provider(_: Request, error: Exception) -> Response:
    log.warning("oncekey demo: %s", str(error) or type(error).__name__)
    return problem(HTTPStatus.BAD_GATEWAY, "provider_failed", "The provider did not say what it did.")


async def _not_executed(_: Request, error: Exception) -> Response:
    log.warning("oncekey demo: %s", error)
    detail = "The provider cannot be reached; nothing was charged. Send the request again."
    return problem(HTTPStatus.SERVICE_UNAVAILABLE, "provider_unavailable", detail, headers={"retry-after": "1"})


async def _unexpected(_: Request, __: Exception) -> Response:
    return problem(HTTPStatus.INTERNAL_SERVER_ERROR, "internal_error", "Something went wrong here.")


def _where(location: Sequence[str | int]) -> str:
    return ".".join(map(str, location))
