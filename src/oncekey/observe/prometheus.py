"""Events as Prometheus metrics: `Once(..., observers=[metrics := Prometheus()])`, and `await metrics.page(once)`.

The twelve counters have no labels, so all of them exist from the start, at 0. Metrics with labels are separate: by
operation, by the transaction's name, and by tenant for the tenants that have their own series. Gauges are read from the
store with each page.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from typing import Final, TypeVar

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.metrics_core import CounterMetricFamily

from oncekey.core.errors import StoreError
from oncekey.observe import events
from oncekey.observe.measuring import Engines, Gauges, PerTenant, Tenants, look, look_blocking

log = logging.getLogger("oncekey")

M = TypeVar("M", Counter, Histogram)

CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"


class Prometheus:
    """An observer that counts in its own registry, or in the one that the application serves.

    `tenants` is how many tenants have their own series; 0 means none.
    """

    content_type: Final = CONTENT_TYPE
    """The media type of the page."""

    def __init__(self, registry: CollectorRegistry | None = None, *, tenants: int = events.TENANTS) -> None:
        self.registry = own = CollectorRegistry() if registry is None else registry
        self._counters = {count: Counter(_name(count), events.MEANING[count], registry=own) for count in events.Count}
        self._requests = _Lines(_counter(own, "requests", "Requests by outcome", "operation", "outcome"))
        self._looks = _counter(own, "lookups", "Queries of the status resource by response", "outcome")
        self._fronts = _counter(own, "fronts", "Queries of the caches before the store by result", "front", "found")
        self._messages = _counter(own, "messages", "Messages to webhooks by response", "source", "status")
        self._beats = _counter(own, "heartbeats", "Heartbeats that workers of this process wrote")
        self._settled = _Lines(
            _counter(own, "settled", "Operations by their final state", "operation", "state", "outcome")
        )
        self._short = _counter(own, "short_lease", "Warnings that a lease is less than twice the p99", "operation")
        self._operation = _Lines(
            _histogram(own, "operation", "Time from the claim to the settlement", events.LONG, "operation")
        )
        self._claim = _Lines(_histogram(own, "claim", "Duration of a request's claim", events.QUICK, "operation"))
        self._store = _Lines(_histogram(own, "store", "Transactions of the store", events.QUICK, "transaction"))
        self._failures = _counter(
            own, "store_failures", "Transactions of the store that failed", "transaction", "error"
        )
        self._recovery = _histogram(own, "recovery", "Time from the failed run to its recovery", events.SLOW, "by")
        self._tenants = each = PerTenant(tenants)
        own.register(_Tenants({"tenant_key_misuse": each.misuse, "tenant_duplicates": each.duplicates}))
        self._records = _gauge(own, "records", "Records by state; finished ones are estimated", "state")
        self._waiting = _gauge(own, "waiting", "Work that waits for a worker or an operator", "what")
        self._oldest = _gauge(own, "waiting_oldest_seconds", "Age of the oldest waiting work", "what")
        self._workers = _gauge(own, "workers", "Live workers by task", "task")
        self._dead = _gauge(own, "dlq_depth", "Dead letters")
        self._lag = _gauge(own, "outbox_lag_seconds", "How long the oldest parcel is overdue")
        self._up = _gauge(own, "store_up", "Whether the store responded when this page was built")

    def __call__(self, event: events.Event) -> None:  # noqa: PLR0912  (one line for each kind of event)
        """Count an event."""
        if type(event) is events.Settled:  # one of two events of nearly every request, and counted nowhere else
            operation = event.about.operation
            self._settled[operation, event.to or "none", event.outcome or ""].inc()
            self._operation[operation,].observe(event.handler + event.settling)
            return
        count, request, recovery = events.counted(event), events.requested(event), events.recovered(event)
        if count is not None:
            self._counters[count[0]].inc(count[1])
        if request is not None:
            self._requests[request].inc()
            self._tenants(event)
        if recovery is not None:
            self._recovery.labels(recovery[0]).observe(recovery[1])
        match event:
            case events.Reserved(about=about):
                self._claim[about.operation,].observe(event.seconds)
            case events.LookedUp():
                self._looks.labels(event.outcome.value).inc()
            case events.Consulted():
                self._fronts.labels(event.front, event.found.value).inc()
            case events.Messaged():
                self._messages.labels(event.source, str(event.status)).inc()
            case events.Beat(leaving=False):
                self._beats.inc()
            case events.ShortLease():
                self._short.labels(event.operation).inc()
            case events.Asked():
                self._store[event.name,].observe(event.seconds)
                if event.failed is not None:
                    self._failures.labels(event.name, event.failed).inc()
            case _:
                pass  # counted above, if at all

    # The page

    async def page(self, once: Engines) -> bytes:
        """The metrics as text, with current gauges."""
        try:
            self._show(await look(once), up=True)
        except StoreError as error:
            log.warning("oncekey: reading the store's gauges failed: %s", error.reason)
            self._show(None, up=False)
        return generate_latest(self.registry)

    def page_blocking(self, once: Engines) -> bytes:
        """Blocking version of `page`."""
        try:
            self._show(look_blocking(once), up=True)
        except StoreError as error:
            log.warning("oncekey: reading the store's gauges failed: %s", error.reason)
            self._show(None, up=False)
        return generate_latest(self.registry)

    def _show(self, gauges: Gauges | None, *, up: bool) -> None:
        self._up.set(up)
        if gauges is None:
            return
        _set(self._records, gauges.records)
        _set(self._waiting, gauges.waiting)
        _set(self._oldest, gauges.oldest)
        _set(self._workers, gauges.workers)
        self._dead.set(gauges.waiting["dead_letters"])
        self._lag.set(gauges.oldest["parcels_due"])


class _Lines(dict[tuple[str, ...], M]):
    """The lines of a metric, by the values of its labels; the library takes a lock to find one."""

    def __init__(self, metric: M) -> None:
        super().__init__()
        self._metric: M = metric

    def __missing__(self, labels: tuple[str, ...]) -> M:
        line: M = self._metric.labels(*labels)
        self[labels] = line
        return line


class _Tenants:
    """The current counts by tenant."""

    def __init__(self, counts: Mapping[str, Tenants]) -> None:
        self._counts = counts

    def describe(self) -> Iterator[CounterMetricFamily]:
        """The families, whose names a registry checks for conflicts."""
        for name in self._counts:
            yield CounterMetricFamily(f"{PREFIX}{name}", f"{name.replace('_', ' ').capitalize()}", labels=["tenant"])

    def collect(self) -> Iterator[CounterMetricFamily]:
        """The families with their lines."""
        for family, tenants in zip(self.describe(), self._counts.values(), strict=True):
            for tenant, count in tenants.counts().items():
                family.add_metric([tenant], count)
            yield family


PREFIX: Final = "api_idempotency_"


def _name(count: events.Count) -> str:
    """The name without `_total`, which the text adds."""
    return count.value.replace(".", "_")


def _counter(registry: CollectorRegistry, name: str, meaning: str, *labels: str) -> Counter:
    return Counter(f"{PREFIX}{name}", meaning, labels, registry=registry)


def _gauge(registry: CollectorRegistry, name: str, meaning: str, *labels: str) -> Gauge:
    return Gauge(f"{PREFIX}{name}", meaning, labels, registry=registry)


def _histogram(
    registry: CollectorRegistry, name: str, meaning: str, buckets: tuple[float, ...], *labels: str
) -> Histogram:
    return Histogram(f"{PREFIX}{name}_duration_seconds", meaning, labels, buckets=buckets, registry=registry)


def _set(gauge: Gauge, values: Mapping[str, float]) -> None:
    for label, value in values.items():
        gauge.labels(label).set(value)
