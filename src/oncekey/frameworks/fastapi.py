"""FastAPI: the status resource behind the application's own dependencies, OpenAPI, and one more start-up check."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from fastapi import routing

from oncekey.core.choices import ErrorFormat, InProgress
from oncekey.core.keys import HeaderSyntax, KeyFormat
from oncekey.core.model import Code, Effects
from oncekey.core.problems import PROBLEMS
from oncekey.engine.enrolment import SAFE
from oncekey.frameworks.routes import routed
from oncekey.frameworks.starlette import status_endpoint

if TYPE_CHECKING:
    from fastapi import FastAPI

    from oncekey.core.policy import Policy
    from oncekey.engine.enrolment import Enrolment
    from oncekey.frameworks.asgi.installation import Installation

log = logging.getLogger("oncekey")

PROBLEM = "application/problem+json"
EXAMPLE = "8e03978e-40d5-43e8-bc93-6894a57f9324"
DOCUMENTED = (
    Code.KEY_MISSING,
    Code.IN_PROGRESS,
    Code.BODY_TOO_LARGE,
    Code.KEY_REUSED,
    Code.STORE_UNAVAILABLE,
)


def add_status(app: FastAPI, installation: Installation, dependencies: Sequence[Any]) -> None:
    """Serve the status resource, authenticated like the application's other routes."""
    app.add_api_route(
        f"{installation.status_path}/{{key:path}}",
        status_endpoint(installation),
        methods=["GET"],
        dependencies=list(dependencies),
        response_model=None,
        summary="What became of a request",
        tags=["idempotency"],
    )


def describe(app: FastAPI) -> None:
    """Wrap `app.openapi`, late and repeatable: routes may still be added after the installation."""
    original = app.openapi

    def openapi() -> dict[str, Any]:
        schema = original()
        for route in routed(app):
            enrolment: Enrolment | None = getattr(route.endpoint, "__oncekey__", None)
            for method in route.methods:
                about = schema.get("paths", {}).get(route.path, {}).get(method.lower())
                if enrolment is None or about is None or "x-oncekey" in about:
                    continue
                if method not in SAFE:
                    _describe(about, enrolment)
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


def _describe(about: dict[str, Any], enrolment: Enrolment) -> None:
    policy = enrolment.policy
    about["x-oncekey"] = {"effects": enrolment.effects.value, "operation": enrolment.operation}
    about.setdefault("parameters", []).append(_parameter(policy))
    responses = about.setdefault("responses", {})
    media = PROBLEM if policy.error_format is ErrorFormat.PROBLEM else "application/json"
    for code in DOCUMENTED:
        problem = PROBLEMS[code]
        response = responses.setdefault(str(problem.status_in(policy.flavor)), {"description": problem.title})
        # A status may be the application's own as well: add a media type, replace nothing.
        response.setdefault("content", {}).setdefault(
            media, {"schema": {"type": "object"}, "example": {"code": code.value, "title": problem.title}}
        )
        if problem.waiting_helps:
            response.setdefault("headers", {})["Retry-After"] = _header(
                "Seconds to wait before the same request again."
            )
    if policy.on_in_progress is InProgress.ACCEPTED:
        running = responses.setdefault("202", {"description": PROBLEMS[Code.IN_PROGRESS].title})
        running.setdefault("headers", {}).update(
            {
                "Retry-After": _header("Seconds to wait before the same request again."),
                "Location": _header("Where the state of the first request can be read."),
            }
        )
    for status, response in responses.items():
        if status.startswith("2"):
            headers = response.setdefault("headers", {})
            headers[policy.key_header] = _header("The key, as it was received.")
            headers[policy.expires_header] = _header("Until when a repeat gets this same answer.")
            headers[policy.replayed_header] = _header("`true` if this answer was stored by an earlier request.")


def _parameter(policy: Policy) -> dict[str, Any]:
    quoted = policy.header_syntax is HeaderSyntax.STRICT
    schema: dict[str, Any] = {"type": "string"}
    if quoted:
        schema["minLength"] = policy.shortest_key + 2
    else:
        schema |= {"minLength": policy.shortest_key, "maxLength": policy.max_key_length}
    if policy.key_format is KeyFormat.UUID and not quoted:
        schema["format"] = "uuid"
    hours = policy.ttl.total_seconds() / 3600
    return {
        "name": policy.key_header,
        "in": "header",
        "required": policy.require_key,
        "description": (
            "Makes the request safe to retry: send the same key with the same request, and it is executed once; every "
            f"repeat within {hours:g} hours gets the original response. Use a new random UUID for each new request."
        ),
        "schema": schema,
        "example": f'"{EXAMPLE}"' if quoted else EXAMPLE,
    }


def _header(description: str) -> dict[str, Any]:
    return {"description": description, "schema": {"type": "string"}}
