"""A load generator: keep-alive connections over loopback, each with one request on its way at any time."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field

HOST = "127.0.0.1"
_END_OF_HEAD = b"\r\n\r\n"
_LENGTH = b"content-length:"


@dataclass(slots=True)
class Volley:
    """What came of one slice of load."""

    seconds: float = 0.0
    latencies: list[float] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)

    @property
    def count(self) -> int:
        return len(self.latencies)

    @property
    def rate(self) -> float:
        return self.count / self.seconds if self.seconds else 0.0


@dataclass(frozen=True, slots=True)
class Load:
    """What to send, how an answer must look, and when to stop."""

    request: Callable[[], bytes]
    status: bytes
    marker: bytes | None = None
    unmarked: bytes | None = None
    connections: int = 16
    seconds: float = 1.0
    at_most: int = 50_000


class _Connection(asyncio.Protocol):
    def __init__(self, load: Load, volley: Volley, ends: float) -> None:
        self._load = load
        self._volley = volley
        self._ends = ends
        self._buffer = b""
        self._sent_at = 0.0
        self._transport: asyncio.Transport | None = None
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self._next()

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        head, separator, body = self._buffer.partition(_END_OF_HEAD)
        if not separator or len(body) < _length(head):
            return
        self._buffer = b""
        self._volley.latencies.append(time.perf_counter() - self._sent_at)
        complaint = self._complaint(head)
        if complaint:
            self._volley.wrong.append(complaint)
        self._next()

    def connection_lost(self, exc: Exception | None) -> None:
        if not self.done.done():
            self._volley.wrong.append(f"the server closed a connection ({exc or 'in order'})")
            self.done.set_result(None)

    def _next(self) -> None:
        assert self._transport is not None
        now = time.perf_counter()
        if now >= self._ends or self._volley.count >= self._load.at_most or len(self._volley.wrong) >= 3:
            self.done.set_result(None)
            self._transport.close()
            return
        self._sent_at = now
        self._transport.write(self._load.request())

    def _complaint(self, head: bytes) -> str | None:
        line = head.split(b"\r\n", 1)[0]
        if line.split(b" ", 2)[1] != self._load.status:
            return line.decode("latin-1")
        lowered = head.lower()
        if self._load.marker is not None and self._load.marker not in lowered:
            return f"an answer without {self._load.marker.decode()}"
        if self._load.unmarked is not None and self._load.unmarked in lowered:
            return f"an answer with {self._load.unmarked.decode()}"
        return None


async def fire(port: int, load: Load) -> Volley:
    """Send for as long as the load says, and count what came back."""
    volley = Volley()
    began = time.perf_counter()
    ends = began + load.seconds
    loop = asyncio.get_running_loop()
    made = await asyncio.gather(
        *(loop.create_connection(lambda: _Connection(load, volley, ends), HOST, port) for _ in range(load.connections))
    )
    async with asyncio.timeout(load.seconds + 30):
        await asyncio.gather(*(connection.done for _, connection in made))
    volley.seconds = time.perf_counter() - began
    return volley


def _length(head: bytes) -> int:
    for line in head.lower().split(b"\r\n"):
        if line.startswith(_LENGTH):
            return int(line[len(_LENGTH) :])
    return 0
