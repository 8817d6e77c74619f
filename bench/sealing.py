"""`python -m bench.sealing`: the cost of encryption, in processor time per request.

One process and one SQLite file for each case, the same requests in turn: with and without encryption, new keys and
replays, INLINE (claim and settle) and PHASED (three steps and a stored request), with a short response and one of 16
KiB. The order alternates, and the best round of each is reported, because the machine may have other load.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

from fastapi import FastAPI

from oncekey import INLINE, PHASED, SINGLE_TENANT, Once, Operation
from oncekey.sealing import AesGcm

SIZES = (200, 16 * 1024)
KINDS = ("inline", "phased", "repeat")


def application(folder: Path, seal: AesGcm | None) -> FastAPI:
    """Two routes on a separate file."""
    once = Once(f"sqlite:///{folder}/{'sealed' if seal else 'plain'}.db", migrate=True, seal=seal)
    app = FastAPI(lifespan=once.lifespan)
    once.install(app, tenant=SINGLE_TENANT)

    @app.post("/inline")
    @once.protect(effects=INLINE)
    async def inline(body: dict[str, Any]) -> dict[str, Any]:
        return body

    @app.post("/phased")
    @once.protect(effects=PHASED)
    async def phased(body: dict[str, Any], op: Operation) -> dict[str, Any]:
        await op.value("one", lambda: 1)
        await op.call("two", _two, repeatable=True)
        await op.value("three", lambda: 3)
        return body

    return app


async def _two(*, key: str) -> dict[str, Any]:  # noqa: ARG001  (every call gets one)
    return {"id": "ch_1"}


async def post(app: FastAPI, path: str, key: str, body: bytes) -> None:
    """One request without a server, so that only the application's time counts."""
    told: list[int] = []

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": body, "more_body": False}

    async def send(message: dict[str, Any]) -> None:
        if message["type"] == "http.response.start":
            told.append(message["status"])

    scope: dict[str, Any] = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "root_path": "",
        "headers": [(b"idempotency-key", f'"{key}"'.encode()), (b"content-type", b"application/json")],
        "client": ("127.0.0.1", 1),
        "server": ("127.0.0.1", 80),
    }
    serving: Callable[..., Awaitable[None]] = app
    await serving(scope, receive, send)
    if told != [200]:
        raise RuntimeError(f"answered {told}")


async def spent(app: FastAPI, kind: str, start: str, body: bytes, requests: int) -> float:
    """Microseconds of processor time per request."""
    path = "/inline" if kind == "repeat" else f"/{kind}"
    if kind == "repeat":
        await post(app, path, f"{start}-the-repeated-key", body)
    begun = time.process_time()
    for number in range(requests):
        await post(app, path, f"{start}-the-repeated-key" if kind == "repeat" else f"{start}-{number:016}", body)
    return (time.process_time() - begun) / requests * 1e6


async def measure(rounds: int, requests: int) -> list[tuple[str, int, float, float]]:
    """For each case: kind, size, time without and with encryption."""
    found: list[tuple[str, int, float, float]] = []
    with tempfile.TemporaryDirectory() as folder:
        async with AsyncExitStack() as stack:
            plain = application(Path(folder), None)
            sealed = application(Path(folder), AesGcm({"k1": os.urandom(32)}, current="k1"))
            for app in (plain, sealed):
                await stack.enter_async_context(app.router.lifespan_context(app))
            for size in SIZES:
                body = json.dumps({"text": "x" * size}).encode()
                for kind in KINDS:
                    best = {plain: float("inf"), sealed: float("inf")}
                    for number in range(rounds):
                        for app in (plain, sealed) if number % 2 else (sealed, plain):
                            took = await spent(app, kind, f"{kind}-{size}-{number}", body, requests)
                            best[app] = min(best[app], took)
                    found.append((kind, size, best[plain], best[sealed]))
    return found


def main() -> None:
    """Measure, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--requests", type=int, default=100)
    given = parser.parse_args()
    out = sys.stdout.write
    out("kind    body    without     sealed  ratio\n")
    for kind, size, without, having in asyncio.run(measure(given.rounds, given.requests)):
        out(f"{kind:7} {size:6} {without:7.0f} us {having:7.0f} us  {having / without:5.2f}\n")


if __name__ == "__main__":
    main()
