"""`/healthz`, `/readyz` and `/metrics` of a worker: a few lines of HTTP, because a worker serves nothing else."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from http import HTTPStatus
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from oncekey.boottime import boottime
from oncekey.core.errors import ConfigurationError

if TYPE_CHECKING:
    from oncekey.workers.service import Service

Metrics: TypeAlias = Callable[[], Awaitable[tuple[str, bytes]]]
PATIENCE: Final = 5.0
"""Seconds within which a caller has to send its request."""


@asynccontextmanager
async def health(service: Service, address: str | None, metrics: Metrics | None = None) -> AsyncIterator[int | None]:
    """Serve while the service runs; yields the port. Without an address nothing is served.

    `metrics` returns the media type and the page of the application's metrics, if it has any.
    """
    if address is None:
        yield None
        return
    host, port = _place(address)
    try:
        server = await asyncio.start_server(lambda *streams: _answer(service, metrics, *streams), host, port)
    except OSError as error:
        raise ConfigurationError(f"--health {address}: cannot listen there ({error.strerror})") from error
    async with server:
        yield server.sockets[0].getsockname()[1]


def report(service: Service) -> dict[str, Any]:
    """The state of every task: when its last good look was, and what is wrong."""
    now = boottime()
    return {
        "ready": service.ready,
        "tasks": {
            name: {
                "seconds_since_good": None if look.good_at is None else round(now - look.good_at, 3),
                "wrong": look.wrong,
            }
            for name, look in service.looks.items()
        },
    }


async def _answer(
    service: Service, metrics: Metrics | None, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
) -> None:
    try:
        async with asyncio.timeout(PATIENCE):
            head = await reader.readuntil(b"\r\n\r\n")
        line = head.split(b" ", 2)[:2]
        if metrics is not None and line[1:] == [b"/metrics"]:
            status, (kind, text) = HTTPStatus.OK, await metrics()
        else:
            status, body = _response(service, line)
            kind, text = "application/json", json.dumps(body).encode()
        writer.write(
            f"HTTP/1.1 {status.value} {status.phrase}\r\nContent-Type: {kind}\r\n"
            f"Content-Length: {len(text)}\r\nCache-Control: no-store\r\nConnection: close\r\n\r\n".encode()
            + text
        )
        await writer.drain()
    except (TimeoutError, OSError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
        pass  # the caller did not wait, or did not speak HTTP
    finally:
        writer.close()


def _response(service: Service, line: list[bytes]) -> tuple[HTTPStatus, dict[str, Any]]:
    match line:
        case [b"GET" | b"HEAD", b"/healthz"]:
            return HTTPStatus.OK, {"alive": True}
        case [b"GET" | b"HEAD", b"/readyz"]:
            state = report(service)
            return (HTTPStatus.OK if state["ready"] else HTTPStatus.SERVICE_UNAVAILABLE), state
        case _:
            return HTTPStatus.NOT_FOUND, {"paths": ["/healthz", "/readyz"]}


def _place(address: str) -> tuple[str, int]:
    host, colon, port = address.rpartition(":")
    if not colon or not port.isascii() or not port.isdigit():
        raise ConfigurationError(f"--health {address}: say host:port, as in --health 127.0.0.1:9000")
    return host.strip("[]") or "127.0.0.1", int(port)
