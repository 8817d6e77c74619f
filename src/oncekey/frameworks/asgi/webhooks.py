"""Webhooks of an ASGI application: this module reads the request, and `Hearing` verifies and applies it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from oncekey.flow import adrive
from oncekey.frameworks.hearing import Rules, Told

if TYPE_CHECKING:
    from oncekey.engine.shell import AsyncEngine
    from oncekey.frameworks.asgi.types import Receive, Scope, Send
    from oncekey.frameworks.hearing import Hearing


class Host(Rules, Protocol):
    """The part of `Once` that a webhook needs."""

    def asynchronous(self) -> AsyncEngine:
        """The engine of the running loop."""


class Webhook:
    """The endpoint, as an ASGI application."""

    def __init__(self, host: Host, hearing: Hearing) -> None:
        self._host = host
        self._hearing = hearing
        self._header = hearing.header.encode("latin-1")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        told = await self._answer(scope, receive)
        body = told.body
        headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
        await send({"type": "http.response.start", "status": told.status, "headers": headers})
        await send({"type": "http.response.body", "body": body})

    async def _answer(self, scope: Scope, receive: Receive) -> Told:
        body = await _read(receive, self._hearing.max_body)
        lines = [value.decode("latin-1") for name, value in scope["headers"] if name == self._header]
        judged = self._hearing.judge(lines, body)
        if isinstance(judged, Told):
            return judged
        engine = self._host.asynchronous()
        return await adrive(self._hearing.take(engine.store, judged), engine.driver.run)


async def _read(receive: Receive, limit: int) -> bytes | None:
    """The body, or None as soon as it is too long."""
    body: bytes = b""
    while True:
        message = await receive()
        body += message.get("body", b"")
        if len(body) > limit:
            return None
        if not message.get("more_body", False):
            return body
