"""`/healthz`: 200 when the demo serves, which takes a store that answers. `/metrics`: what it has done so far."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fastapi import APIRouter, Response
from fastapi.responses import PlainTextResponse

if TYPE_CHECKING:
    from oncekey.demo.tables import Tables
    from oncekey.observe.prometheus import Prometheus
    from oncekey.once import Once


def health_routes(tables: Tables, once: Once, metrics: Prometheus) -> APIRouter:
    """The routes for whoever watches over the process."""
    router = APIRouter(tags=["health"])

    @router.get("/healthz", summary="Whether the demo can serve")
    async def healthz() -> dict[str, str]:
        await tables.read("look")
        return {"status": "ok"}

    @router.get("/metrics", summary="Counters and gauges as Prometheus reads them", response_class=PlainTextResponse)
    async def show_metrics() -> Response:
        return Response(await metrics.page(once), media_type=metrics.content_type)

    return router
