"""Webhooks of a WSGI application: the request is read here, and judged by `WebhookReceiver`."""

from __future__ import annotations

from http import HTTPStatus
from typing import TYPE_CHECKING, Protocol

from oncekey.flow import drive
from oncekey.frameworks.blocking import TOO_LARGE
from oncekey.frameworks.webhook import WebhookReply, WebhookRules
from oncekey.frameworks.wsgi import read

if TYPE_CHECKING:
    from collections.abc import Iterable
    from wsgiref.types import StartResponse, WSGIEnvironment

    from oncekey.engine.shell import Engine
    from oncekey.frameworks.webhook import WebhookReceiver


class Host(WebhookRules, Protocol):
    """What a webhook needs of `Once`."""

    def blocking(self) -> Engine:
        """The engine of all threads."""


class WsgiWebhook:
    """The endpoint, as a WSGI application. It takes POST only, as there is no route before it that would see to it."""

    def __init__(self, host: Host, receiver: WebhookReceiver) -> None:
        self._host = host
        self._receiver = receiver
        self._header = "HTTP_" + receiver.header.upper().replace("-", "_")

    def __call__(self, environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
        """Answer one request."""
        posted = environ["REQUEST_METHOD"] == "POST"
        reply = self._answer(environ) if posted else WebhookReply(405, "Webhooks are posted.")
        body = reply.body
        headers = [("Content-Type", "application/json"), ("Content-Length", str(len(body)))]
        if not posted:
            headers.append(("Allow", "POST"))
        start_response(f"{reply.status} {HTTPStatus(reply.status).phrase}", headers)
        return [] if environ["REQUEST_METHOD"] == "HEAD" else [body]

    def _answer(self, environ: WSGIEnvironment) -> WebhookReply:
        # A server joins several lines of one name by commas, and two times in one signature are refused.
        lines = [environ[self._header]] if self._header in environ else []
        body = read(environ, self._receiver.max_body)
        taken = None if body is TOO_LARGE else body if isinstance(body, bytes) else b""
        verified = self._receiver.verify(lines, taken)
        if isinstance(verified, WebhookReply):
            return verified
        engine = self._host.blocking()
        return drive(self._receiver.apply(engine.store, verified), engine.driver.run)
