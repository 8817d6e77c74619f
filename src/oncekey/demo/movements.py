"""The shop's payments, transfers and receipts in its own tables; what was charged is in the provider's ledger."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from oncekey.demo.models import born, datetime_of, moment
from oncekey.demo.money import Payment, Receipt, Transfer

if TYPE_CHECKING:
    from uuid import UUID

    from oncekey.demo.tables import Tables
    from oncekey.flow import Row, Value


class Movements:
    """Rows of one tenant each; those of a handler are written through its own connection."""

    def __init__(self, tables: Tables) -> None:
        self._tables = tables

    async def insert(self, connection: Any, tenant: str, moved: Payment | Transfer) -> None:  # noqa: ANN401
        """Write a payment or a transfer as part of the transaction that `connection` has open."""
        params: dict[str, Value] = {
            "tenant": tenant,
            "id": str(moved.id),
            "status": moved.status,
            "customer_id": moved.customer_id,
            "amount_cents": moved.amount_cents,
            "currency": moved.currency,
            "created_at": moment(moved.created_at),
        }
        statement = "insert_payment" if isinstance(moved, Payment) else "insert_transfer"
        await self._tables.say(connection, statement, params)

    async def end(self, connection: Any, tenant: str, payment: Payment) -> None:  # noqa: ANN401
        """Write how a payment ended."""
        params: dict[str, Value] = {
            "tenant": tenant,
            "id": str(payment.id),
            "status": payment.status,
            "charge_id": payment.charge_id,
        }
        await self._tables.say(connection, "end_payment", params)

    async def keep_receipt(self, tenant: str, payment_id: str) -> None:
        """Write a receipt; a message may come twice, and the second one changes nothing."""
        params: dict[str, Value] = {"tenant": tenant, "payment_id": payment_id, "sent_at": moment(born()[1])}
        await self._tables.write("insert_receipt", params)

    async def payments(self, tenant: str, limit: int) -> list[Payment]:
        """The tenant's payments, the newest first."""
        rows = await self._tables.read("newest_payments", {"tenant": tenant, "limit": limit})
        return [Payment(**_members(row)) for row in rows]

    async def payment(self, tenant: str, payment_id: UUID) -> Payment | None:
        """One payment of the tenant."""
        rows = await self._tables.read("find_payment", {"tenant": tenant, "id": str(payment_id)})
        return Payment(**_members(rows[0])) if rows else None

    async def transfers(self, tenant: str, limit: int) -> list[Transfer]:
        """The tenant's transfers as they were asked for, the newest first."""
        rows = await self._tables.read("newest_transfers", {"tenant": tenant, "limit": limit})
        return [Transfer(**_members(row)) for row in rows]

    async def receipts(self, tenant: str, limit: int) -> list[Receipt]:
        """The tenant's receipts, the newest payment first."""
        rows = await self._tables.read("newest_receipts", {"tenant": tenant, "limit": limit})
        return [Receipt(payment_id=row["payment_id"], sent_at=datetime_of(row["sent_at"])) for row in rows]


def _members(row: Row) -> dict[str, Any]:
    return {**row, "created_at": datetime_of(row["created_at"])}
