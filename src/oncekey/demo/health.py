"""`/healthz`: 200 when the demo serves, which takes a store that answers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fastapi import APIRouter

if TYPE_CHECKING:
    from oncekey.demo.orders import Orders


def health_routes(orders: Orders) -> APIRouter:
    """The route for whoever watches over the process."""
    router = APIRouter(tags=["health"])

    @router.get("/healthz", summary="Whether the demo can serve")
    async def healthz() -> dict[str, str]:
        await orders.look()
        return {"status": "ok"}

    return router
