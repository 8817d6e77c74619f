"""`python -m bench.observe`: the cost of observers per request, and that it is zero without observers.

One process calls an application on a store in memory, without a socket: new keys, and replays. Without disk and network
the processor time remains, which other load hardly changes. It is measured with no observer, with one that does
nothing, and with each shipped one, in turn, round after round. That no event is created without an observer cannot be
measured by time: `tests/frameworks/test_budget.py` counts the calls.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import statistics
import sys
import time
import uuid
from collections.abc import Callable
from contextlib import AsyncExitStack
from typing import Any

from bench.places import ROOT

WAYS = ("nobody", "does nothing", "logs", "prometheus", "opentelemetry")


def observers(way: str) -> list[Callable[[Any], None]]:
    """The observers of this case."""
    from opentelemetry.sdk.metrics import MeterProvider  # noqa: PLC0415
    from opentelemetry.sdk.trace import TracerProvider  # noqa: PLC0415

    from oncekey.observe.logs import Logs  # noqa: PLC0415
    from oncekey.observe.opentelemetry import OpenTelemetry  # noqa: PLC0415
    from oncekey.observe.prometheus import Prometheus  # noqa: PLC0415

    match way:
        case "nobody":
            return []
        case "does nothing":
            return [lambda _: None]
        case "logs":
            return [Logs(logging.getLogger("bench.observe"))]
        case "prometheus":
            return [Prometheus()]
        case _:
            return [OpenTelemetry(meter_provider=MeterProvider(), tracer_provider=TracerProvider())]


class Shop:
    """One protected route, and a way to call it."""

    def __init__(self, way: str) -> None:
        from fastapi import FastAPI  # noqa: PLC0415

        from oncekey import INLINE, SINGLE_TENANT, Once  # noqa: PLC0415

        self.once = Once("memory:", observers=observers(way))
        self.app = FastAPI()
        self.once.install(self.app, tenant=SINGLE_TENANT)

        @self.app.post("/orders", status_code=201)
        @self.once.protect(effects=INLINE, operation="order")
        async def order() -> dict[str, str]:
            return {"status": "created"}

    async def send(self, key: str) -> None:
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
            "headers": [(b"host", b"bench"), (b"idempotency-key", f'"{key}"'.encode())],
            "state": {},
        }
        statuses: list[int] = []

        async def receive() -> dict[str, Any]:
            return {"type": "http.request", "body": b"", "more_body": False}

        async def send(message: Any) -> None:
            if message["type"] == "http.response.start":
                statuses.append(message["status"])

        await self.app(scope, receive, send)
        assert statuses == [201]

    async def measure(self, requests: int) -> tuple[float, float]:
        """Microseconds of processor time for a new key and for a replay."""
        keys = [uuid.uuid4().hex for _ in range(requests)]
        took = []
        for _ in range(2):
            began = time.process_time()
            for key in keys:
                await self.send(key)
            took.append((time.process_time() - began) / requests * 1_000_000)
        return took[0], took[1]


async def run(rounds: int, requests: int) -> dict[str, list[tuple[float, float]]]:
    shops = {way: Shop(way) for way in WAYS}
    found: dict[str, list[tuple[float, float]]] = {way: [] for way in WAYS}
    async with AsyncExitStack() as open_ones:
        for shop in shops.values():
            await open_ones.enter_async_context(shop.once.lifespan(shop.app))
            await shop.measure(max(2, requests // 4))  # fills caches
        for _ in range(rounds):
            for way, shop in shops.items():
                found[way].append(await shop.measure(requests))
    return found


def table(found: dict[str, list[tuple[float, float]]]) -> str:
    """One line for each case: its extra cost compared with no observer in the same round, and the ratio."""
    lines = [f"{'observed by':15}{'new key':>12}{'more':>9}{'times':>7}{'replay':>12}{'more':>9}{'times':>7}"]
    for way, figures in found.items():
        cells = ""
        for place in range(2):
            pairs = [(one[place], base[place]) for one, base in zip(figures, found["nobody"], strict=True)]
            own = statistics.median(one for one, _ in pairs)
            more = statistics.median(one - base for one, base in pairs)
            times = statistics.median(one / base for one, base in pairs)
            cells += f"{own:9.0f} us{more:+6.0f} us{times:7.2f}"
        lines.append(f"{way:15}{cells}")
    return "\n".join(lines)


def main() -> None:
    """Measure, and print the table."""
    parser = argparse.ArgumentParser(prog="bench.observe", description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--requests", type=int, default=200, help="of each kind, in each round")
    given = parser.parse_args()
    sys.path.insert(0, str(ROOT / "src"))
    print(table(asyncio.run(run(given.rounds, given.requests))))


if __name__ == "__main__":
    main()
