"""The provider as the tortured shop sees it: what each of its answers proves, and what none of them does."""

from __future__ import annotations

import json
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any, Self

from oncekey.core.errors import NotExecuted, Rejected
from oncekey.demo.outbound import AnswerLostError, NothingSentError, ask
from oncekey.torture.settings import CALL_TIMEOUT

CURRENCY = "EUR"


class UncertainError(Exception):
    """The provider may have charged; it did not say."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """What a request asks for. The customer is the key itself, so that the ledger alone tells whose charge it is."""

    customer: str
    cents: int
    recognises: bool = True
    """Whether the provider recognises a repeated downstream key."""
    declines: bool = False
    """Whether the provider's final word is no."""

    @classmethod
    def of(cls, data: dict[str, Any]) -> Self:
        """Read a body, or a payload."""
        return cls(data["customer"], data["cents"], data["recognises"], data["declines"])

    def data(self) -> dict[str, Any]:
        """As JSON has it."""
        return {
            "customer": self.customer,
            "cents": self.cents,
            "recognises": self.recognises,
            "declines": self.declines,
        }

    @property
    def label(self) -> str:
        """The request in one word: two bodies under one key differ in it."""
        return f"{self.cents} cents"


async def charge(url: str, wanted: Wanted, downstream_key: str, fault: str | None = None) -> str:
    """Charge, and return the charge's id."""
    headers = {"Content-Type": "application/json", "Idempotency-Key": downstream_key}
    if wanted.declines:
        headers["X-Demo-Fault"] = "decline"
    elif fault:
        headers["X-Demo-Fault"] = fault
    if not wanted.recognises:
        headers["X-Demo-Dedup"] = "off"
    order = {"customer_id": wanted.customer, "amount_cents": wanted.cents, "currency": CURRENCY}
    content = json.dumps(order).encode()
    try:
        reply = await ask("POST", f"{url}/charges", content=content, headers=headers, patience=CALL_TIMEOUT * 2)
    except NothingSentError as error:
        raise NotExecuted("the provider cannot be reached") from error
    except AnswerLostError as error:
        raise UncertainError(str(error)) from error
    if reply.status == HTTPStatus.PAYMENT_REQUIRED:
        raise Rejected({"declined": wanted.customer})
    if not reply.ok:
        raise UncertainError(f"the provider answered {reply.status}")
    made: str = reply.json()["id"]
    return made
