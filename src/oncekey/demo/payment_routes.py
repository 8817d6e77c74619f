"""`/payments`: a handler that may die anywhere, and whoever comes next goes on where it was."""

from __future__ import annotations

from http import HTTPStatus
from typing import TYPE_CHECKING, Any, Final
from uuid import UUID

from fastapi import APIRouter, Response

from oncekey.core.errors import Rejected
from oncekey.demo.money import Money, Payment, Receipt, begin
from oncekey.demo.notification_routes import declined
from oncekey.demo.order_routes import Limit
from oncekey.demo.problems import ProblemError
from oncekey.demo.tenants import Tenant
from oncekey.demo.wishes import Wished
from oncekey.effects import PHASED
from oncekey.engine.operation import Operation
from oncekey.topics import Message

if TYPE_CHECKING:
    from oncekey.demo.charging import Charging
    from oncekey.demo.movements import Movements
    from oncekey.once import Once

RECEIPT = "receipt"
CHARGE: Final = "charge_created"
"""The name of the call, from which its key comes."""


def payment_routes(once: Once, movements: Movements, charging: Charging) -> APIRouter:
    """The routes for payments and their receipts."""
    router = APIRouter(tags=["payments"])

    @router.post("/payments", status_code=HTTPStatus.CREATED, summary="Make a payment")
    @once.protect(effects=PHASED, operation="create_payment")
    async def create_payment(
        wanted: Money, tenant: Tenant, wishes: Wished, response: Response, op: Operation
    ) -> Payment:
        # What kind of call it is was decided by the first request; a retry, or a completer, may lack its headers.
        # The fault is not kept: it strikes the request that brings it.
        how = await op.value("how", lambda: {"deduplicate": wishes.deduplicate, "repeatable": wishes.repeatable})

        async def create(tx: Any) -> dict[str, Any]:  # noqa: ANN401  (the driver's own connection)
            payment = Payment(status="created", **begin(wanted))
            await movements.insert(tx, tenant, payment)
            return payment.model_dump(mode="json")

        created = Payment.model_validate(await op.phase("payment_created", create))

        async def charge(key: str) -> dict[str, Any]:
            return await charging.charge(created.money, key, deduplicate=how["deduplicate"], fault=wishes.fault)

        async def settle(tx: Any) -> dict[str, Any]:  # noqa: ANN401
            settled = created.model_copy(update={"status": "settled", "charge_id": made["id"]})
            await movements.end(tx, tenant, settled)
            op.emit(RECEIPT, {"tenant": tenant, "payment_id": str(settled.id)})
            return settled.model_dump(mode="json")

        async def decline(tx: Any) -> None:  # noqa: ANN401
            await movements.end(tx, tenant, created.model_copy(update={"status": "declined"}))

        try:
            made = await op.call(CHARGE, charge, repeatable=how["repeatable"], given=wanted.model_dump())
        except Rejected:
            await op.phase("payment_declined", decline)
            raise declined() from None
        settled = Payment.model_validate(await op.phase("payment_settled", settle))
        response.headers["Location"] = f"/payments/{settled.id}"
        return settled

    @router.get("/payments", summary="The newest payments")
    async def list_payments(tenant: Tenant, limit: Limit = 100) -> list[Payment]:
        return await movements.payments(tenant, limit)

    @router.get("/payments/{payment_id}", summary="One payment")
    async def read_payment(tenant: Tenant, payment_id: str) -> Payment:
        try:
            payment = await movements.payment(tenant, UUID(payment_id))
        except ValueError:
            payment = None
        if payment is None:
            raise ProblemError(HTTPStatus.NOT_FOUND, "payment_not_found", "There is no such payment.")
        return payment

    @router.get("/receipts", summary="The receipts of the newest payments")
    async def list_receipts(tenant: Tenant, limit: Limit = 100) -> list[Receipt]:
        return await movements.receipts(tenant, limit)

    return router


def payment_topics(once: Once, movements: Movements) -> None:
    """What a worker does with receipts; it may be told of one twice."""

    @once.topic(RECEIPT, repeatable=True)
    async def receipt(message: Message) -> None:
        await movements.keep_receipt(message.payload["tenant"], message.payload["payment_id"])
