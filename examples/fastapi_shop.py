"""A payments service on FastAPI, each route with the effects that fit it: README.md has the command that starts it."""

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
    """The caller's tenant. A worker that resumes a request has no token: it acts for the stored tenant."""
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


app = FastAPI(title="A shop on FastAPI", dependencies=[Depends(authenticate)])


@app.post("/orders", status_code=201)
@once.protect(effects=LOCAL)
async def create_order(order: OrderIn, tenant: Tenant, op: Operation) -> dict[str, Any]:
    """LOCAL: the row, the key and the response commit together, or not at all."""
    cursor = await op.connection.execute(ORDER, (tenant, order.product, order.quantity))
    row = await cursor.fetchone()
    return {"id": row["id"], "status": "created"}


@app.get("/orders")
def list_orders(tenant: Tenant) -> list[dict[str, Any]]:
    """A read changes nothing, and needs no key."""
    return orders_of(tenant)


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


@app.post("/payments", status_code=201)
@once.protect(effects=PHASED, lease=10, call_timeout=10)  # how long a payment waits after a crash
async def create_payment(money: Money, tenant: Tenant, op: Operation) -> dict[str, Any]:
    """PHASED: after a crash at any point, a retry or a worker resumes at the last step."""
    number = await op.phase("payment_created", begin, tenant, money.cents)
    made = await op.call("charged", charge_card, money.cents, repeatable=True)
    await op.phase("payment_settled", settle, number, made["id"])
    return {"id": number, "charge": made["id"]}


@app.post("/transfers", status_code=202)
@once.protect(effects=OUTBOX)
async def create_transfer(money: Money, op: Operation) -> None:
    """OUTBOX: a worker makes the call and the answer; until then it is 202."""
    op.defer("transfer", {"cents": money.cents})


@once.topic("transfer", repeatable=True)
async def transfer(message: Message) -> Reply:
    """What the worker does."""
    made = await charge_card(message.payload["cents"], key=message.downstream_key)
    return Reply(201, {"charge": made["id"]})


@app.post("/charges", status_code=201)
@once.protect(effects=INLINE)
async def create_charge(money: Money, op: Operation) -> dict[str, Any]:
    """INLINE: one outside call, under a key that its provider recognises; an outcome that is lost is called unknown."""
    made = await charge_card(money.cents, key=op.downstream_key("charge"))
    return {"charge": made["id"]}


once.install(app, tenant=lambda request: request.state.tenant, status_dependencies=[Depends(authenticate)])
