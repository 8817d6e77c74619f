"""A payments service on FastAPI, with a route for each kind of effects; README.md has the command to start it."""

from __future__ import annotations

import asyncio
from typing import Annotated, Any

from fastapi import Depends, FastAPI, Header, HTTPException, Request
from provider import charge
from pydantic import BaseModel
from shop_tables import ORDER, PAID, PAYMENT, create_tables, orders_of, tenant_of

from oncekey import INLINE, LOCAL, OUTBOX, PHASED, Message, Once, Operation, Reply, resumed_as

create_tables()
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
    """The body of an order."""

    product: str
    quantity: int


class PaymentIn(BaseModel):
    """The body of a payment."""

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
    """A read needs no idempotency key."""
    return orders_of(tenant)


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


@app.post("/payments", status_code=201)
@once.protect(effects=PHASED, lease=10, call_timeout=10)  # limits how long a payment waits after a crash
async def create_payment(payment: PaymentIn, tenant: Tenant, op: Operation) -> dict[str, Any]:
    """PHASED: after a crash at any point, a retry or a worker resumes after the last stored step."""
    payment_id = await op.phase("payment_created", begin, tenant, payment.cents)
    charged = await op.call("charged", charge_card, payment.cents, repeatable=True)
    await op.phase("payment_settled", settle, payment_id, charged["id"])
    return {"id": payment_id, "charge": charged["id"]}


@app.post("/transfers", status_code=202)
@once.protect(effects=OUTBOX)
async def create_transfer(payment: PaymentIn, op: Operation) -> None:
    """OUTBOX: responds with 202; a worker makes the call and stores the final response."""
    op.defer("transfer", {"cents": payment.cents})


@once.topic("transfer", repeatable=True)
async def transfer(message: Message) -> Reply:
    """Charge the card, in a worker."""
    charged = await charge_card(message.payload["cents"], key=message.downstream_key)
    return Reply(201, {"charge": charged["id"]})


@app.post("/charges", status_code=201)
@once.protect(effects=INLINE)
async def create_charge(payment: PaymentIn, op: Operation) -> dict[str, Any]:
    """INLINE: one external call with a downstream key; if its reply is lost, the outcome is unknown."""
    charged = await charge_card(payment.cents, key=op.downstream_key("charge"))
    return {"charge": charged["id"]}


once.install(app, tenant=lambda request: request.state.tenant, status_dependencies=[Depends(authenticate)])
