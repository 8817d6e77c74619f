"""A payments service on Litestar, each route with the effects that fit it: README.md has the command that starts it."""

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
    """The caller's tenant. A worker that resumes a request has no token: it acts for the stored tenant."""
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
    """LOCAL: the row, the key and the response commit together, or not at all."""
    cursor = await op.connection.execute(ORDER, (request.state.tenant, data.product, data.quantity))
    row = await cursor.fetchone()
    return {"id": row["id"], "status": "created"}


@get("/orders", sync_to_thread=True)
def list_orders(request: Asked) -> list[dict[str, Any]]:
    """A read changes nothing, and needs no key."""
    return orders_of(request.state.tenant)


async def begin(tx: Any, tenant: str, cents: int) -> int:  # noqa: ANN401  (a connection of the driver)
    """The first step of a payment."""
    cursor = await tx.execute(PAYMENT, (tenant, cents))
    row = await cursor.fetchone()
    return int(row["id"])


async def charge_card(cents: int, *, key: str) -> dict[str, Any]:
    """The call; the provider deduplicates by key."""
    return await asyncio.to_thread(charge, cents, key=key)


async def settle(tx: Any, number: int, charge_id: str) -> None:  # noqa: ANN401
    """The last step."""
    await tx.execute(PAID, (charge_id, number))


@post("/payments")
@once.protect(effects=PHASED, lease=10, call_timeout=10)  # how long a payment waits after a crash
async def create_payment(data: Money, request: Asked, op: Operation) -> dict[str, Any]:
    """PHASED: after a crash at any point, a retry or a worker resumes at the last step."""
    number = await op.phase("payment_created", begin, request.state.tenant, data.cents)
    made = await op.call("charged", charge_card, data.cents, repeatable=True)
    await op.phase("payment_settled", settle, number, made["id"])
    return {"id": number, "charge": made["id"]}


@post("/transfers", status_code=202)
@once.protect(effects=OUTBOX)
async def create_transfer(data: Money, op: Operation) -> None:
    """OUTBOX: a worker makes the call and the answer; until then it is 202."""
    op.defer("transfer", {"cents": data.cents})


@once.topic("transfer", repeatable=True)
async def transfer(message: Message) -> Reply:
    """What the worker does."""
    made = await charge_card(message.payload["cents"], key=message.downstream_key)
    return Reply(201, {"charge": made["id"]})


@post("/charges")
@once.protect(effects=INLINE)
async def create_charge(data: Money, op: Operation) -> dict[str, Any]:
    """INLINE: one outside call, under a key that its provider recognises; an outcome that is lost is called unknown."""
    made = await charge_card(data.cents, key=op.downstream_key("charge"))
    return {"charge": made["id"]}


handlers = [create_order, list_orders, create_payment, create_transfer, create_charge]
plugin = OncePlugin(once, tenant=lambda request: request.state.tenant, status_guards=[authenticate])
app = Litestar([Router("/", route_handlers=handlers, guards=[authenticate])], plugins=[plugin])
