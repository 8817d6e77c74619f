"""The service as a Litestar application, whose guard authenticates."""

from __future__ import annotations

from typing import Any

from litestar import Litestar, Request, Response, get, post
from litestar.exceptions import HTTPException
from litestar.response import Stream

from oncekey.engine.operation import Operation
from oncekey.frameworks.resuming import resumed_as
from oncekey.litestar import OncePlugin
from skins.service import ROUTES, Asked, Route, Said, Service

Asking = Request[Any, Any, Any]


def make(service: Service) -> Litestar:
    once = service.once

    async def authenticate(request: Any, _: object) -> None:
        resumed = resumed_as(request)
        token = request.headers.get("authorization", "")
        tenant, status = (resumed, 200) if resumed else service.admits(token, request.method)
        if status != 200:
            raise HTTPException(status_code=status)
        request.state.tenant = tenant
        if request.method == "POST" and not service.takes(request.url.path, await request.body()):
            raise HTTPException(status_code=422)

    def routed(route: Route) -> Any:
        @post(route.path, name=route.operation)
        @once.protect(effects=route.effects, operation=route.operation, **route.options)
        async def handler(data: dict[str, Any], request: Asking, op: Operation[Any]) -> Response[Any]:
            asked = Asked(request.state.tenant, data, float(request.headers.get("x-delay", 0)))
            return _answered(await service.waiting(route.does(asked), asked, op))

        return handler

    @get("/orders", sync_to_thread=True)
    def orders(request: Asking) -> Response[Any]:
        return _answered(service.orders(request.state.tenant))

    return Litestar(
        [*map(routed, ROUTES), orders],
        guards=[authenticate],
        plugins=[OncePlugin(once, tenant=lambda request: request.state.tenant)],
    )


def _answered(said: Said) -> Response[Any]:
    if said.pieces:
        return Stream(iter(said.pieces), status_code=said.status, media_type=said.media_type)
    return Response(said.content, status_code=said.status, headers=said.headers)
