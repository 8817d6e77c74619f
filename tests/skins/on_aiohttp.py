"""The service as an application of aiohttp's, whose middleware authenticates."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

from aiohttp import web

from oncekey.aiohttp import install
from oncekey.engine.operation import Operation
from oncekey.frameworks.resuming import resumed_as
from skins.service import ROUTES, Asked, Route, Said, Service


def make(service: Service) -> web.Application:
    once = service.once

    @web.middleware
    async def authenticate(request: web.Request, handler: Any) -> Any:
        resumed = resumed_as(request)
        token = request.headers.get("Authorization", "")
        tenant, status = (resumed, 200) if resumed else service.admits(token, request.method)
        if status == 200 and request.method == "POST" and not service.takes(request.path, await request.read()):
            status = 422
        request["tenant"] = tenant
        return await handler(request) if status == 200 else web.Response(status=status)

    app = web.Application(middlewares=[authenticate])

    def add(route: Route) -> None:
        @once.protect(effects=route.effects, operation=route.operation, **route.options)
        async def handler(request: web.Request, op: Operation[Any]) -> web.Response:
            asked = Asked(request["tenant"], await request.json(), float(request.headers.get("X-Delay", 0)))
            return _answered(await service.waiting(route.does(asked), asked, op))

        app.router.add_post(route.path, handler)

    for route in ROUTES:
        add(route)

    async def orders(request: web.Request) -> web.Response:
        return _answered(await asyncio.to_thread(service.orders, request["tenant"]))

    app.router.add_get("/orders", orders)
    install(once, app, tenant=lambda request: request["tenant"])
    return app


def _answered(said: Said) -> web.Response:
    return web.Response(status=said.status, headers=said.headers, body=_each(said) if said.pieces else said.content)


async def _each(said: Said) -> AsyncIterator[bytes]:
    for piece in said.pieces:
        yield piece
