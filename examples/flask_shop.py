"""A payments service on Flask, with a route for each kind of effects; README.md has the command to start it."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable
from typing import Any

import flask
from provider import charge
from shop_tables import ORDER, PAID, PAYMENT, create_tables, orders_of, tenant_of

from oncekey import INLINE, LOCAL, OUTBOX, PHASED, Message, Once, Reply, SyncOperation, resumed_as

JsonResponse = tuple[dict[str, Any], int]

create_tables()
once = Once("sqlite:///shop.db", migrate=True, workers=True)
app = flask.Flask(__name__)


@app.before_request
def authenticate() -> None:
    """The caller's tenant. A worker that resumes a request has no token: it acts for the stored tenant."""
    tenant = resumed_as(flask.request) or tenant_of(flask.request.headers.get("Authorization"))
    if tenant is None:
        flask.abort(401)
    flask.g.tenant = tenant


def validates(**fields: type) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Reject an invalid body before the handler is called, so that it does not use up the key."""

    def decorate(view: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(view)
        def checked(**arguments: Any) -> Any:  # noqa: ANN401  (whatever a view returns)
            body = flask.request.get_json()
            if not isinstance(body, dict) or any(type(body.get(name)) is not kind for name, kind in fields.items()):
                flask.abort(422)
            return view(**arguments)

        return checked

    return decorate


@app.post("/orders")
@validates(product=str, quantity=int)
@once.protect(effects=LOCAL)
def create_order(op: SyncOperation) -> JsonResponse:
    """LOCAL: the row, the key and the response commit together, or not at all."""
    body = flask.request.get_json()
    row = op.connection.execute(ORDER, (flask.g.tenant, body["product"], body["quantity"])).fetchone()
    return {"id": row["id"], "status": "created"}, 201


@app.get("/orders")
def list_orders() -> list[dict[str, Any]]:
    """A read needs no idempotency key."""
    return orders_of(flask.g.tenant)


def begin(tx: Any, tenant: str, cents: int) -> int:  # noqa: ANN401  (a connection of the driver)
    """The first step of a payment: insert the row."""
    return int(tx.execute(PAYMENT, (tenant, cents)).fetchone()["id"])


def settle(tx: Any, payment_id: int, charge_id: str) -> None:  # noqa: ANN401
    """The last step: store the charge's id."""
    tx.execute(PAID, (charge_id, payment_id))


@app.post("/payments")
@validates(cents=int)
@once.protect(effects=PHASED, lease=10, call_timeout=10)  # limits how long a payment waits after a crash
def create_payment(op: SyncOperation) -> JsonResponse:
    """PHASED: after a crash at any point, a retry or a worker resumes after the last stored step."""
    cents = flask.request.get_json()["cents"]
    payment_id = op.phase("payment_created", begin, flask.g.tenant, cents)
    charged = op.call("charged", charge, cents, repeatable=True)
    op.phase("payment_settled", settle, payment_id, charged["id"])
    return {"id": payment_id, "charge": charged["id"]}, 201


@app.post("/transfers")
@validates(cents=int)
@once.protect(effects=OUTBOX)
def create_transfer(op: SyncOperation) -> JsonResponse:
    """OUTBOX: responds with 202; a worker makes the call and stores the final response."""
    op.defer("transfer", {"cents": flask.request.get_json()["cents"]})
    return {}, 202


@once.topic("transfer", repeatable=True)
async def transfer(message: Message) -> Reply:
    """Charge the card, in a worker."""
    charged = await asyncio.to_thread(charge, message.payload["cents"], key=message.downstream_key)
    return Reply(201, {"charge": charged["id"]})


@app.post("/charges")
@validates(cents=int)
@once.protect(effects=INLINE)
def create_charge(op: SyncOperation) -> JsonResponse:
    """INLINE: one external call with a downstream key; if its reply is lost, the outcome is unknown."""
    charged = charge(flask.request.get_json()["cents"], key=op.downstream_key("charge"))
    return {"charge": charged["id"]}, 201


once.wsgi(app, tenant=lambda _: flask.g.tenant, status="/idempotency-keys")
