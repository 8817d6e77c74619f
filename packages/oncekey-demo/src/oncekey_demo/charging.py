"""The shop's client for the provider: it says what each answer proves about a charge, and what it leaves open.

Each request has a connection of its own, so that the client knows whether a request was certainly not sent, or may have
been. The demo talks only to its own provider, and this small client shows where the difference comes from.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any, Final
from urllib.parse import SplitResult, urlencode, urlsplit

from oncekey.core.errors import ConfigurationError, NotExecutedError, RejectedError

PATIENCE: Final = 20.0
_LONGEST_ANSWER: Final = 16 * 1024 * 1024


class NothingSentError(Exception):
    """There was no connection, so no byte of the request was sent."""


class AnswerLostError(Exception):
    """The request was sent, and no complete answer came back: the provider may have executed it or not."""


@dataclass(frozen=True, slots=True)
class Reply:
    """The answer of the server."""

    status: int
    body: bytes
    headers: Mapping[str, str]
    """By their names in lower case."""

    @property
    def ok(self) -> bool:
        """Whether the status is a success."""
        return HTTPStatus.OK <= self.status < HTTPStatus.MULTIPLE_CHOICES

    def json(self) -> Any:  # noqa: ANN401  (whatever it holds)
        """The body as data."""
        return json.loads(self.body)


def http_url(text: str) -> SplitResult:
    """The parts of a URL that `ask` can use."""
    try:
        parts = urlsplit(text)
        usable = parts.scheme == "http" and bool(parts.hostname) and (parts.port or 80) > 0
    except ValueError:
        usable = False
    if not usable:
        raise ConfigurationError(f"{text!r} is no address like http://127.0.0.1:8001")
    return parts


async def ask(
    method: str,
    url: str,
    *,
    content: bytes = b"",
    headers: Mapping[str, str] | None = None,
    patience: float = PATIENCE,
) -> Reply:
    """Send a request and return its answer."""
    parts = http_url(url)
    try:
        async with asyncio.timeout(patience):
            reader, writer = await asyncio.open_connection(parts.hostname, parts.port or 80)
    except (OSError, TimeoutError) as error:
        raise NothingSentError(f"{parts.netloc} cannot be reached") from error
    try:
        async with asyncio.timeout(patience):
            writer.write(_head(method, parts, content, headers or {}) + content)
            await writer.drain()
            return await _whole(reader)
    except (OSError, TimeoutError, asyncio.IncompleteReadError, ValueError, IndexError) as error:
        raise AnswerLostError(f"{parts.netloc} gave no whole answer ({type(error).__name__})") from error
    finally:
        writer.transport.abort()  # the connection cannot be used after a half-finished exchange


def _head(method: str, parts: SplitResult, content: bytes, headers: Mapping[str, str]) -> bytes:
    target = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
    lines = [
        f"{method} {target} HTTP/1.1",
        f"Host: {parts.netloc}",
        "Connection: close",
        f"Content-Length: {len(content)}",
        *(f"{name}: {value}" for name, value in headers.items()),
    ]
    return "\r\n".join([*lines, "", ""]).encode("latin-1")


async def _whole(reader: asyncio.StreamReader) -> Reply:
    """An answer with `Content-Length`, which is the only kind that our own servers give."""
    first, *lines = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
    status = int(first.split(" ", 2)[1])
    fields = {name.strip().lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    length = int(fields["content-length"]) if "content-length" in fields else 0
    if length > _LONGEST_ANSWER:
        raise ValueError("the answer is too long")
    return Reply(status, await reader.readexactly(length), fields)


class ProviderFailedError(Exception):
    """No answer, or one that does not say whether there is a charge: a 5xx may come before it or after it."""


class Charging:
    """Charges at the provider."""

    def __init__(self, url: str, patience: float) -> None:
        http_url(url)
        self._url = url.rstrip("/")
        self._patience = patience

    async def charge(
        self, order: Mapping[str, object], key: str, *, deduplicate: bool, fault: str | None
    ) -> dict[str, Any]:
        """Charge under a downstream key.

        No connection proves that nothing was sent, 402 is the provider's final no, and every other answer that is no
        charge leaves the outcome open.
        """
        headers = {"Content-Type": "application/json", "Idempotency-Key": key}
        if fault is not None:
            headers["X-Demo-Fault"] = fault
        if not deduplicate:
            headers["X-Demo-Dedup"] = "off"
        content = json.dumps(order).encode()
        try:
            reply = await ask("POST", f"{self._url}/charges", content=content, headers=headers, patience=self._patience)
        except NothingSentError as error:
            raise NotExecutedError("the provider cannot be reached") from error
        except AnswerLostError as error:
            raise ProviderFailedError(str(error)) from error
        if reply.status == HTTPStatus.PAYMENT_REQUIRED:
            raise RejectedError({"detail": "The card was declined; nothing was charged."})
        if not reply.ok:
            raise ProviderFailedError(f"the provider answered {reply.status}")
        charge: dict[str, Any] = reply.json()
        return charge

    async def find(self, key: str | None) -> dict[str, Any] | None:
        """The first charge under a downstream key; raises `ProviderFailedError` if the provider does not answer."""
        found = await self.charges(key or "")
        return found[0] if found else None

    async def charges(self, key: str | None = None) -> list[dict[str, Any]]:
        """All charges, or those under one downstream key, the oldest first.

        It raises `ProviderFailedError` if the provider does not answer.
        """
        query = "" if key is None else f"?{urlencode({'downstream_key': key})}"
        try:
            reply = await ask("GET", f"{self._url}/charges{query}", patience=self._patience)
            found: list[dict[str, Any]] = reply.json()["charges"]
        except (NothingSentError, AnswerLostError, json.JSONDecodeError, KeyError) as error:
            raise ProviderFailedError("the provider does not say what it has charged") from error
        return found
