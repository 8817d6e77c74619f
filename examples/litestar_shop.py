"""A payments service on Litestar, each route with the effects that fit it: see README.md for how it is started."""

import asyncio
from dataclasses import dataclass
from typing import Any

from litestar import Litestar, Request, Router, get, post
from litestar.connection import ASGIConnection
from litestar.exceptions import NotAuthorizedException
from litestar.handlers import BaseRouteHandler
from provider import charge
from shop_tables import ORDER, PAID, PAYMENT, make_tables, orders_of, tenant_of

from oncekey import INLINE, LOCAL, OUTBOX, PHASED, Message, Once, Operation, Reply, resumed_as
from oncekey.litestar import OncePlugin

Asked = Request[Any, Any, Any]

make_tables()
once = Once("sqlite:///shop.db", migrate=True, workers=True)


async def authenticate(connection: ASGIConnection[Any, Any, Any, Any], _: BaseRouteHandler) -> None:
    """Who calls; a worker that goes on with a request has no token, and asks in the name of its tenant."""
    tenant = resumed_as(connection) or tenant_of(connection.headers.get("Authorization"))
    if tenant is None:
        raise NotAuthorizedException
    connection.state.tenant = tenant


@dataclass
class OrderIn:
    """What a client orders."""

    product: str
    quantity: int


@dataclass
class Money:
    """What a client pays."""

    cents: int


@post("/orders")
@once.protect(effects=LOCAL)
async def create_order(data: OrderIn, request: Asked, op: Operation) -> dict[str, Any]:
    """LOCAL: the row commits with the key and the answer, or not at all."""
    cursor = await op.connection.execute(ORDER, (request.state.tenant, data.product, data.quantity))
    row = await cursor.fetchone()
    return {"id": row["id"], "status": "created"}


@get("/orders", sync_to_thread=True)
def list_orders(request: Asked) -> list[dict[str, Any]]:
    """Looking changes nothing, and needs no key."""
    return orders_of(request.state.tenant)


@post("/payments")
@once.protect(effects=PHASED, lease=10, call_timeout=10)  # how long a payment rests after a crash
async def create_payment(data: Money, request: Asked, op: Operation) -> dict[str, Any]:
    """PHASED: the process may die anywhere, and a retry or a worker goes on where it was."""

    async def begin(tx: Any) -> int:  # noqa: ANN401  (a connection of the driver)
        cursor = await tx.execute(PAYMENT, (request.state.tenant, data.cents))
        row = await cursor.fetchone()
        return int(row["id"])

    async def settle(tx: Any) -> None:  # noqa: ANN401
        await tx.execute(PAID, (made["id"], number))

    number = await op.phase("payment_created", begin)
    made = await op.call("charged", lambda key: asyncio.to_thread(charge, key, data.cents), repeatable=True)
    await op.phase("payment_settled", settle)
    return {"id": number, "charge": made["id"]}


@post("/transfers", status_code=202)
@once.protect(effects=OUTBOX)
async def create_transfer(data: Money, op: Operation) -> None:
    """OUTBOX: a worker makes the call and the answer; until then it is 202."""
    op.defer("transfer", {"cents": data.cents})


@once.topic("transfer", repeatable=True)
async def transfer(message: Message) -> Reply:
    """What the worker does."""
    made = await asyncio.to_thread(charge, message.downstream_key, message.payload["cents"])
    return Reply(201, {"charge": made["id"]})


@post("/charges")
@once.protect(effects=INLINE)
async def create_charge(data: Money, op: Operation) -> dict[str, Any]:
    """INLINE: one outside call, under a key that its provider recognises; an outcome that is lost is called unknown."""
    made = await asyncio.to_thread(charge, op.downstream_key("charge"), data.cents)
    return {"charge": made["id"]}


handlers = [create_order, list_orders, create_payment, create_transfer, create_charge]
plugin = OncePlugin(once, tenant=lambda request: request.state.tenant, status_guards=[authenticate])
app = Litestar([Router("/", route_handlers=handlers, guards=[authenticate])], plugins=[plugin])
