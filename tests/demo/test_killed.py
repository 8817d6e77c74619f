"""kill -9 of the demo between the provider's success and the shop's commit: what the ledger and the retry say."""

from __future__ import annotations

import os
import subprocess
import sys
import time
import uuid
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path

import httpx
import pytest

from harness.demo import Demo
from harness.patience import PATIENCE, wait_until
from harness.processes import children, is_alive
from harness.provider import Provider
from harness.tables import leases_run_out

_until = partial(wait_until, every=0.05)
LEASE = 1
ONCEKEY = (sys.executable, "-c", "from oncekey.cli import main; main()")
STORES = ["sqlite", "postgresql"]
IN_DOUBT = (409, "idempotency_outcome_unknown")
LATER = {"idempotency_key_in_progress", "idempotency_execution_failed"}


@pytest.fixture(params=STORES)
def store(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path / 'demo.db'}"
    dsn: str = request.getfixturevalue("postgres_dsn")
    return dsn.replace("postgresql", request.param, 1)


def _end(demo: Demo, route: str, key: str) -> httpx.Response:
    deadline = time.monotonic() + PATIENCE
    while True:
        answer = demo.post(route, key)
        if answer.status_code != 202 and answer.json().get("code") not in LATER:
            return answer
        assert time.monotonic() < deadline, answer.text
        time.sleep(0.1)


def _demo(folder: Path, provider: Provider, store: str, *more: str) -> Demo:
    # Nobody settles what is unknown while these tests look at it. No call times out before the kill, because a demo
    # that is started asks once about what it finds unknown.
    options = ("--provider", provider.url, "--lease", str(LEASE), "--call-timeout", "60", "--interval", "3600")
    return Demo(folder, *options, *more, store=store)


def _killed_after_the_charges(
    demo: Demo, provider: Provider, routes: tuple[str, ...], *, repeatable: bool, dedup: bool
) -> dict[str, str]:
    """Send requests whose charges are made and never answered, and kill the demo while it waits; return the keys."""
    keys = {route: str(uuid.uuid4()) for route in routes}

    def client(route: str) -> None:
        with suppress(httpx.TransportError):
            demo.post(route, keys[route], fault="hang-after", repeatable=repeatable, dedup=dedup)

    with ThreadPoolExecutor(len(routes)) as waiting:
        list(map(partial(waiting.submit, client), routes))
        _until(lambda: len(provider.charges()) == len(routes))
        demo.kill()
    return keys


def test_kill_with_a_deduplicating_provider_results_in_one_charge(tmp_path: Path, store: str) -> None:
    # R117, R120, R249, F31
    with Provider(tmp_path) as provider, _demo(tmp_path, provider, store) as demo:
        keys = _killed_after_the_charges(demo, provider, ("/payments", "/transfers"), repeatable=True, dedup=True)
        leases_run_out(store)
        demo.start()
        # Nobody retries: the workers of the demo that was started again go on by themselves.
        _until(lambda: {demo.record(key)["state"] for key in keys.values()} == {"completed"})
        retried = {route: _end(demo, route, key) for route, key in keys.items()}
        assert {answer.status_code for answer in retried.values()} == {201}
        assert {answer.headers["idempotent-replayed"] for answer in retried.values()} == {"true"}
        charges = {charge["id"] for charge in provider.charges()}
        assert {answer.json()["charge_id"] for answer in retried.values()} == charges
        assert len(provider.charges()) == len(keys)
        for route, key in keys.items():
            assert demo.post(route, key).content == retried[route].content
        (payment,) = demo.read("/payments").json()
        assert (payment["status"], payment["charge_id"]) == ("settled", retried["/payments"].json()["charge_id"])


def test_kill_with_a_non_repeatable_call_leaves_the_outcome_unknown(tmp_path: Path, store: str) -> None:
    # R85, R117, R125, F6, F31
    routes = ("/payments", "/transfers", "/notifications")
    with Provider(tmp_path) as provider, _demo(tmp_path, provider, store) as demo:
        keys = _killed_after_the_charges(demo, provider, routes, repeatable=False, dedup=False)
        leases_run_out(store)
        # Every worker but the one that asks the provider, which would settle what this test looks at.
        place = {"ONCEKEY_DEMO_STORE": store, "ONCEKEY_DEMO_PROVIDER": provider.url}
        worker = ("worker", "--app", "oncekey_demo.service:once", "--once", "--without", "reconciler")
        done = subprocess.run(
            [*ONCEKEY, *worker], env={**os.environ, **place}, capture_output=True, text=True, check=False
        )
        assert "2 done, 1 failed" in done.stdout, done.stderr  # the parcel is parked as a dead letter
        with _demo(tmp_path, provider, store, "--no-workers") as again:
            for route, key in keys.items():
                answers = [_end(again, route, key) for _ in range(3)]
                assert [(answer.status_code, answer.json()["code"]) for answer in answers] == [IN_DOUBT] * 3
                assert again.record(key)["state"] == "unknown"
        assert len(provider.charges()) == len(routes)


def test_options_of_the_first_request_apply_after_a_kill(tmp_path: Path) -> None:
    # R117: the retry names no header, so by itself its call would be deduplicated.
    store = f"sqlite:///{tmp_path / 'demo.db'}"
    with Provider(tmp_path) as provider, _demo(tmp_path, provider, store) as demo:
        keys = _killed_after_the_charges(demo, provider, ("/payments",), repeatable=True, dedup=False)
        leases_run_out(store)
        demo.start()
        assert _end(demo, "/payments", keys["/payments"]).status_code == 201
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
