"""What is told although no key was reserved for it: refusals before a claim, look-ups, messages, beats, commands."""

from __future__ import annotations

import json
import sqlite3
import subprocess
import sys
import time
from contextlib import closing
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import generate_latest

from cli.operating import oncekey
from console.trouble import INLINE_KEY, OUTBOX_KEY, PHASED_KEY, fill, opened
from observe.shop import EXECUTED, AsgiShop, Stranger, labelled, read
from observe.test_counters import SECRET
from oncekey import Policy, Rejected, Sighting
from oncekey.core.keys import key_digest
from oncekey.core.model import Code, State
from oncekey.core.resolution import SIGNATURE_HEADER, sign
from oncekey.engine.run import FAILURES
from oncekey.observe.events import (
    Beat,
    Bypassed,
    Contradicted,
    LookedUp,
    Messaged,
    Refused,
    Reserved,
    StoreFailed,
    TurnedAway,
)
from oncekey.workers.tasks import presence_of

KEY = "a-key-that-nobody-may-see-0f"
JSON = {"Content-Type": "application/json", "Tenant": "acme"}
KEYED = {**JSON, "Idempotency-Key": KEY}


@pytest.mark.parametrize(
    ("lines", "body", "status", "code"),
    [
        (JSON, b"{}", 400, Code.KEY_MISSING),
        ({**JSON, "Idempotency-Key": "short"}, b"{}", 400, Code.KEY_MALFORMED),
        (KEYED, b'{"item": 1, "item": 2}', 400, Code.BODY_INVALID),
        (KEYED, b'{"item": "' + 500 * b"x" + b'"}', 413, Code.BODY_TOO_LARGE),
    ],
    ids=["missing", "malformed", "invalid", "too large"],
)
async def test_a_refusal_before_the_claim(either: Any, lines: Any, body: bytes, status: int, code: Code) -> None:
    # R191, R195
    shop = either(policy=Policy(max_request_bytes=100))
    async with shop.serving():
        before = shop.counts()
        assert await shop.ask("POST", "/inline", lines, body) == status
        assert shop.moved(before) == {}
        assert shop.requests() == {("inline", code.value): 1}
    assert shop.told(TurnedAway) == [TurnedAway("inline", code)]
    assert shop.told(Refused) == shop.told(Reserved) == []


async def test_metrics_distinguish_conflict_key_misuse_and_store_failure(asgi_shop: AsgiShop) -> None:
    # R99, R191, R205, R215
    shop, ended = asgi_shop, "api.idempotency.operation.duration"
    async with shop.serving():
        before = shop.counts()
        assert await shop.send("/local", KEY, does="conflict") == 409
        assert shop.moved(before) == {"api.idempotency.reserve.created.count": 1}
        settled = labelled(shop.metrics.page_blocking(Stranger()).decode(), "api_idempotency_settled_total")
        assert settled == {("local", "failure", "completed"): 1}
        assert shop.exported()[ended, ("local", "completed", "failure")] == 1
        before = shop.counts()
        assert await shop.send("/local", KEY, item="coffee") == 422
        assert shop.moved(before) == {"api.idempotency.reserve.key_misuse.count": 1}
        before = shop.counts()
        shop.execute(f"ALTER TABLE {shop.records} RENAME TO gone")
        assert await shop.send("/local", f"{KEY}-2") == 503
        assert shop.moved(before) == {"api.idempotency.store.error.count": 1}


async def test_refusal_by_a_limit_is_counted_by_code_only(either: Any) -> None:
    # R187
    shop = either(policy=Policy(max_live_keys=1, max_request_age=timedelta(hours=1)))
    async with shop.serving():
        assert await shop.send("/inline", KEY) == 201
        before = shop.counts()
        assert await shop.send("/inline", f"{KEY}-2") == 429
        old = {"Idempotency-Key": f"{KEY}-3", "Idempotency-First-Sent": "Mon, 01 Jan 2024 00:00:00 GMT"}
        assert await shop.ask("POST", "/inline", {**JSON, **old}, b"{}") == 412
        assert shop.moved(before) == {}
    assert [one.code for one in shop.told(Refused)] == [Code.RATE_LIMITED, Code.REQUEST_TOO_OLD]


async def test_refusal_by_the_circuit_breaker_is_not_a_store_error(either: Any) -> None:
    # R205, R212
    shop = either()
    async with shop.serving():
        await shop.send("/inline", KEY)
        (installation,) = shop.once._installations
        installation.breaker._clock = lambda: 0.0
        shop.execute(f"ALTER TABLE {shop.records} RENAME TO gone")
        for number in range(FAILURES):
            assert await shop.send("/inline", f"{KEY}-{number}") == 503
        before, failed = shop.counts(), shop.requests()
        assert before["api.idempotency.store.error.count"] == FAILURES
        assert await shop.send("/inline", f"{KEY}-later") == 503
        assert shop.moved(before) == {}
        unavailable = ("inline", Code.STORE_UNAVAILABLE.value)
        assert shop.requests()[unavailable] == failed[unavailable] + 1


async def test_fail_open_request_is_counted_as_bypassed(either: Any) -> None:
    # R110, R205
    shop = either(inline={"on_store_error": "fail_open", "naturally_idempotent": True})
    async with shop.serving():
        await shop.send("/inline", KEY)
        shop.execute(f"ALTER TABLE {shop.records} RENAME TO gone")
        before = shop.counts()
        assert await shop.send("/inline", f"{KEY}-2") == 201
        assert shop.moved(before) == {"api.idempotency.store.error.count": 1}
        assert shop.requests()["inline", "bypassed"] == 1
    (bypassed,) = shop.told(Bypassed)
    assert bypassed.about.key_digest == key_digest(f"{KEY}-2")


async def test_status_lookups_are_counted_by_result(either: Any) -> None:
    # R84, R205
    shop = either()
    async with shop.serving():
        await shop.send("/inline", KEY)
        before = shop.counts()
        assert await shop.ask("GET", f"/idempotency-keys/{KEY}", JSON) == 200
        assert await shop.ask("GET", "/idempotency-keys/another-key-of-nobody", JSON) == 404
        assert shop.moved(before) == {}
        shop.execute(f"ALTER TABLE {shop.records} RENAME TO gone")
        assert await shop.ask("GET", f"/idempotency-keys/{KEY}", JSON) == 503
        assert shop.moved(before) == {"api.idempotency.store.error.count": 1}
    assert [one.outcome for one in shop.told(LookedUp)] == [
        State.COMPLETED,
        Code.KEY_NOT_FOUND,
        Code.STORE_UNAVAILABLE,
    ]
    assert [one.where for one in shop.told(StoreFailed)] == ["status"]
    page = shop.metrics.page_blocking(Stranger()).decode()
    looks = {("completed",): 1, (Code.KEY_NOT_FOUND.value,): 1, (Code.STORE_UNAVAILABLE.value,): 1}
    assert labelled(page, "api_idempotency_lookups_total") == looks
    assert shop.exported()["api.idempotency.lookups.count", ("completed",)] == 1


async def test_worker_heartbeats_are_counted_until_it_leaves(asgi_shop: AsgiShop) -> None:
    # R135, R205
    shop = asgi_shop
    async with shop.serving():
        presence = presence_of(shop.once, [shop._task("sweeper"), shop._task("relay")])
        assert presence is not None
        before = shop.counts()
        await presence.run_once()
        await presence.stop(0)
        assert shop.moved(before) == {}
        assert shop.told(Beat) == [Beat(presence.who, ("sweeper", "relay"), leaving) for leaving in (False, True)]
        assert "api_idempotency_heartbeats_total 1.0" in shop.metrics.page_blocking(Stranger()).decode()
        assert shop.exported()["api.idempotency.heartbeats.count", ()] == 1
        shop.execute(f"DROP TABLE {shop.records.replace('record', 'worker')}")
        await presence.stop(0)  # it leaves although nobody can be told
        assert shop.moved(before) == {"api.idempotency.store.error.count": 1}


async def test_provider_webhooks_are_counted_by_status(either: Any) -> None:
    # R191, R209: one that is not signed, one that settles, and one that contradicts it
    shop = either()
    said: dict[str, Any] = {"now": EXECUTED}
    shop.webhook("/hooks", secret=SECRET, parse=lambda event: Sighting(said["now"], event["key"]))

    async def hear(resolution: Any, secret: bytes = SECRET, **more: str) -> int:
        said["now"] = resolution
        body = json.dumps({"key": shop.charged[0], **more}).encode()
        return await shop.ask("POST", "/hooks", _signed(body, secret), body)

    async with shop.serving():
        await shop.send("/outbox", KEY, item="unloved")
        await shop.work("relay")
        before = shop.counts()
        assert await hear(EXECUTED, b"somebody else's secret") == 401
        assert shop.moved(before) == {}
        assert await hear(EXECUTED) == 200
        assert shop.moved(before) == {"api.idempotency.reconcile.resolved.count": 1}
        before = shop.counts()
        assert await hear(Rejected({"error": "no"}), another="event") == 200
        assert shop.moved(before) == {}
    assert [one.status for one in shop.told(Messaged)] == [401, 200, 200]
    (contradicted,) = shop.told(Contradicted)
    assert (contradicted.about.key_digest, contradicted.source) == (key_digest(KEY), "webhook")
    page = shop.metrics.page_blocking(Stranger()).decode()
    assert labelled(page, "api_idempotency_messages_total") == {("webhook", "401"): 1, ("webhook", "200"): 2}
    assert shop.exported()["api.idempotency.messages.count", ("webhook", 401)] == 1


def _signed(body: bytes, secret: bytes) -> dict[str, str]:
    return {SIGNATURE_HEADER.decode(): sign(body, secret, int(time.time()))}


# Commands

COUNTING = """
from oncekey import Once
from oncekey.observe import Prometheus

metrics = Prometheus()
once = Once("sqlite:///shop.db", observers=[metrics])
"""
EXPORTING = """
from oncekey.observe import OpenTelemetry
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import ConsoleMetricExporter, PeriodicExportingMetricReader

reader = PeriodicExportingMetricReader(ConsoleMetricExporter())
telemetry = OpenTelemetry(meter_provider=MeterProvider([reader]))
"""


@pytest.fixture
def desk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A store with trouble, and commands whose events are counted; what moved, and the lines of --log."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "commanded", raising=False)
    (tmp_path / "commanded.py").write_text(COUNTING)
    url = "sqlite:///shop.db"
    with opened(url) as world:
        fill(world, finished=3)

    def command(*words: str) -> tuple[dict[str, float], list[dict[str, Any]]]:
        metrics = _commanded_metrics()
        before = {} if metrics is None else read(generate_latest(metrics.registry).decode())
        result = oncekey("--log", "--observe", "commanded:once", *words, "--store", url)
        assert result.exit_code == 0, result.output
        after = read(generate_latest(_commanded_metrics().registry).decode())
        moved = {name: now - before.get(name, 0) for name, now in after.items() if now != before.get(name, 0)}
        lines = [json.loads(line) for line in result.stderr.splitlines() if line.startswith("{")]
        return moved, lines

    return command


def _commanded_metrics() -> Any:
    return getattr(sys.modules.get("commanded"), "metrics", None)


def test_operator_commands_move_counters_and_log_events(desk: Any) -> None:
    # R209, R216, R195
    why = ("--reason", "looked there", "--by", "ann", "--tenant")
    resolved = {"api.idempotency.reconcile.resolved.count": 1}
    moved, lines = desk("keys", "resolve", INLINE_KEY, "--not-executed", "--closed", *why, "acme")
    assert moved == resolved
    assert [(one["event"], one["trigger"], one["who"]) for one in lines[:1]] == [("operated", "not_executed", "ann")]
    assert [one["event"] for one in lines] == ["operated", "resolved"]
    assert lines[0]["key_digest"] == key_digest(INLINE_KEY)
    moved, _ = desk("keys", "resolve", PHASED_KEY, "--executed", "--result", '{"id": "ch"}', *why, "acme")
    assert moved == resolved
    moved, lines = desk("keys", "release", "checkout-7701", *why, "acme")
    assert moved == {"api.idempotency.zombie_key.count": 1}
    assert [one["event"] for one in lines] == ["operated", "swept"]
    moved, lines = desk("keys", "bust", "order-2026-11-0000", "--runs-again", *why, "acme")
    assert (moved, [one["trigger"] for one in lines]) == ({}, ["bust"])
    assert INLINE_KEY not in json.dumps(lines)


def test_dlq_commands_move_counters_and_log_events(desk: Any) -> None:
    # R210, R216
    listed = oncekey("dlq", "list", "--json", "--store", "sqlite:///shop.db")
    letters = {one["kind"]: one["id"] for one in json.loads(listed.stdout)["items"]}
    why = ("--reason", "looked there", "--by", "ann")
    moved, lines = desk("dlq", "retry", letters["emit"], *why)
    assert (moved, [(one["event"], one["trigger"]) for one in lines]) == ({}, [("operated", "dlq_retry")])
    moved, lines = desk("dlq", "discard", letters["defer"], *why)
    assert moved == {"api.idempotency.reconcile.resolved.count": 1}
    assert lines[0]["key_digest"] == key_digest(OUTBOX_KEY)


def test_reap_and_sweep_commands_move_counters_and_log_events(desk: Any) -> None:
    # R206, R207, R216
    with closing(sqlite3.connect("shop.db")) as connection, connection:
        gone = connection.execute("UPDATE oncekey_record SET expires_at = 1 WHERE state = 'completed'").rowcount
    moved, lines = desk("reap", "--once")
    assert moved == {"api.idempotency.ttl_pruned.count": gone}
    assert [(one["event"], one["what"]) for one in lines] == [("reaped", "purged")]
    moved, lines = desk("sweep", "--once", "--app", "commanded:once")  # named twice, its observers are told once
    assert moved == {"api.idempotency.zombie_key.count": 1}
    assert [one["event"] for one in lines] == ["swept"]


@pytest.mark.usefixtures("desk")
def test_worker_with_the_log_option_logs_events_as_json(tmp_path: Path) -> None:
    # R206, R216
    command = [str(Path(sys.executable).with_name("oncekey")), "--log", "worker", "--app", "commanded:once", "--once"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
    lines = [json.loads(line) for line in done.stderr.splitlines() if line.startswith("{")]
    assert "swept" in {one["event"] for one in lines}


@pytest.mark.usefixtures("desk")
def test_command_exports_its_metrics_on_exit(tmp_path: Path) -> None:
    # R209: nobody scrapes a process that is over, but OpenTelemetry exports at its end
    (tmp_path / "exporting.py").write_text(EXPORTING)
    command = [str(Path(sys.executable).with_name("oncekey")), "--observe", "exporting:telemetry", "keys", "resolve"]
    words = ["--not-executed", "--closed", "--reason", "x", "--by", "ann", "--store", "sqlite:///shop.db"]
    done = subprocess.run([*command, INLINE_KEY, *words], cwd=tmp_path, capture_output=True, text=True, check=True)
    exported = done.stdout[done.stdout.index("{") :]
    (scope,) = json.JSONDecoder().raw_decode(exported)[0]["resource_metrics"][0]["scope_metrics"]
    counts = {one["name"]: one["data"]["data_points"][0].get("value") for one in scope["metrics"]}
    assert {name for name, value in counts.items() if value} == {"api.idempotency.reconcile.resolved.count"}
    assert "unknown -> failed_retryable" in done.stdout
    assert done.stderr == ""


@pytest.mark.parametrize(
    ("place", "why"),
    [("nowhere:once", "--observe: the module nowhere does not exist"), ("json:decoder", "not a Once or an observer")],
)
def test_observe_option_rejects_an_invalid_observer(place: str, why: str) -> None:
    result = oncekey("--observe", place, "stats", "--store", "sqlite:///none.db")
    assert result.exit_code == 2
    assert why in result.stderr
