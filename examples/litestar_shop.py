"""A payments service on Litestar, with a route for each kind of effects; README.md has the command to start it."""

import asyncio
from dataclasses import dataclass
from typing import Any

from litestar import Litestar, Request, Router, get, post
from litestar.connection import ASGIConnection
from litestar.exceptions import NotAuthorizedException
from litestar.handlers import BaseRouteHandler
from provider import charge
from shop_tables import ORDER, PAID, PAYMENT, create_tables, orders_of, tenant_of

from oncekey import INLINE, LOCAL, OUTBOX, PHASED, Message, Once, Operation, Reply, resumed_as
from oncekey.litestar import OncePlugin

AnyRequest = Request[Any, Any, Any]

create_tables()
once = Once("sqlite:///shop.db", migrate=True, workers=True)


async def authenticate(connection: ASGIConnection[Any, Any, Any, Any], _: BaseRouteHandler) -> None:
    """The caller's tenant. A worker that resumes a request has no token: it acts for the stored tenant."""
    tenant = resumed_as(connection) or tenant_of(connection.headers.get("Authorization"))
    if tenant is None:
        raise NotAuthorizedException
    connection.state.tenant = tenant


@dataclass
class OrderIn:
    """The body of an order."""

    product: str
    quantity: int


@dataclass
class PaymentIn:
    """The body of a payment."""

    cents: int


@post("/orders")
@once.protect(effects=LOCAL)
async def create_order(data: OrderIn, request: AnyRequest, op: Operation) -> dict[str, Any]:
    """LOCAL: the row, the key and the response commit together, or not at all."""
    cursor = await op.connection.execute(ORDER, (request.state.tenant, data.product, data.quantity))
    row = await cursor.fetchone()
    return {"id": row["id"], "status": "created"}


@get("/orders", sync_to_thread=True)
def list_orders(request: AnyRequest) -> list[dict[str, Any]]:
    """A read needs no idempotency key."""
    return orders_of(request.state.tenant)


async def begin(tx: Any, tenant: str, cents: int) -> int:  # noqa: ANN401  (a connection of the driver)
    """The first step of a payment: insert the row."""
    cursor = await tx.execute(PAYMENT, (tenant, cents))
    row = await cursor.fetchone()
    return int(row["id"])


async def charge_card(cents: int, *, key: str) -> dict[str, Any]:
    """Call the provider, which deduplicates by key."""
    return await asyncio.to_thread(charge, cents, key=key)


async def settle(tx: Any, payment_id: int, charge_id: str) -> None:  # noqa: ANN401
    """The last step: store the charge's id."""
    await tx.execute(PAID, (charge_id, payment_id))


@post("/payments")
@once.protect(effects=PHASED, lease=10, call_timeout=10)  # limits how long a payment waits after a crash
async def create_payment(data: PaymentIn, request: AnyRequest, op: Operation) -> dict[str, Any]:
    """PHASED: after a crash at any point, a retry or a worker resumes after the last stored step."""
    payment_id = await op.phase("payment_created", begin, request.state.tenant, data.cents)
    charged = await op.call("charged", charge_card, data.cents, repeatable=True)
    await op.phase("payment_settled", settle, payment_id, charged["id"])
    return {"id": payment_id, "charge": charged["id"]}


@post("/transfers", status_code=202)
@once.protect(effects=OUTBOX)
async def create_transfer(data: PaymentIn, op: Operation) -> None:
    """OUTBOX: responds with 202; a worker makes the call and stores the final response."""
    op.defer("transfer", {"cents": data.cents})


@once.topic("transfer", repeatable=True)
async def transfer(message: Message) -> Reply:
    """Charge the card, in a worker."""
    charged = await charge_card(message.payload["cents"], key=message.downstream_key)
    return Reply(201, {"charge": charged["id"]})


@post("/charges")
@once.protect(effects=INLINE)
async def create_charge(data: PaymentIn, op: Operation) -> dict[str, Any]:
    """INLINE: one external call with a downstream key; if its reply is lost, the outcome is unknown."""
    charged = await charge_card(data.cents, key=op.downstream_key("charge"))
    return {"charge": charged["id"]}


handlers = [create_order, list_orders, create_payment, create_transfer, create_charge]
plugin = OncePlugin(once, tenant=lambda request: request.state.tenant, status_guards=[authenticate])
app = Litestar([Router("/", route_handlers=handlers, guards=[authenticate])], plugins=[plugin])
