"""FastAPI: the status resource, OpenAPI, and an additional start-up check."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Final

from fastapi import FastAPI, routing

from oncekey.core.lazy import Lazy
from oncekey.core.model import Effects
from oncekey.frameworks.starlette import listed, status_endpoint

if TYPE_CHECKING:
    from oncekey.engine.enrolment import Enrolment
    from oncekey.frameworks import openapi as openapi_document
    from oncekey.frameworks.asgi.installation import Installation
else:
    openapi_document = Lazy("oncekey.frameworks.openapi")

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
        summary="Status of a request",
        openapi_extra={"parameters": [_KEY]},
        tags=["idempotency"],
    )


def describe(app: FastAPI) -> None:
    """Wrap `app.openapi`, late and repeatable: routes may still be added after the installation."""
    original = app.openapi

    def openapi() -> dict[str, Any]:
        schema = original()
        openapi_document.describe(schema, listed(app) or ())
        return schema

    app.openapi = openapi  # type: ignore[method-assign]


def warn_of_late_commits(app: FastAPI) -> None:
    """Log the dependencies that end after the response was stored and sent: a commit there comes too late."""
    for route in getattr(app, "routes", ()):
        for path, endpoint, dependant in _dependants(route):
            enrolment: Enrolment | None = getattr(endpoint, "__oncekey__", None)
            if enrolment is None or enrolment.effects not in {Effects.LOCAL, Effects.OUTBOX}:
                continue
            for call in dict.fromkeys(_late(dependant)):
                log.warning(
                    "oncekey: %s (%s) depends on %s, which ends after the response was stored and sent; if it "
                    "commits, its rows can be lost although a success was stored: write through op.connection or "
                    "once.session, which commit with the key",
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
