"""`/transfers`: the request writes a row and a message, and a worker makes the charge and the answer."""

from __future__ import annotations

import json
from http import HTTPStatus
from typing import TYPE_CHECKING, Any

from fastapi import APIRouter

from oncekey.core.errors import Rejected
from oncekey.demo.money import Money, Transfer, begin
from oncekey.demo.notification_routes import declined
from oncekey.demo.order_routes import Limit
from oncekey.demo.problems import MEDIA_TYPE
from oncekey.demo.tenants import Tenant
from oncekey.demo.wishes import Wished
from oncekey.effects import OUTBOX
from oncekey.engine.operation import Operation
from oncekey.topics import Message, Reply

if TYPE_CHECKING:
    from oncekey.demo.charging import Charging
    from oncekey.demo.movements import Movements
    from oncekey.once import Once
    from oncekey.resolvers import Question

REPEATABLE, UNREPEATABLE = "transfer", "transfer_once"


def transfer_routes(once: Once, movements: Movements) -> APIRouter:
    """The routes for transfers."""
    router = APIRouter(tags=["transfers"])

    @router.post("/transfers", status_code=HTTPStatus.ACCEPTED, summary="Ask for a transfer")
    @once.protect(effects=OUTBOX, operation="create_transfer")
    async def create_transfer(wanted: Money, tenant: Tenant, wishes: Wished, op: Operation) -> Transfer:
        transfer = Transfer(status="requested", **begin(wanted))
        await movements.insert(op.connection, tenant, transfer)
        op.defer(
            REPEATABLE if wishes.repeatable else UNREPEATABLE,
            {
                "transfer": transfer.model_dump(mode="json"),
                "deduplicate": wishes.deduplicate,
                "fault": wishes.fault,
            },
        )
        return transfer

    @router.get("/transfers", summary="The newest transfers, as they were asked for")
    async def list_transfers(tenant: Tenant, limit: Limit = 100) -> list[Transfer]:
        return await movements.transfers(tenant, limit)

    return router


def transfer_topics(once: Once, charging: Charging) -> None:
    """What a worker does with the messages; whether the call may be repeated is a property of its topic."""

    @once.topic(REPEATABLE, repeatable=True)
    async def transfer(message: Message) -> Reply:
        return await _transferred(charging, message)

    @once.topic(UNREPEATABLE, repeatable=False)
    async def transfer_once(message: Message) -> Reply:
        return await _transferred(charging, message)


async def _transferred(charging: Charging, message: Message) -> Reply:
    payload = message.payload
    wanted = Transfer.model_validate(payload["transfer"])
    # The fault strikes the first try only, or no worker would ever be done with it.
    fault = payload["fault"] if message.attempt == 1 else None
    try:
        charge = await charging.charge(
            wanted.money, message.downstream_key, deduplicate=payload["deduplicate"], fault=fault
        )
    except Rejected:
        # Raised, and not returned: an answer that is returned says that the call was made.
        no = declined().answer
        reply = Reply(no.status_code, json.loads(bytes(no.body)), (("content-type", MEDIA_TYPE),))
        raise Rejected(reply) from None
    return _done(wanted, charge)


def transferred(question: Question, charge: dict[str, Any]) -> Reply:
    """The answer of a transfer whose charge was found later."""
    return _done(Transfer.model_validate(question.payload["transfer"]), charge)


def _done(wanted: Transfer, charge: dict[str, Any]) -> Reply:
    done = wanted.model_copy(update={"status": "done", "charge_id": charge["id"]})
    return Reply(HTTPStatus.CREATED, done.model_dump(mode="json"), provider_id=charge["id"])
