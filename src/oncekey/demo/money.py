"""Money that moves: what is asked for, and the payments, transfers and notifications that come of it."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Any, Final, Literal
from uuid import UUID

from pydantic import BaseModel, ConfigDict, Field

from oncekey.demo.models import Name, born

LARGEST: Final = 10**12

Cents = Annotated[int, Field(ge=1, le=LARGEST)]
Currency = Annotated[str, Field(pattern=r"^[A-Z]{3}$")]


class Money(BaseModel):
    """How much, and of whom."""

    model_config = ConfigDict(
        strict=True,
        extra="forbid",
        frozen=True,
        json_schema_extra={"examples": [{"customer_id": "cus_1001", "amount_cents": 1999, "currency": "EUR"}]},
    )

    customer_id: Name
    amount_cents: Cents
    currency: Currency


class _Moved(BaseModel):
    model_config = ConfigDict(frozen=True)

    id: UUID
    charge_id: str | None = None
    customer_id: str
    amount_cents: int
    currency: str
    created_at: datetime

    @property
    def money(self) -> Money:
        """What was asked for."""
        return Money(customer_id=self.customer_id, amount_cents=self.amount_cents, currency=self.currency)


class Payment(_Moved):
    """A payment; it is settled when the provider has charged for it."""

    status: Literal["created", "settled", "declined"]


class Transfer(_Moved):
    """A transfer; a worker makes it, and the response of its key tells how it ended."""

    status: Literal["requested", "done"]


class Notification(_Moved):
    """A notification that costs something, such as a text message: the provider charges when it is sent."""

    status: Literal["sent"]


class Receipt(BaseModel):
    """What a customer got for a payment."""

    payment_id: UUID
    sent_at: datetime


def begin(wanted: Money) -> dict[str, Any]:
    """The members that everything which moves money begins with."""
    new_id, created_at = born()
    return {"id": new_id, "created_at": created_at, **wanted.model_dump()}
