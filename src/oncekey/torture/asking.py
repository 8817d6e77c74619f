"""One request over a connection of its own, and what came back, if anything did."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

_HOST = "127.0.0.1"


@dataclass(frozen=True, slots=True)
class Answer:
    """A whole answer; header names are in lower case."""

    status: int
    body: bytes
    headers: Mapping[str, str] = field(default_factory=dict)


async def post(port: int, path: str, content: bytes, headers: Mapping[str, str], patience: float) -> Answer | None:
    """Send a request to a server of the run; None if it gave no whole answer in time."""
    try:
        async with asyncio.timeout(patience):
            return await _exchange(port, path, content, headers)
    except (OSError, TimeoutError, asyncio.IncompleteReadError, ValueError, IndexError):
        return None


async def _exchange(port: int, path: str, content: bytes, headers: Mapping[str, str]) -> Answer:
    reader, writer = await asyncio.open_connection(_HOST, port)
    try:
        lines = [
            f"POST {path} HTTP/1.1",
            f"Host: {_HOST}",
            "Connection: close",
            "Content-Type: application/json",
            f"Content-Length: {len(content)}",
            *(f"{name}: {value}" for name, value in headers.items()),
        ]
        writer.write("\r\n".join([*lines, "", ""]).encode("latin-1") + content)
        await writer.drain()
        first, *fields = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
        found = {name.strip().lower(): value.strip() for name, _, value in (line.partition(":") for line in fields)}
        body = await reader.readexactly(int(found["content-length"])) if "content-length" in found else b""
        return Answer(int(first.split(" ", 2)[1]), body, found)
    finally:
        writer.transport.abort()
