"""The shop's routes, one for each kind of side effects: orders, payments, transfers and notifications.

Request headers slow the handler (`X-Demo-Delay: seconds`) and choose a fault of the provider (`X-Demo-Fault:
drop-after`, `X-Demo-Dedup: off`, `X-Demo-Repeatable: off`), so that a person can watch overlapping requests and each
fault.
"""

from __future__ import annotations

import asyncio
import json
import math
from dataclasses import dataclass
from http import HTTPStatus
from typing import TYPE_CHECKING, Annotated, Any, Final
from uuid import UUID

from fastapi import APIRouter, Depends, Header, Query, Response

from oncekey.core.errors import RejectedError
from oncekey.core.model import INLINE, LOCAL, OUTBOX, PHASED
from oncekey.core.topics import Message, Reply
from oncekey.engine.operation import Operation
from oncekey_demo.data import Money, Notification, Order, OrderIn, Payment, Receipt, Transfer, begin, place
from oncekey_demo.problems import MEDIA_TYPE, ProblemError, Tenant
from oncekey_demo.provider_ledger import NAMES, Fault, UnknownFaultError

if TYPE_CHECKING:
    from oncekey.core.resolvers import Question
    from oncekey.once import Once
    from oncekey_demo.charging import Charging
    from oncekey_demo.data import Movements, Orders


LONGEST_DELAY: Final = 60.0


async def wanted_delay(
    x_demo_delay: Annotated[str, Header(description="Makes the handler slow: seconds, 0 to 60.")] = "0",
) -> float:
    """The requested delay in seconds."""
    try:
        seconds = float(x_demo_delay)
    except ValueError:
        seconds = math.nan
    if not 0 <= seconds <= LONGEST_DELAY:
        detail = f"X-Demo-Delay must be a number of seconds from 0 to {LONGEST_DELAY:g}."
        raise ProblemError(HTTPStatus.BAD_REQUEST, "invalid_delay", detail)
    return seconds


Delay = Annotated[float, Depends(wanted_delay)]


_FAULT = f"How the provider fails: {', '.join(NAMES)}. The fault applies to this request only."
_DEDUP = "`off`: the provider ignores downstream keys."
_REPEATABLE = "`off`: the call to the provider is not repeatable."


@dataclass(frozen=True, slots=True)
class ProviderBehaviour:
    """The provider's behaviour for a request, and the shop's assumption about it."""

    fault: str | None = None
    deduplicate: bool = True
    repeatable: bool = True


async def wanted_behaviour(
    x_demo_fault: Annotated[str | None, Header(description=_FAULT)] = None,
    x_demo_dedup: Annotated[str, Header(description=_DEDUP)] = "on",
    x_demo_repeatable: Annotated[str, Header(description=_REPEATABLE)] = "on",
) -> ProviderBehaviour:
    """The requested behaviour of the provider."""
    try:
        fault = str(Fault.parse(x_demo_fault)) if x_demo_fault else None
    except UnknownFaultError as error:
        raise ProblemError(HTTPStatus.BAD_REQUEST, "unknown_fault", str(error)) from None
    return ProviderBehaviour(fault, _on("X-Demo-Dedup", x_demo_dedup), _on("X-Demo-Repeatable", x_demo_repeatable))


WantedBehaviour = Annotated[ProviderBehaviour, Depends(wanted_behaviour)]


def _on(name: str, value: str) -> bool:
    if value.lower() not in {"on", "off"}:
        raise ProblemError(HTTPStatus.BAD_REQUEST, "invalid_switch", f"{name} must be on or off.")
    return value.lower() == "on"


Limit = Annotated[int, Query(ge=1, le=10_000, description="The number of rows, newest first.")]


def order_routes(once: Once, orders: Orders) -> APIRouter:
    """The routes for orders."""
    router = APIRouter(tags=["orders"])

    @router.post("/orders", status_code=HTTPStatus.CREATED, summary="Place an order")
    @once.protect(effects=LOCAL, operation="create_order")
    async def create_order(wanted: OrderIn, tenant: Tenant, delay: Delay, response: Response, op: Operation) -> Order:
        await asyncio.sleep(delay)  # before the first statement: a slow handler must not hold a writer's lock
        order = place(wanted)
        await orders.insert(op.connection, tenant, order)
        response.headers["Location"] = f"/orders/{order.id}"
        return order

    @router.get("/orders", summary="List the newest orders")
    async def list_orders(tenant: Tenant, limit: Limit = 100) -> list[Order]:
        return await orders.newest(tenant, limit)

    @router.get("/orders/{order_id}", summary="Read one order")
    async def read_order(tenant: Tenant, order_id: str) -> Order:
        order = await orders.find(tenant, _uuid(order_id))
        if order is None:
            raise _not_found()
        return order

    return router


def _uuid(text: str) -> UUID:
    try:
        return UUID(text)
    except ValueError:
        raise _not_found() from None


def _not_found() -> ProblemError:
    return ProblemError(HTTPStatus.NOT_FOUND, "order_not_found", "There is no such order.")


CALL: Final = "notification_sent"
"""The name of the call; its downstream key is derived from it."""


def notification_routes(once: Once, charging: Charging) -> APIRouter:
    """The route for notifications."""
    router = APIRouter(tags=["notifications"])

    @router.post("/notifications", status_code=HTTPStatus.CREATED, summary="Send a notification, which is charged")
    @once.protect(effects=INLINE, operation="send_notification")
    async def send_notification(wanted: Money, _: Tenant, behaviour: WantedBehaviour, op: Operation) -> Notification:
        key = op.downstream_key(CALL)
        try:
            charge = await charging.charge(
                wanted.model_dump(), key, deduplicate=behaviour.deduplicate, fault=behaviour.fault
            )
        except RejectedError:
            raise declined() from None
        return _sent(wanted, charge)

    return router


def notified(_: Question, charge: dict[str, Any]) -> Reply:
    """The response to a notification whose charge was found later."""
    wanted = Money(**{name: charge[name] for name in Money.model_fields})
    return Reply(HTTPStatus.CREATED, _sent(wanted, charge).model_dump(mode="json"))


def _sent(wanted: Money, charge: dict[str, Any]) -> Notification:
    return Notification(status="sent", charge_id=charge["id"], **begin(wanted))


def declined() -> ProblemError:
    """The shop's response if the provider declines."""
    return ProblemError(HTTPStatus.PAYMENT_REQUIRED, "card_declined", "The card was declined; nothing was charged.")


RECEIPT = "receipt"
NO_MAILBOX: Final = "cus_no_mailbox"
"""A customer whose receipts cannot be delivered: each becomes a dead letter."""
CHARGE: Final = "charge_created"
"""The name of the call; its downstream key is derived from it."""


def _assumptions(behaviour: ProviderBehaviour) -> dict[str, bool]:
    return {"deduplicate": behaviour.deduplicate, "repeatable": behaviour.repeatable}


async def _create(tx: Any, movements: Movements, tenant: str, wanted: Money) -> dict[str, Any]:  # noqa: ANN401  (the driver's own connection)
    payment = Payment(status="created", **begin(wanted))
    await movements.insert(tx, tenant, payment)
    return payment.model_dump(mode="json")


async def _charge(
    charging: Charging, money: dict[str, Any], how: dict[str, bool], fault: str | None, *, key: str
) -> dict[str, Any]:
    return await charging.charge(money, key, deduplicate=how["deduplicate"], fault=fault)


async def _settle(tx: Any, op: Operation, movements: Movements, tenant: str, settled: Payment) -> dict[str, Any]:  # noqa: ANN401
    await movements.end(tx, tenant, settled)
    op.emit(RECEIPT, {"tenant": tenant, "payment_id": str(settled.id), "customer_id": settled.customer_id})
    return settled.model_dump(mode="json")


async def _decline(tx: Any, movements: Movements, tenant: str, created: Payment) -> None:  # noqa: ANN401
    await movements.end(tx, tenant, created.model_copy(update={"status": "declined"}))


def payment_routes(once: Once, movements: Movements, charging: Charging) -> APIRouter:
    """The routes for payments and their receipts."""
    router = APIRouter(tags=["payments"])

    @router.post("/payments", status_code=HTTPStatus.CREATED, summary="Make a payment")
    @once.protect(effects=PHASED, operation="create_payment")
    async def create_payment(
        wanted: Money, tenant: Tenant, behaviour: WantedBehaviour, response: Response, op: Operation
    ) -> Payment:
        # The first request decides what kind of call it is; a retry, or the completer, may lack its headers.
        # The fault is not stored: it applies only to the request that names it.
        how = await op.value("how", _assumptions, behaviour)
        created = Payment.model_validate(await op.phase("payment_created", _create, movements, tenant, wanted))
        money = created.money.model_dump()
        try:
            made = await op.call(
                CHARGE,
                _charge,
                charging,
                money,
                how,
                behaviour.fault,
                repeatable=how["repeatable"],
                parameters=wanted.model_dump(),
            )
        except RejectedError:
            await op.phase("payment_declined", _decline, movements, tenant, created)
            raise declined() from None
        paid = created.model_copy(update={"status": "settled", "charge_id": made["id"]})
        settled = Payment.model_validate(await op.phase("payment_settled", _settle, op, movements, tenant, paid))
        response.headers["Location"] = f"/payments/{settled.id}"
        return settled

    @router.get("/payments", summary="List the newest payments")
    async def list_payments(tenant: Tenant, limit: Limit = 100) -> list[Payment]:
        return await movements.payments(tenant, limit)

    @router.get("/payments/{payment_id}", summary="Read one payment")
    async def read_payment(tenant: Tenant, payment_id: str) -> Payment:
        try:
            payment = await movements.payment(tenant, UUID(payment_id))
        except ValueError:
            payment = None
        if payment is None:
            raise ProblemError(HTTPStatus.NOT_FOUND, "payment_not_found", "There is no such payment.")
        return payment

    @router.get("/receipts", summary="List the receipts of the newest payments")
    async def list_receipts(tenant: Tenant, limit: Limit = 100) -> list[Receipt]:
        return await movements.receipts(tenant, limit)

    return router


class NoMailboxError(Exception):
    """The customer has no mailbox for a receipt."""


def payment_topics(once: Once, movements: Movements) -> None:
    """Register the workers' handler for receipts; a message may be delivered twice."""

    @once.topic(RECEIPT, repeatable=True)
    async def receipt(message: Message) -> None:
        if message.payload.get("customer_id") == NO_MAILBOX:
            raise NoMailboxError
        await movements.keep_receipt(message.payload["tenant"], message.payload["payment_id"])


REPEATABLE, UNREPEATABLE = "transfer", "transfer_once"


def transfer_routes(once: Once, movements: Movements) -> APIRouter:
    """The routes for transfers."""
    router = APIRouter(tags=["transfers"])

    @router.post("/transfers", status_code=HTTPStatus.ACCEPTED, summary="Request a transfer")
    @once.protect(effects=OUTBOX, operation="create_transfer")
    async def create_transfer(wanted: Money, tenant: Tenant, behaviour: WantedBehaviour, op: Operation) -> Transfer:
        transfer = Transfer(status="requested", **begin(wanted))
        await movements.insert(op.connection, tenant, transfer)
        op.defer(
            REPEATABLE if behaviour.repeatable else UNREPEATABLE,
            {
                "transfer": transfer.model_dump(mode="json"),
                "deduplicate": behaviour.deduplicate,
                "fault": behaviour.fault,
            },
        )
        return transfer

    @router.get("/transfers", summary="List the newest transfers, as they were requested")
    async def list_transfers(tenant: Tenant, limit: Limit = 100) -> list[Transfer]:
        return await movements.transfers(tenant, limit)

    return router


def transfer_topics(once: Once, charging: Charging) -> None:
    """Register the workers' handlers for deferred transfers, one for repeatable calls and one for others."""
    failed: set[str] = set()

    @once.topic(REPEATABLE, repeatable=True)
    async def transfer(message: Message) -> Reply:
        return await _transferred(charging, message, failed)

    @once.topic(UNREPEATABLE, repeatable=False)
    async def transfer_once(message: Message) -> Reply:
        return await _transferred(charging, message, failed)


async def _transferred(charging: Charging, message: Message, failed: set[str]) -> Reply:
    payload = message.payload
    wanted = Transfer.model_validate(payload["transfer"])
    # The fault applies to the first call only, or no worker would ever finish the transfer. The attempts of a call that
    # an operator sends again count from 1, so this process remembers the call.
    fault = payload["fault"] if message.attempt == 1 and message.downstream_key not in failed else None
    if fault is not None:
        failed.add(message.downstream_key)
    try:
        charge = await charging.charge(
            wanted.money.model_dump(), message.downstream_key, deduplicate=payload["deduplicate"], fault=fault
        )
    except RejectedError:
        # Raised, not returned: a returned reply would mean that the call was made.
        refusal = declined().answer
        reply = Reply(refusal.status_code, json.loads(bytes(refusal.body)), (("content-type", MEDIA_TYPE),))
        raise RejectedError(reply) from None
    return _done(wanted, charge)


def transferred(question: Question, charge: dict[str, Any]) -> Reply:
    """The response to a transfer whose charge was found later."""
    return _done(Transfer.model_validate(question.payload["transfer"]), charge)


def _done(wanted: Transfer, charge: dict[str, Any]) -> Reply:
    done = wanted.model_copy(update={"status": "done", "charge_id": charge["id"]})
    return Reply(HTTPStatus.CREATED, done.model_dump(mode="json"), provider_id=charge["id"])
