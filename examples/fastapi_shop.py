"""A payments service on FastAPI, each route with the effects that fit it: see README.md for how it is started."""

from __future__ import annotations

import asyncio
from typing import Annotated, Any

from fastapi import Depends, FastAPI, Header, HTTPException, Request
from provider import charge
from pydantic import BaseModel
from shop_tables import ORDER, PAID, PAYMENT, make_tables, orders_of, tenant_of

from oncekey import INLINE, LOCAL, OUTBOX, PHASED, Message, Once, Operation, Reply, resumed_as

make_tables()
once = Once("sqlite:///shop.db", migrate=True, workers=True)


async def authenticate(request: Request, authorization: Annotated[str | None, Header()] = None) -> str:
    """Who calls; a worker that goes on with a request has no token, and asks in the name of its tenant."""
    tenant = resumed_as(request) or tenant_of(authorization)
    if tenant is None:
        raise HTTPException(401)
    request.state.tenant = tenant
    return tenant


Tenant = Annotated[str, Depends(authenticate)]


class OrderIn(BaseModel):
    """What a client orders."""

    product: str
    quantity: int


class Money(BaseModel):
    """What a client pays."""

    cents: int


app = FastAPI(title="A shop on FastAPI", lifespan=once.lifespan, dependencies=[Depends(authenticate)])


@app.post("/orders", status_code=201)
@once.protect(effects=LOCAL)
async def create_order(order: OrderIn, tenant: Tenant, op: Operation) -> dict[str, Any]:
    """LOCAL: the row commits with the key and the answer, or not at all."""
    cursor = await op.connection.execute(ORDER, (tenant, order.product, order.quantity))
    row = await cursor.fetchone()
    return {"id": row["id"], "status": "created"}


@app.get("/orders")
def list_orders(tenant: Tenant) -> list[dict[str, Any]]:
    """Looking changes nothing, and needs no key."""
    return orders_of(tenant)


@app.post("/payments", status_code=201)
@once.protect(effects=PHASED, lease=10, call_timeout=10)  # how long a payment rests after a crash
async def create_payment(money: Money, tenant: Tenant, op: Operation) -> dict[str, Any]:
    """PHASED: the process may die anywhere, and a retry or a worker goes on where it was."""

    async def begin(tx: Any) -> int:  # noqa: ANN401  (a connection of the driver)
        cursor = await tx.execute(PAYMENT, (tenant, money.cents))
        row = await cursor.fetchone()
        return int(row["id"])

    async def settle(tx: Any) -> None:  # noqa: ANN401
        await tx.execute(PAID, (made["id"], number))

    number = await op.phase("payment_created", begin)
    made = await op.call("charged", lambda key: asyncio.to_thread(charge, key, money.cents), repeatable=True)
    await op.phase("payment_settled", settle)
    return {"id": number, "charge": made["id"]}


@app.post("/transfers", status_code=202)
@once.protect(effects=OUTBOX)
async def create_transfer(money: Money, op: Operation) -> None:
    """OUTBOX: a worker makes the call and the answer; until then it is 202."""
    op.defer("transfer", {"cents": money.cents})


@once.topic("transfer", repeatable=True)
async def transfer(message: Message) -> Reply:
    """What the worker does."""
    made = await asyncio.to_thread(charge, message.downstream_key, message.payload["cents"])
    return Reply(201, {"charge": made["id"]})


@app.post("/charges", status_code=201)
@once.protect(effects=INLINE)
async def create_charge(money: Money, op: Operation) -> dict[str, Any]:
    """INLINE: one outside call, under a key that its provider recognises; an outcome that is lost is called unknown."""
    made = await asyncio.to_thread(charge, op.downstream_key("charge"), money.cents)
    return {"charge": made["id"]}


once.install(app, tenant=lambda request: request.state.tenant, status_dependencies=[Depends(authenticate)])
