"""What the backends make of events: levels and fields, lines per tenant, histograms, and gauges that ask the store."""

from __future__ import annotations

import asyncio
import json
import logging
import subprocess
import sys
from collections import Counter
from dataclasses import fields
from itertools import product
from typing import Any, get_args
from uuid import uuid4

import hypothesis.strategies as st
import pytest
from hypothesis import given
from prometheus_client.parser import text_string_to_metric_families

from core.records import a_record
from observe.shop import AsgiShop, WsgiShop
from oncekey.core.keys import key_digest
from oncekey.core.model import Code, Effects, RecordId, State
from oncekey.core.scope import BindTo, bound_scope, scope_of, tenant_of
from oncekey.core.transitions import Actor, Mover
from oncekey.engine.notifying import how_of
from oncekey.observe.events import (
    MEANING,
    RESERVATIONS,
    About,
    Count,
    Doubted,
    Event,
    How,
    Refused,
    Replayed,
    Reserved,
    Settled,
    ShortLease,
    StoreFailed,
    counted,
    notify_all,
)
from oncekey.observe.logs import JsonLines, Logs, fields_of, level_of
from oncekey.observe.measuring import OTHERS, Tenants
from oncekey.observe.prometheus import Prometheus

KEY = "a-key-that-nobody-may-see-0f"
LIFE = uuid4()


def about(tenant: str = "acme") -> About:
    return About("orders", Effects.LOCAL, RecordId(scope_of("default", tenant), KEY), LIFE)


def samples(page: bytes | str) -> dict[tuple[str, tuple[str, ...]], float]:
    text = page.decode() if isinstance(page, bytes) else page
    return {
        (
            sample.name.removeprefix("api_idempotency_"),
            tuple(value for _, value in sorted(sample.labels.items())),
        ): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


# The table


def test_every_reservation_has_a_counter_and_every_counter_a_description() -> None:
    assert set(RESERVATIONS) == set(How)
    assert set(MEANING) == set(Count)


def test_refusals_are_counted_by_what_they_mean() -> None:
    # R201, R202, R204
    moved = {code: counted(Refused(about(), code, 0.0)) for code in Code}
    assert {code: one for code, one in moved.items() if one is not None} == {
        Code.IN_PROGRESS: (Count.IN_PROGRESS, 1),
        Code.KEY_REUSED: (Count.KEY_MISUSE, 1),
        Code.OUTCOME_UNKNOWN: (Count.UNKNOWN, 1),
    }


def test_how_of_classifies_new_retried_and_taken_over_requests() -> None:
    record = a_record()
    assert how_of(None, record) is How.NEW
    for state in State:
        met = a_record(state=state, incarnation=record.incarnation)
        assert how_of(met, record) is (How.TAKEN_OVER if state is State.IN_PROGRESS else How.RETRIED)
        assert how_of(a_record(state=state, incarnation=uuid4()), record) is How.NEW


# Tenants


@given(st.text(min_size=1).filter(str.strip), st.sampled_from([None, "alice"]))
def test_tenant_is_extracted_from_a_scope(tenant: str, principal: str | None) -> None:
    bind_to = BindTo.TENANT if principal is None else BindTo.PRINCIPAL
    scope = bound_scope(bind_to, "shop", tenant, principal=principal)
    if scope.startswith("sha256:"):
        assert tenant_of(scope) == scope
    elif not any("\ud800" <= letter <= "\udfff" for letter in tenant):
        assert tenant_of(scope) == tenant


@pytest.mark.parametrize("scope", ["", "default", "9", "4:acme", "7", "x:y"])
def test_malformed_scope_is_returned_as_the_tenant(scope: str) -> None:
    assert tenant_of(scope) == scope


@given(st.lists(st.sampled_from("abcdefgh") | st.just(OTHERS)), st.integers(0, 4))
def test_tenants_are_bounded_and_none_is_lost(seen: list[str], most: int) -> None:
    # R192, R211
    tenants, last = Tenants(most), 0
    for tenant in seen:
        tenants.add(tenant)
        shared = tenants.counts().get(OTHERS, 0)
        assert shared >= last  # a counter that falls would be taken for one that began anew
        last = shared
    counts = tenants.counts()
    assert sum(counts.values()) == len(seen)
    assert len(set(counts) - {OTHERS}) <= most
    true = Counter(seen)
    assert all(counts[tenant] <= true[tenant] for tenant in counts if tenant != OTHERS)


def test_new_heavy_tenant_gets_a_separate_count() -> None:
    # R192: a spike is seen also of a tenant that came when all lines were taken
    tenants = Tenants(2)
    for tenant in ["a", "b", *(["c", "d", "e", "spike"] * 20), *(["spike"] * 40)]:
        tenants.add(tenant)
    assert "spike" in tenants.counts()


def test_misuse_and_duplicates_by_tenant() -> None:
    # R191, R192, R211, R255
    metrics = Prometheus(tenants=1)
    for tenant, code in product(("acme", "other"), (Code.KEY_REUSED, Code.IN_PROGRESS)):
        metrics(Refused(about(tenant), code, 0.001))
    metrics(Replayed(about("acme"), 0.001))
    from prometheus_client import generate_latest

    found = samples(generate_latest(metrics.registry))
    assert found["tenant_key_misuse_total", ("acme",)] == found["tenant_key_misuse_total", ("other",)] == 1
    assert found["tenant_duplicates_total", ("acme",)] == 2


# Logs


def some_events() -> list[Event]:
    """One of each kind, with any values that fit."""
    made: list[Event] = []
    values: dict[str, Any] = {
        "about": about(),
        "how": How.NEW,
        "code": Code.KEY_REUSED,
        "to": State.UNKNOWN,
        "by": Actor.SWEEPER,
        "records": 3,
        "seconds": 0.1,
        "handler": 0.1,
        "settling": 0.1,
        "after": 5,
        "late": 5,
        "attempts": 2,
        "tries": 2,
        "lease": 5,
        "p99": 5,
        "resumed": False,
        "recalled": False,
        "status": 401,
        "tasks": ("relay",),
        "leaving": True,
        "outcome": State.UNKNOWN,
    }
    for kind in get_args(Event):
        given = {one.name: values.get(one.name, "text") for one in fields(kind)}
        made.append(kind(**given))
    return made


def test_every_event_has_a_line_without_its_key(caplog: pytest.LogCaptureFixture) -> None:
    # R195, R216
    caplog.set_level(logging.DEBUG, logger="oncekey.events")
    for event in some_events():
        Logs()(event)
    assert len(caplog.records) == len(get_args(Event))
    assert KEY not in caplog.text
    written = [json.loads(JsonLines().format(record)) for record in caplog.records]
    assert KEY not in json.dumps(written)
    (doubted,) = [line for line in written if line["event"] == "doubted"]
    assert (doubted["tenant"], doubted["key_digest"], doubted["level"]) == ("acme", key_digest(KEY), "error")


def test_events_that_need_attention_are_logged_as_errors() -> None:
    loud = {fields_of(event)["event"] for event in some_events() if level_of(event) >= logging.ERROR}
    assert loud == {"doubted", "given_up", "contradicted", "buried", "store_failed", "bypassed", "settled"}


def test_log_observer_skips_disabled_levels(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.ERROR, logger="oncekey.events")
    Logs()(Replayed(about(), 0.1))
    assert caplog.records == []


def test_notify_all_without_observers_is_none() -> None:
    assert notify_all([]) is None


def test_engine_without_observers_does_not_import_prometheus_client() -> None:
    code = "import sys, oncekey.engine.serve, oncekey.workers.tasks; print('prometheus_client' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


# Histograms


def test_durations_are_in_their_buckets() -> None:
    # R149, R214
    from prometheus_client import generate_latest

    metrics = Prometheus()
    for handler in (0.02, 0.02, 4.0):
        metrics(Settled(about(), State.COMPLETED, None, handler, 0.001))
    metrics(Reserved(about(), How.TAKEN_OVER, 0.003, after=2_000_000))
    metrics(ShortLease("orders", 1, 2))
    found = samples(generate_latest(metrics.registry))
    assert found["operation_duration_seconds_bucket", ("0.025", "orders")] == 2
    assert found["operation_duration_seconds_bucket", ("5.0", "orders")] == 3
    assert found["recovery_duration_seconds_sum", ("requester",)] == 2.0
    assert found["claim_duration_seconds_count", ("orders",)] == 1
    assert found["short_lease_total", ("orders",)] == 1


def test_prometheus_uses_the_registry_of_the_application() -> None:
    from prometheus_client import CollectorRegistry, generate_latest

    registry = CollectorRegistry()
    Prometheus(registry)(StoreFailed("claim", "StoreUnavailableError"))
    assert b"api_idempotency_store_error_count_total 1.0" in generate_latest(registry)


# Gauges


async def test_gauges_read_their_values_from_the_store(asgi_shop: AsgiShop) -> None:
    # R129, R135, R213, R214
    shop = asgi_shop
    async with shop.serving():
        await shop.send("/local", "key-000000000000000001", emit="unloved")
        await shop.send("/inline", "key-000000000000000002", does="nothing")
        await shop.send("/outbox", "key-000000000000000003")
        before = samples(await shop.metrics.page(shop.once))
        assert before["records", ("failed_retryable",)] == before["records", ("pending",)] == 1
        assert (before["waiting", ("parcels_due",)], before["dlq_depth", ()], before["store_up", ()]) == (2, 0, 1)
        assert before["outbox_lag_seconds", ()] >= 0
        assert before["workers", ("relay",)] == 0
        await shop.work("relay")
        after = samples(await shop.metrics.page(shop.once))
        assert (after["waiting", ("parcels_due",)], after["dlq_depth", ()]) == (0, 1)
        assert after["waiting_oldest_seconds", ("dead_letters",)] >= 0
        assert after["store_duration_seconds_count", ("standing",)] == 2
        assert after["store_duration_seconds_count", ("claim",)] == 1


async def test_each_round_of_the_sweeper_is_counted(asgi_shop: AsgiShop) -> None:
    # R148
    async with asgi_shop.serving():
        for rounds in (1, 2):
            await asgi_shop.work("sweeper")
            found = samples(await asgi_shop.metrics.page(asgi_shop.once))
            assert found["store_duration_seconds_count", ("stale",)] == rounds


async def test_blocking_metrics_page_reads_gauges_from_the_store(store: Any) -> None:
    # R213
    shop = WsgiShop(store("psycopg"))
    async with shop.serving():
        await shop.send("/inline", KEY, does="nothing")
        found = samples(await asyncio.to_thread(shop.metrics.page_blocking, shop.once))
        assert (found["records", ("failed_retryable",)], found["dlq_depth", ()]) == (1, 0)
        shop.execute(f"ALTER TABLE {shop.records} RENAME TO gone")
        assert samples(await asyncio.to_thread(shop.metrics.page_blocking, shop.once))["store_up", ()] == 0


async def test_worker_gauge_counts_live_workers(asgi_shop: AsgiShop) -> None:
    # R135
    from oncekey.workers.tasks import presence_of, tasks_for

    shop = asgi_shop
    async with shop.serving():
        presence = presence_of(shop.once, tasks_for(shop.once))
        assert presence is not None
        await presence.run_once()
        found = samples(await shop.metrics.page(shop.once))
        assert found["workers", ("relay",)] == found["workers", ("sweeper",)] == 1
        await presence.stop(0)
        assert samples(await shop.metrics.page(shop.once))["workers", ("relay",)] == 0


async def test_metrics_page_reports_an_unreachable_store(asgi_shop: AsgiShop) -> None:
    # R212
    shop = asgi_shop
    async with shop.serving():
        await shop.send("/local", KEY)
        shop.execute(f"ALTER TABLE {shop.records} RENAME TO gone")
        found = samples(await shop.metrics.page(shop.once))
        assert (found["store_up", ()], found["reserve_created_count_total", ()]) == (0, 1)


def test_doubted_event_includes_its_actor() -> None:
    assert fields_of(Doubted(about(), "why", Mover(Actor.REAPER, "x").actor))["by"] == "reaper"
