"""What every application here has in common: one small order, one row, one answer."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel

INSERT = "INSERT INTO bench_order (product, quantity) VALUES ($1, $2) RETURNING id"
BEGIN = "INSERT INTO bench_payment (product, quantity) VALUES ($1, $2) RETURNING id"
SETTLE = "UPDATE bench_payment SET charge = $1 WHERE id = $2"
POOL = 10
"""Connections of every pool: asyncpg's own default, and ours."""


class OrderIn(BaseModel):
    """The body of every request."""

    product: str
    quantity: int


def made(number: int | None, order: OrderIn) -> dict[str, Any]:
    """The answer to every request."""
    return {"id": number, "product": order.product, "quantity": order.quantity, "status": "created"}


async def charge(key: str) -> dict[str, Any]:
    """The outside call of the routes that have one: it costs nothing, so that only its bookkeeping is measured."""
    return {"id": f"ch_{key[-12:]}"}
