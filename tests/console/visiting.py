"""Visits to a console without a browser: the application called in this process, as a server would call it."""

from __future__ import annotations

import re
from html import unescape
from typing import Any, Self

import httpx

from oncekey.console import Console

ANN, BOB = "ann-token-0123456789", "bob-token-0123456789"
TOKENS = f"ann:operate:{ANN}\nbob:read:{BOB}"


class Visitor:
    """Somebody with a browser's manners, as far as they are about cookies and forms."""

    def __init__(self, app: Any, *, base: str = "http://127.0.0.1", client: str = "127.0.0.1") -> None:
        transport = httpx.ASGITransport(app, client=(client, 50_000), raise_app_exceptions=False)
        self.http = httpx.AsyncClient(transport=transport, base_url=base)
        self.proof = ""
        self._app = app

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.http.aclose()
        if isinstance(self._app, Console):
            await self._app.close()

    async def log_in(self, token: str = ANN) -> httpx.Response:
        """Give a token."""
        answer = await self.http.post("login", data={"token": token})
        if answer.status_code == 303:
            await self.get("")
        return answer

    async def get(self, path: str, **options: Any) -> httpx.Response:
        """Look at a page, and keep the proof of its forms."""
        return self._keep(await self.http.get(path, **options))

    async def post(self, path: str, *, proof: str | None = None, **fields: str) -> httpx.Response:
        """Send a form, with the proof of the last page that was looked at."""
        sent = {"proof": self.proof if proof is None else proof, **fields}
        return self._keep(await self.http.post(path, data=sent))

    async def find(self, key: str, tenant: str = "") -> str:
        """The address of a key's page."""
        answer = await self.post("find", key=key, tenant=tenant)
        assert answer.status_code == 303, answer.text
        return answer.headers["location"].lstrip("/")

    def _keep(self, answer: httpx.Response) -> httpx.Response:
        found = re.search(r'name="proof" value="([0-9a-f]+)"', answer.text)
        self.proof = found[1] if found else self.proof
        return answer


def console_on(url: str, **options: Any) -> Console:
    """A console with an operator and a reader."""
    return Console(url, **{"tokens": TOKENS, **options})


def said(answer: httpx.Response) -> str:
    """The words of a page, in one line."""
    body = answer.text.partition("<main")[2] or answer.text
    return unescape(re.sub(r"\s+", " ", re.sub(r"<[^>]+>", " ", body)))
