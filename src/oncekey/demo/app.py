"""The application: the shop's routes behind oncekey."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from fastapi import Depends, FastAPI

from oncekey.demo.health import health_routes
from oncekey.demo.limits import BodyLimit
from oncekey.demo.order_routes import order_routes
from oncekey.demo.orders import Orders
from oncekey.demo.pages import page_routes
from oncekey.demo.problems import add_problems
from oncekey.demo.tenants import authenticate, tenant_of
from oncekey.once import Once

if TYPE_CHECKING:
    from oncekey.core.policy import Policy


def create_app(store_url: str, policy: Policy) -> FastAPI:
    """The demo on a store. Its tables, and oncekey's, are made at start-up."""
    once = Once(store_url, policy=policy, migrate=True)
    orders = Orders(once.asynchronous)

    @asynccontextmanager
    async def tables(_: FastAPI) -> AsyncIterator[None]:
        await orders.create_tables()
        yield

    app = FastAPI(
        title="oncekey demo",
        summary="A small shop whose requests may be sent as often as one likes.",
        lifespan=once.lifespan_with(tables),
        # The pages that come with FastAPI load their scripts from elsewhere.
        docs_url=None,
        redoc_url=None,
    )
    app.include_router(order_routes(once, orders))
    app.include_router(health_routes(orders))
    app.include_router(page_routes(policy))
    add_problems(app)
    app.add_middleware(BodyLimit, limit=policy.max_request_bytes)
    once.install(app, tenant=tenant_of, status_dependencies=[Depends(authenticate)])
    return app
