"""The connection to a Redis or Valkey cache in front of the store, under asyncio and in threads.

It must never delay a request noticeably. So there is one short timeout and no retry, and after a few failures in a row
the breaker stops all queries except one probe per pause. If the server is unavailable the result is None, never an
exception: the request continues with the store.

An event loop has one pipeline in flight at a time. Requests that arrive meanwhile wait, and share the next pipeline:
under load they share one round trip. This also keeps the order: commands arrive in the order in which they were given,
so no removal can overtake the write that it removes. A pipeline runs in its own task; a cancelled request leaves, and
the others still get their replies.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from contextvars import Context
from typing import Any, Final, Protocol
from weakref import WeakKeyDictionary

import redis
import redis.asyncio
from redis.backoff import NoBackoff
from redis.retry import Retry

from oncekey.core.fronts import GET, Command

log = logging.getLogger("oncekey")

MOST: Final = 64
"""The maximum number of commands in one pipeline: their values are in memory together, and each may be large."""

Replies = list[bytes | None] | None


class Breaks(Protocol):
    """A circuit breaker: stops queries to a server that does not reply."""

    @property
    def closed(self) -> bool:
        """Whether the server replied to the last query."""

    def allows(self) -> bool:
        """Whether a query may be sent."""

    def failed(self) -> None:
        """Record that the server did not reply."""

    def worked(self) -> None:
        """Record that the server replied."""


class RedisLine:
    """One server, shared by all requests of a process."""

    def __init__(self, url: str, seconds: float, breaker: Breaks) -> None:
        self._url = url
        self._seconds = seconds
        self._breaker = breaker
        self._loops: WeakKeyDictionary[asyncio.AbstractEventLoop, _Pipelines] = WeakKeyDictionary()
        self._opening = threading.Lock()
        self._blocking: Any = None

    async def ask(self, commands: tuple[Command, ...]) -> Replies:
        """The server's reply to each command; None if it did not reply."""
        if not self._breaker.allows():
            return None
        return await self._here().ask(commands)

    def post(self, commands: tuple[Command, ...]) -> None:
        """Send commands without waiting for the replies."""
        if self._breaker.allows():
            self._here().post(commands)

    def ask_blocking(self, commands: tuple[Command, ...]) -> Replies:
        """`ask` in a thread."""
        if not self._breaker.allows():
            return None
        try:
            pipeline = self._client().pipeline(transaction=False)
            for command in commands:
                pipeline.execute_command(*command.words)
            replies = pipeline.execute(raise_on_error=False)
        except Exception as error:  # noqa: BLE001  (a server that lies makes a client raise anything)
            _failed(self._breaker, error)
            return None
        self._breaker.worked()
        return [_value(one) for one in replies]

    async def close(self) -> None:
        pipelines = self._loops.pop(asyncio.get_running_loop(), None)
        if pipelines is not None:
            await pipelines.close()

    def close_blocking(self) -> None:
        with self._opening:
            client, self._blocking = self._blocking, None
        if client is not None:
            client.close()

    def _here(self) -> _Pipelines:
        loop = asyncio.get_running_loop()
        pipelines = self._loops.get(loop)
        if pipelines is None:
            # One timeout around everything is cheaper than one per read.
            client = redis.asyncio.Redis.from_url(self._url, **{**_settings(self._seconds), "socket_timeout": None})
            pipelines = self._loops[loop] = _Pipelines(client, self._seconds, self._breaker)
        return pipelines

    def _client(self) -> Any:  # noqa: ANN401  (its types follow from how it was made)
        with self._opening:
            if self._blocking is None:
                self._blocking = redis.Redis.from_url(self._url, **_settings(self._seconds))
            return self._blocking


def _settings(seconds: float) -> dict[str, Any]:
    return {
        "socket_timeout": seconds,
        "socket_connect_timeout": seconds,
        "retry": Retry(NoBackoff(), 0),
        "protocol": 2,
        "decode_responses": False,
    }


class _Pipelines:
    """The commands of one event loop, pipeline after pipeline."""

    def __init__(self, client: Any, seconds: float, breaker: Breaks) -> None:  # noqa: ANN401
        self._client = client
        self._seconds = seconds
        self._breaker = breaker
        self._waiting: list[tuple[tuple[Command, ...], asyncio.Future[Replies] | None]] = []
        self._task: asyncio.Task[None] | None = None

    async def ask(self, commands: tuple[Command, ...]) -> Replies:
        reply: asyncio.Future[Replies] = asyncio.get_running_loop().create_future()
        self._put(commands, reply)
        return await reply

    def post(self, commands: tuple[Command, ...]) -> None:
        self._put(commands, None)

    async def close(self) -> None:
        if self._task is not None:
            await asyncio.wait([self._task])
        await self._client.aclose()

    def _put(self, commands: tuple[Command, ...], reply: asyncio.Future[Replies] | None) -> None:
        self._waiting.append((commands, reply))
        if self._task is None:
            # The task serves several requests, so it belongs to no request's context or trace.
            self._task = asyncio.get_running_loop().create_task(self._run(), context=Context())

    async def _run(self) -> None:
        under_way: list[tuple[tuple[Command, ...], asyncio.Future[Replies] | None]] = []
        try:
            while self._waiting:
                under_way, self._waiting = self._waiting[:MOST], self._waiting[MOST:]
                # A cancelled request needs no reply; posted commands are sent in any case.
                under_way = [one for one in under_way if one[1] is None or not one[1].done()]
                replies = await self._send([command for commands, _ in under_way for command in commands])
                place = 0
                for commands, reply in under_way:
                    if reply is not None and not reply.done():
                        reply.set_result(None if replies is None else replies[place : place + len(commands)])
                    place += len(commands)
        finally:
            self._task = None
            for _, reply in (*under_way, *self._waiting):  # the end of an event loop cancels its tasks
                if reply is not None and not reply.done():
                    reply.cancel()

    async def _send(self, commands: list[Command]) -> Replies:
        if not commands:
            return []
        try:
            async with asyncio.timeout(self._seconds):
                if all(command.verb == GET for command in commands):  # the common case, and the cheapest to parse
                    replies = await self._client.execute_command(b"MGET", *[command.name for command in commands])
                else:
                    pipeline = self._client.pipeline(transaction=False)
                    for command in commands:
                        pipeline.execute_command(*command.words)
                    replies = await pipeline.execute(raise_on_error=False)
        except Exception as error:  # noqa: BLE001  (a server that lies makes a client raise anything)
            _failed(self._breaker, error)
            return None
        self._breaker.worked()
        return [_value(one) for one in replies]


def _value(replies: object) -> bytes | None:
    """A value, if the reply is one: a full server, or one with another type under the name, replies with an error."""
    return replies if isinstance(replies, bytes) else None


def _failed(breaker: Breaks, error: Exception) -> None:
    closed = breaker.closed
    breaker.failed()
    if closed and not breaker.closed:
        log.warning(
            "oncekey: the cache in front of the store does not respond (%s): requests read the store until it does",
            type(error).__name__,
        )
