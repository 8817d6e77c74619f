"""Events as Prometheus metrics: `Once(..., observers=[Prometheus()])`, and `metrics.asgi(once)` serves them.

The twelve counters have no labels, so all of them are there from the start, at 0. What has labels is beside them: by
operation, by the transaction's name, and by tenant for as many tenants as have a line of their own. Gauges are asked of
the store when the page is.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Final, assert_never

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4
from prometheus_client.metrics_core import CounterMetricFamily

from oncekey.core.errors import StoreError
from oncekey.core.model import SECOND, Code
from oncekey.observe.events import (
    MEANING,
    Asked,
    Bypassed,
    Count,
    Refused,
    Replayed,
    Reserved,
    Resolved,
    Settled,
    ShortLease,
    counted,
)
from oncekey.observe.gauges import look, look_blocking
from oncekey.observe.tenants import Tenants

if TYPE_CHECKING:
    from wsgiref.types import StartResponse, WSGIEnvironment

    from oncekey.observe.events import Event
    from oncekey.observe.gauges import Engines, Gauges

TENANTS: Final = 50
QUICK: Final = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10)
LONG: Final = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300)
SLOW: Final = (0.1, 1, 5, 15, 60, 300, 900, 3600, 6 * 3600, 24 * 3600)
"""Buckets in seconds: of the store, of operations, and of what waits for somebody."""


class Prometheus:
    """An observer that counts in a registry: its own, or the one that the application serves anyway.

    `tenants` is how many tenants have lines of their own; 0 names none.
    """

    def __init__(self, registry: CollectorRegistry | None = None, *, tenants: int = TENANTS) -> None:
        self.registry = own = CollectorRegistry() if registry is None else registry
        self._counters = {count: Counter(_name(count), MEANING[count], registry=own) for count in Count}
        self._requests = _counter(own, "requests", "Requests by what became of them", "operation", "outcome")
        self._settled = _counter(own, "settled", "Operations by where they ended", "operation", "state", "outcome")
        self._short = _counter(own, "short_lease", "Warnings that a lease is less than twice the p99", "operation")
        self._operation = _histogram(own, "operation", "From the claim to the settlement", LONG, "operation")
        self._claim = _histogram(own, "claim", "The claim of a request", QUICK, "operation")
        self._store = _histogram(own, "store", "Transactions of the store", QUICK, "transaction")
        self._recovery = _histogram(own, "recovery", "From the run that failed to its recovery", SLOW, "by")
        self._misuse, self._duplicates = Tenants(tenants), Tenants(tenants)
        own.register(_PerTenant({"tenant_key_misuse": self._misuse, "tenant_duplicates": self._duplicates}))
        self._records = _gauge(own, "records", "Records by state; of finished ones an estimate", "state")
        self._waiting = _gauge(own, "waiting", "What waits for somebody", "what")
        self._oldest = _gauge(own, "waiting_oldest_seconds", "How long the oldest of it waits", "what")
        self._workers = _gauge(own, "workers", "Living workers by task", "task")
        self._dead = _gauge(own, "dlq_depth", "Dead letters")
        self._lag = _gauge(own, "outbox_lag_seconds", "How long the oldest parcel is overdue")
        self._up = _gauge(own, "store_up", "Whether the store answered when this page was asked for")

    def __call__(self, event: Event) -> None:
        """Count an event."""
        count = counted(event)
        if count is not None:
            self._counters[count[0]].inc(count[1])
        match event:
            case Reserved() | Replayed() | Refused() | Bypassed():
                self._request(event)
            case Settled(about=about):
                state, outcome = event.to or "none", event.outcome or ""
                self._settled.labels(about.operation, str(state), str(outcome)).inc()
                self._operation.labels(about.operation).observe(event.handler + event.settling)
            case Resolved():
                self._recovery.labels(event.by.value).observe(event.after / SECOND)
            case ShortLease():
                self._short.labels(event.operation).inc()
            case Asked():
                self._store.labels(event.name).observe(event.seconds)
            case _:
                pass  # counted above, if it is

    def _request(self, event: Reserved | Replayed | Refused | Bypassed) -> None:
        about = event.about
        match event:
            case Reserved():
                self._requests.labels(about.operation, event.how.value).inc()
                self._claim.labels(about.operation).observe(event.seconds)
                if event.after is not None:
                    self._recovery.labels("completer" if event.resumed else "requester").observe(event.after / SECOND)
            case Replayed():
                self._requests.labels(about.operation, "replayed").inc()
                self._duplicates.add(about.tenant)
            case Refused(code=code):
                self._requests.labels(about.operation, code.value).inc()
                if code is Code.KEY_REUSED:
                    self._misuse.add(about.tenant)
                elif code is Code.IN_PROGRESS:
                    self._duplicates.add(about.tenant)
            case Bypassed():
                self._requests.labels(about.operation, "bypassed").inc()
            case _:
                assert_never(event)

    # The page

    async def page(self, once: Engines) -> bytes:
        """The metrics as text, with gauges of this moment."""
        try:
            self._show(await look(once), up=True)
        except StoreError:
            self._show(None, up=False)
        return generate_latest(self.registry)

    def page_blocking(self, once: Engines) -> bytes:
        """`page` for threads."""
        try:
            self._show(look_blocking(once), up=True)
        except StoreError:
            self._show(None, up=False)
        return generate_latest(self.registry)

    def asgi(self, once: Engines) -> Callable[..., Awaitable[None]]:
        """The page as an ASGI application: `app.mount("/metrics", metrics.asgi(once))`."""

        async def serve(_scope: Any, _receive: Any, send: Any) -> None:  # noqa: ANN401  (ASGI's own)
            body = await self.page(once)
            headers = [(b"content-type", CONTENT_TYPE_PLAIN_0_0_4.encode()), (b"content-length", b"%d" % len(body))]
            await send({"type": "http.response.start", "status": 200, "headers": headers})
            await send({"type": "http.response.body", "body": body})

        return serve

    def wsgi(self, once: Engines) -> Callable[[WSGIEnvironment, StartResponse], Iterable[bytes]]:
        """The page as a WSGI application."""

        def serve(_environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
            body = self.page_blocking(once)
            start_response("200 OK", [("Content-Type", CONTENT_TYPE_PLAIN_0_0_4), ("Content-Length", str(len(body)))])
            return [body]

        return serve

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


class _PerTenant:
    """The counts by tenant, as they are when the page is asked for."""

    def __init__(self, counts: Mapping[str, Tenants]) -> None:
        self._counts = counts

    def describe(self) -> Iterator[CounterMetricFamily]:
        """Its families, which a registry compares with others by name."""
        for name in self._counts:
            yield CounterMetricFamily(f"{PREFIX}{name}", f"{name.replace('_', ' ').capitalize()}", labels=["tenant"])

    def collect(self) -> Iterator[CounterMetricFamily]:
        """The families with their lines."""
        for family, tenants in zip(self.describe(), self._counts.values(), strict=True):
            for tenant, count in tenants.counts().items():
                family.add_metric([tenant], count)
            yield family


PREFIX: Final = "api_idempotency_"


def _name(count: Count) -> str:
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
