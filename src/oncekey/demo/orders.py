"""The shop's orders."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from oncekey.demo.models import Item, Order, datetime_of, moment

if TYPE_CHECKING:
    from uuid import UUID

    from oncekey.demo.tables import Tables
    from oncekey.flow import Row


class Orders:
    """Orders, each of one tenant."""

    def __init__(self, tables: Tables) -> None:
        self._tables = tables

    async def insert(self, connection: Any, tenant: str, order: Order) -> None:  # noqa: ANN401  (the driver's own)
        """Write an order as part of the transaction that `connection` has open."""
        await self._tables.say(
            connection,
            "insert_order",
            {
                "tenant": tenant,
                "id": str(order.id),
                "status": order.status,
                "customer_id": order.customer_id,
                "items": json.dumps([item.model_dump() for item in order.items], separators=(",", ":")),
                "created_at": moment(order.created_at),
            },
        )

    async def newest(self, tenant: str, limit: int) -> list[Order]:
        """The tenant's orders, the newest first."""
        return [_order(row) for row in await self._tables.read("newest_orders", {"tenant": tenant, "limit": limit})]

    async def find(self, tenant: str, order_id: UUID) -> Order | None:
        """One order of the tenant."""
        rows = await self._tables.read("find_order", {"tenant": tenant, "id": str(order_id)})
        return _order(rows[0]) if rows else None


def _order(row: Row) -> Order:
    return Order(
        id=row["id"],
        status=row["status"],
        customer_id=row["customer_id"],
        items=[Item(**item) for item in json.loads(row["items"])],
        created_at=datetime_of(row["created_at"]),
    )
