"""`/demo/ledger`: the provider's own books, read-only, beside the shop's."""

from __future__ import annotations

from http import HTTPStatus
from typing import TYPE_CHECKING, Any

from fastapi import APIRouter

from oncekey.demo.problems import ProblemError
from oncekey.demo.provider_errors import ProviderFailedError

if TYPE_CHECKING:
    from oncekey.demo.charging import Charging


def ledger_routes(charging: Charging) -> APIRouter:
    """The route for whoever compares."""
    router = APIRouter(tags=["provider"])

    @router.get("/demo/ledger", summary="What the provider has charged")
    async def read_ledger() -> dict[str, Any]:
        try:
            return await charging.ledger()
        except ProviderFailedError as error:
            detail = "The provider does not answer."
            headers = {"retry-after": "1"}
            raise ProblemError(HTTPStatus.SERVICE_UNAVAILABLE, "provider_unavailable", detail, headers) from error

    return router
