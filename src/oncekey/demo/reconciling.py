"""What became of a charge whose answer was lost: the provider is asked, or tells it by itself."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from oncekey.demo.notification_routes import CALL, notified
from oncekey.demo.transfer_routes import transferred
from oncekey.resolvers import Executed, Question, Sighting, Unexecuted

if TYPE_CHECKING:
    from fastapi import FastAPI

    from oncekey.demo.charging import Charging
    from oncekey.once import Once

WEBHOOKS: Final = "/webhooks/provider"
SECRET: Final = "whsec_demo_of_oncekey"  # noqa: S105  (a demo's)
"""What the provider signs its webhooks with, if it is not told otherwise."""


def resolvers(once: Once, charging: Charging) -> None:
    """One for each operation that charges; the provider is asked by the key that the charge was sent with."""

    @once.resolver("create_payment")
    async def payment(question: Question) -> Executed | Unexecuted:
        charge = await charging.find(question.downstream_key)
        return Unexecuted() if charge is None else Executed(charge, provider_id=charge["id"])

    @once.resolver("create_transfer", answer=transferred)
    async def transfer(question: Question) -> Executed | Unexecuted:
        charge = await charging.find(question.downstream_key)
        return Unexecuted() if charge is None else Executed(transferred(question, charge), provider_id=charge["id"])

    @once.resolver("send_notification", call=CALL, answer=notified)
    async def notification(question: Question) -> Executed | Unexecuted:
        charge = await charging.find(question.downstream_key)
        return Unexecuted() if charge is None else Executed(notified(question, charge), provider_id=charge["id"])


def webhooks(once: Once, app: FastAPI, secret: str = SECRET) -> None:
    """Where the provider tells of its charges."""
    once.webhook(app, WEBHOOKS, secret=secret, parse=_sighting, name="provider")


def _sighting(event: dict[str, Any]) -> Sighting | None:
    charge = event["charge"]
    if event["type"] != "charge.succeeded" or charge["downstream_key"] is None:
        return None
    return Sighting(
        Executed(charge), downstream_key=charge["downstream_key"], provider_id=charge["id"], event_id=event["id"]
    )
