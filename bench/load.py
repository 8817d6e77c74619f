"""A load generator: keep-alive connections over loopback, each with one request in progress at a time."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import cast

HOST = "127.0.0.1"
PATIENCE = 60.0
AT_LEAST = 3
_END_OF_HEAD = b"\r\n\r\n"
_LENGTH = b"\r\ncontent-length:"
_CHUNKED = b"\r\ntransfer-encoding: chunked"
_LAST_CHUNK = b"0\r\n\r\n"
_COMPLAINTS = 3


@dataclass(slots=True)
class Volley:
    """The results of one slice of load."""

    seconds: float = 0.0
    sent: int = 0
    latencies: list[float] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)

    @property
    def count(self) -> int:
        return len(self.latencies)


@dataclass(frozen=True, slots=True)
class Load:
    """What to send, what a response must contain, and when to stop: by time, by number, or when no request is left."""

    request: Callable[[], bytes | None]
    status: bytes
    marker: bytes | None = None
    """Text that the head of every response must contain, in lower case."""
    unmarked: bytes | None = None
    """Text that no response head may contain."""
    seconds: float = 1.0
    at_most: int = 50_000


class Lanes:
    """Connections to one server, opened once and used by every slice."""

    def __init__(self, lanes: list[_Lane]) -> None:
        self._lanes = lanes

    @classmethod
    async def open(cls, port: int, count: int) -> Lanes:
        loop = asyncio.get_running_loop()
        opened = await asyncio.gather(*(loop.create_connection(_Lane, HOST, port) for _ in range(count)))
        return cls([lane for _, lane in opened])

    async def fire(self, load: Load) -> Volley:
        """Send for the duration of the load, wait for open requests, and count the responses."""
        volley = Volley()
        began = time.perf_counter()
        ended = [lane.run(load, volley, began + load.seconds) for lane in self._lanes]
        try:
            async with asyncio.timeout(load.seconds + PATIENCE):
                await asyncio.gather(*ended)
        except TimeoutError:
            volley.wrong.append(f"no response within {PATIENCE:.0f} seconds")
        volley.seconds = time.perf_counter() - began
        return volley

    async def close(self) -> None:
        for lane in self._lanes:
            lane.close()
        await asyncio.gather(*(lane.closed for lane in self._lanes))


class _Lane(asyncio.Protocol):
    """One connection, which is idle between slices."""

    def __init__(self) -> None:
        self._buffer = b""
        self._sent_at = self._ends = 0.0
        self._sent = 0
        self._load: Load | None = None
        self._volley = Volley()
        self._done: asyncio.Future[None] | None = None
        self._transport: asyncio.Transport | None = None
        self.closed: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def run(self, load: Load, volley: Volley, ends: float) -> asyncio.Future[None]:
        """Begin a slice; the future is done when the last response has arrived."""
        self._load, self._volley, self._ends, self._sent = load, volley, ends, 0
        self._done = asyncio.get_running_loop().create_future()
        self._next()
        return self._done

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)  # uvloop's is one in all but name

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        head, separator, body = self._buffer.partition(_END_OF_HEAD)
        if not separator or self._load is None:
            return
        lowered = head.lower()
        if not _whole(lowered, body):
            return
        self._buffer = b""
        self._volley.latencies.append(time.perf_counter() - self._sent_at)
        complaint = _complaint(lowered, self._load)
        if complaint:
            self._volley.wrong.append(complaint)
        self._next()

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        self.closed.set_result(None)
        if self._done is not None and not self._done.done():
            self._volley.wrong.append(f"the server closed a connection ({exc or 'in order'})")
            self._done.set_result(None)

    def _next(self) -> None:
        assert self._load is not None
        assert self._done is not None
        now = time.perf_counter()
        volley = self._volley
        # Even when time is up, every lane sends a few: the first work of a resumed server is shared by many requests.
        late = self._sent >= AT_LEAST and now >= self._ends
        if late or volley.sent >= self._load.at_most or len(volley.wrong) >= _COMPLAINTS:
            request = None
        else:
            request = self._load.request()
        if request is None or self._transport is None:
            if self._transport is None:
                volley.wrong.append("the server had closed a connection")
            self._done.set_result(None)
            return
        self._sent += 1
        volley.sent += 1
        self._sent_at = now
        self._transport.write(request)


async def fire(port: int, load: Load, connections: int = 1) -> Volley:
    """One slice on separate connections."""
    lanes = await Lanes.open(port, connections)
    try:
        return await lanes.fire(load)
    finally:
        await lanes.close()


def _complaint(head: bytes, load: Load) -> str | None:
    line = head.split(b"\r\n", 1)[0]
    if line.split(b" ", 2)[1] != load.status:
        return line.decode("latin-1")
    if load.marker is not None and load.marker not in head:
        return f"a response without {load.marker.decode()}"
    if load.unmarked is not None and load.unmarked in head:
        return f"a response with {load.unmarked.decode()}"
    return None


def _whole(head: bytes, body: bytes) -> bool:
    """Whether a response is complete."""
    if _CHUNKED in head:
        return body.endswith(_LAST_CHUNK)
    at = head.find(_LENGTH)
    return at < 0 or len(body) >= int(head[at + len(_LENGTH) :].split(b"\r\n", 1)[0])
