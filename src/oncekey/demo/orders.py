"""The shop's orders in the store's own database, through whichever driver it is reached by."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from oncekey.core.errors import ConfigurationError
from oncekey.demo.models import Item, Order, datetime_of, moment
from oncekey.demo.speaking import speaker_for
from oncekey.flow import Mode, Statement, Transaction
from oncekey.stores.postgres import PostgresStore
from oncekey.stores.queries import load
from oncekey.stores.sqlite import SqliteStore

if TYPE_CHECKING:
    from collections.abc import Callable
    from uuid import UUID

    from oncekey.demo.speaking import Speaker
    from oncekey.engine.shell import AsyncEngine
    from oncekey.flow import Row, Rows, Steps, Value


class Orders:
    """Orders are written through the connection that a handler is handed, and read by themselves."""

    def __init__(self, engine: Callable[[], AsyncEngine]) -> None:
        self._engine = engine
        self._statements: dict[str, str] | None = None
        self._speaker: Speaker | None = None

    async def create_tables(self) -> None:
        """Make what is missing."""
        wanted = [name for name in ("one_at_a_time", "create_table") if name in self._sql]
        await self._run(Mode.ATOMIC, *((name, {}) for name in wanted))

    async def insert(self, connection: Any, tenant: str, order: Order) -> None:  # noqa: ANN401  (the driver's own)
        """Write an order as part of the transaction that `connection` has open."""
        params: dict[str, Value] = {
            "tenant": tenant,
            "id": str(order.id),
            "status": order.status,
            "customer_id": order.customer_id,
            "items": json.dumps([item.model_dump() for item in order.items], separators=(",", ":")),
            "created_at": moment(order.created_at),
        }
        self._speaker = self._speaker or speaker_for(self._engine().driver)
        await self._speaker.say(connection, self._sql["insert_order"], params)

    async def newest(self, tenant: str, limit: int) -> list[Order]:
        """The tenant's orders, the newest first."""
        rows = await self._run(Mode.READ, ("newest_orders", {"tenant": tenant, "limit": limit}))
        return [_order(row) for row in rows]

    async def find(self, tenant: str, order_id: UUID) -> Order | None:
        """One order of the tenant."""
        rows = await self._run(Mode.READ, ("find_order", {"tenant": tenant, "id": str(order_id)}))
        return _order(rows[0]) if rows else None

    async def look(self) -> None:
        """Ask the store for next to nothing; it raises when it cannot be asked."""
        await self._run(Mode.READ, ("look", {}))

    async def _run(self, mode: Mode, *statements: tuple[str, dict[str, Value]]) -> Rows:
        """The rows of the last statement."""

        def body() -> Steps[Rows]:
            rows: Rows = ()
            for name, params in statements:
                rows = yield Statement(f"demo.{name}", self._sql[name], params)
            return rows

        return await self._engine().driver.run(Transaction(f"demo.{statements[-1][0]}", mode, body))

    @property
    def _sql(self) -> dict[str, str]:
        if self._statements is None:
            self._statements = load(__package__, _dialect(self._engine()))
        return self._statements


def _dialect(engine: AsyncEngine) -> str:
    match engine.store:
        case SqliteStore():
            return "sql/sqlite.sql"
        case PostgresStore():
            return "sql/postgres.sql"
        case _:
            raise ConfigurationError("the demo needs SQLite or PostgreSQL")


def _order(row: Row) -> Order:
    return Order(
        id=row["id"],
        status=row["status"],
        customer_id=row["customer_id"],
        items=[Item(**item) for item in json.loads(row["items"])],
        created_at=datetime_of(row["created_at"]),
    )
