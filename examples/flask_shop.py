"""A payments service on Flask, each route with the effects that fit it: README.md has the command that starts it."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable
from typing import Any

import flask
from provider import charge
from shop_tables import ORDER, PAID, PAYMENT, make_tables, orders_of, tenant_of

from oncekey import INLINE, LOCAL, OUTBOX, PHASED, Message, Once, Reply, SyncOperation, resumed_as

Answer = tuple[dict[str, Any], int]

make_tables()
once = Once("sqlite:///shop.db", migrate=True, workers=True)
app = flask.Flask(__name__)


@app.before_request
def authenticate() -> None:
    """The caller's tenant. A worker that resumes a request has no token: it acts for the stored tenant."""
    tenant = resumed_as(flask.request) or tenant_of(flask.request.headers.get("Authorization"))
    if tenant is None:
        flask.abort(401)
    flask.g.tenant = tenant


def takes(**fields: type) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Refuse another body before the handler is called: a mistake must not use up a key."""

    def decorate(view: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(view)
        def checked(**given: Any) -> Any:  # noqa: ANN401  (whatever a view returns)
            body = flask.request.get_json()
            if not isinstance(body, dict) or any(type(body.get(name)) is not kind for name, kind in fields.items()):
                flask.abort(422)
            return view(**given)

        return checked

    return decorate


@app.post("/orders")
@takes(product=str, quantity=int)
@once.protect(effects=LOCAL)
def create_order(op: SyncOperation) -> Answer:
    """LOCAL: the row, the key and the response commit together, or not at all."""
    body = flask.request.get_json()
    row = op.connection.execute(ORDER, (flask.g.tenant, body["product"], body["quantity"])).fetchone()
    return {"id": row["id"], "status": "created"}, 201


@app.get("/orders")
def list_orders() -> list[dict[str, Any]]:
    """A read changes nothing, and needs no key."""
    return orders_of(flask.g.tenant)


def begin(tx: Any, tenant: str, cents: int) -> int:  # noqa: ANN401  (a connection of the driver)
    """The first step of a payment."""
    return int(tx.execute(PAYMENT, (tenant, cents)).fetchone()["id"])


def settle(tx: Any, number: int, charge_id: str) -> None:  # noqa: ANN401
    """The last step."""
    tx.execute(PAID, (charge_id, number))


@app.post("/payments")
@takes(cents=int)
@once.protect(effects=PHASED, lease=10, call_timeout=10)  # how long a payment waits after a crash
def create_payment(op: SyncOperation) -> Answer:
    """PHASED: after a crash at any point, a retry or a worker resumes at the last step."""
    cents = flask.request.get_json()["cents"]
    number = op.phase("payment_created", begin, flask.g.tenant, cents)
    made = op.call("charged", charge, cents, repeatable=True)
    op.phase("payment_settled", settle, number, made["id"])
    return {"id": number, "charge": made["id"]}, 201


@app.post("/transfers")
@takes(cents=int)
@once.protect(effects=OUTBOX)
def create_transfer(op: SyncOperation) -> Answer:
    """OUTBOX: a worker makes the call and the answer; until then it is 202."""
    op.defer("transfer", {"cents": flask.request.get_json()["cents"]})
    return {}, 202


@once.topic("transfer", repeatable=True)
async def transfer(message: Message) -> Reply:
    """What the worker does."""
    made = await asyncio.to_thread(charge, message.payload["cents"], key=message.downstream_key)
    return Reply(201, {"charge": made["id"]})


@app.post("/charges")
@takes(cents=int)
@once.protect(effects=INLINE)
def create_charge(op: SyncOperation) -> Answer:
    """INLINE: one outside call, under a key that its provider recognises; an outcome that is lost is called unknown."""
    made = charge(flask.request.get_json()["cents"], key=op.downstream_key("charge"))
    return {"charge": made["id"]}, 201


once.wsgi(app, tenant=lambda _: flask.g.tenant, status="/idempotency-keys")
