"""The shop's data: orders, payments, transfers and notifications, and the tables that store them, for every driver.

A handler writes through `op.connection`, which is the driver's own connection. An application has one driver and calls
it directly. The demo runs on any driver, so it has a `SqlExecutor` for each. The charges are in the provider's ledger.
"""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Callable, Mapping
from datetime import UTC, datetime, timedelta
from importlib.resources import files
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal, Protocol
from uuid import UUID

from pydantic import BaseModel, ConfigDict, Field

from oncekey.core.errors import ConfigurationError, StoreUnavailableError
from oncekey.core.flow import Body, Mode, Row, Rows, Statement, Transaction, Value
from oncekey.databases.mariadb.store import MariadbStore
from oncekey.databases.placeholders import numbered, pyformat
from oncekey.databases.postgres.store import PostgresStore
from oncekey.databases.sqlite.store import SqliteStore
from oncekey.stores.statements import load

if TYPE_CHECKING:
    from oncekey.engine.shell import AsyncEngine

# No control characters in a name; PostgreSQL cannot store NUL at all.
Name = Annotated[str, Field(min_length=1, max_length=100, pattern=r"^[^\x00-\x1f\x7f-\x9f]+$")]
Quantity = Annotated[int, Field(ge=1, le=1_000_000)]

_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)


class Item(BaseModel):
    """A product and its quantity."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)

    product_id: Name
    quantity: Quantity


class OrderIn(BaseModel):
    """An order as the client sends it."""

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
    """A placed order."""

    model_config = ConfigDict(frozen=True)

    id: UUID
    status: Literal["placed"]
    customer_id: str
    items: list[Item]
    created_at: datetime


def place(wanted: OrderIn) -> Order:
    """Create an order, with a new id and the current time."""
    new_id, created_at = new_id_and_time()
    return Order(
        id=new_id,
        status="placed",
        customer_id=wanted.customer_id,
        items=wanted.items,
        created_at=created_at,
    )


def new_id_and_time() -> tuple[UUID, datetime]:
    """A new id, and the current time."""
    now = time.time_ns()
    return ordered_uuid(now, secrets.randbits(62)), _EPOCH + timedelta(microseconds=now // 1000)


def moment(created_at: datetime) -> int:
    """A time as it is stored: microseconds since 1970."""
    return (created_at - _EPOCH) // timedelta(microseconds=1)


def datetime_of(micros: int) -> datetime:
    """The time of a stored value."""
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
        """The amount and the customer."""
        return Money(customer_id=self.customer_id, amount_cents=self.amount_cents, currency=self.currency)


class Payment(_Moved):
    """A payment; it is settled when the provider has charged the customer."""

    status: Literal["created", "settled", "declined"]


class Transfer(_Moved):
    """A transfer; a worker makes it, and the stored response of its key has the outcome."""

    status: Literal["requested", "done"]


class Notification(_Moved):
    """A notification with a price, such as a text message: the provider charges when it is sent."""

    status: Literal["sent"]


class Receipt(BaseModel):
    """The receipt that a customer got for a payment."""

    payment_id: UUID
    sent_at: datetime


def begin(wanted: Money) -> dict[str, Any]:
    """The first fields of a payment, a transfer or a notification."""
    new_id, created_at = new_id_and_time()
    return {"id": new_id, "created_at": created_at, **wanted.model_dump()}


class SqlExecutor(Protocol):
    """Executes one statement. Any error is an outage of the database, because the demo's statements are valid."""

    async def execute(self, connection: Any, sql: str, params: Mapping[str, Value]) -> None:  # noqa: ANN401
        """Execute the statement; its parameters are written `:name`."""


class SqliteExecutor:
    """SQLite: parameters as `:name`."""

    async def execute(self, connection: Any, sql: str, params: Mapping[str, Value]) -> None:  # noqa: ANN401
        """Execute the statement."""
        try:
            await connection.execute(sql, params)
        except connection.Error as error:
            raise StoreUnavailableError("SQLite did not execute the statement") from error


class PsycopgExecutor:
    """psycopg: parameters as `%(name)s`."""

    async def execute(self, connection: Any, sql: str, params: Mapping[str, Value]) -> None:  # noqa: ANN401
        """Execute the statement."""
        import psycopg  # noqa: PLC0415  (an optional package)

        try:
            await connection.execute(pyformat(sql), params)
        except psycopg.Error as error:
            raise StoreUnavailableError("PostgreSQL did not execute the statement") from error


class AsyncpgExecutor:
    """asyncpg: parameters as `$1`."""

    async def execute(self, connection: Any, sql: str, params: Mapping[str, Value]) -> None:  # noqa: ANN401
        """Execute the statement."""
        import asyncpg  # noqa: PLC0415  (an optional package)

        statement = numbered(sql)
        try:
            await connection.execute(statement.text, *statement.arguments(params))
        except (asyncpg.PostgresError, asyncpg.InterfaceError, OSError) as error:
            raise StoreUnavailableError("PostgreSQL did not execute the statement") from error


class AiomysqlExecutor:
    """aiomysql: parameters as `%(name)s`."""

    async def execute(self, connection: Any, sql: str, params: Mapping[str, Value]) -> None:  # noqa: ANN401
        """Execute the statement."""
        import pymysql  # noqa: PLC0415  (an optional package)

        try:
            async with connection.cursor() as cursor:
                await cursor.execute(pyformat(sql), params)
        except (pymysql.MySQLError, OSError) as error:
            raise StoreUnavailableError("MariaDB did not execute the statement") from error


def executor_for(driver: object) -> SqlExecutor:
    """The executor for a driver's connections."""
    match type(driver).__name__:  # by name: importing every driver would need every package
        case "AsyncSqliteDriver":
            return SqliteExecutor()
        case "AsyncPsycopgDriver":
            return PsycopgExecutor()
        case "AsyncpgDriver":
            return AsyncpgExecutor()
        case "AiomysqlDriver":
            return AiomysqlExecutor()
        case other:
            raise ConfigurationError(f"the demo does not support the driver {other}")


_DIALECTS: Final[Mapping[type, str]] = {SqliteStore: "sqlite", PostgresStore: "postgres", MariadbStore: "mariadb"}


class Tables:
    """Writes rows through a handler's connection, and reads them in separate transactions.

    The statements are files of `package`: `sql/sqlite.sql` and so on. `needs` is the error for a store without a file.
    """

    def __init__(
        self,
        engine: Callable[[], AsyncEngine],
        package: str = "oncekey_demo",
        needs: str = "the demo needs SQLite or PostgreSQL",
    ) -> None:
        self._engine = engine
        self._package = package
        self._name = package.rpartition(".")[2]
        self._needs = needs
        self._statements: dict[str, str] | None = None
        self._executor: SqlExecutor | None = None

    async def create(self) -> None:
        """Create the tables that are missing."""
        first = [name for name in ("one_at_a_time",) if name in self._sql]
        await self.run(Mode.ATOMIC, *((name, {}) for name in [*first, *self.named("create_")]))

    async def execute(self, connection: Any, statement: str, params: Mapping[str, Value]) -> None:  # noqa: ANN401
        """Write in the open transaction of `connection`."""
        self._executor = self._executor or executor_for(self._engine().driver)
        await self._executor.execute(connection, self._sql[statement], params)

    def statement(self, name: str, params: dict[str, Value]) -> Statement:
        """A statement by its name, for a transaction that the caller runs."""
        return Statement(f"{self._name}.{name}", self._sql[name], params)

    async def write(self, statement: str, params: dict[str, Value]) -> None:
        """Write in a separate transaction."""
        await self.run(Mode.ATOMIC, (statement, params))

    async def read(self, statement: str, params: dict[str, Value] | None = None) -> Rows:
        """The rows of a statement; raises if the store is down."""
        return await self.run(Mode.READ, (statement, params or {}))

    async def run(self, mode: Mode, *named: tuple[str, dict[str, Value]]) -> Rows:
        """Run statements in one transaction; returns the rows of the last one."""
        # Created here: a driver may run the body in a thread, where the engine cannot be found by its event loop.
        statements = [self.statement(name, params) for name, params in named]

        def body() -> Body[Rows]:
            rows: Rows = ()
            for statement in statements:
                rows = yield statement
            return rows

        return await self._engine().driver.run(Transaction(f"{self._name}.{named[-1][0]}", mode, body))

    def named(self, prefix: str) -> list[str]:
        """The statements whose names begin with `prefix`, in the file's order."""
        return [name for name in self._sql if name.startswith(prefix)]

    @property
    def _sql(self) -> dict[str, str]:
        if self._statements is None:
            dialect = _DIALECTS.get(type(self._engine().store), "")
            if not files(self._package).joinpath(f"sql/{dialect}.sql").is_file():
                raise ConfigurationError(self._needs)
            self._statements = load(self._package, f"sql/{dialect}.sql")
        return self._statements


class Orders:
    """The orders of all tenants."""

    def __init__(self, tables: Tables) -> None:
        self._tables = tables

    async def insert(self, connection: Any, tenant: str, order: Order) -> None:  # noqa: ANN401  (the driver's own)
        """Write an order in the open transaction of `connection`."""
        await self._tables.execute(
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
        """The tenant's orders, newest first."""
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


class Movements:
    """The payments, transfers and receipts of all tenants. A handler's rows are written through its connection."""

    def __init__(self, tables: Tables) -> None:
        self._tables = tables

    async def insert(self, connection: Any, tenant: str, moved: Payment | Transfer) -> None:  # noqa: ANN401
        """Write a payment or a transfer in the open transaction of `connection`."""
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
        await self._tables.execute(connection, statement, params)

    async def end(self, connection: Any, tenant: str, payment: Payment) -> None:  # noqa: ANN401
        """Write a payment's final status."""
        params: dict[str, Value] = {
            "tenant": tenant,
            "id": str(payment.id),
            "status": payment.status,
            "charge_id": payment.charge_id,
        }
        await self._tables.execute(connection, "end_payment", params)

    async def keep_receipt(self, tenant: str, payment_id: str) -> None:
        """Write a receipt; a second delivery of the message changes nothing."""
        params: dict[str, Value] = {"tenant": tenant, "payment_id": payment_id, "sent_at": moment(new_id_and_time()[1])}
        await self._tables.write("insert_receipt", params)

    async def payments(self, tenant: str, limit: int) -> list[Payment]:
        """The tenant's payments, newest first."""
        rows = await self._tables.read("newest_payments", {"tenant": tenant, "limit": limit})
        return [Payment(**_members(row)) for row in rows]

    async def payment(self, tenant: str, payment_id: UUID) -> Payment | None:
        """One payment of the tenant."""
        rows = await self._tables.read("find_payment", {"tenant": tenant, "id": str(payment_id)})
        return Payment(**_members(rows[0])) if rows else None

    async def transfers(self, tenant: str, limit: int) -> list[Transfer]:
        """The tenant's transfers as they were requested, newest first."""
        rows = await self._tables.read("newest_transfers", {"tenant": tenant, "limit": limit})
        return [Transfer(**_members(row)) for row in rows]

    async def receipts(self, tenant: str, limit: int) -> list[Receipt]:
        """The tenant's receipts, newest payment first."""
        rows = await self._tables.read("newest_receipts", {"tenant": tenant, "limit": limit})
        return [Receipt(payment_id=row["payment_id"], sent_at=datetime_of(row["sent_at"])) for row in rows]


def _members(row: Row) -> dict[str, Any]:
    return {**row, "created_at": datetime_of(row["created_at"])}
