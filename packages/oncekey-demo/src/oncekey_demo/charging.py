"""The shop's client for the provider: it decides what each response proves about a charge.

Each request has its own connection, so the client can distinguish a request that was certainly not sent from one that
may have been. The demo connects only to its own provider.
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
    """The connection failed, so no byte of the request was sent."""


class AnswerLostError(Exception):
    """The request was sent, but no complete response arrived: the provider may or may not have executed it."""


@dataclass(frozen=True, slots=True)
class Reply:
    """The server's response."""

    status: int
    body: bytes
    headers: Mapping[str, str]
    """Keyed by lower-case name."""

    @property
    def ok(self) -> bool:
        """Whether the status is a success."""
        return HTTPStatus.OK <= self.status < HTTPStatus.MULTIPLE_CHOICES

    def json(self) -> Any:  # noqa: ANN401  (any JSON)
        """The parsed body."""
        return json.loads(self.body)


def http_url(text: str) -> SplitResult:
    """Parse a URL for `ask`."""
    try:
        parts = urlsplit(text)
        usable = parts.scheme == "http" and bool(parts.hostname) and (parts.port or 80) > 0
    except ValueError:
        usable = False
    if not usable:
        raise ConfigurationError(f"{text!r} is not a URL like http://127.0.0.1:8001")
    return parts


async def ask(
    method: str,
    url: str,
    *,
    content: bytes = b"",
    headers: Mapping[str, str] | None = None,
    patience: float = PATIENCE,
) -> Reply:
    """Send a request and return its response."""
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
        raise AnswerLostError(f"{parts.netloc} sent no complete response ({type(error).__name__})") from error
    finally:
        writer.transport.abort()  # an unfinished exchange leaves the connection unusable


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
    """Read a response with `Content-Length`, the only kind that the demo's servers send."""
    first, *lines = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
    status = int(first.split(" ", 2)[1])
    fields = {name.strip().lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    length = int(fields["content-length"]) if "content-length" in fields else 0
    if length > _LONGEST_ANSWER:
        raise ValueError("the response is too long")
    return Reply(status, await reader.readexactly(length), fields)


class ProviderFailedError(Exception):
    """No response, or one that does not prove a charge or its absence: a 5xx may be sent before or after a charge."""


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

        A failed connection proves that nothing was sent. 402 is the provider's final refusal. Any other response
        without a charge leaves the outcome unknown.
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
            raise ProviderFailedError(f"the provider returned {reply.status}")
        charge: dict[str, Any] = reply.json()
        return charge

    async def find(self, key: str | None) -> dict[str, Any] | None:
        """The first charge under a downstream key; raises `ProviderFailedError` if the provider does not respond."""
        found = await self.charges(key or "")
        return found[0] if found else None

    async def charges(self, key: str | None = None) -> list[dict[str, Any]]:
        """All charges, or those under one downstream key, oldest first.

        It raises `ProviderFailedError` if the provider does not respond.
        """
        query = "" if key is None else f"?{urlencode({'downstream_key': key})}"
        try:
            reply = await ask("GET", f"{self._url}/charges{query}", patience=self._patience)
            found: list[dict[str, Any]] = reply.json()["charges"]
        except (NothingSentError, AnswerLostError, json.JSONDecodeError, KeyError) as error:
            raise ProviderFailedError("the provider does not return its charges") from error
        return found
