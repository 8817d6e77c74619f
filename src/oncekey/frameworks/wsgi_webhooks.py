"""Webhooks of a WSGI application: the request is read here, and judged by `Hearing`."""

from __future__ import annotations

from http import HTTPStatus
from typing import TYPE_CHECKING, Final, Protocol

from oncekey.flow import drive
from oncekey.frameworks.hearing import Rules, Told

if TYPE_CHECKING:
    from collections.abc import Iterable
    from wsgiref.types import InputStream, StartResponse, WSGIEnvironment

    from oncekey.engine.shell import Engine
    from oncekey.frameworks.hearing import Hearing

_CHUNK: Final = 64 * 1024
_DIGITS: Final = 18


class Host(Rules, Protocol):
    """What a webhook needs of `Once`."""

    def blocking(self) -> Engine:
        """The engine of all threads."""


class WsgiWebhook:
    """The endpoint, as a WSGI application. It takes POST only, as there is no route before it that would see to it."""

    def __init__(self, host: Host, hearing: Hearing) -> None:
        self._host = host
        self._hearing = hearing
        self._header = "HTTP_" + hearing.header.upper().replace("-", "_")

    def __call__(self, environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
        """Answer one request."""
        posted = environ["REQUEST_METHOD"] == "POST"
        told = self._answer(environ) if posted else Told(405, "Webhooks are posted.")
        body = told.body
        headers = [("Content-Type", "application/json"), ("Content-Length", str(len(body)))]
        if not posted:
            headers.append(("Allow", "POST"))
        start_response(f"{told.status} {HTTPStatus(told.status).phrase}", headers)
        return [] if environ["REQUEST_METHOD"] == "HEAD" else [body]

    def _answer(self, environ: WSGIEnvironment) -> Told:
        # A server joins several lines of one name by commas, and two times in one signature are refused.
        lines = [environ[self._header]] if self._header in environ else []
        judged = self._hearing.judge(lines, _read(environ, self._hearing.max_body))
        if isinstance(judged, Told):
            return judged
        engine = self._host.blocking()
        return drive(self._hearing.take(engine.store, judged), engine.driver.run)


def _read(environ: WSGIEnvironment, limit: int) -> bytes | None:
    """The body, or None if it is too long; never beyond its length, where some servers would wait for ever."""
    length: str = environ.get("CONTENT_LENGTH") or ""
    if length.isascii() and length.isdigit():
        size = int(length[:_DIGITS])  # a number of thousands of digits is too large, and nothing that int() would take
        return None if size > limit or len(length) > _DIGITS else _up_to(environ["wsgi.input"], size)
    if not environ.get("wsgi.input_terminated"):
        return b""
    body = _up_to(environ["wsgi.input"], limit + 1)
    return None if len(body) > limit else body


def _up_to(stream: InputStream, size: int) -> bytes:
    body = b""
    while len(body) < size:
        chunk = stream.read(min(size - len(body), _CHUNK))
        if not chunk:
            break
        body += chunk
    return body
