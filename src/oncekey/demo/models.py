"""Orders, as they are asked for and as they are."""

from __future__ import annotations

import secrets
import time
from datetime import UTC, datetime, timedelta
from typing import Annotated, Final, Literal
from uuid import UUID

from pydantic import BaseModel, ConfigDict, Field

# Visible characters only: a control character has no place in a name, and PostgreSQL cannot store NUL at all.
Name = Annotated[str, Field(min_length=1, max_length=100, pattern=r"^[^\x00-\x1f\x7f-\x9f]+$")]
Quantity = Annotated[int, Field(ge=1, le=1_000_000)]

_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)


class Item(BaseModel):
    """So many of one product."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)

    product_id: Name
    quantity: Quantity


class OrderIn(BaseModel):
    """An order as it is asked for."""

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
