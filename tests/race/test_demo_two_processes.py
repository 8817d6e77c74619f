"""Two demos on one database: every key is sent by eight clients at once to both, and happens once."""

from __future__ import annotations

import asyncio
import uuid
from pathlib import Path

import httpx
import pytest

from harness.demo import ALPHA, TEAPOT, Demo
from harness.patience import PATIENCE

CLIENTS = 8
AT_ONCE = 10
"""Keys under way at the same time."""


@pytest.mark.parametrize(
    ("count", "drivers"),
    [(60, ("postgresql", "postgresql")), (40, ("postgresql+asyncpg", "postgresql+psycopg"))],
    ids=["one-driver", "two-drivers"],
)
def test_every_key_by_8_clients_is_one_order(
    tmp_path: Path, postgres_dsn: str, count: int, drivers: tuple[str, str]
) -> None:
    # R246
    one, other = (Demo(tmp_path, store=postgres_dsn.replace("postgresql", driver, 1)) for driver in drivers)
    with one, other:
        keys = [str(uuid.uuid4()) for _ in range(count)]
        answers = asyncio.run(_storm([one.url, other.url], keys))
        orders = one.orders()
        assert other.orders() == orders
        assert len(orders) == len({order["id"] for order in orders}) == count
        for key in keys:
            assert len(answers[key]) == CLIENTS
            assert len({answer.content for answer in answers[key]}) == 1
            assert len({answer.headers["location"] for answer in answers[key]}) == 1
            first = [answer for answer in answers[key] if "idempotent-replayed" not in answer.headers]
            assert len(first) == 1
        assert {answers[key][0].json()["id"] for key in keys} == {order["id"] for order in orders}
        for demo in (one, other):
            assert "Traceback" not in demo.output
            assert "Warning" not in demo.output


async def _storm(urls: list[str], keys: list[str]) -> dict[str, list[httpx.Response]]:
    """Send every key from all clients in the same moment; who is told to wait comes back."""
    # No connection is used twice: a server may close one that rests just as it is used again.
    limits = httpx.Limits(max_connections=CLIENTS * AT_ONCE, max_keepalive_connections=0)
    room = asyncio.Semaphore(AT_ONCE)
    async with httpx.AsyncClient(limits=limits, timeout=PATIENCE, verify=False) as client:

        async def until_answered(url: str, key: str, start: asyncio.Event) -> httpx.Response:
            await start.wait()
            while True:
                headers = {"Authorization": f"Bearer {ALPHA}", "Idempotency-Key": key}
                answer = await client.post(f"{url}/orders", json=TEAPOT, headers=headers)
                if answer.status_code == 201:
                    return answer
                assert answer.status_code == 409, answer.text
                assert int(answer.headers["retry-after"]) >= 1
                await asyncio.sleep(0.25)

        async def one_key(key: str) -> list[httpx.Response]:
            async with room:
                start = asyncio.Event()
                clients = [until_answered(urls[number % 2], key, start) for number in range(CLIENTS)]
                sent = asyncio.gather(*clients)
                await asyncio.sleep(0)
                start.set()
                return list(await sent)

        return dict(zip(keys, await asyncio.gather(*map(one_key, keys)), strict=True))
