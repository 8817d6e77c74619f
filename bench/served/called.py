"""Applications of one source tree, called without a socket: `called.py` has a route run a batch for each line it reads.

Arguments: `route=address` for each route. A line is `route requests together`; the reply is the process's own processor
time and the time that passed, both in seconds. `prepare route requests together` makes the records that the next batch
of the route replays, as another process would. An empty line ends it.
"""

from __future__ import annotations

import asyncio
import sys
import time
import uuid
from collections.abc import Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Any

import ours
import plain
from fastapi import FastAPI

BODY = b'{"product":"teapot","quantity":2}'
HEADERS = [(b"host", b"bench"), (b"content-type", b"application/json"), (b"content-length", b"%d" % len(BODY))]
WARM = 200
"""Requests before the first batch: pools are filled, statements prepared and caches full."""


@dataclass(frozen=True, slots=True)
class Route:
    """An application, and what is sent to it."""

    app: Callable[[str], FastAPI]
    path: str = "/orders"
    keyed: bool = True
    replays: bool = False
    """Whether each key has a record of another application on the same database, to which it is new."""


ROUTES: dict[str, Route] = {
    "stock": Route(plain.stock, keyed=False),
    "stock-again": Route(plain.stock, keyed=False),
    "bare": Route(lambda _: plain.bare(), "/bare", keyed=False),
    "local": Route(ours.asyncpg),
    "local-observed": Route(ours.asyncpg_observed),
    "psycopg": Route(ours.psycopg),
    "cold-replay": Route(ours.asyncpg, replays=True),
    "phased": Route(ours.asyncpg, "/phased"),
    "sqlite-unkeyed": Route(ours.sqlite, keyed=False),
    "sqlite": Route(ours.sqlite),
}


class Served:
    """A route with its application, and the keys of its next batch."""

    def __init__(self, route: Route, app: FastAPI, earlier: FastAPI) -> None:
        self.route = route
        self.app = app
        self._earlier = earlier
        self._answered: list[str | None] = []

    async def prepare(self, requests: int, together: int) -> None:
        """Have another application answer the keys of the next batch."""
        self._answered = _new_keys(requests)
        await batch(self._earlier, self.route.path, self._answered, together)

    async def run(self, requests: int, together: int) -> tuple[float, float]:
        """Send one batch."""
        keys = self._answered if self.route.replays else _new_keys(requests)
        return await batch(self.app, self.route.path, keys if self.route.keyed else [None] * requests, together)


async def send(app: FastAPI, path: str, key: str | None) -> None:
    """Call the application once; anything but 201 is an error."""
    headers = HEADERS if key is None else [*HEADERS, (b"idempotency-key", f'"{key}"'.encode())]
    scope = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "root_path": "",
        "headers": headers,
        "state": {},
    }
    statuses: list[int] = []
    body = [{"type": "http.request", "body": BODY, "more_body": False}]

    async def receive() -> dict[str, Any]:
        if not body:
            await asyncio.Event().wait()
        return body.pop()

    async def take(message: Any) -> None:
        if message["type"] == "http.response.start":
            statuses.append(message["status"])

    await app(scope, receive, take)
    if statuses != [201]:
        raise RuntimeError(f"the route answered {statuses}")


async def batch(app: FastAPI, path: str, keys: list[str | None], together: int) -> tuple[float, float]:
    """Seconds for one request per key: this process's processor time, and the time that passed."""
    left = iter(keys)

    async def worker() -> None:
        for key in left:
            await send(app, path, key)

    started, began = time.perf_counter(), time.process_time()
    await asyncio.gather(*[worker() for _ in range(together)])
    return time.process_time() - began, time.perf_counter() - started


def _new_keys(requests: int) -> list[str | None]:
    return [uuid.uuid4().hex for _ in range(requests)]


async def main(words: list[str]) -> None:
    """Serve batches until the input ends."""
    async with AsyncExitStack() as open_ones:

        async def started(route: Route, address: str) -> FastAPI:
            app = route.app(address)
            await open_ones.enter_async_context(app.router.lifespan_context(app))
            return app

        routes = {}
        for name, address in (word.split("=", 1) for word in words):
            route = ROUTES[name]
            app = await started(route, address)
            served = routes[name] = Served(route, app, await started(route, address) if route.replays else app)
            if route.replays:
                await served.prepare(WARM, 8)
            await served.run(WARM, 8)
        print("ready", flush=True)
        while line := (await asyncio.to_thread(sys.stdin.readline)).strip():
            *prepares, name, requests, together = line.split()
            if prepares:
                await routes[name].prepare(int(requests), int(together))
                print("prepared", flush=True)
            else:
                print(*await routes[name].run(int(requests), int(together)), flush=True)


if __name__ == "__main__":
    try:
        import uvloop
    except ImportError:
        asyncio.run(main(sys.argv[1:]))
    else:
        uvloop.run(main(sys.argv[1:]))
