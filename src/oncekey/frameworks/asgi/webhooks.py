"""Webhooks of an ASGI application: this module reads the request, and `WebhookReceiver` verifies and applies it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from oncekey.flow import adrive
from oncekey.frameworks.webhook import WebhookReply, WebhookRules

if TYPE_CHECKING:
    from oncekey.engine.shell import AsyncEngine
    from oncekey.frameworks.asgi.types import Receive, Scope, Send
    from oncekey.frameworks.webhook import WebhookReceiver


class Host(WebhookRules, Protocol):
    """The part of `Once` that a webhook needs."""

    def asynchronous(self) -> AsyncEngine:
        """The engine of the running loop."""


class Webhook:
    """The endpoint, as an ASGI application."""

    def __init__(self, host: Host, receiver: WebhookReceiver) -> None:
        self._host = host
        self._receiver = receiver
        self._header = receiver.header.encode("latin-1")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        reply = await self._answer(scope, receive)
        body = reply.body
        headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
        await send({"type": "http.response.start", "status": reply.status, "headers": headers})
        await send({"type": "http.response.body", "body": body})

    async def _answer(self, scope: Scope, receive: Receive) -> WebhookReply:
        body = await _read(receive, self._receiver.max_body)
        lines = [value.decode("latin-1") for name, value in scope["headers"] if name == self._header]
        verified = self._receiver.verify(lines, body)
        if isinstance(verified, WebhookReply):
            return verified
        engine = self._host.asynchronous()
        return await adrive(self._receiver.apply(engine.store, verified), engine.driver.run)


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
