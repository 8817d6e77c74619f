"""The application: the shop's routes behind oncekey, its resolvers and webhooks, and its pages for a browser.

`/demo/ledger` and `/demo/charges` return the provider's charges, read-only. `/healthz` returns 200 while the store
responds; `/metrics` returns the demo's counters.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from decimal import Decimal
from http import HTTPStatus
from importlib.resources import files
from typing import TYPE_CHECKING, Annotated, Any, Final

from fastapi import APIRouter, Depends, FastAPI, Path, Response
from fastapi.responses import PlainTextResponse

from oncekey.canonical.digests import downstream_key
from oncekey.console import Console, Ledger, Operator, Role, Tokens
from oncekey.console.views import palette
from oncekey.core.flow import adrive
from oncekey.core.model import Instant, RecordId
from oncekey.core.resolvers import Executed, NotExecuted, Question, Sighting
from oncekey.core.scope import scope_of
from oncekey.engine.enrolment import NO_NAMESPACE
from oncekey.observe.prometheus import Prometheus
from oncekey.once import Once
from oncekey.reconcile import LedgerEntry, Pointers
from oncekey_demo import routes
from oncekey_demo.charging import Charging, ProviderFailedError
from oncekey_demo.data import Movements, Orders, Tables
from oncekey_demo.problems import BodyLimit, ProblemError, Tenant, add_problems, authenticate, tenant_of

if TYPE_CHECKING:
    from oncekey.core.policy import Policy


def health_routes(tables: Tables, once: Once, metrics: Prometheus) -> APIRouter:
    """The routes for monitoring: health and metrics."""
    router = APIRouter(tags=["health"])

    @router.get("/healthz", summary="Check that the demo can serve requests")
    async def healthz() -> dict[str, str]:
        await tables.read("look")
        return {"status": "ok"}

    @router.get("/metrics", summary="Counters and gauges for Prometheus", response_class=PlainTextResponse)
    async def show_metrics() -> Response:
        return Response(await metrics.page(once), media_type=metrics.content_type)

    return router


CALLS: Final = {
    "create_payment": (routes.CHARGE,),
    "create_transfer": (routes.REPEATABLE, routes.UNREPEATABLE),
    "send_notification": (routes.CALL,),
}
"""The names of each operation's calls to the provider; its downstream keys are derived from them."""

ClientKey = Annotated[str, Path(pattern=r"^[\x21-\x7e]{1,255}$", description="The request's `Idempotency-Key`")]


def ledger_routes(once: Once, charging: Charging) -> APIRouter:
    """The routes that return the provider's charges."""
    router = APIRouter(tags=["provider"])

    @router.get("/demo/ledger", summary="The provider's charges")
    async def read_ledger() -> dict[str, Any]:
        try:
            return {"charges": await charging.charges()}
        except ProviderFailedError as error:
            raise _no_response() from error

    @router.get("/demo/charges/{key}", summary="The provider's charges for one request")
    async def read_charges(key: ClientKey, tenant: Tenant) -> dict[str, Any]:
        engine = once.asynchronous()
        found = await adrive(engine.store.find(RecordId(scope_of(NO_NAMESPACE, tenant), key)), engine.driver.run)
        if found.record is None:
            raise ProblemError(HTTPStatus.NOT_FOUND, "request_not_found", "No request with this key is stored.")
        keys = [downstream_key(found.record.seed, name) for name in CALLS.get(found.record.operation, ())]
        try:
            return {"charges": [charge for sent in keys for charge in await charging.charges(sent)]}
        except ProviderFailedError as error:
            raise _no_response() from error

    return router


def _no_response() -> ProblemError:
    detail = "The provider does not respond."
    return ProblemError(HTTPStatus.SERVICE_UNAVAILABLE, "provider_unavailable", detail, {"retry-after": "1"})


WEBHOOKS: Final = "/webhooks/provider"
SECRET: Final = "whsec_demo_of_oncekey"  # noqa: S105  (a demo's)
"""The default secret for the provider's webhook signatures."""


def resolvers(once: Once, charging: Charging) -> None:
    """Register a resolver for each operation that charges: it looks the charge up by its downstream key."""

    @once.resolver("create_payment")
    async def payment(question: Question) -> Executed | NotExecuted:
        charge = await charging.find(question.downstream_key)
        return NotExecuted() if charge is None else Executed(charge, provider_id=charge["id"])

    @once.resolver("create_transfer", answer=routes.transferred)
    async def transfer(question: Question) -> Executed | NotExecuted:
        charge = await charging.find(question.downstream_key)
        return (
            NotExecuted()
            if charge is None
            else Executed(routes.transferred(question, charge), provider_id=charge["id"])
        )

    @once.resolver("send_notification", call=routes.CALL, answer=routes.notified)
    async def notification(question: Question) -> Executed | NotExecuted:
        charge = await charging.find(question.downstream_key)
        return (
            NotExecuted() if charge is None else Executed(routes.notified(question, charge), provider_id=charge["id"])
        )


def webhooks(once: Once, app: FastAPI, secret: str = SECRET) -> None:
    """Add the endpoint for the provider's webhooks, one for each charge."""
    once.webhook(app, WEBHOOKS, secret=secret, parse=_sighting, name="provider")


def _sighting(event: dict[str, Any]) -> Sighting | None:
    charge = event["charge"]
    if event["type"] != "charge.succeeded" or charge["downstream_key"] is None:
        return None
    return Sighting(
        Executed(charge), downstream_key=charge["downstream_key"], provider_id=charge["id"], event_id=event["id"]
    )


_MEDIA_TYPES: Final = {
    "index.html": "text/html",
    "demo.css": "text/css",
    "demo.js": "text/javascript",
    "verdict.js": "text/javascript",
    "icon.svg": "image/svg+xml",
}
_HEADERS: Final = {
    "cache-control": "no-cache",
    "content-security-policy": "default-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
}


def page_routes() -> APIRouter:
    """The page and its files, all served from the package."""
    router = APIRouter(include_in_schema=False)
    for name in _MEDIA_TYPES:
        _serve(router, "/" if name == "index.html" else f"/{name}", name)
    return router


def _serve(router: APIRouter, path: str, name: str) -> None:
    content = files(__package__).joinpath("page", name).read_bytes()
    if name == "demo.css":
        content = palette() + content

    async def page() -> Response:
        return Response(content, media_type=_MEDIA_TYPES[name], headers=_HEADERS)

    router.add_api_route(path, page, methods=["GET", "HEAD"])


# The console

PATH: Final = "/console"
OPERATOR: Final = "demo"
"""The operator's name in the audit, for the printed link."""


def add_console(app: FastAPI, once: Once, charging: Charging, token: str) -> None:
    """Mount the console for the operator who has the token."""

    async def charges(_: Instant) -> list[LedgerEntry]:
        return [
            LedgerEntry(one["downstream_key"], one["id"], Decimal(one["amount_cents"]), one["currency"])
            for one in await charging.charges()
        ]

    pointers, inline = Pointers("/amount_cents", "/currency"), {"send_notification": routes.CALL}
    ledger = Ledger(charges, pointers, inline, minor_units=True)
    tokens = Tokens([(token, Operator(OPERATOR, Role.OPERATE))])
    app.mount(PATH, Console(once, tokens=tokens, ledger=ledger, title="oncekey demo"))


def link_to(address: str, token: str) -> str:
    """The URL that logs an operator in. The browser does not send the part after the #."""
    return f"{address}{PATH}/login#{token}"


DEFAULT_PROVIDER = "http://127.0.0.1:8001"
"""The default address of `oncekey provider`."""


def create_app(
    store_url: str,
    policy: Policy,
    provider_url: str = DEFAULT_PROVIDER,
    *,
    workers: bool = True,
    console_token: str | None = None,
) -> FastAPI:
    """The demo on a store and a provider. Its tables, and oncekey's, are created at start-up.

    `console_token` gives an operator access to the console.
    """
    metrics = Prometheus()
    once = Once(store_url, policy=policy, migrate=True, workers=workers, observers=[metrics])
    tables = Tables(once.asynchronous)
    movements = Movements(tables)
    charging = Charging(provider_url, policy.call_timeout.total_seconds())

    routes.payment_topics(once, movements)
    routes.transfer_topics(once, charging)
    resolvers(once, charging)

    @asynccontextmanager
    async def prepared(_: FastAPI) -> AsyncIterator[None]:
        await tables.create()
        yield

    app = FastAPI(
        title="oncekey demo",
        summary="A small shop whose requests are safe to retry.",
        lifespan=prepared,
        # FastAPI's own pages load their scripts from other hosts.
        docs_url=None,
        redoc_url=None,
    )
    app.include_router(routes.order_routes(once, Orders(tables)))
    app.include_router(routes.payment_routes(once, movements, charging))
    app.include_router(routes.transfer_routes(once, movements))
    app.include_router(routes.notification_routes(once, charging))
    app.include_router(ledger_routes(once, charging))
    app.include_router(health_routes(tables, once, metrics))
    app.include_router(page_routes())
    if console_token is not None:
        add_console(app, once, charging, console_token)
    add_problems(app)
    app.add_middleware(BodyLimit, limit=policy.max_request_bytes)
    app.state.once = once
    webhooks(once, app)
    once.install(app, tenant=tenant_of, status_dependencies=[Depends(authenticate)])
    return app
