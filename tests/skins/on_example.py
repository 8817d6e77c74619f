"""The service on the framework of the guide "write a framework", whose skin is no part of oncekey."""

from __future__ import annotations

import json
from typing import Any

from small_framework import Request, Response, Small, protect

from oncekey.engine.operation import SyncOperation
from oncekey.frameworks.resuming import resumed_as
from skins.service import ROUTES, Asked, Route, Said, Service


def make(service: Service) -> Small:
    def before(request: Request) -> Response | None:
        resumed = resumed_as(request)
        token = request.headers.get("authorization", "")
        request.scope["tenant"], status = (resumed, 200) if resumed else service.admits(token, request.method)
        if status == 200 and request.method == "POST" and not service.takes(request.path, request.body):
            status = 422
        return None if status == 200 else Response(status)

    app, once = Small(before), service.once

    def add(route: Route) -> None:
        @app.route("POST", route.path)
        @once.protect(effects=route.effects, operation=route.operation, **route.options)
        def handler(request: Request, op: SyncOperation[Any]) -> Response:
            delay = float(request.headers.get("x-delay", 0))
            asked = Asked(request.scope["tenant"], json.loads(request.body), delay)
            return _answered(service.blocking(route.does(asked), asked, op))

    for route in ROUTES:
        add(route)

    @app.route("GET", "/orders")
    def orders(request: Request) -> Response:
        return _answered(service.orders(request.scope["tenant"]))

    protect(once, app, tenant=lambda request: request.scope["tenant"])
    return app


def _answered(said: Said) -> Response:
    return Response(said.status, said.headers, said.pieces or [said.content])
