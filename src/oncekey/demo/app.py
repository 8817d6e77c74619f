"""The application: the shop's routes behind oncekey."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from fastapi import Depends, FastAPI

from oncekey.demo.charging import Charging
from oncekey.demo.health import health_routes
from oncekey.demo.ledger_route import ledger_routes
from oncekey.demo.limits import BodyLimit
from oncekey.demo.movements import Movements
from oncekey.demo.notification_routes import notification_routes
from oncekey.demo.order_routes import order_routes
from oncekey.demo.orders import Orders
from oncekey.demo.pages import add_console, page_routes
from oncekey.demo.payment_routes import payment_routes, payment_topics
from oncekey.demo.problems import add_problems
from oncekey.demo.reconciling import resolvers, webhooks
from oncekey.demo.tables import Tables
from oncekey.demo.tenants import authenticate, tenant_of
from oncekey.demo.transfer_routes import transfer_routes, transfer_topics
from oncekey.observe.prometheus import Prometheus
from oncekey.once import Once

if TYPE_CHECKING:
    from oncekey.core.policy import Policy
    from oncekey.core.pulse import History

DEFAULT_PROVIDER = "http://127.0.0.1:8001"
"""Where `oncekey provider` listens if it is not told otherwise."""


def create_app(
    store_url: str,
    policy: Policy,
    provider_url: str = DEFAULT_PROVIDER,
    *,
    workers: bool = True,
    console_token: str | None = None,
    seen: History | None = None,
) -> FastAPI:
    """The demo on a store and a provider. Its tables, and oncekey's, are made at start-up.

    With a `console_token` whoever has it may use the operators' console, whose charts begin with what was
    `seen` before.
    """
    metrics = Prometheus()
    once = Once(store_url, policy=policy, migrate=True, workers=workers, observers=[metrics])
    tables = Tables(once.asynchronous)
    movements = Movements(tables)
    charging = Charging(provider_url, policy.call_timeout.total_seconds())

    payment_topics(once, movements)
    transfer_topics(once, charging)
    resolvers(once, charging)

    @asynccontextmanager
    async def prepared(_: FastAPI) -> AsyncIterator[None]:
        await tables.create()
        yield

    app = FastAPI(
        title="oncekey demo",
        summary="A small shop whose requests may be sent as often as one likes.",
        lifespan=once.lifespan_with(prepared),
        # The pages that come with FastAPI load their scripts from elsewhere.
        docs_url=None,
        redoc_url=None,
    )
    app.include_router(order_routes(once, Orders(tables)))
    app.include_router(payment_routes(once, movements, charging))
    app.include_router(transfer_routes(once, movements))
    app.include_router(notification_routes(once, charging))
    app.include_router(ledger_routes(once, charging))
    app.include_router(health_routes(tables, once, metrics))
    app.include_router(page_routes())
    if console_token is not None:
        add_console(app, once, charging, console_token, seen)
    add_problems(app)
    app.add_middleware(BodyLimit, limit=policy.max_request_bytes)
    app.state.once = once
    webhooks(once, app)
    once.install(app, tenant=tenant_of, status_dependencies=[Depends(authenticate)])
    return app
