"""`/orders`: one route that must happen once, and two that only look."""

from __future__ import annotations

import asyncio
from http import HTTPStatus
from typing import TYPE_CHECKING, Annotated
from uuid import UUID

from fastapi import APIRouter, Query, Response

from oncekey.demo.delay import Delay
from oncekey.demo.models import Order, OrderIn, place
from oncekey.demo.problems import ProblemError
from oncekey.demo.tenants import Tenant
from oncekey.effects import LOCAL
from oncekey.engine.operation import Operation

if TYPE_CHECKING:
    from oncekey.demo.orders import Orders
    from oncekey.once import Once

Limit = Annotated[int, Query(ge=1, le=10_000, description="How many, the newest first.")]


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

    @router.get("/orders", summary="The newest orders")
    async def list_orders(tenant: Tenant, limit: Limit = 100) -> list[Order]:
        return await orders.newest(tenant, limit)

    @router.get("/orders/{order_id}", summary="One order")
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
