"""A relay that counts what a client says to PostgreSQL, and stops one message after so many of its bytes.

A message here is what is said before the other side answers: what is sent without waiting is one message and costs one
round trip.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import StrEnum

from harness.proxy import Proxy, _Loss
from oncekey_demo.torture.proxy import Link

_CHUNK = 65_536


class Side(StrEnum):
    """Who is interrupted."""

    CLIENT = "client"
    SERVER = "server"


@dataclass(slots=True)
class Stop:
    """Where to stop: after so many bytes of one side of a message. It lets go when it is told to, or ends all."""

    message: int | bytes
    """Its number, or bytes that only it has: a request that says things again has the same ones at other numbers."""
    side: Side
    after: int
    ends: bool
    happened: threading.Event = field(default_factory=threading.Event)
    let_go: threading.Event = field(default_factory=threading.Event)


class CuttingProxy(Proxy):
    """Counts from `count()` on. Use it with one connection at a time."""

    def __init__(self, host: str, port: int) -> None:
        super().__init__(host, port)
        self._said: list[dict[Side, bytearray]] = []
        self._answered = True
        self._stop: Stop | None = None

    def count(self) -> None:
        """Forget what was said so far."""
        self._said, self._answered, self._stop = [], True, None

    @property
    def messages(self) -> list[tuple[bytes, bytes]]:
        """What was said since, and what was answered to it."""
        return [(bytes(one[Side.CLIENT]), bytes(one[Side.SERVER])) for one in self._said]

    def stop(self, message: int | bytes, side: Side, after: int, *, ends: bool) -> Stop:
        """Stop after so many bytes of one side of a message: for good, or until `let_go` is set."""
        self._stop = Stop(message, side, after, ends)
        return self._stop

    def _is_meant(self, stop: Stop, side: Side) -> bool:
        if stop.side is not side:
            return False
        if isinstance(stop.message, bytes):
            return stop.message in self._said[-1][Side.CLIENT]
        return stop.message == len(self._said) - 1

    async def _requests(self, link: Link[_Loss]) -> None:
        with contextlib.suppress(OSError):
            while chunk := await link.from_client.read(_CHUNK):
                if self._answered:
                    self._said.append({Side.CLIENT: bytearray(), Side.SERVER: bytearray()})
                    self._answered = False
                link.to_server.write(await self._passed(link, Side.CLIENT, chunk))
                await link.to_server.drain()
            link.to_server.write_eof()

    async def _replies(self, link: Link[_Loss]) -> None:
        with contextlib.suppress(OSError):
            while chunk := await link.from_server.read(_CHUNK):
                self._answered = True
                link.to_client.write(await self._passed(link, Side.SERVER, chunk))
                await link.to_client.drain()
            link.to_client.write_eof()

    async def _passed(self, link: Link[_Loss], side: Side, chunk: bytes) -> bytes:
        """What of a chunk is passed on now; what was passed on before a stop is on its way already."""
        if not self._said:
            return chunk
        done, stop = self._said[-1][side], self._stop
        before = len(done)
        done += chunk
        if stop is None or not self._is_meant(stop, side):
            return chunk
        if not before <= stop.after < before + len(chunk):
            return chunk
        self._stop = None
        to = link.to_server if side is Side.CLIENT else link.to_client
        first, rest = chunk[: stop.after - before], chunk[stop.after - before :]
        to.write(first)
        await to.drain()
        stop.happened.set()
        if stop.ends:
            link.end()
            raise ConnectionAbortedError
        await self._loop.run_in_executor(None, stop.let_go.wait, 10.0)
        return rest


def edges(text: bytes) -> Iterator[int]:
    """Where to stop in a message: at the borders of every frame of the protocol, beside them and inside."""
    at, found = 0, {0}
    while at + 5 <= len(text):
        size = 1 + int.from_bytes(text[at + 1 : at + 5], "big")
        found |= {at, at + 1, at + 5, at + size // 2, at + size - 1}
        at += size
    yield from sorted(one for one in found if one < len(text))
