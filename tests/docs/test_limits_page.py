"""The program of the guide to limits turns away what its page says, and nothing else."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace

import httpx
import pytest

from harness.pages import ROOT, Page, load
from oncekey.core.model import SECOND

NOW = 1_800_000_000.25  # 2027-01-15T08:00:00Z
Said = tuple[int, str | None, str | None]
"""Status, code, Retry-After."""
LIMITED, OLD = "idempotency_rate_limited", "idempotency_request_too_old"


@pytest.fixture
def limited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The page's program, with a clock that the test moves: `module.clock.now`."""
    monkeypatch.chdir(tmp_path)
    module = load(Page(ROOT / "docs/howto/limits.md").program("limited.py"), "limited.py", tmp_path, monkeypatch)
    clock = SimpleNamespace(now=NOW)
    for counting in ("limits.aio.storage.memory", "limits.aio.strategies"):
        __import__(counting)
        monkeypatch.setattr(f"{counting}.time", SimpleNamespace(time=lambda: clock.now), raising=False)
    limits = module.once._installed[module.app].limits
    limits._now = lambda: round(clock.now * SECOND)
    limits._boot = lambda: clock.now
    module.clock = clock  # type: ignore[attr-defined]
    return module


def _client(module: ModuleType) -> httpx.AsyncClient:
    transport = httpx.ASGITransport(module.app, raise_app_exceptions=False)
    return httpx.AsyncClient(transport=transport, base_url="http://shop.example", headers={"X-Tenant": "acme"})


def _orders(client: httpx.AsyncClient) -> Callable[..., Awaitable[Said]]:
    async def order(number: int, **headers: str) -> Said:
        lines = {"Idempotency-Key": f"key-{number:016}", **{name.replace("_", "-"): v for name, v in headers.items()}}
        answer = await client.post("/orders", headers=lines)
        return answer.status_code, answer.json().get("code"), answer.headers.get("Retry-After")

    return order


async def test_rate_limit_applies_to_new_keys_but_not_to_replays(limited: ModuleType) -> None:
    # R188
    async with limited.once.lifespan(limited.app), _client(limited) as client:
        order = _orders(client)
        done = (201, None, None)
        assert [await order(number) for number in (1, 2, 3)] == [done, done, (429, LIMITED, "1")]
        assert await order(3, X_Tenant="other") == done  # nobody pays for a neighbour
        assert [await order(number) for number in (1, 2, 1, 2)] == [done] * 4
        limited.clock.now += 1.01
        assert [await order(3), await order(4)] == [done, (429, LIMITED, "60")]  # three keys are live
        replayed = await client.post("/orders", headers={"Idempotency-Key": f"key-{1:016}"})
        assert replayed.headers["Idempotent-Replayed"] == "true"


async def test_rate_limit_applies_to_status_lookups(limited: ModuleType) -> None:
    # R187
    async with limited.once.lifespan(limited.app), _client(limited) as client:
        await _orders(client)(1)
        seen = [await client.get(f"/idempotency-keys/key-{number:016}") for number in (1, 2, 1)]
        assert [answer.status_code for answer in seen] == [200, 404, 429]
        assert (seen[2].json()["code"], seen[2].headers["Retry-After"]) == (LIMITED, "1")


async def test_request_older_than_the_limit_returns_412_unless_stored(limited: ModuleType) -> None:
    # R189
    async with limited.once.lifespan(limited.app), _client(limited) as client:
        order = _orders(client)
        young, old = "2027-01-14T09:00:01Z", "Thu, 14 Jan 2027 08:59:59 GMT"
        assert await order(1, Idempotency_First_Sent=young) == (201, None, None)
        assert await order(2, Idempotency_First_Sent=old) == (412, OLD, None)
        assert await order(2, Idempotency_First_Sent="2027-01-15T08:00:00") == (412, OLD, None)  # no offset
        assert await order(1, Idempotency_First_Sent=old) == (201, None, None)  # the replay
        assert await order(2) == (201, None, None)  # the refusals left nothing behind
