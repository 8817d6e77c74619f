"""What OpenTelemetry exports: metrics by their dotted names, and spans that tell the story of one request."""

from __future__ import annotations

import asyncio
from typing import Any
from uuid import UUID

from opentelemetry import trace

from observe.shop import EXECUTED, AsgiShop, WsgiShop
from observe.test_counters import KEY, under_way
from oncekey.core.keys import key_digest


def spans(shop: Any) -> dict[str, Any]:
    return {one.name: one for one in shop.exporter.get_finished_spans()}


async def test_metrics_by_their_names(asgi_shop: AsgiShop) -> None:
    # R214, R211
    shop = asgi_shop
    async with shop.serving():
        for item in ("tea", "tea", "coffee"):
            await shop.send("/local", KEY, item=item)
        found = shop.exported()
        assert found["api.idempotency.operation.duration", ("local", "completed", "success")] == 1
        assert found["api.idempotency.requests.count", ("local", "replayed")] == 1
        assert found["api.idempotency.tenant.key_misuse.count", ("acme",)] == 1
        assert found["api.idempotency.tenant.duplicates.count", ("acme",)] == 1
        await shop.send("/inline", f"{KEY}-2")
        assert shop.exported()["api.idempotency.store.duration", ("claim",)] == 1


async def test_opentelemetry_reads_gauges_at_export(store: Any) -> None:
    # R213
    shop = WsgiShop(store("psycopg"))
    async with shop.serving():
        await shop.send("/inline", KEY, does="nothing")
        shop.telemetry.gauges(shop.once)
        found = await asyncio.to_thread(shop.exported)
        assert found["api.idempotency.dlq.depth", ()] == 0
        assert found["api.idempotency.records", ("failed_retryable",)] == 1
        assert found["api.idempotency.workers", ("relay",)] == 0
        assert found["api.idempotency.outbox.lag", ()] == 0


async def test_the_spans_of_a_phased_request(asgi_shop: AsgiShop) -> None:
    shop = asgi_shop
    async with shop.serving():
        with shop.traces.get_tracer("server").start_as_current_span("POST /phased") as server:
            assert await shop.send("/phased", KEY) == 201
    found = spans(shop)
    assert set(found) == {
        "POST /phased",
        "oncekey attempt phased",
        "oncekey claim",
        "oncekey handler phased",
        "oncekey value drawn",
        "oncekey phase noted",
        "oncekey settle",
    }
    story = found.pop("oncekey attempt phased")
    assert {one.context.trace_id for one in found.values()} == {server.get_span_context().trace_id}
    handler = found["oncekey handler phased"]
    for name in ("oncekey claim", "oncekey handler phased", "oncekey settle"):
        assert found[name].parent.span_id == server.get_span_context().span_id
    for name in ("oncekey value drawn", "oncekey phase noted"):
        assert found[name].parent.span_id == handler.context.span_id
        assert handler.start_time <= found[name].start_time <= found[name].end_time <= handler.end_time
    assert handler.attributes["oncekey.key_digest"] == key_digest(KEY)
    # The two traces know of each other.
    assert [link.context.span_id for link in story.links] == [handler.context.span_id]
    assert [link.context.trace_id for link in found["oncekey claim"].links] == [story.context.trace_id]
    ((incarnation,),) = shop.execute(f"SELECT incarnation FROM {shop.records}")
    assert story.context.trace_id == UUID(str(incarnation)).int
    assert KEY not in str([(one.name, one.attributes) for one in found.values()])


async def test_the_spans_of_a_request_behind_wsgi(store: Any) -> None:
    shop = WsgiShop(store("psycopg"))
    async with shop.serving():
        assert await shop.send("/phased", KEY) == 201
    found = spans(shop)
    assert found["oncekey phase noted"].parent.span_id == found["oncekey handler phased"].context.span_id
    assert found["oncekey phase noted"].attributes["oncekey.effects"] == "phased"


async def test_a_handler_that_lost_its_key_ends_its_span(shop: Any) -> None:
    async with shop.serving():
        async with under_way(shop, "/inline"):
            shop.owner_is_long_gone()
            await shop.send("/inline", KEY, does="wait")  # it is unknown from now on
            shop.execute(f"DELETE FROM {shop.records}")
        assert spans(shop)["oncekey handler inline"].end_time is not None
    (settle,) = [one for one in shop.exporter.get_finished_spans() if one.name == "oncekey settle"]
    assert settle.status.status_code is trace.StatusCode.ERROR


async def test_attempts_and_resolution_of_a_record_share_one_trace(asgi_shop: AsgiShop) -> None:
    shop = asgi_shop
    async with shop.serving():
        with shop.traces.get_tracer("server").start_as_current_span("the first"):
            await shop.send("/inline", KEY, does="nothing and doubt")  # it fails provably, then nobody knows
        with shop.traces.get_tracer("server").start_as_current_span("the second"):
            await shop.send("/inline", KEY, does="nothing and doubt")
    shop.asked_about_now()
    shop.resolution = EXECUTED
    await shop.work("reconciler")
    async with shop.serving():
        assert await shop.send("/inline", KEY, does="nothing and doubt") == 200
    told = shop.exporter.get_finished_spans()
    found = {one.name: one for one in told}
    story = found["oncekey resolved"].context.trace_id
    assert [one.name for one in told if one.context.trace_id == story] == [
        "oncekey attempt inline",
        "oncekey attempt inline",
        "oncekey doubted",
        "oncekey resolved",
    ]
    assert found["oncekey doubted"].status.status_code is trace.StatusCode.ERROR
    assert found["oncekey resolved"].attributes["oncekey.by"] == "resolver"
    # Each attempt leads to the trace of its own request, and each claim, also the replay, to the story.
    requests = [found[name].context.trace_id for name in ("the first", "the second")]
    attempts = [one for one in told if one.name == "oncekey attempt inline"]
    assert [one.links[0].context.trace_id for one in attempts] == requests
    claims = [one for one in told if one.name == "oncekey claim"]
    assert [link.context.trace_id for one in claims for link in one.links] == [story] * 3


async def test_parcel_span_links_to_the_trace_of_its_record(asgi_shop: AsgiShop) -> None:
    shop = asgi_shop
    async with shop.serving():
        await shop.send("/outbox", KEY)
        await shop.work("relay")
    found = spans(shop)
    process = found["process transfer"]
    assert process.attributes["messaging.destination.name"] == "transfer"
    assert process.links[0].context.trace_id == found["oncekey attempt outbox"].context.trace_id
    ((version, story, span, flags),) = [one.split("-") for one in shop.traceparents]
    assert (version, int(story, 16), flags) == ("00", process.links[0].context.trace_id, "01")
    assert int(span, 16) == process.links[0].context.span_id


async def test_unsampled_request_exports_no_spans(store: Any) -> None:
    from opentelemetry.sdk.trace.sampling import ALWAYS_OFF, ParentBased

    shop = AsgiShop(store("asyncpg"), sampler=ParentBased(ALWAYS_OFF))
    async with shop.serving():
        await shop.send("/inline", KEY)
    assert shop.exporter.get_finished_spans() == ()


def test_stored_request_keeps_only_its_trace_headers() -> None:
    from oncekey.engine.kept_request import kept_of

    lines = [(b"traceparent", b"00-1-2-01"), (b"tracestate", b"a=b"), (b"authorization", b"secret")]
    assert kept_of(lines, frozenset()) == tuple(lines[:2])
