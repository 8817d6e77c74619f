"""What a person sees in a browser: the page that sends requests and shows what they did, and the operators' console."""

from __future__ import annotations

from decimal import Decimal
from importlib.resources import files
from typing import TYPE_CHECKING, Final

from fastapi import APIRouter
from starlette.responses import Response

from oncekey.console import Console, Ledger, Operator, Role, Tokens
from oncekey.console.views import palette
from oncekey.demo.notification_routes import CALL
from oncekey.reconcile.books import Pointers
from oncekey.reconcile.ledger import LedgerEntry

if TYPE_CHECKING:
    from fastapi import FastAPI

    from oncekey.core.model import Instant
    from oncekey.core.pulse import History
    from oncekey.demo.charging import Charging
    from oncekey.once import Once

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
    """The page and what it loads; everything comes from the package and nothing from elsewhere."""
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
"""Who whoever comes by the printed link is, for the audit."""


def add_console(app: FastAPI, once: Once, charging: Charging, token: str, seen: History | None = None) -> None:
    """Mount the console for whoever has the token; its charts begin with what was seen before."""

    async def booked(_: Instant) -> list[LedgerEntry]:
        return [
            LedgerEntry(one["downstream_key"], one["id"], Decimal(one["amount_cents"]), one["currency"])
            for one in await charging.charges()
        ]

    books = Ledger(booked, Pointers("/amount_cents", "/currency"), inline={"send_notification": CALL})
    tokens = Tokens([(token, Operator(OPERATOR, Role.OPERATE))])
    app.mount(PATH, Console(once, tokens=tokens, ledger=books, title="oncekey demo", history=seen))


def link_to(address: str, token: str) -> str:
    """The address that logs in; what stands behind the # is sent to nobody."""
    return f"{address}{PATH}/login#{token}"
