"""`/demo/ledger` and `/demo/charges`: the provider's own books, read-only, as a whole and for one request."""

from __future__ import annotations

from http import HTTPStatus
from typing import TYPE_CHECKING, Annotated, Any, Final

from fastapi import APIRouter, Path

from oncekey.core.model import RecordId
from oncekey.core.scope import scope_of
from oncekey.core.seed import downstream_key
from oncekey.demo.notification_routes import CALL
from oncekey.demo.payment_routes import CHARGE
from oncekey.demo.problems import ProblemError
from oncekey.demo.provider_errors import ProviderFailedError
from oncekey.demo.tenants import Tenant
from oncekey.demo.transfer_routes import REPEATABLE, UNREPEATABLE
from oncekey.engine.enrolment import NO_NAMESPACE
from oncekey.flow import adrive

if TYPE_CHECKING:
    from oncekey.demo.charging import Charging
    from oncekey.once import Once

CALLS: Final = {
    "create_payment": (CHARGE,),
    "create_transfer": (REPEATABLE, UNREPEATABLE),
    "send_notification": (CALL,),
}
"""The names under which each operation may call the provider; its downstream keys come from them."""

ClientKey = Annotated[str, Path(pattern=r"^[\x21-\x7e]{1,255}$", description="The request's `Idempotency-Key`")]


def ledger_routes(once: Once, charging: Charging) -> APIRouter:
    """The routes that let a person compare what was answered with what was charged."""
    router = APIRouter(tags=["provider"])

    @router.get("/demo/ledger", summary="What the provider has charged")
    async def read_ledger() -> dict[str, Any]:
        try:
            return {"charges": await charging.charges()}
        except ProviderFailedError as error:
            raise _silent() from error

    @router.get("/demo/charges/{key}", summary="What the provider has charged for one request")
    async def read_charges(key: ClientKey, tenant: Tenant) -> dict[str, Any]:
        engine = once.asynchronous()
        found = await adrive(engine.store.find(RecordId(scope_of(NO_NAMESPACE, tenant), key)), engine.driver.run)
        if found.record is None:
            raise ProblemError(HTTPStatus.NOT_FOUND, "request_not_found", "No request with this key is stored.")
        keys = [downstream_key(found.record.seed, name) for name in CALLS.get(found.record.operation, ())]
        try:
            return {"charges": [charge for sent in keys for charge in await charging.charges(sent)]}
        except ProviderFailedError as error:
            raise _silent() from error

    return router


def _silent() -> ProblemError:
    detail = "The provider does not answer."
    return ProblemError(HTTPStatus.SERVICE_UNAVAILABLE, "provider_unavailable", detail, {"retry-after": "1"})
