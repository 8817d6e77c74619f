"""kill -9 of the demo between the provider's success and the shop's commit: what the ledger and the retry say."""

from __future__ import annotations

import threading
import time
import uuid
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import httpx
import pytest

from harness.demo import Demo
from harness.processes import children, is_alive
from harness.provider import Provider

LEASE = 1
STORES = ["sqlite", "postgresql+asyncpg", "postgresql+psycopg"]
IN_DOUBT = (409, "idempotency_outcome_unknown")
LATER = {"idempotency_key_in_progress", "idempotency_execution_failed"}


@pytest.fixture(params=STORES)
def store(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path / 'demo.db'}"
    dsn: str = request.getfixturevalue("postgres_dsn")
    return dsn.replace("postgresql", request.param, 1)


def _until(holds: Callable[[], bool], seconds: float = 30) -> None:
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def _end(demo: Demo, route: str, key: str) -> httpx.Response:
    deadline = time.monotonic() + 90
    while True:
        answer = demo.post(route, key)
        if answer.json().get("code") not in LATER:
            return answer
        assert time.monotonic() < deadline, answer.text
        time.sleep(0.1)


def _demo(folder: Path, provider: Provider, store: str) -> Demo:
    options = ("--provider", provider.url, "--lease", str(LEASE), "--call-timeout", "2")
    return Demo(folder, *options, store=store)


def _killed_after_the_charge(demo: Demo, provider: Provider, route: str, *, repeatable: bool, dedup: bool) -> str:
    """Send a request whose charge is made and never answered, and kill the demo while it waits; return the key."""
    key = str(uuid.uuid4())

    def client() -> None:
        with suppress(httpx.TransportError):
            demo.post(route, key, fault="hang-after", repeatable=repeatable, dedup=dedup)

    waiting = threading.Thread(target=client)
    waiting.start()
    _until(lambda: len(provider.charges()) == 1)
    demo.kill()
    waiting.join()
    return key


@pytest.mark.parametrize("route", ["/payments", "/transfers"])
def test_a_provider_that_deduplicates_has_one_charge_and_the_retry_gets_it(
    tmp_path: Path, store: str, route: str
) -> None:
    # R117, R119, R120, F31
    with Provider(tmp_path) as provider, _demo(tmp_path, provider, store) as demo:
        key = _killed_after_the_charge(demo, provider, route, repeatable=True, dedup=True)
        demo.start()
        retried = _end(demo, route, key)
        (charge,) = provider.charges()
        assert (retried.status_code, retried.json()["charge_id"]) == (201, charge["id"])
        assert demo.post(route, key).content == retried.content
        if route == "/payments":
            (payment,) = demo.read("/payments").json()
            assert (payment["status"], payment["charge_id"]) == ("settled", charge["id"])


@pytest.mark.parametrize("route", ["/payments", "/transfers", "/notifications"])
def test_a_provider_that_does_not_is_asked_once_and_the_outcome_is_unknown(
    tmp_path: Path, store: str, route: str
) -> None:
    # R85, R118, R125, F6, F31
    with Provider(tmp_path) as provider, _demo(tmp_path, provider, store) as demo:
        key = _killed_after_the_charge(demo, provider, route, repeatable=False, dedup=False)
        demo.start()
        answers = [_end(demo, route, key) for _ in range(3)]
        assert [(answer.status_code, answer.json()["code"]) for answer in answers] == [IN_DOUBT] * 3
        assert demo.record(key)["state"] == "unknown"
        demo.kill()
        demo.start()
        assert _end(demo, route, key).json()["code"] == IN_DOUBT[1]
        assert len(provider.charges()) == 1


def test_what_the_client_wished_for_is_remembered_when_the_retry_lacks_it(tmp_path: Path) -> None:
    # R118: the retry names no header, and would be a repeatable call by itself.
    store = f"sqlite:///{tmp_path / 'demo.db'}"
    with Provider(tmp_path) as provider, _demo(tmp_path, provider, store) as demo:
        key = _killed_after_the_charge(demo, provider, "/payments", repeatable=True, dedup=False)
        demo.start()
        assert _end(demo, "/payments", key).status_code == 201
        # The shop believed that the provider deduplicates, and it did not: the ledger shows what that costs.
        one, two = provider.charges()
        assert one["downstream_key"] == two["downstream_key"]


def test_the_demos_own_provider_ends_with_it_and_keeps_its_ledger(tmp_path: Path) -> None:
    with Demo(tmp_path) as demo:
        paid = demo.post("/payments", str(uuid.uuid4())).json()
        (provider,) = children(demo.pid)
        demo.kill()
        _until(lambda: not is_alive(provider))
        assert (tmp_path / "oncekey-demo-provider.db").exists()
        demo.start()
        assert [charge["id"] for charge in demo.ledger()] == [paid["charge_id"]]
        (provider,) = children(demo.pid)
        demo.stop()
        _until(lambda: not is_alive(provider))
