"""The service as a Starlette application, whose middleware authenticates."""

from __future__ import annotations

import functools
from typing import Any

from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route as StarletteRoute

from oncekey.engine.operation import Operation
from oncekey.frameworks.resuming import resumed_as
from skins.on_fastapi import answered
from skins.service import ROUTES, Asked, Route, Service


class Authenticated:
    """Lets in who may call, and leaves the tenant in the scope."""

    def __init__(self, app: Any, service: Service) -> None:
        self.app, self.service = app, service

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "http":
            token = dict(scope["headers"]).get(b"authorization", b"").decode()
            resumed = resumed_as(scope)
            tenant, status = (resumed, 200) if resumed else self.service.admits(token, scope["method"])
            if status != 200:
                await Response(status_code=status)(scope, receive, send)
                return
            scope.setdefault("state", {})["tenant"] = tenant
        await self.app(scope, receive, send)


def make(service: Service) -> Starlette:
    once = service.once

    def endpoint(route: Route) -> Any:
        @once.protect(effects=route.effects, operation=route.operation, **route.options)
        async def handler(request: Request, op: Operation) -> Response:
            asked = Asked(request.state.tenant, await request.json(), float(request.headers.get("x-delay", 0)))
            return answered(await service.waiting(route.does(asked), asked, op))

        async def validated(request: Request) -> Response:
            if not service.takes(route.path, await request.body()):
                return Response(status_code=422)
            return await handler(request)

        return functools.wraps(handler)(validated)

    def orders(request: Request) -> Response:
        return answered(service.orders(request.state.tenant))

    routes = [StarletteRoute(route.path, endpoint(route), methods=["POST"]) for route in ROUTES]
    app = Starlette(
        routes=[*routes, StarletteRoute("/orders", orders)],
        middleware=[Middleware(Authenticated, service=service)],
        lifespan=once.lifespan,
    )
    once.install(app, tenant=lambda request: request.state.tenant)
    return app
