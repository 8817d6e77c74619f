"""`/healthz`: 200 when the demo serves, which takes a store that answers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fastapi import APIRouter

if TYPE_CHECKING:
    from oncekey.demo.tables import Tables


def health_routes(tables: Tables) -> APIRouter:
    """The route for whoever watches over the process."""
    router = APIRouter(tags=["health"])

    @router.get("/healthz", summary="Whether the demo can serve")
    async def healthz() -> dict[str, str]:
        await tables.read("look")
        return {"status": "ok"}

    return router
