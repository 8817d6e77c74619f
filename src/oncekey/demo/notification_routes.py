"""`/notifications`: a route that talks to the provider directly, and knows afterwards only what it was told."""

from __future__ import annotations

from http import HTTPStatus
from typing import TYPE_CHECKING

from fastapi import APIRouter

from oncekey.core.errors import Rejected
from oncekey.demo.money import Money, Notification, begin
from oncekey.demo.problems import ProblemError
from oncekey.demo.tenants import Tenant
from oncekey.demo.wishes import Wished
from oncekey.effects import INLINE
from oncekey.frameworks.asgi.operation import Operation

if TYPE_CHECKING:
    from oncekey.demo.charging import Charging
    from oncekey.once import Once


def notification_routes(once: Once, charging: Charging) -> APIRouter:
    """The route for notifications."""
    router = APIRouter(tags=["notifications"])

    @router.post("/notifications", status_code=HTTPStatus.CREATED, summary="Send a notification, for a charge")
    @once.protect(effects=INLINE, operation="send_notification")
    async def send_notification(wanted: Money, _: Tenant, wishes: Wished, op: Operation) -> Notification:
        key = op.downstream_key("notification_sent")
        try:
            charge = await charging.charge(wanted, key, deduplicate=wishes.deduplicate, fault=wishes.fault)
        except Rejected:
            raise declined() from None
        return Notification(status="sent", charge_id=charge["id"], **begin(wanted))

    return router


def declined() -> ProblemError:
    """The provider's final no, as the shop passes it on."""
    return ProblemError(HTTPStatus.PAYMENT_REQUIRED, "card_declined", "The card was declined; nothing was charged.")
