"""Applications of one source tree, called without a socket: `called.py` has a route run a batch for each line it reads.

Arguments: `route=dsn` for each route. A line is `route requests together`; the reply is the process's own processor
time in seconds. An empty line ends it.
"""

from __future__ import annotations

import asyncio
import sys
import time
import uuid
from collections.abc import Callable
from contextlib import AsyncExitStack
from typing import Any

import ours
import plain
from fastapi import FastAPI

BODY = b'{"product":"teapot","quantity":2}'
HEADERS = [(b"host", b"bench"), (b"content-type", b"application/json"), (b"content-length", b"%d" % len(BODY))]
WARM = 200
"""Requests before the first batch: pools are filled, statements prepared and caches full."""

ROUTES: dict[str, Callable[[str], FastAPI]] = {
    "stock": plain.stock,
    "stock-again": plain.stock,
    "local": ours.asyncpg,
    "local-observed": ours.asyncpg_observed,
    "psycopg": ours.psycopg,
}


async def send(app: FastAPI, key: str | None) -> None:
    """Call the application once; anything but 201 is an error."""
    headers = HEADERS if key is None else [*HEADERS, (b"idempotency-key", f'"{key}"'.encode())]
    scope = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": "/orders",
        "raw_path": b"/orders",
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


async def batch(app: FastAPI, keys: list[str | None], together: int) -> float:
    """Seconds of this process's processor time for one request per key."""
    left = iter(keys)

    async def worker() -> None:
        for key in left:
            await send(app, key)

    began = time.process_time()
    await asyncio.gather(*[worker() for _ in range(together)])
    return time.process_time() - began


def keys(route: str, requests: int) -> list[str | None]:
    """A new key for each request of a protected route."""
    return [None if route.startswith("stock") else uuid.uuid4().hex for _ in range(requests)]


async def main(words: list[str]) -> None:
    """Serve batches until the input ends."""
    async with AsyncExitStack() as open_ones:
        apps = {}
        for route, dsn in (word.split("=", 1) for word in words):
            app = apps[route] = ROUTES[route](dsn)
            await open_ones.enter_async_context(app.router.lifespan_context(app))
            await batch(app, keys(route, WARM), 8)
        print("ready", flush=True)
        while line := (await asyncio.to_thread(sys.stdin.readline)).strip():
            route, requests, together = line.split()
            spent = await batch(apps[route], keys(route, int(requests)), int(together))
            print(spent, flush=True)


if __name__ == "__main__":
    try:
        import uvloop
    except ImportError:
        asyncio.run(main(sys.argv[1:]))
    else:
        uvloop.run(main(sys.argv[1:]))
