"""A worker's liveness: its row in the store, and `/healthz`, `/readyz` and `/metrics`.

The worker writes the row with every heartbeat, and deletes it when it stops. The three paths are a few lines of HTTP,
because a worker serves nothing else.
"""

from __future__ import annotations

import asyncio
import json
import logging
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping
from contextlib import asynccontextmanager
from http import HTTPStatus
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from oncekey.core.errors import ConfigurationError, StoreError
from oncekey.core.flow import Transaction, adrive
from oncekey.core.model import SECOND
from oncekey.engine.notifying import notify_failure
from oncekey.observe.events import Beat, Notify
from oncekey.ops.stats import troubled
from oncekey.runtimes import boottime
from oncekey.workers.service import Pace, Service, Task, this_process

if TYPE_CHECKING:
    from oncekey.ports.store import Upkeep


Metrics: TypeAlias = Callable[[], Awaitable[tuple[str, bytes]]]
PATIENCE: Final = 5.0
"""Timeout in seconds for a caller to send its request."""


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
    """The state of every task: the time of its last successful round, and its error."""
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
        pass  # the caller disconnected, or did not send HTTP
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
        raise ConfigurationError(f"--health {address} is not host:port: write it like --health 127.0.0.1:9000")
    return host.strip("[]") or "127.0.0.1", int(port)


log = logging.getLogger("oncekey.worker")

EVERY: Final = 15.0
"""The longest time in seconds between two heartbeats."""
NO_CALLS: Final[Mapping[str, tuple[str, ...]]] = MappingProxyType({})
FORGOTTEN: Final = 24 * 3600 * SECOND
"""How long the row of a dead worker is kept, so that operators see that it died."""


class Presence:
    """A task that writes the heartbeat. It never finds work."""

    name: Final = "heartbeat"
    about: Final = ""
    done: Final = 0
    failed: Final = 0

    def __init__(
        self,
        store: Upkeep,
        run: Callable[[Transaction[object]], Awaitable[object]],
        tasks: Iterable[Task],
        *,
        calls: Mapping[str, tuple[str, ...]] = NO_CALLS,
        every: float = EVERY,
        who: str | None = None,
        notify: Notify | None = None,
    ) -> None:
        self.pace = Pace(shortest=every, longest=every)
        # A container's process has the same pid after every start, so the name has a random part.
        self.who = who or f"{this_process()}:{uuid.uuid4().hex[:6]}"
        self._store = store
        self._run = run
        self._tasks = tuple(task.name for task in tasks)
        self._calls = calls
        self._notify = notify
        self._every = round(every * SECOND)
        self.troubles: Callable[[], Mapping[str, str]] = dict
        self._stopped = False
        self._writing = asyncio.Lock()

    async def run_once(self) -> int:
        """Write one heartbeat."""
        async with self._writing:
            if not self._stopped:
                wrong = self.troubles()
                tasks = tuple(troubled(name, wrong[name]) if name in wrong else name for name in self._tasks)
                await adrive(self._store.beat(self.who, tasks, self._every, self._calls), self._run)
                self._notify_beat(leaving=False)
        return 0

    async def shut_down(self) -> None:
        """No-op: a heartbeat leaves nothing open."""

    async def stop(self, grace: float) -> None:  # noqa: ARG002  (one statement)
        """Delete the row, after any running heartbeat; if the store does not respond, it stays for a day."""
        self._stopped = True
        async with self._writing:
            try:
                await adrive(self._store.leave(self.who), self._run)
            except StoreError as error:
                log.warning("heartbeat: the store did not respond (%s); the row stays", error.reason)
                notify_failure(self._notify, self.name, error)
            else:
                self._notify_beat(leaving=True)

    def _notify_beat(self, *, leaving: bool) -> None:
        if self._notify is not None:
            self._notify(Beat(self.who, self._tasks, leaving))
