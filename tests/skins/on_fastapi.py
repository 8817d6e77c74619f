"""The service as a FastAPI application."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import Depends, FastAPI, Header, HTTPException, Request, Response
from fastapi.responses import StreamingResponse

from oncekey.engine.operation import Operation
from oncekey.frameworks.resuming import resumed_as
from skins.service import ROUTES, Asked, Route, Said, Service


def make(service: Service) -> FastAPI:
    async def authenticate(request: Request, authorization: Annotated[str, Header()] = "") -> None:
        resumed = resumed_as(request)
        tenant, status = (resumed, 200) if resumed else service.admits(authorization, request.method)
        if status != 200:
            raise HTTPException(status)
        request.state.tenant = tenant
        if request.method == "POST" and not service.takes(request.url.path, await request.body()):
            raise HTTPException(422)

    once = service.once
    app = FastAPI(lifespan=once.lifespan, dependencies=[Depends(authenticate)], docs_url=None, redoc_url=None)

    def add(route: Route) -> None:
        @app.post(route.path, status_code=201, response_model=None)
        @once.protect(effects=route.effects, operation=route.operation, **route.options)
        async def handler(
            order: dict[str, Any], request: Request, op: Operation, x_delay: Annotated[float, Header()] = 0.0
        ) -> Response:
            asked = Asked(request.state.tenant, order, x_delay)
            return answered(await service.waiting(route.does(asked), asked, op))

    for route in ROUTES:
        add(route)

    @app.get("/orders")
    def orders(request: Request) -> Response:
        return answered(service.orders(request.state.tenant))

    once.install(app, tenant=lambda request: request.state.tenant, status_dependencies=[Depends(authenticate)])
    return app


def answered(said: Said) -> Response:
    if said.pieces:
        return StreamingResponse(iter(said.pieces), said.status, said.headers, media_type=said.media_type)
    return Response(said.content, said.status, said.headers)
