"""Each event is driven once by a real request, worker or operator: its counter moves by one, and no other does."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from harness.asgi import Caller
from harness.patience import PATIENCE
from observe.shop import EXECUTED, AsgiShop, Shop, Stranger
from oncekey import Sighting
from oncekey.core.flow import adrive
from oncekey.core.keys import key_digest
from oncekey.core.model import RecordId, State
from oncekey.core.operate import Moved, OperatorCommand, Order
from oncekey.core.resolution import SIGNATURE_HEADER, sign
from oncekey.core.scope import scope_of
from oncekey.core.transitions import Actor, Mover, Trigger
from oncekey.engine import operate
from oncekey.engine.enrolment import NO_NAMESPACE
from oncekey.observe.events import (
    Buried,
    Count,
    Delivered,
    Doubted,
    How,
    Operated,
    Refused,
    Replayed,
    Reserved,
    Resolved,
    Settled,
    ShortLease,
    Stepped,
    StoreFailed,
    Swept,
    Unsettled,
)

KEY = "a-key-that-nobody-may-see-0f"
SECRET = b"a secret of sixteen bytes and more"


@asynccontextmanager
async def under_way(shop: Any, path: str, **order: Any) -> AsyncIterator[asyncio.Task[int]]:
    """A request whose handler waits until the block ends."""
    running = asyncio.create_task(shop.send(path, KEY, **{"does": "wait", **order}))
    await asyncio.to_thread(shop.entered.acquire, timeout=PATIENCE)
    try:
        yield running
    finally:
        shop.go_on.set()
        await running


async def test_all_counters_are_exported_with_initial_zero(shop: Any) -> None:
    # R199-R210
    assert shop.counts() == {count.value: 0 for count in Count}
    assert len(Count) == 12


async def test_new_key_increments_the_created_counter(shop: Any) -> None:
    # R199
    async with shop.serving():
        before = shop.counts()
        assert await shop.send("/local", KEY) == 201
        assert shop.moved(before) == {"api.idempotency.reserve.created.count": 1}
    (settled,) = shop.told(Settled)
    assert (settled.about.operation, settled.to, settled.outcome) == ("local", State.COMPLETED, "success")


async def test_replay_increments_the_replay_counter(shop: Any) -> None:
    # R200
    async with shop.serving():
        await shop.send("/local", KEY)
        before = shop.counts()
        assert await shop.send("/local", KEY) == 201
        assert shop.moved(before) == {"api.idempotency.reserve.replay.count": 1}
    assert len(shop.told(Replayed)) == 1


@pytest.mark.parametrize("path", ["/local", "/inline"])
async def test_concurrent_request_increments_the_in_progress_counter(shop: Any, path: str) -> None:
    # R201
    async with shop.serving(), under_way(shop, path):
        before = shop.counts()
        assert await shop.send(path, KEY, does="wait") == 409
        assert shop.moved(before) == {"api.idempotency.reserve.in_progress.count": 1}


async def test_different_body_increments_the_key_misuse_counter(shop: Any, caplog: pytest.LogCaptureFixture) -> None:
    # R191, R195, R202
    async with shop.serving():
        await shop.send("/local", KEY)
        before = shop.counts()
        assert await shop.send("/local", KEY, item="coffee") == 422
        assert shop.moved(before) == {"api.idempotency.reserve.key_misuse.count": 1}
    (line,) = [one for one in caplog.records if one.name == "oncekey.security"]
    assert line.oncekey["key_digest"] == key_digest(KEY)
    assert KEY not in caplog.text


async def test_retry_after_a_failure_increments_the_failed_retry_counter(shop: Any) -> None:
    # R203
    async with shop.serving():
        await shop.send("/inline", KEY, does="nothing")
        before = shop.counts()
        assert await shop.send("/inline", KEY, does="nothing") == 201
        assert shop.moved(before) == {"api.idempotency.reserve.failed_retry.count": 1}
    assert shop.told(Reserved)[-1].how is How.RETRIED
    assert shop.told(Reserved)[-1].after is not None


async def test_unknown_outcome_increments_scheduled_then_unknown_counters(shop: Any) -> None:
    # R204, R208
    async with shop.serving():
        async with under_way(shop, "/inline", does="wait and fail"):
            before = shop.counts()
        assert shop.moved(before) == {"api.idempotency.reconcile.scheduled.count": 1}
        before = shop.counts()
        assert await shop.send("/inline", KEY, does="wait and fail") == 409
        assert shop.moved(before) == {"api.idempotency.reserve.unknown.count": 1}
    (doubted,) = shop.told(Doubted)
    assert (doubted.by, doubted.why) == (Actor.OWNER, "handler_raised")


@pytest.mark.parametrize("path", ["/local", "/inline"])
async def test_store_failure_increments_the_error_counter(shop: Any, path: str) -> None:
    # R205, R212
    async with shop.serving():
        await shop.send("/local", "another-key-00000000")
        before = shop.counts()
        shop.execute(f"ALTER TABLE {shop.records} RENAME TO gone")
        assert await shop.send(path, KEY) == 503
        assert shop.moved(before) == {"api.idempotency.store.error.count": 1}
        schema, _, table = shop.records.rpartition(".")
        shop.execute(f"ALTER TABLE {schema}{'.' if schema else ''}gone RENAME TO {table}")
        assert await shop.send(path, KEY) == 201
    (failed,) = shop.told(StoreFailed)
    assert failed.where == "claim"


async def test_store_failure_in_a_worker_increments_the_error_counter(asgi_shop: AsgiShop) -> None:
    # R205
    from oncekey.workers.service import Service

    async with asgi_shop.serving():
        service = Service([asgi_shop._task("sweeper")], notify=asgi_shop.once.notify)
        asgi_shop.execute(f"ALTER TABLE {asgi_shop.records} RENAME TO gone")
        before = asgi_shop.counts()
        await service.once()
        assert asgi_shop.moved(before) == {"api.idempotency.store.error.count": 1}
    assert asgi_shop.told(StoreFailed)[-1].where == "sweeper"


async def test_a_dead_owner_is_found_by_the_sweeper(shop: Any) -> None:
    # R206, R150, R216
    async with shop.serving(), under_way(shop, "/phased"):
        shop.owner_is_long_gone()
        before = shop.counts()
        if isinstance(shop, AsgiShop):
            await shop.work("sweeper")
        else:
            await sweep_from_elsewhere(shop)
        assert shop.moved(before) == {"api.idempotency.zombie_key.count": 1}
    (swept,) = shop.told(Swept)
    assert (swept.to, swept.by, swept.about.operation) == (State.FAILED_RETRYABLE, Actor.SWEEPER, "phased")
    assert swept.late >= 3600_000_000
    assert len(shop.told(Unsettled)) == 1  # its owner came back after all, and was told that it is none any more


async def sweep_from_elsewhere(shop: Shop) -> None:
    """The engine for threads is in use, and would be closed with the event loop's."""
    kept, shop.once._blocking = shop.once._blocking, None
    await shop.work("sweeper")
    shop.once._blocking = kept


async def test_a_dead_owner_is_found_by_the_next_request(shop: Any) -> None:
    # R206
    async with shop.serving(), under_way(shop, "/phased"):
        shop.owner_is_long_gone()
        before = shop.counts()
        second = asyncio.create_task(shop.send("/phased", KEY, does="wait"))
        await asyncio.to_thread(shop.entered.acquire, timeout=PATIENCE)
        assert shop.moved(before) == {"api.idempotency.zombie_key.count": 1}
        shop.go_on.set()
        assert await second == 201
    assert shop.told(Reserved)[-1].how is How.TAKEN_OVER
    assert [(one.name, one.recalled) for one in shop.told(Stepped)][-2:] == [("drawn", True), ("noted", True)]


async def test_dead_owner_of_a_non_repeatable_call_counts_as_unknown(shop: Any) -> None:
    # R204, R206, R208: a stuck key was found, its outcome is unknown from now on, and the request met that
    async with shop.serving(), under_way(shop, "/inline"):
        shop.owner_is_long_gone()
        before = shop.counts()
        assert await shop.send("/inline", KEY, does="wait") == 409
        assert shop.moved(before) == {
            "api.idempotency.zombie_key.count": 1,
            "api.idempotency.reconcile.scheduled.count": 1,
            "api.idempotency.reserve.unknown.count": 1,
        }
    assert [(one.to, one.by) for one in shop.told(Swept)] == [(State.UNKNOWN, Actor.REQUESTER)]


async def test_reused_expired_key_increments_the_created_counter(shop: Any) -> None:
    # R199
    async with shop.serving():
        await shop.send("/local", KEY)
        shop.all_is_long_ago()
        before = shop.counts()
        assert await shop.send("/local", KEY, item="coffee") == 201
        assert shop.moved(before) == {"api.idempotency.reserve.created.count": 1}


async def test_reaper_increments_the_ttl_pruned_counter(shop: Any) -> None:
    # R207, R216
    async with shop.serving():
        await shop.send("/local", KEY)
    shop.all_is_long_ago()
    before = shop.counts()
    await shop.work("reaper")
    assert shop.moved(before) == {"api.idempotency.ttl_pruned.count": 1}


async def unknown(shop: Any) -> None:
    """An INLINE request whose outcome nobody knows, long enough ago to be asked about."""
    async with shop.serving(), under_way(shop, "/inline", does="wait and fail"):
        pass
    shop.asked_about_now()


async def test_resolver_with_a_result_increments_the_resolved_counter(shop: Any) -> None:
    # R209
    await unknown(shop)
    shop.resolution = EXECUTED
    before = shop.counts()
    await shop.work("reconciler")
    assert shop.moved(before) == {"api.idempotency.reconcile.resolved.count": 1}
    (resolved,) = shop.told(Resolved)
    assert (resolved.to, resolved.by, resolved.about.key_digest) == (State.COMPLETED, Actor.RESOLVER, key_digest(KEY))


async def test_resolver_without_a_result_increments_the_failed_counter(shop: Any) -> None:
    # R210
    await unknown(shop)
    before = shop.counts()
    await shop.work("reconciler")
    assert shop.moved(before) == {"api.idempotency.reconcile.failed.count": 1}


async def test_operator_decision_increments_the_resolved_counter(shop: Any) -> None:
    # R209, R216
    await unknown(shop)
    before = shop.counts()
    tenant = "acme" if isinstance(shop, AsgiShop) else "single"
    found = RecordId(scope_of(NO_NAMESPACE, tenant), KEY)
    async with shop.once.lifespan():
        engine = shop.once.asynchronous()
        wish = OperatorCommand(Order.NOT_EXECUTED, reason="the provider knows nothing of it", closed=True)
        mover = Mover(Actor.OPERATOR, "ann")
        done = await adrive(operate.act(engine.store, found, wish, mover, notify=shop.once.notify), engine.driver.run)
    assert isinstance(done, Moved)
    assert shop.moved(before) == {"api.idempotency.reconcile.resolved.count": 1}
    (operated,) = shop.told(Operated)
    assert (operated.trigger, operated.who) == (Trigger.NOT_EXECUTED, "ann")


async def test_webhook_increments_the_resolved_counter(asgi_shop: AsgiShop) -> None:
    # R209
    shop = asgi_shop
    shop.webhook("/hooks", secret=SECRET, parse=lambda event: Sighting(EXECUTED, event["key"]))
    await unknown(shop)
    body = json.dumps({"key": shop.charged[0]}).encode()
    signed = sign(body, SECRET, int(time.time()))
    before = shop.counts()
    async with shop.serving():
        lines = [(SIGNATURE_HEADER.decode(), signed)]
        assert (await Caller(shop.app, "POST", "/hooks", headers=lines, body=body).run()).status == 200
    assert shop.moved(before) == {"api.idempotency.reconcile.resolved.count": 1}
    assert shop.told(Resolved)[0].by is Actor.WEBHOOK


async def test_store_failure_in_a_phase_increments_the_error_counter(asgi_shop: AsgiShop) -> None:
    # R205
    shop = asgi_shop
    async with shop.serving():
        shop.breaks = True
        before = shop.counts()
        assert await shop.send("/phased", KEY) == 503
    moved = shop.moved(before)
    assert moved.pop("api.idempotency.reserve.created.count") == 1
    assert moved.keys() == {"api.idempotency.store.error.count"}
    assert shop.told(StoreFailed)[0].where == "phase"


async def test_undeliverable_message_increments_the_failed_counter(asgi_shop: AsgiShop) -> None:
    # R210, R216
    async with asgi_shop.serving():
        await asgi_shop.send("/local", KEY, emit="unloved")
        before = asgi_shop.counts()
        await asgi_shop.work("relay")
        assert asgi_shop.moved(before) == {"api.idempotency.reconcile.failed.count": 1}
    (buried,) = asgi_shop.told(Buried)
    assert (buried.about.operation, buried.attempts, buried.why) == ("parcel", 1, "buried")


async def test_deferred_call_of_unknown_outcome_increments_the_scheduled_counter(shop: Any) -> None:
    # R208
    async with shop.serving():
        await shop.send("/outbox", KEY, item="unloved")
        before = shop.counts()
        await shop.work("relay")
        assert shop.moved(before) == {"api.idempotency.reconcile.scheduled.count": 1}


async def test_successful_delivery_increments_no_counter(shop: Any) -> None:
    async with shop.serving():
        await shop.send("/outbox", KEY)
        before = shop.counts()
        await shop.work("relay")
        assert shop.moved(before) == {}
    assert len(shop.told(Delivered)) == 1


async def test_failing_observer_does_not_change_responses(make: Any, caplog: pytest.LogCaptureFixture) -> None:
    def fails(_: object) -> None:
        raise ValueError(KEY)

    shop = make(fails)
    async with shop.serving():
        assert [await shop.send("/local", KEY) for _ in range(2)] == [201, 201]
    assert len([one for one in caplog.records if "observer" in one.getMessage()]) == 1
    assert KEY not in caplog.text
    assert shop.counts()["api.idempotency.reserve.replay.count"] == 1


async def test_no_event_shows_a_key(shop: Any) -> None:
    # R195
    async with shop.serving():
        for item in ("tea", "tea", "coffee"):
            await shop.send("/local", KEY, item=item)
        await shop.send("/phased", f"{KEY}-2")
    assert [type(one) for one in shop.events if isinstance(one, Replayed | Refused)] == [Replayed, Refused]
    assert KEY not in repr(shop.events)


async def test_sweeper_reports_a_lease_too_short_for_its_operation(asgi_shop: AsgiShop) -> None:
    # R149
    shop = asgi_shop
    async with shop.serving():
        for number in range(20):
            await shop.send("/local", f"{KEY}-{number}")
        await shop.work("sweeper")
        assert shop.told(ShortLease) == []
        shop.execute(f"UPDATE {shop.records} SET last_run_at = finished_at - 3600000000")
        await shop.work("sweeper")
    (short,) = shop.told(ShortLease)
    assert (short.operation, short.p99 >= 3600_000_000) == ("local", True)
    assert "api_idempotency_short_lease_total" in shop.metrics.page_blocking(Stranger()).decode()


async def test_completer_resumes_a_request_of_a_dead_owner(store: Any) -> None:
    # R206
    shop = AsgiShop(store("asyncpg"), complete=True)
    async with shop.serving(), under_way(shop, "/phased"):
        shop.owner_is_long_gone()
        before = shop.counts()
        completing = asyncio.create_task(shop.work("completer"))
        await asyncio.to_thread(shop.entered.acquire, timeout=PATIENCE)
        assert shop.moved(before) == {"api.idempotency.zombie_key.count": 1}
        shop.go_on.set()
        await completing
    first, second = shop.told(Reserved)
    assert [(one.how, one.resumed) for one in (first, second)] == [(How.NEW, False), (How.TAKEN_OVER, True)]
    assert first.about.incarnation == second.about.incarnation
