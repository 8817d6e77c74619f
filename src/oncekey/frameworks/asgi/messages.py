"""The messages of an exchange: its request as it comes in, and its answer as it is sent.

`Intake` keeps the chunks of the body, and holds a disconnect back from the handler.
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import TYPE_CHECKING, Any, cast

from oncekey.core.answers import marked_lines
from oncekey.core.headers import TRACE_PARENT, first, trace_id_of

if TYPE_CHECKING:
    from collections.abc import Generator

    from oncekey.core.answers import Answer
    from oncekey.core.model import Instant
    from oncekey.core.policy import Policy
    from oncekey.engine.capture import Capture
    from oncekey.frameworks.asgi import Message, Receive, Scope, Send


class ClientLeftError(Exception):
    """The client disconnected before its request was complete: nothing is executed."""


class TooLargeError(Exception):
    """The body is larger than a keyed request may be."""


class TooSlowError(Exception):
    """The body did not arrive in the time that the policy gives it."""


class Intake:
    """The `receive` that the application gets instead of the server's.

    While the handler runs, the intake holds a disconnect back until the answer was sent: frameworks cancel a streaming
    response when the client disconnects, and the operation must come to its end all the same.
    """

    __slots__ = (
        "_chunks",
        "_complete",
        "_hold",
        "_left",
        "_limit",
        "_queued",
        "_receive",
        "_released",
        "_size",
        "_too_large",
        "_too_slow",
        "_waited",
    )

    def __init__(self, receive: Receive, limit: int, *, again: Intake | None = None) -> None:
        self._receive = receive
        self._limit = limit
        self._chunks: list[bytes] = []
        self._size = 0
        self._complete = False
        self._too_large = False
        self._too_slow = False
        self._waited = 0.0
        self._queued: deque[Message] = deque()
        self._hold = False
        self._left: Message | None = None
        self._released: asyncio.Event | None = None
        if again is not None:
            self._repeat(again)

    @property
    def source(self) -> Receive:
        """The server's `receive`, from which the intake reads."""
        return self._receive

    async def receive(self, patience: float | None = None) -> Message:
        """The next message for the application; `patience` is how many seconds the body may take in all."""
        if self._queued:
            return self._queued.popleft()
        # A server may announce a disconnect only once, and the task that received it may have been cancelled since.
        message = self._left or await (self._receive() if self._complete else self._next(patience))
        if message["type"] == "http.request":
            self._keep(message)
            return message
        self._left = message
        if self._hold:
            self._released = self._released or asyncio.Event()
            await self._released.wait()
        return message

    async def body(self, patience: float | None = None) -> bytes:
        """The whole body, within `patience` seconds. The messages that are read for it wait for the application."""
        while not self._complete and not self._too_large:
            message = self._left or await self._next(patience)
            if message["type"] != "http.request":
                self._left = message
                raise ClientLeftError
            self._keep(message)
            self._queued.append(message)
        if self._too_large:
            raise TooLargeError
        return self._chunks[0] if len(self._chunks) == 1 else b"".join(self._chunks)

    def hold(self) -> None:
        """Hold a disconnect back from now on."""
        self._hold = True

    def release(self) -> None:
        """The answer was sent: pass a disconnect on to the application."""
        self._hold = False
        if self._released is not None:
            self._released.set()

    def _repeat(self, again: Intake) -> None:
        """Queue what an earlier intake of the same request has read: a server gives each part of a body only once."""
        self._left = again._left
        self._too_large = again._too_large
        self._too_slow = again._too_slow
        if not again._chunks and not again._complete:
            return
        chunks = again._chunks or [b""]
        for number, chunk in enumerate(chunks, 1):
            more = number < len(chunks) or not again._complete
            message: Message = {"type": "http.request", "body": chunk, "more_body": more}
            self._keep(message)
            self._queued.append(message)

    async def _next(self, patience: float | None) -> Message:
        """The next message of the body. Only the time spent waiting counts, not what the application does between."""
        if self._too_slow:
            raise TooSlowError
        if patience is None:
            return await self._receive()
        waiting = self._receive().__await__()
        try:
            first = next(waiting)
        except StopIteration as arrived:
            return cast("Message", arrived.value)  # the message was there already, so no timer was needed
        clock = asyncio.get_running_loop().time
        began = clock()
        try:
            async with asyncio.timeout(max(0.0, patience - self._waited)) as limit:
                return await _Begun(waiting, first)
        except TimeoutError:
            if not limit.expired():
                raise
            self._too_slow = True
            raise TooSlowError from None
        finally:
            self._waited += clock() - began

    def _keep(self, message: Message) -> None:
        chunk = message.get("body", b"")
        self._complete = not message.get("more_body", False)
        if self._too_large or not chunk:
            return
        self._size += len(chunk)
        if self._size > self._limit:
            self._too_large = True
            self._chunks.clear()
        else:
            self._chunks.append(chunk)


class _Begun:
    """An awaitable whose first step `_next` has made: it waits for what that step yielded, then goes on."""

    __slots__ = ("_first", "_waiting")

    def __init__(self, waiting: Generator[Any, Any, Message], first: object) -> None:
        self._waiting = waiting
        self._first = first

    def __await__(self) -> Generator[Any, Any, Message]:
        awaited = self._first
        while True:
            try:
                yield awaited
            except BaseException as error:  # noqa: BLE001  (a cancellation above all: it is handed on as it came)
                try:
                    awaited = self._waiting.throw(error)
                except StopIteration as ended:
                    return cast("Message", ended.value)
            else:
                return (yield from self._waiting)


def trace_of(scope: Scope) -> str:
    """The trace that the `traceparent` of a request names; empty without one."""
    return trace_id_of(first(scope["headers"], TRACE_PARENT))


async def send_answer(send: Send, answer: Answer) -> None:
    """Send an answer of ours. The list of headers is a copy, because outer middleware changes it in place."""
    await send({"type": "http.response.start", "status": answer.status, "headers": list(answer.headers)})
    await send({"type": "http.response.body", "body": answer.body, "more_body": False})


async def send_captured(
    send: Send, capture: Capture, policy: Policy, *, echo: bytes | None, expires_at: Instant | None
) -> None:
    """Send the application's response with our header lines, in one piece unless it was spooled."""
    headers = marked_lines(capture.headers, policy, echo=echo, expires_at=expires_at)
    await send({"type": "http.response.start", "status": capture.status, "headers": headers})
    whole = capture.kept
    if whole is not None:
        await send({"type": "http.response.body", "body": whole, "more_body": False})
        return
    pieces = iter(capture.pieces())
    piece = next(pieces, b"")
    for following in pieces:
        await send({"type": "http.response.body", "body": piece, "more_body": True})
        piece = following
    await send({"type": "http.response.body", "body": piece, "more_body": False})
