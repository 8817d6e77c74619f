"""A shop with every kind of effects whose observers are watched, behind ASGI and behind WSGI, on real stores.

Time is the database's own, so what should be long ago is made so by whoever may write into it.
"""

from __future__ import annotations

import asyncio
import json
import sqlite3
import threading
from collections.abc import Iterable
from contextlib import closing
from typing import Any

import httpx
import psycopg
from fastapi import FastAPI, HTTPException, Request
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from prometheus_client.parser import text_string_to_metric_families

from harness.asgi import Caller
from harness.patience import PATIENCE
from oncekey import SINGLE_TENANT, Executed, Message, NotExecutedError, Once, Policy, Question, Undecided
from oncekey.core.model import INLINE, LOCAL, OUTBOX, PHASED
from oncekey.engine.operation import Operation, SyncOperation
from oncekey.observe.events import Count, Event
from oncekey.observe.opentelemetry import OpenTelemetry
from oncekey.observe.prometheus import Prometheus
from oncekey.workers.service import Task
from oncekey.workers.tasks import Wanted, tasks_for

POLICY = Policy(outbox_max_attempts=1, reconcile_max_tries=1)


class ProviderError(Exception):
    """Nobody knows whether it happened."""


class Shop:
    """What handlers do, and who observes them."""

    def __init__(self, url: str, *observers: Any, policy: Policy = POLICY, sampler: Any = None) -> None:
        self.url = url
        self.events: list[Event] = []
        self.metrics = Prometheus(tenants=2)
        self.reader, self.exporter = InMemoryMetricReader(), InMemorySpanExporter()
        self.traces = TracerProvider(sampler)
        self.traces.add_span_processor(SimpleSpanProcessor(self.exporter))
        self.telemetry = OpenTelemetry(
            meter_provider=MeterProvider([self.reader]), tracer_provider=self.traces, tenants=2
        )
        watching = [self.metrics, self.telemetry, self.events.append, *observers]
        self.once = Once(url, policy=policy, migrate=True, observers=watching)
        self.entered = threading.Semaphore(0)
        """Released by each handler that waits."""
        self.go_on = threading.Event()
        self.resolution: Any = Undecided()
        self.stumbles = 1
        self.traceparents: list[str] = []
        self.charged: list[str] = []
        """Downstream keys of calls, of INLINE handlers and of parcels."""
        self.breaks = False
        """Whether the tables are gone when a phased handler has drawn its value."""
        self.once.topic("parcel")(self._deliver)
        self.once.topic("transfer")(self._deliver)

    def _deliver(self, message: Message) -> dict[str, str]:
        self.traceparents.append(message.traceparent)
        self.charged.append(message.downstream_key)
        if message.payload["item"] == "unloved":
            raise ProviderError
        return {"delivered": message.payload["item"]}

    def _resolve(self, _: Question) -> Any:
        return self.resolution

    def _sell(self, order: dict[str, Any]) -> dict[str, str]:
        self._does(order)
        return {"sold": order["item"]}

    def _draw(self, order: dict[str, Any]) -> str:
        if self.breaks:
            self.execute(f"ALTER TABLE {self.records} RENAME TO gone")
        return str(order["item"])

    def _does(self, order: dict[str, Any]) -> None:
        match order.get("does"):
            case "wait":
                self.entered.release()
                assert self.go_on.wait(PATIENCE)
            case "wait and fail":
                self.entered.release()
                assert self.go_on.wait(PATIENCE)
                raise ProviderError
            case "conflict":
                raise HTTPException(409, "sold out")
            case "nothing" if self.stumbles:
                self.stumbles -= 1
                raise NotExecutedError
            case "nothing and doubt":
                self.stumbles -= 1
                raise NotExecutedError if self.stumbles == 0 else ProviderError
            case _:
                pass

    # What was counted

    def counts(self) -> dict[str, float]:
        """The twelve counters, which are all there, as the text of Prometheus and OpenTelemetry's export have them."""
        counts = read(self.metrics.page_blocking(Stranger()).decode())
        exported = self.exported()
        assert counts == {name: exported[name, ()] for name in counts}
        return counts

    def exported(self) -> dict[tuple[str, tuple[Any, ...]], Any]:
        """What OpenTelemetry exports: values of counters and gauges, counts of histograms, by name and attributes."""
        data = self.reader.get_metrics_data()
        assert data is not None
        return {
            (metric.name, tuple((point.attributes or {}).values())): point.value
            if hasattr(point, "value")
            else point.count
            for resource in data.resource_metrics
            for scope in resource.scope_metrics
            for metric in scope.metrics
            for point in metric.data.data_points
        }

    def moved(self, before: dict[str, float]) -> dict[str, float]:
        """Those that have moved since, and by how much."""
        return {name: now - before[name] for name, now in self.counts().items() if now != before[name]}

    def told(self, kind: type) -> list[Any]:
        return [event for event in self.events if isinstance(event, kind)]

    def requests(self) -> dict[tuple[str, ...], float]:
        """Requests by operation and outcome, which both backends know alike."""
        page = self.metrics.page_blocking(Stranger()).decode()
        found = labelled(page, "api_idempotency_requests_total")
        exported = {labels: value for (name, labels), value in self.exported().items() if name == REQUESTS}
        assert found == exported
        return found

    # What only a stranger can do

    def execute(self, sql: str) -> list[Any]:
        if self.url.startswith("sqlite"):
            with closing(sqlite3.connect(self.url.removeprefix("sqlite:///"))) as connection, connection:
                return connection.execute(sql).fetchall()
        with psycopg.connect(plain(self.url), autocommit=True) as connection:
            cursor = connection.execute(sql.encode())
            return cursor.fetchall() if cursor.description else []

    @property
    def records(self) -> str:
        return "oncekey_record" if self.url.startswith("sqlite") else "oncekey.record"

    def owner_is_long_gone(self) -> None:
        """Whoever runs is taken for dead: its lease was over an hour ago."""
        self.execute(f"UPDATE {self.records} SET lease_until = created_at - 3600000000 WHERE state = 'in_progress'")

    def all_is_long_ago(self) -> None:
        """Everything has expired."""
        self.execute(f"UPDATE {self.records} SET expires_at = created_at - 8640000000000")

    def asked_about_now(self) -> None:
        """What is unknown is due to be asked about."""
        table = self.records.replace("oncekey.record", "oncekey.work")
        self.execute(f"UPDATE {table} SET reconcile_after = 1 WHERE reconcile_after IS NOT NULL")

    # Workers

    async def work(self, name: str) -> Any:
        """One look of one of the application's own workers."""
        async with self.once.lifespan():
            task = self._task(name)
            await task.run_once()
            await task.shut_down()
            await task.stop(PATIENCE)
        return task

    def _task(self, name: str) -> Task:
        (task,) = tasks_for(self.once, Wanted(frozenset({name})))
        return task


class Stranger:
    """Engines of nobody: the counters need no store."""

    def blocking(self) -> Any:
        from oncekey.wire import connect

        return connect("memory:")

    asynchronous = blocking


def plain(url: str) -> str:
    return url.replace("postgresql+psycopg://", "postgresql://").replace("postgresql+asyncpg://", "postgresql://")


def read(text: str) -> dict[str, float]:
    """The twelve counters of a page; one that is missing is a KeyError."""
    samples = {
        sample.name: sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if not sample.labels
    }
    return {count.value: samples[f"{count.value.replace('.', '_')}_total"] for count in Count}


REQUESTS = "api.idempotency.requests.count"


def labelled(text: str, name: str) -> dict[tuple[str, ...], float]:
    """The lines of one metric by the values of their labels."""
    return {
        tuple(sample.labels.values()): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name == name
    }


class AsgiShop(Shop):
    """FastAPI. Its requests are made in the test's event loop."""

    def __init__(self, url: str, *observers: Any, complete: bool = False, inline: Any = None, **options: Any) -> None:
        super().__init__(url, *observers, **options)
        self.app = FastAPI(lifespan=self.once.lifespan)
        once = self.once

        @self.app.post("/local", status_code=201)
        @once.protect(effects=LOCAL, operation="local")
        async def local(op: Operation[Any], order: dict[str, Any]) -> dict[str, str]:
            if "emit" in order:
                op.emit("parcel", {"item": order["emit"]})
            return await asyncio.to_thread(self._sell, order)

        @self.app.post("/inline", status_code=201)
        @once.protect(effects=INLINE, operation="inline", **(inline or {}))
        async def charge(op: Operation[Any], order: dict[str, Any]) -> dict[str, str]:
            self.charged.append(op.downstream_key("charge"))
            return await asyncio.to_thread(self._sell, order)

        @self.app.post("/phased", status_code=201)
        @once.protect(effects=PHASED, operation="phased", complete=complete)
        async def phased(op: Operation[Any], order: dict[str, Any]) -> dict[str, str]:
            drawn = await op.value("drawn", lambda: self._draw(order))
            await op.phase("noted", lambda _: None)
            await asyncio.to_thread(self._does, order)
            return {"drawn": drawn}

        @self.app.post("/outbox", status_code=202)
        @once.protect(effects=OUTBOX, operation="outbox")
        async def outbox(op: Operation[Any], order: dict[str, Any]) -> None:
            op.defer("transfer", {"item": order["item"]})

        once.resolver("inline", call="charge")(self._resolve)
        once.install(self.app, tenant=_tenant)

    async def send(self, path: str, key: str, item: str = "tea", **order: Any) -> int:
        """One request; the status of its answer."""
        lines = {"Idempotency-Key": key, "Content-Type": "application/json", "Tenant": "acme"}
        try:
            return await self.ask("POST", path, lines, json.dumps({"item": item, **order}).encode())
        except ProviderError:
            return 500  # what a server would say to an application that raises

    async def ask(self, method: str, path: str, lines: dict[str, str], body: bytes = b"") -> int:
        """Any request; the status of its answer."""
        return (await Caller(self.app, method, path, headers=lines, body=body).run()).status

    def webhook(self, path: str, **settings: Any) -> None:
        self.once.webhook(self.app, path, **settings)

    def serving(self) -> Any:
        return self.once.lifespan(self.app)


def _tenant(request: Request) -> str:
    return request.headers.get("Tenant", "acme")


class WsgiShop(Shop):
    """Plain WSGI. Its requests are made in threads of the test's."""

    def __init__(self, url: str, *observers: Any, inline: Any = None, **options: Any) -> None:
        super().__init__(url, *observers, **options)
        once = self.once

        @once.protect(effects=LOCAL, operation="local")
        def local(environ: Any, start_response: Any) -> Iterable[bytes]:
            return _answer(start_response, self._sell(_order(environ)))

        @once.protect(effects=INLINE, operation="inline", **(inline or {}))
        def charge(environ: Any, start_response: Any) -> Iterable[bytes]:
            return _answer(start_response, self._sell(_order(environ)))

        @once.protect(effects=PHASED, operation="phased", complete=False)
        def phased(environ: Any, start_response: Any, op: SyncOperation[Any]) -> Iterable[bytes]:
            order = _order(environ)
            drawn = op.value("drawn", lambda: self._draw(order))
            op.phase("noted", lambda _: None)
            self._does(order)
            return _answer(start_response, {"drawn": drawn})

        @once.protect(effects=OUTBOX, operation="outbox")
        def outbox(environ: Any, start_response: Any, op: SyncOperation[Any]) -> Iterable[bytes]:
            op.defer("transfer", {"item": _order(environ)["item"]})
            return _answer(start_response, {})

        self.routes = {"/local": local, "/inline": charge, "/phased": phased, "/outbox": outbox}
        self.app = once.wsgi(
            lambda environ, start: self.routes[environ["PATH_INFO"]](environ, start),
            tenant=SINGLE_TENANT,
            status="/idempotency-keys",
        )
        once.resolver("inline", call="charge")(self._resolve)

    async def send(self, path: str, key: str, item: str = "tea", **order: Any) -> int:
        """One request over a socket; the status of its answer."""
        from wsgi.shop import send

        reply = await asyncio.to_thread(send, self.port, path, {"item": item, **order}, key=key)
        return reply.status

    async def ask(self, method: str, path: str, lines: dict[str, str], body: bytes = b"") -> int:
        """Any request over a socket; the status of its answer."""
        url = f"http://127.0.0.1:{self.port}{path}"
        return (await asyncio.to_thread(httpx.request, method, url, headers=lines, content=body)).status_code

    def webhook(self, path: str, **settings: Any) -> None:
        self.routes[path] = self.once.webhook_wsgi(**settings)

    def serving(self) -> Any:
        return _Served(self)


class _Served:
    def __init__(self, shop: WsgiShop) -> None:
        self._shop = shop

    async def __aenter__(self) -> None:
        from wsgi.shop import served

        self._server = served(self._shop.app)
        self._shop.port = self._server.__enter__()

    async def __aexit__(self, *_: object) -> None:
        self._server.__exit__(None, None, None)
        for installation in self._shop.once._threaded.values():
            assert installation.stop(PATIENCE)
        self._shop.once.blocking().close()
        self._shop.once._blocking = None


def _order(environ: Any) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(environ["wsgi.input"].read(int(environ["CONTENT_LENGTH"])))
    return found


def _answer(start_response: Any, said: dict[str, str]) -> Iterable[bytes]:
    start_response("201 Created", [("Content-Type", "application/json")])
    return [json.dumps(said).encode()]


EXECUTED = Executed({"charged": "tea"})
