"""What nobody knows in the demo, and how it ends: by a webhook, by the poller, or by an operator (issue 4)."""

from __future__ import annotations

import json
import os
import sqlite3
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from contextlib import closing
from functools import partial
from pathlib import Path

import httpx
import pytest

from harness.demo import MONEY, Demo
from harness.patience import wait_until
from harness.provider import Provider
from oncekey_demo.app import SECRET, WEBHOOKS
from oncekey_demo.provider_server import sign

_until = partial(wait_until, every=0.05)
QUICK = ("--lease", "3", "--call-timeout", "1.5", "--interval", "0.5")
ONCEKEY = (sys.executable, "-c", "from oncekey.cli import main; main()")
ROUTES = ("/payments", "/transfers", "/notifications")


def _key() -> str:
    return str(uuid.uuid4())


def _doubted(demo: Demo, route: str) -> str:
    """A time-out after executing, at a provider that recognises no keys."""
    key = _key()
    answer = demo.post(route, key, fault="drop-after", repeatable=False, dedup=False)
    assert answer.status_code in {202, 409, 502}
    return key


def _settled(demo: Demo, route: str, key: str) -> httpx.Response:
    """The answer that everybody hears from now on; a phased handler is gone on with by the completer."""
    _until(lambda: demo.record(key)["state"] == "completed")
    answer = demo.post(route, key)
    assert answer.status_code == 201, answer.text
    assert demo.post(route, key).content == answer.content
    return answer


@pytest.fixture
def store(tmp_path: Path, request: pytest.FixtureRequest) -> str:
    if getattr(request, "param", "sqlite") == "sqlite":
        return f"sqlite:///{tmp_path / 'demo.db'}"
    dsn: str = request.getfixturevalue("postgres_dsn")
    return dsn


@pytest.mark.parametrize("store", ["sqlite", "postgresql"], indirect=True)
@pytest.mark.parametrize("webhooks", ["on", "off"])
def test_unknown_outcomes_are_settled_with_and_without_webhooks(tmp_path: Path, store: str, webhooks: str) -> None:
    # R135, R136, R137, F22: one charge each, every retry replays 201, and the payment's own row is settled
    with Demo(tmp_path, *QUICK, "--webhooks", webhooks, store=store) as demo:
        keys = {route: _doubted(demo, route) for route in ROUTES}
        answers = {route: _settled(demo, route, key) for route, key in keys.items()}
        charges = demo.ledger()
        assert {answer.json()["charge_id"] for answer in answers.values()} == {charge["id"] for charge in charges}
        assert len(charges) == len(ROUTES)
        (payment,) = demo.read("/payments").json()
        assert (payment["status"], payment["charge_id"]) == ("settled", answers["/payments"].json()["charge_id"])
        _until(lambda: len(demo.read("/receipts").json()) == 1)


@pytest.fixture
def apart(tmp_path: Path, store: str) -> Iterator[tuple[Demo, Provider]]:
    """A demo whose workers look once an hour, and a provider that tells nothing by itself."""
    with Provider(tmp_path) as provider:
        slow = ("--lease", "3", "--call-timeout", "1.5", "--interval", "3600", "--provider", provider.url)
        with Demo(tmp_path, *slow, store=store) as demo:
            yield demo, provider


def _event(charge: dict[str, object], event_id: str = "evt_1") -> bytes:
    return json.dumps({"id": event_id, "type": "charge.succeeded", "charge": charge}).encode()


def _notify(demo: Demo, body: bytes, *, secret: str = SECRET, at: float | None = None) -> httpx.Response:
    header = {"Oncekey-Signature": sign(body, secret, int(time.time() if at is None else at))}
    with demo.client() as client:
        return client.post(WEBHOOKS, content=body, headers=header)


@pytest.mark.parametrize("fault", ["error-before", "drop-after"])
def test_call_that_was_not_executed_is_sent_again_without_its_fault(
    apart: tuple[Demo, Provider], store: str, fault: str
) -> None:
    demo, provider = apart
    key = _key()
    assert demo.post("/transfers", key, fault=fault, repeatable=False, dedup=False).status_code == 202
    _until(lambda: demo.record(key)["state"] == "unknown")
    before = len(provider.charges())
    _oncekey("keys", "resolve", key, "--not-executed", "--closed", "--reason", "closed at the provider", store=store)
    _settled(demo, "/transfers", key)
    assert len(provider.charges()) == before + 1


def test_forged_old_and_repeated_webhooks_change_nothing(apart: tuple[Demo, Provider]) -> None:  # R136
    demo, provider = apart
    for route in ROUTES:
        key = _doubted(demo, route)
        _until(lambda key=key: demo.record(key)["state"] == "unknown")  # type: ignore[misc]
        charge = provider.charges()[-1]
        body = _event(charge, f"evt_{route}")
        assert _notify(demo, body, secret="another secret of 22 ").status_code == 401
        assert _notify(demo, body, at=time.time() - 3600).status_code == 401
        assert demo.record(key)["state"] == "unknown"
        assert _notify(demo, body).json()["detail"] == "Settled."
        answer = _settled(demo, route, key)
        assert _notify(demo, body).json()["detail"] == "Known."
        assert answer.json()["charge_id"] == charge["id"]
        assert demo.post(route, key).content == answer.content


def test_operator_settles_an_unknown_outcome_if_the_provider_is_down(tmp_path: Path, store: str) -> None:  # R138, R143
    with Provider(tmp_path) as provider:
        options = ("--lease", "3", "--call-timeout", "1.5", "--interval", "3600", "--provider", provider.url)
        with Demo(tmp_path, *options, store=store) as demo:
            key = _doubted(demo, "/notifications")
            charge = provider.charges()[-1]
            _until(lambda: demo.record(key)["state"] == "unknown")
            provider.kill()
            place = ("--app", "oncekey_demo.service:once", "--once", "--json")
            environment = {**os.environ, "ONCEKEY_DEMO_STORE": store, "ONCEKEY_DEMO_PROVIDER": provider.url}
            with closing(sqlite3.connect(tmp_path / "demo.db")) as connection, connection:
                # As after nine looks in vain: each of them, and the pauses between, is another test's.
                connection.execute(
                    "UPDATE oncekey_record SET reconcile_after = 0, reconcile_tries = 9 WHERE state = 'unknown'"
                )
            done = subprocess.run(
                [*ONCEKEY, "reconcile", *place], capture_output=True, text=True, env=environment, check=True
            )
            assert json.loads(done.stdout)["exhausted"] == 1
            told = _oncekey("unknown", "list", "--json", store=store)
            (one,) = json.loads(told)["items"]
            assert (one["reconcile_after"], one["reconcile_tries"]) == (None, 10)
            answer = tmp_path / "answer.json"
            answer.write_text(json.dumps({"charge_id": charge["id"]}))
            command = ("keys", "resolve", key, "--executed", "--status", "201", "--body", str(answer))
            _oncekey(*command, "--scope", one["scope"], "--reason", "seen in the provider's books", store=store)
            assert (demo.post("/notifications", key).status_code, demo.record(key)["state"]) == (201, "completed")
            history = _oncekey("keys", "history", key, "--scope", one["scope"], "--json", store=store)
            assert "reconcile_exhausted" in history
            assert "seen in the provider's books" in history


def test_ledger_reconciliation_finds_a_planted_charge(apart: tuple[Demo, Provider], store: str) -> None:  # R140
    demo, provider = apart
    for route in ROUTES:
        key = _key()
        demo.post(route, key)
        _until(lambda key=key: demo.record(key)["state"] == "completed")  # type: ignore[misc]
    book = (f"{provider.url}/charges", "--column", "provider_id=id", "--column", "amount=amount_cents")
    command = ("reconcile", "ledger", "--ledger", *book, "--amount", "/amount_cents", "--json")
    inline = ("--inline", "send_notification=notification_sent")
    assert json.loads(_oncekey(*command, *inline, store=store))["agree"] is True
    planted = provider.client.post(f"{provider.url}/charges", json=MONEY, headers={"Idempotency-Key": "planted"}).json()
    report = json.loads(_oncekey(*command, *inline, store=store, code=1))
    assert [(one["kind"], one["provider_id"]) for one in report["differences"]] == [("orphan_charge", planted["id"])]


def _oncekey(*arguments: str, store: str, code: int = 0) -> str:
    done = subprocess.run([*ONCEKEY, *arguments, "--store", store], capture_output=True, text=True, check=False)
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout
