"""One HTTP request over a connection of its own; a request that never left is told apart from one that may have.

The demo talks to nothing but its own provider, and a client of sixty lines shows where the difference comes from.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any, Final
from urllib.parse import SplitResult, urlsplit

from oncekey.core.errors import ConfigurationError

PATIENCE: Final = 20.0
_LONGEST_ANSWER: Final = 16 * 1024 * 1024


class NothingSentError(Exception):
    """There was no connection, so not one byte of the request has left."""


class AnswerLostError(Exception):
    """The request was sent, and no whole answer came back: the other side may have done anything."""


@dataclass(frozen=True, slots=True)
class Reply:
    """What the other side said."""

    status: int
    body: bytes

    @property
    def ok(self) -> bool:
        """Whether it did as it was asked."""
        return HTTPStatus.OK <= self.status < HTTPStatus.MULTIPLE_CHOICES

    def json(self) -> Any:  # noqa: ANN401  (whatever it holds)
        """The body as data."""
        return json.loads(self.body)


def http_url(text: str) -> SplitResult:
    """A URL that `ask` can be given, in parts."""
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
    except (OSError, TimeoutError, asyncio.IncompleteReadError, ValueError) as error:
        raise AnswerLostError(f"{parts.netloc} gave no whole answer ({type(error).__name__})") from error
    finally:
        writer.transport.abort()  # a half-finished exchange is of no use to anybody


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
    return Reply(status, await reader.readexactly(length))
