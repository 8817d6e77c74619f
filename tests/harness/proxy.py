"""A TCP relay on loopback that loses, delays and cuts on demand, for faults between a client and its server.

It knows no protocol: what is lost is named by bytes that pass through. It runs in a thread of its own, so
blocking and async tests use it alike.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import threading
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any, Self

from harness.dsn import address
from harness.patience import PATIENCE
from harness.ports import free_port
from oncekey_demo.torture.proxy import Link

_CHUNK = 65_536


class Proxy:
    """Relays connections from `port` to a server; use it as a context manager.

    A loss is armed for one request: the first that contains the bytes is hit, later ones pass.
    """

    def __init__(self, host: str, port: int) -> None:
        self.port = free_port()
        self.accepted = 0
        self._target = (host, port)
        self._losses: list[_Loss] = []
        self._links: set[Link[_Loss]] = set()
        self._tasks: dict[asyncio.Task[None], asyncio.StreamWriter] = {}
        self._delay = 0.0
        self._passing = asyncio.Event()
        self._server: asyncio.Server | None = None
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="fault-proxy", daemon=True)

    @classmethod
    def before(cls, dsn: str) -> Self:
        """Return a proxy in front of the server that an address names."""
        return cls(*address(dsn))

    def __enter__(self) -> Self:
        self._thread.start()
        self.release()
        self.reopen()
        return self

    def __exit__(self, *_: object) -> None:
        self._run(self._close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(PATIENCE)
        self._loop.close()

    def lose_reply(self, request: bytes, reply: bytes = b"", *, keep: int = 0) -> threading.Event:
        """Let a request with these bytes arrive, drop what comes back after `keep` bytes, and end the connection.

        The client sees the end only when the dropped bytes contain `reply`, so by then the server has done
        the work. A client that sends ahead must name the reply: else that of an earlier request will do.
        Returns an event that is set when it happened.
        """
        return self._arm(_Loss(request, reply, keep=keep)).happened

    def lose_request(self, request: bytes) -> threading.Event:
        """End the connection instead of passing on a request with these bytes; the event says it happened."""
        return self._arm(_Loss(request, None)).happened

    def postpone(self, request: bytes, reply: bytes = b"") -> Postponed:
        """End the client's side when it sends these bytes, and keep them to be delivered later."""
        loss = self._arm(_Loss(request, reply, due=asyncio.Event()))
        return Postponed(loss.happened, functools.partial(self._deliver, loss))

    def delay(self, seconds: float) -> None:
        """Hold back each piece of what the server says from now on by so much."""
        self._delay = seconds

    def hold(self) -> None:
        """Pass nothing on in either direction while connections stay open, as a silent network does."""
        self._run(self._switch(passing=False))

    def release(self) -> None:
        """Pass on again, beginning with what was held."""
        self._run(self._switch(passing=True))

    def cut(self) -> None:
        """Reset every connection that is there now; new ones are welcome."""
        self._run(self._cut())

    def shut(self) -> None:
        """Refuse new connections from now on, as a server that is down; those that are there go on."""
        self._run(self._shut())

    def reopen(self) -> None:
        """Accept connections again, on the same port."""
        self._run(self._listen())

    def _arm(self, loss: _Loss) -> _Loss:
        if not loss.request:
            raise ValueError("a loss needs the bytes of the request that it hits")
        self._losses.append(loss)
        return loss

    def _deliver(self, loss: _Loss) -> None:
        if loss.due is not None:
            self._loop.call_soon_threadsafe(loss.due.set)
        if not loss.answered.wait(PATIENCE):
            raise TimeoutError(f"the server gave no answer to the late {loss.request!r}")

    def _run(self, step: Coroutine[Any, Any, None]) -> None:
        asyncio.run_coroutine_threadsafe(step, self._loop).result(PATIENCE)

    async def _switch(self, *, passing: bool) -> None:
        if passing:
            self._passing.set()
        else:
            self._passing.clear()

    async def _listen(self) -> None:
        if self._server is None:
            self._server = await asyncio.start_server(self._accept, "127.0.0.1", self.port)

    async def _shut(self) -> None:
        if self._server is not None:
            self._server.close()
            self._server = None

    async def _cut(self) -> None:
        for link in self._links:
            link.reset()

    async def _close(self) -> None:
        await self._shut()
        await self._cut()
        relays = dict(self._tasks)
        for task in relays:
            task.cancel()
        await asyncio.gather(*relays, return_exceptions=True)
        for to_client in relays.values():
            to_client.transport.abort()  # a relay that was not connected yet has closed nothing

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.accepted += 1
        task = self._loop.create_task(self._relay(reader, writer))
        self._tasks[task] = writer
        task.add_done_callback(self._tasks.pop)

    async def _relay(self, from_client: asyncio.StreamReader, to_client: asyncio.StreamWriter) -> None:
        try:
            from_server, to_server = await asyncio.open_connection(*self._target)
        except OSError:
            to_client.transport.abort()
            return
        link: Link[_Loss] = Link(from_client, to_client, from_server, to_server)
        self._links.add(link)
        try:
            await asyncio.gather(self._requests(link), self._replies(link))
        finally:
            self._links.discard(link)
            link.end()

    async def _requests(self, link: Link[_Loss]) -> None:
        before = b""
        # An error of either side is the end of the connection, like any other.
        with contextlib.suppress(OSError):
            while chunk := await link.from_client.read(_CHUNK):
                await self._passing.wait()
                loss = self._loss_in(before, chunk)
                if loss is not None and loss.reply is None:
                    loss.happened.set()
                    link.end()
                    return
                # Noted before the bytes leave, so that the answer cannot come first.
                link.loss = link.loss or loss
                if loss is not None and loss.due is not None:
                    loss.happened.set()
                    link.to_client.transport.abort()
                    await loss.due.wait()
                before = (before + chunk)[-_CHUNK:]
                link.to_server.write(chunk)
                await link.to_server.drain()
            link.to_server.write_eof()

    async def _replies(self, link: Link[_Loss]) -> None:
        dropped = b""
        with contextlib.suppress(OSError):
            while chunk := await link.from_server.read(_CHUNK):
                loss = link.loss
                await self._passing.wait()
                if loss is None:
                    await asyncio.sleep(self._delay)
                    link.to_client.write(chunk)
                    await link.to_client.drain()
                    continue
                dropped += chunk
                if loss.reply is not None and loss.reply in dropped:
                    if loss.keep:
                        link.to_client.write(dropped[: loss.keep])
                        await link.to_client.drain()
                    loss.happened.set()
                    loss.answered.set()
                    link.end()
                    return
            link.to_client.write_eof()

    def _loss_in(self, before: bytes, chunk: bytes) -> _Loss | None:
        for loss in self._losses:
            # A request may come in pieces, but one that passed before the loss was armed is not hit.
            seam = max(0, len(before) - len(loss.request) + 1)
            if loss.request in before[seam:] + chunk:
                self._losses.remove(loss)
                return loss
        return None


@dataclass(frozen=True, slots=True)
class Postponed:
    """A request that its client gave up and that the server has yet to see.

    `happened` is set when the client's side has ended; `deliver` hands the request over and returns when the
    server has answered it.
    """

    happened: threading.Event
    deliver: Callable[[], None]


@dataclass(frozen=True, slots=True)
class _Loss:
    """One thing to lose: without `reply` the request must not arrive, with `due` it arrives late."""

    request: bytes
    reply: bytes | None
    due: asyncio.Event | None = None
    keep: int = 0
    happened: threading.Event = field(default_factory=threading.Event)
    answered: threading.Event = field(default_factory=threading.Event)
