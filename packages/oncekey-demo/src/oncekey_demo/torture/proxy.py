"""A TCP relay between the run's processes and their database, which loses, holds and cuts messages on demand.

It parses two parts of the protocol: the word COMMIT in a request, and the end of a reply.
"""

from __future__ import annotations

import asyncio
import re
import socket
import struct
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import Final, Generic, Self, TypeVar

L = TypeVar("L")

_CHUNK: Final = 65_536
_RESET: Final = struct.pack("ii", 1, 0)
_COMMIT: Final = re.compile(rb"\bCOMMIT\b")
"""The word alone: a transaction begins with READ COMMITTED."""
_DONE: Final = b"Z\x00\x00\x00\x05"
"""ReadyForQuery: the server has executed the request."""

_MORE: Final = 8
"""SERVER_MORE_RESULTS_EXISTS."""


def answered_postgres(reply: bytes) -> bool:
    """Whether PostgreSQL's reply is complete."""
    return _DONE in reply


def answered_mysql(reply: bytes) -> bool:
    """Whether MariaDB's reply is complete: the last packet is an error, or an OK after which nothing follows."""
    last = b""
    while reply:
        size = int.from_bytes(reply[:3], "little")
        if len(reply) < size + 4:
            return False
        last, reply = reply[4 : 4 + size], reply[4 + size :]
    if last[:1] == b"\xff":
        return True
    if last[:1] != b"\0":
        return False
    at = 1
    for _ in range(2):  # the number of rows, and the last inserted id: the first byte of each gives its length
        at += {0xFC: 3, 0xFD: 4, 0xFE: 9}.get(last[at], 1) if at < len(last) else 1
    return not int.from_bytes(last[at : at + 2], "little") & _MORE


class Loss(StrEnum):
    """The next message that the proxy drops, a request or a reply. The client sees only that the connection ends."""

    COMMIT_REPLY = "commit reply lost"
    COMMIT_REQUEST = "commit request lost"
    ANY_REPLY = "reply lost"

    def fits(self, request: bytes) -> bool:
        """Whether this loss applies to a request."""
        return self is Loss.ANY_REPLY or _COMMIT.search(request) is not None


class Proxy:
    """Relays connections from `port` on loopback; use it as an asynchronous context manager."""

    def __init__(self, host: str, port: int, is_whole: Callable[[bytes], bool] = answered_postgres) -> None:
        self.port = 0
        self._is_whole = is_whole
        self.lost: Counter[Loss] = Counter()
        self._target = (host, port)
        self._armed: list[Loss] = []
        self._links: set[Link[Loss]] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._passing = asyncio.Event()
        self._passing.set()
        self._server: asyncio.Server | None = None

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._server is not None
        self._server.close()
        self.calm()
        self.cut()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def lose(self, loss: Loss) -> None:
        """Lose the next request to which this loss applies, or its reply."""
        self._armed.append(loss)

    def cut(self) -> None:
        """Reset every open connection; new ones are accepted."""
        for link in tuple(self._links):
            link.reset()

    def hold(self) -> None:
        """Pass nothing on while connections stay open, as a silent network does."""
        self._passing.clear()

    def calm(self) -> None:
        """Stop losing and holding messages."""
        self._armed.clear()
        self._passing.set()

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.get_running_loop().create_task(self._relay(reader, writer))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _relay(self, from_client: asyncio.StreamReader, to_client: asyncio.StreamWriter) -> None:
        try:
            from_server, to_server = await asyncio.open_connection(*self._target)
        except OSError:
            to_client.transport.abort()
            return
        link: Link[Loss] = Link(from_client, to_client, from_server, to_server)
        self._links.add(link)
        try:
            await asyncio.gather(self._requests(link), self._replies(link))
        except OSError:
            # One side closed its connection: close the other one, or a server would wait for a client that is dead.
            link.reset()
        finally:
            self._links.discard(link)
            link.end()

    async def _requests(self, link: Link[Loss]) -> None:
        while chunk := await link.from_client.read(_CHUNK):
            await self._passing.wait()
            loss = self._take(chunk)
            if loss is Loss.COMMIT_REQUEST:
                self.lost[loss] += 1
                link.end()
                return
            # Noted before the bytes are sent, so that the reply cannot arrive first.
            link.loss = link.loss or loss
            link.to_server.write(chunk)
            await link.to_server.drain()
        link.to_server.write_eof()

    async def _replies(self, link: Link[Loss]) -> None:
        dropped = b""
        while chunk := await link.from_server.read(_CHUNK):
            await self._passing.wait()
            if link.loss is None:
                link.to_client.write(chunk)
                await link.to_client.drain()
                continue
            dropped += chunk
            # A statement is prepared before it is executed, and the reply to that is not the reply to the COMMIT.
            if link.loss is Loss.ANY_REPLY or self._is_whole(dropped):
                self.lost[link.loss] += 1
                link.end()
                return
        link.to_client.write_eof()

    def _take(self, request: bytes) -> Loss | None:
        for loss in self._armed:
            if loss.fits(request):
                self._armed.remove(loss)
                return loss
        return None


@dataclass(eq=False, slots=True)
class Link(Generic[L]):
    """The connection of a client, and the proxy's connection to the database for it."""

    from_client: asyncio.StreamReader
    to_client: asyncio.StreamWriter
    from_server: asyncio.StreamReader
    to_server: asyncio.StreamWriter
    loss: L | None = None

    def end(self) -> None:
        """Close both sides without sending what is still waiting."""
        self.to_client.transport.abort()
        self.to_server.transport.abort()

    def reset(self) -> None:
        """Close both sides so that each peer sees a reset instead of an end."""
        for writer in (self.to_client, self.to_server):
            connection = writer.get_extra_info("socket")
            if connection is not None and connection.fileno() >= 0:
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
        self.end()
