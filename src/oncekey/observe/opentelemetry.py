"""Events as OpenTelemetry metrics and spans: `Once(..., observers=[OpenTelemetry()])`.

Metrics have the names of `Count`, with their dots. An event is reported when its subject has ended, so spans are
created with the times in the event; only the handler's span is open while its steps are reported, because it is their
parent. The parent of all spans is the span that was current when the request arrived. Keys are digests here, too.

One request may span hours and processes: a retry, a resume, a reconciliation. All of them have one incarnation, which
has as many bits as a trace id. So each incarnation has its own trace, its story: the trace id is derived from the
record, and nothing is stored for it. The story contains the attempts, each with a link to the trace of its own request,
and every action of workers and operators; and each claim links to its story.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Final, assert_never

from opentelemetry import metrics, trace
from opentelemetry.metrics import CallbackOptions, Observation
from opentelemetry.trace import Link, NonRecordingSpan, Span, SpanContext, SpanKind, StatusCode, TraceFlags, Tracer

from oncekey.core.errors import StoreError
from oncekey.core.model import Effects, EntryKind, State
from oncekey.observe import events
from oncekey.observe.logs import fields_of
from oncekey.observe.measuring import Engines, Gauges, PerTenant, Tenants, look_blocking

if TYPE_CHECKING:
    from opentelemetry.util.types import AttributeValue


log = logging.getLogger("oncekey")

SCOPE: Final = "oncekey"
PREFIX: Final = "api.idempotency."
UNDER_WAY: Final = 10_000
"""The maximum number of running operations with an open span; a dropped span is never exported."""
FRESH: Final = 1.0
"""Seconds for which a reading of the gauges is reused: several instruments are collected at once."""


class OpenTelemetry:
    """An observer that counts and traces with the given providers, or with the global ones.

    `tenants` is how many tenants have their own series. `gauges` needs `once.blocking()`.
    """

    def __init__(
        self,
        *,
        meter_provider: metrics.MeterProvider | None = None,
        tracer_provider: trace.TracerProvider | None = None,
        tenants: int = events.TENANTS,
    ) -> None:
        self._meter = meter = metrics.get_meter(SCOPE, meter_provider=meter_provider)
        self._spans = Spans(trace.get_tracer(SCOPE, tracer_provider=tracer_provider))
        self._counters = {one: meter.create_counter(one.value, "{event}", events.MEANING[one]) for one in events.Count}
        for counter in self._counters.values():
            counter.add(0)  # it exists from the start
        self._requests = meter.create_counter(f"{PREFIX}requests.count", "{request}", "Requests by their outcome")
        self._looks = meter.create_counter(f"{PREFIX}lookups.count", "{request}", "Queries of the status resource")
        self._fronts = meter.create_counter(
            f"{PREFIX}fronts.count", "{question}", ("Queries of the caches before the store")
        )
        self._messages = meter.create_counter(f"{PREFIX}messages.count", "{message}", "Messages to webhooks")
        self._beats = meter.create_counter(f"{PREFIX}heartbeats.count", "{beat}", "Heartbeats of workers")
        self._short = meter.create_counter(f"{PREFIX}short_lease.count", "{warning}", "Leases below twice the p99")
        self._operation = self._histogram("operation", "Time from the claim to the settlement", events.LONG)
        self._store = self._histogram("store", "Transactions of the store", events.QUICK)
        self._recovery = self._histogram("recovery", "Time from the failed run to its recovery", events.SLOW)
        self._tenants = each = PerTenant(tenants)
        for name, counts in (("key_misuse", each.misuse), ("duplicates", each.duplicates)):
            meter.create_observable_counter(f"{PREFIX}tenant.{name}.count", [_lines(counts)], "{request}")

    def _histogram(self, name: str, meaning: str, buckets: tuple[float, ...]) -> metrics.Histogram:
        return self._meter.create_histogram(
            f"{PREFIX}{name}.duration", "s", meaning, explicit_bucket_boundaries_advisory=buckets
        )

    def __call__(self, event: events.Event) -> None:
        """Count an event, and trace it."""
        count, request, recovery = events.counted(event), events.requested(event), events.recovered(event)
        if count is not None:
            self._counters[count[0]].add(count[1])
        if request is not None:
            self._requests.add(1, {"oncekey.operation": request[0], "oncekey.outcome": request[1]})
            self._tenants(event)
        if recovery is not None:
            self._recovery.record(recovery[1], {"oncekey.by": recovery[0]})
        self._spans(event)
        match event:
            case events.LookedUp():
                self._looks.add(1, {"oncekey.outcome": event.outcome.value})
            case events.Consulted():
                self._fronts.add(1, {"oncekey.front": event.front, "oncekey.found": event.found.value})
            case events.Messaged():
                self._messages.add(1, {"oncekey.source": event.source, "http.response.status_code": event.status})
            case events.Beat(leaving=False):
                self._beats.add(1)
            case events.Settled(about=about):
                known = {"oncekey.operation": about.operation, "oncekey.state": str(event.to or "none")}
                if event.outcome is not None:
                    known["oncekey.outcome"] = event.outcome.value
                self._operation.record(event.handler + event.settling, known)
            case events.ShortLease():
                self._short.add(1, {"oncekey.operation": event.operation})
            case events.Asked():
                failed = {} if event.failed is None else {"error.type": event.failed}
                self._store.record(event.seconds, {"db.operation.name": event.name, **failed})
            case _:
                pass  # counted and traced above, if at all

    def gauges(self, once: Engines) -> None:
        """Also export the store's gauges: the exporter's thread reads them at each collection."""
        standing = _Standing(once)
        shown: dict[str, tuple[str, str, Callable[[Gauges], Mapping[str, float]]]] = {
            "records": ("{record}", "oncekey.state", lambda one: one.records),
            "waiting": ("{record}", "oncekey.what", lambda one: one.waiting),
            "waiting.oldest": ("s", "oncekey.what", lambda one: one.oldest),
            "workers": ("{worker}", "oncekey.task", lambda one: one.workers),
            "dlq.depth": ("{parcel}", "", lambda one: {"": one.waiting["dead_letters"]}),
            "outbox.lag": ("s", "", lambda one: {"": one.oldest["parcels_due"]}),
        }
        for name, (unit, label, values) in shown.items():
            self._meter.create_observable_gauge(f"{PREFIX}{name}", [standing.reading(label, values)], unit)


def _lines(counts: Tenants) -> Callable[[CallbackOptions], Iterable[Observation]]:
    def read(_: CallbackOptions) -> Iterable[Observation]:
        return [Observation(count, {"oncekey.tenant": tenant}) for tenant, count in counts.counts().items()]

    return read


class _Standing:
    """The store's gauges, read once for all instruments of one collection."""

    def __init__(self, once: Engines) -> None:
        self._once = once
        self._asked = -FRESH
        self._gauges: Gauges | None = None
        self._lock = threading.Lock()

    def reading(
        self, label: str, values: Callable[[Gauges], Mapping[str, float]]
    ) -> Callable[[CallbackOptions], Iterable[Observation]]:
        def read(_: CallbackOptions) -> Iterable[Observation]:
            gauges = self._now()
            shown = {} if gauges is None else values(gauges)
            return [Observation(value, {label: name} if label else {}) for name, value in shown.items()]

        return read

    def _now(self) -> Gauges | None:
        with self._lock:
            if time.monotonic() - self._asked >= FRESH:
                try:
                    self._gauges = look_blocking(self._once)
                except StoreError as error:
                    log.warning("oncekey: reading the store's gauges failed: %s", error.reason)
                    self._gauges = None  # no value is better than a wrong one
                self._asked = time.monotonic()
            return self._gauges


# Traces


class Spans:
    """Creates spans from events: claim, handler with its steps, settlement, and moves by workers and operators."""

    def __init__(self, tracer: Tracer, clock: Callable[[], int] = time.time_ns) -> None:
        self._tracer = tracer
        self._clock = clock
        self._handlers: OrderedDict[int, Span] = OrderedDict()

    def __call__(self, event: events.Event) -> None:
        """Create the spans of an event, if it has any."""
        now = self._clock()
        match event:
            case events.Reserved(about=about):
                self._span("oncekey claim", event, now - _nanos(event.seconds), now, links=[Link(story_of(about))])
                handler = self._start(f"oncekey handler {about.operation}", _known(about), now)
                self._handlers[id(about)] = handler
                if len(self._handlers) > UNDER_WAY:
                    self._handlers.popitem(last=False)
                self._attempt(event, handler.get_span_context(), now)
            case events.Replayed() | events.Refused():
                links = [Link(story_of(event.about))] if isinstance(event, events.Replayed) else []
                self._span("oncekey claim", event, now - _nanos(event.seconds), now, links=links)
            case events.Stepped():
                self._step(event, now)
            case events.Settled(about=about) | events.Unsettled(about=about):
                ended, running = now - _nanos(event.settling), self._handlers.pop(id(about), None)
                if running is not None:
                    running.end(ended)
                self._span("oncekey settle", event, ended, now, failed=isinstance(event, events.Unsettled))
            case events.Delivered() | events.Buried():
                attributes = {
                    "messaging.system": SCOPE,
                    "messaging.destination.name": event.about.operation,
                    "messaging.operation.type": "process",
                }
                name, bad = f"process {event.about.operation}", isinstance(event, events.Buried)
                links = [Link(story_of(event.about))]
                self._span(name, event, now, now, kind=SpanKind.CONSUMER, more=attributes, links=links, failed=bad)
            case (
                events.Swept()
                | events.Doubted()
                | events.Resolved()
                | events.GivenUp()
                | events.Contradicted()
                | events.Operated()
            ):
                bad = not isinstance(event, events.Resolved | events.Operated)
                name, here = f"oncekey {fields_of(event)['event']}", trace.get_current_span().get_span_context()
                links = [Link(here)] if here.is_valid else []
                story = NonRecordingSpan(story_of(event.about))
                self._span(name, event, now, now, parent=story, links=links, failed=bad)
            case events.Bypassed() | events.TurnedAway() | events.Messaged():
                # An error of the sender is not a failure of this server.
                bad = (
                    event.status >= _OURS if isinstance(event, events.Messaged) else isinstance(event, events.Bypassed)
                )
                self._span(f"oncekey {fields_of(event)['event']}", event, now, now, failed=bad)
            case events.LookedUp():
                self._span("oncekey looked_up", event, now - _nanos(event.seconds), now)
            case (
                events.Keyless()
                | events.Reaped()
                | events.ShortLease()
                | events.Beat()
                | events.Asked()
                | events.StoreFailed()
                | events.Consulted()
            ):
                pass  # counted by metrics; it belongs to no request
            case _:
                assert_never(event)

    def _attempt(self, event: events.Reserved, here: SpanContext, now: int) -> None:
        """Add an attempt to the story; a first attempt that ends with its commit needs no story."""
        if event.how is events.How.NEW and event.about.effects is Effects.LOCAL:
            return
        story = NonRecordingSpan(story_of(event.about, here.trace_flags))
        self._span(f"oncekey attempt {event.about.operation}", event, now, now, parent=story, links=[Link(here)])

    def _step(self, event: events.Stepped, now: int) -> None:
        handler = self._handlers.get(id(event.about))
        kind = SpanKind.CLIENT if event.kind is EntryKind.CALL and not event.recalled else SpanKind.INTERNAL
        more = {} if event.error is None else {"error.type": event.error}
        began, name = now - _nanos(event.seconds), f"oncekey {event.kind} {event.name}"
        self._span(name, event, began, now, kind=kind, more=more, parent=handler, failed=event.error is not None)

    def _span(
        self,
        name: str,
        event: events.Event,
        began: int,
        ended: int,
        *,
        kind: SpanKind = SpanKind.INTERNAL,
        more: Mapping[str, AttributeValue] | None = None,
        parent: Span | None = None,
        links: Sequence[Link] = (),
        failed: bool = False,
    ) -> None:
        attributes = {f"oncekey.{field}": value for field, value in fields_of(event).items() if field != "seconds"}
        span = self._start(name, {**attributes, **(more or {})}, began, kind=kind, parent=parent, links=links)
        if failed:
            span.set_status(StatusCode.ERROR)
        span.end(ended)

    def _start(
        self,
        name: str,
        attributes: Mapping[str, AttributeValue],
        began: int,
        *,
        kind: SpanKind = SpanKind.INTERNAL,
        parent: Span | None = None,
        links: Sequence[Link] = (),
    ) -> Span:
        context = None if parent is None else trace.set_span_in_context(parent)
        return self._tracer.start_span(name, context, kind, attributes, links, began)


_OURS: Final = 500
SAMPLED: Final = TraceFlags(TraceFlags.SAMPLED)


def story_of(about: events.About, flags: TraceFlags = SAMPLED) -> SpanContext:
    """The trace of one incarnation of a key, and its root span, which is never exported."""
    number = about.incarnation.int
    return SpanContext(number, number & 0xFFFF_FFFF_FFFF_FFFF, is_remote=True, trace_flags=flags)


def _known(about: events.About) -> dict[str, AttributeValue]:
    known = {"oncekey.operation": about.operation, "oncekey.tenant": about.tenant}
    return {**known, "oncekey.key_digest": about.key_digest, "oncekey.state": State.IN_PROGRESS.value}


def _nanos(seconds: float) -> int:
    return round(seconds * 1_000_000_000)
