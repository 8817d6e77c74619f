"""`/notifications`: a route that talks to the provider directly, and knows afterwards only what it was told."""

from __future__ import annotations

from http import HTTPStatus
from typing import TYPE_CHECKING, Any, Final

from fastapi import APIRouter

from oncekey.core.errors import Rejected
from oncekey.demo.money import Money, Notification, begin
from oncekey.demo.problems import ProblemError
from oncekey.demo.tenants import Tenant
from oncekey.demo.wishes import Wished
from oncekey.effects import INLINE
from oncekey.engine.operation import Operation
from oncekey.topics import Reply

if TYPE_CHECKING:
    from oncekey.demo.charging import Charging
    from oncekey.once import Once
    from oncekey.resolvers import Question


CALL: Final = "notification_sent"
"""The name of the call, from which its key comes."""


def notification_routes(once: Once, charging: Charging) -> APIRouter:
    """The route for notifications."""
    router = APIRouter(tags=["notifications"])

    @router.post("/notifications", status_code=HTTPStatus.CREATED, summary="Send a notification, for a charge")
    @once.protect(effects=INLINE, operation="send_notification")
    async def send_notification(wanted: Money, _: Tenant, wishes: Wished, op: Operation) -> Notification:
        key = op.downstream_key(CALL)
        try:
            charge = await charging.charge(wanted, key, deduplicate=wishes.deduplicate, fault=wishes.fault)
        except Rejected:
            raise declined() from None
        return _sent(wanted, charge)

    return router


def notified(_: Question, charge: dict[str, Any]) -> Reply:
    """The answer of a notification whose charge was found later."""
    wanted = Money(**{name: charge[name] for name in Money.model_fields})
    return Reply(HTTPStatus.CREATED, _sent(wanted, charge).model_dump(mode="json"))


def _sent(wanted: Money, charge: dict[str, Any]) -> Notification:
    return Notification(status="sent", charge_id=charge["id"], **begin(wanted))


def declined() -> ProblemError:
    """The provider's final no, as the shop passes it on."""
    return ProblemError(HTTPStatus.PAYMENT_REQUIRED, "card_declined", "The card was declined; nothing was charged.")
