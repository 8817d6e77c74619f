"""The data of the shop: orders, amounts of money, and payments, transfers and notifications."""

from __future__ import annotations

import secrets
import time
from datetime import UTC, datetime, timedelta
from typing import Annotated, Any, Final, Literal
from uuid import UUID

from pydantic import BaseModel, ConfigDict, Field

# Visible characters only: a control character has no place in a name, and PostgreSQL cannot store NUL at all.
Name = Annotated[str, Field(min_length=1, max_length=100, pattern=r"^[^\x00-\x1f\x7f-\x9f]+$")]
Quantity = Annotated[int, Field(ge=1, le=1_000_000)]

_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)


class Item(BaseModel):
    """A product and its quantity."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)

    product_id: Name
    quantity: Quantity


class OrderIn(BaseModel):
    """An order as the client asks for it."""

    model_config = ConfigDict(
        strict=True,
        extra="forbid",
        frozen=True,
        json_schema_extra={
            "examples": [{"customer_id": "cus_1001", "items": [{"product_id": "sku_teapot", "quantity": 2}]}]
        },
    )

    customer_id: Name
    items: Annotated[list[Item], Field(min_length=1, max_length=100)]


class Order(BaseModel):
    """An order that was placed."""

    model_config = ConfigDict(frozen=True)

    id: UUID
    status: Literal["placed"]
    customer_id: str
    items: list[Item]
    created_at: datetime


def place(wanted: OrderIn) -> Order:
    """An order with an id and a time of its own."""
    new_id, created_at = born()
    return Order(
        id=new_id,
        status="placed",
        customer_id=wanted.customer_id,
        items=wanted.items,
        created_at=created_at,
    )


def born() -> tuple[UUID, datetime]:
    """An id and a time for something new."""
    now = time.time_ns()
    return ordered_uuid(now, secrets.randbits(62)), _EPOCH + timedelta(microseconds=now // 1000)


def moment(created_at: datetime) -> int:
    """A time as the tables keep it: microseconds since 1970."""
    return (created_at - _EPOCH) // timedelta(microseconds=1)


def datetime_of(micros: int) -> datetime:
    """The time that the tables kept."""
    return _EPOCH + timedelta(microseconds=micros)


def ordered_uuid(now: int, rest: int) -> UUID:
    """A UUID of version 7 (RFC 9562), precise to less than a microsecond: the newest orders have the largest ids."""
    millis, nanos = divmod(now, 1_000_000)
    fraction = nanos * 4096 // 1_000_000
    return UUID(int=(millis << 80) | (7 << 76) | (fraction << 64) | (2 << 62) | rest)


LARGEST: Final = 10**12

Cents = Annotated[int, Field(ge=1, le=LARGEST)]
Currency = Annotated[str, Field(pattern=r"^[A-Z]{3}$")]


class Money(BaseModel):
    """An amount, and the customer who pays it."""

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
