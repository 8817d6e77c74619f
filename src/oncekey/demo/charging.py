"""The provider as the shop sees it: what each of its answers proves, and what none of them does."""

from __future__ import annotations

import json
from http import HTTPStatus
from typing import TYPE_CHECKING, Any
from urllib.parse import urlencode

from oncekey.core.errors import NotExecuted, Rejected
from oncekey.demo.outbound import AnswerLostError, NothingSentError, ask, http_url
from oncekey.demo.provider_errors import ProviderFailedError

if TYPE_CHECKING:
    from oncekey.demo.money import Money


class Charging:
    """Charges at the provider."""

    def __init__(self, url: str, patience: float) -> None:
        http_url(url)
        self._url = url.rstrip("/")
        self._patience = patience

    async def charge(self, money: Money, key: str, *, deduplicate: bool, fault: str | None) -> dict[str, Any]:
        """Charge under a downstream key.

        No connection is proof that nothing was sent, 402 is the provider's final no, and everything else that is no
        charge leaves the outcome open.
        """
        headers = {"Content-Type": "application/json", "Idempotency-Key": key}
        if fault is not None:
            headers["X-Demo-Fault"] = fault
        if not deduplicate:
            headers["X-Demo-Dedup"] = "off"
        content = money.model_dump_json().encode()
        try:
            reply = await ask("POST", f"{self._url}/charges", content=content, headers=headers, patience=self._patience)
        except NothingSentError as error:
            raise NotExecuted("the provider cannot be reached") from error
        except AnswerLostError as error:
            raise ProviderFailedError(str(error)) from error
        if reply.status == HTTPStatus.PAYMENT_REQUIRED:
            raise Rejected({"detail": "The card was declined; nothing was charged."})
        if not reply.ok:
            raise ProviderFailedError(f"the provider answered {reply.status}")
        charge: dict[str, Any] = reply.json()
        return charge

    async def find(self, key: str | None) -> dict[str, Any] | None:
        """The first charge under a downstream key; it raises `ProviderFailedError` when the provider does not say."""
        found = await self.charges(key or "")
        return found[0] if found else None

    async def charges(self, key: str | None = None) -> list[dict[str, Any]]:
        """All charges, or those under one downstream key, the oldest first.

        It raises `ProviderFailedError` when the provider does not say.
        """
        query = "" if key is None else f"?{urlencode({'downstream_key': key})}"
        try:
            reply = await ask("GET", f"{self._url}/charges{query}", patience=self._patience)
            found: list[dict[str, Any]] = reply.json()["charges"]
        except (NothingSentError, AnswerLostError, json.JSONDecodeError, KeyError) as error:
            raise ProviderFailedError("the provider does not say what it has charged") from error
        return found
