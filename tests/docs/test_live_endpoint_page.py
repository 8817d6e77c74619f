"""The guide to a live endpoint: its program goes through the three steps, on the same file."""

from __future__ import annotations

import re
import sqlite3
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing
from pathlib import Path

import httpx
import pytest
from prometheus_client import REGISTRY

from harness.pages import ROOT, Page, load

PAGE = Page(ROOT / "docs/howto/live-endpoint.md")
ACME, BOLT = ({"Authorization": f"Bearer token-of-{name}"} for name in ("acme", "bolt"))
KEY = {"Idempotency-Key": "a-key-of-the-page"}


@asynccontextmanager
async def deployed(
    folder: Path, monkeypatch: pytest.MonkeyPatch, *, required: bool
) -> AsyncIterator[httpx.AsyncClient]:
    """The program, as one deployment has it."""
    monkeypatch.setenv("REQUIRE_KEYS", "yes" if required else "no")
    for collector in {one for name, one in REGISTRY._names_to_collectors.items() if name.startswith("api_idempotency")}:
        REGISTRY.unregister(collector)  # what ends with its process
    module = load(PAGE.program("live.py"), "live.py", folder, monkeypatch)
    transport = httpx.ASGITransport(module.app)
    async with (
        module.once.lifespan(module.app),
        httpx.AsyncClient(transport=transport, base_url="http://shop") as client,
    ):
        yield client


async def order(client: httpx.AsyncClient, **headers: str) -> tuple[int, object, str | None]:
    answer = await client.post("/orders", json={"product": "tea"}, headers={**ACME, **headers})
    return answer.status_code, answer.json(), answer.headers.get("Idempotent-Replayed")


async def counted(client: httpx.AsyncClient) -> str:
    lines = (await client.get("/metrics")).text.splitlines()
    return "\n".join(sorted(line for line in lines if line.startswith("api_idempotency_requests_total"))) + "\n"


async def test_live_endpoint_guide_moves_keys_from_optional_to_required(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.chdir(tmp_path)
    with closing(sqlite3.connect("live.db")) as connection:
        connection.execute("CREATE TABLE orders (id INTEGER PRIMARY KEY, product TEXT)")
    (shown,) = [block.text for block in PAGE.blocks("text") if "keyless" in block.text and "increase" not in block.text]
    shown = shown.partition("\n")[2]  # below the answers

    async with deployed(tmp_path, monkeypatch, required=False) as client:
        assert await order(client) == (201, {"id": 1}, None)
        assert await order(client, **BOLT) == (201, {"id": 2}, None)
        assert await order(client, **KEY) == (201, {"id": 3}, None)
        assert await order(client, **KEY) == (201, {"id": 3}, "true")
        assert await counted(client) == shown
        assert (await order(client, **{"Idempotency-Key": "short"}))[0] == 400
    assert re.findall(r"no key from (\w+)", caplog.text) == ["acme", "bolt"]

    async with deployed(tmp_path, monkeypatch, required=True) as client:
        status, problem, _ = await order(client)
        assert (status, problem["code"]) == (400, "idempotency_key_missing")  # type: ignore[index]  # it is JSON
        assert await order(client, **KEY) == (201, {"id": 3}, "true")
        assert 'outcome="idempotency_key_missing"} 1.0' in await counted(client)
        assert "keyless" not in await counted(client)

    async with deployed(tmp_path, monkeypatch, required=False) as client:
        assert await order(client) == (201, {"id": 4}, None)
    with closing(sqlite3.connect("live.db")) as connection:
        assert connection.execute("SELECT count(*) FROM orders").fetchall() == [(4,)]
