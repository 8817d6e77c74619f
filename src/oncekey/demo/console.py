"""`/console`: the operators' pages of the shop, with the provider's books to compare ours with."""

from __future__ import annotations

from decimal import Decimal
from typing import TYPE_CHECKING, Final

from oncekey.console import Console, Ledger, Operator, Role, Tokens
from oncekey.demo.notification_routes import CALL
from oncekey.reconcile.books import Pointers
from oncekey.reconcile.ledger import LedgerEntry

if TYPE_CHECKING:
    from fastapi import FastAPI

    from oncekey.core.model import Instant
    from oncekey.core.pulse import History
    from oncekey.demo.charging import Charging
    from oncekey.once import Once

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
