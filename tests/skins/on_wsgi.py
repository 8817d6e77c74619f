"""The service as a plain WSGI application: each protected handler is one itself."""

from __future__ import annotations

import io
import json
from collections.abc import Iterable
from typing import Any

from oncekey.engine.operation import SyncOperation
from oncekey.frameworks.resuming import resumed_as
from skins.service import ROUTES, Asked, Route, Said, Service


def make(service: Service) -> Any:
    once = service.once

    def handler(route: Route) -> Any:
        @once.protect(effects=route.effects, operation=route.operation, **route.options)
        def handle(environ: Any, start_response: Any, op: SyncOperation[Any]) -> Iterable[bytes]:
            body = environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
            asked = Asked(environ["tenant"], json.loads(body), float(environ.get("HTTP_X_DELAY", 0)))
            return _answered(service.blocking(route.does(asked), asked, op), start_response)

        return handle

    handlers = {route.path: handler(route) for route in ROUTES}

    def app(environ: Any, start_response: Any) -> Iterable[bytes]:
        path, method = environ["PATH_INFO"], environ["REQUEST_METHOD"]
        resumed = resumed_as(environ)
        token = environ.get("HTTP_AUTHORIZATION", "")
        environ["tenant"], status = (resumed, 200) if resumed else service.admits(token, method)
        if status != 200:
            return _answered(Said(status, {}), start_response)
        if method == "GET" and path == "/orders":
            return _answered(service.orders(environ["tenant"]), start_response)
        if method != "POST" or path not in handlers:
            return _answered(Said(405 if path in handlers else 404, {}), start_response)
        body = environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
        if not service.takes(path, body):
            return _answered(Said(422, {}), start_response)
        environ["wsgi.input"] = io.BytesIO(body)
        return handlers[path](environ, start_response)

    def tenant(environ: Any) -> str:
        """Who was admitted; the status resource is asked before the application."""
        who: str = environ.get("tenant") or service.admits(environ.get("HTTP_AUTHORIZATION", ""), "GET")[0]
        return who

    return once.wsgi(app, tenant=tenant, status="/idempotency-keys")


def _answered(said: Said, start_response: Any) -> Iterable[bytes]:
    start_response(f"{said.status} Status", list(said.headers.items()))
    return iter(said.pieces) if said.pieces else [said.content]
