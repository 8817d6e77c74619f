"""The inputs of metrics besides events: gauges of the store, transaction times, and counts per tenant.

The gauges are read from the store when metrics are collected: no event has these numbers. Counts per tenant use bounded
memory: the most frequent tenants have their own series, the others share one.

Only observed drivers are patched, and only their `run`; the engine still sees the rest of the driver. The begin and the
commit of a LOCAL handler are not in `run`; `Reserved.seconds` and `Settled.settling` have those times.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Protocol, runtime_checkable

from oncekey.core.errors import StoreError
from oncekey.core.flow import Flow, Transaction, adrive, drive
from oncekey.core.model import SECOND, Code
from oncekey.observe.events import Asked, Event, Notify, Refused, Replayed
from oncekey.ops.tasks import NAMES

if TYPE_CHECKING:
    from oncekey.ops.stats import Backlog
    from oncekey.ports.store import AsyncDriver, Driver, Store


class Engine(Protocol):
    """The required interface of a blocking engine."""

    store: Store
    driver: Driver


class AsyncEngine(Protocol):
    """The required interface of an asyncio engine."""

    store: Store
    driver: AsyncDriver


class Engines(Protocol):
    """The required interface of `Once`: the engine of the running event loop, and the one for threads."""

    def asynchronous(self) -> AsyncEngine:
        """The engine of the running event loop."""

    def blocking(self) -> Engine:
        """The engine for threads."""


@runtime_checkable
class MetricsPage(Protocol):
    """An observer that has a page for a metrics collector."""

    @property
    def content_type(self) -> str:
        """The media type of the page."""

    async def page(self, once: Engines) -> bytes:
        """The current page."""


@dataclass(frozen=True, slots=True)
class Gauges:
    """Counts of each kind, and the age of the oldest in seconds."""

    records: Mapping[str, int]
    """Unfinished records by state, and `finished` ones: an estimate where counting them would read them all."""
    waiting: Mapping[str, int]
    """Work that waits for a worker or an operator: unknown, stale, resumable, expired, parcels_due, dead_letters."""
    oldest: Mapping[str, float]
    """How long the oldest of each has waited; 0 if there is none."""
    workers: Mapping[str, int]
    """Live workers, by task."""


def gauges_of(store: Store) -> Flow[Gauges | None]:
    """The gauges; None for an in-memory store."""
    if store.operate is None or store.upkeep is None:
        return None
    backlog: Backlog = yield from store.operate.backlog()
    roll = yield from store.upkeep.workers()
    living = [one for one in roll.workers if one.is_alive(roll.now)]
    return Gauges(
        records=backlog.records,
        waiting={one.what: one.count for one in backlog.waiting},
        oldest={
            one.what: 0.0 if one.oldest is None else max(0, backlog.now - one.oldest) / SECOND
            for one in backlog.waiting
        },
        workers={task: sum(task in one.tasks for one in living) for task in NAMES},  # including those without a worker
    )


async def look(engines: Engines) -> Gauges | None:
    """Read the gauges under asyncio."""
    engine = engines.asynchronous()
    return await adrive(gauges_of(engine.store), engine.driver.run)


def look_blocking(engines: Engines) -> Gauges | None:
    """Read the gauges from a thread."""
    engine = engines.blocking()
    return drive(gauges_of(engine.store), engine.driver.run)


OTHERS: Final = "other"
"""The series of all tenants without their own; a tenant with this name is also counted there."""


class Tenants:
    """A limited number of tenants by name. A new tenant replaces the least frequent one when it is seen more often.

    A replaced tenant adds its count to the shared series, so the sum is always right. The same number of tenants
    without a series are counted as well: each further newcomer lowers all of their counts by one, and a tenant at 0 is
    dropped (Misra and Gries). So a tenant with a real share of the events is never missed, however many others exist.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._named: Counter[str] = Counter()
        self._waiting: Counter[str] = Counter()
        self._others = 0
        self._lock = threading.Lock()

    def add(self, tenant: str) -> None:
        """Count one event of a tenant."""
        with self._lock:
            if tenant in self._named or (len(self._named) < self._most and tenant != OTHERS):
                self._named[tenant] += 1
                return
            self._others += 1
            if self._most and tenant != OTHERS:
                self._wait(tenant)

    def _wait(self, tenant: str) -> None:
        waiting = self._waiting
        if tenant not in waiting and len(waiting) >= self._most:
            waiting.subtract(dict.fromkeys(waiting, 1))
            self._waiting = +waiting
            return
        waiting[tenant] += 1
        least = min(self._named, key=lambda name: self._named[name])
        if waiting[tenant] > self._named[least]:
            self._others += self._named.pop(least) - waiting[tenant]
            self._named[tenant] = waiting.pop(tenant)

    def counts(self) -> dict[str, int]:
        """Events by tenant, and those of all others."""
        with self._lock:
            return {**self._named, OTHERS: self._others} if self._others else dict(self._named)


class PerTenant:
    """The counts for each tenant: keys reused with another payload, and retried requests."""

    def __init__(self, most: int) -> None:
        self.misuse, self.duplicates = Tenants(most), Tenants(most)

    def __call__(self, event: Event) -> None:
        """Count an event, if it is one of those."""
        if isinstance(event, Replayed) or (isinstance(event, Refused) and event.code is Code.IN_PROGRESS):
            self.duplicates.add(event.about.tenant)
        elif isinstance(event, Refused) and event.code is Code.KEY_REUSED:
            self.misuse.add(event.about.tenant)


def watch(driver: AsyncDriver, notify: Notify) -> None:
    """Report each transaction of an asyncio driver from now on."""
    run = driver.run

    async def timed(transaction: Transaction[Any]) -> Any:  # noqa: ANN401  (what the transaction returns)
        with _measured(transaction.name, notify):
            return await run(transaction)

    setattr(driver, "run", timed)  # noqa: B010  (a method of one object)


def watch_blocking(driver: Driver, notify: Notify) -> None:
    """Report each transaction of a blocking driver from now on."""
    run = driver.run

    def timed(transaction: Transaction[Any]) -> Any:  # noqa: ANN401  (what the transaction returns)
        with _measured(transaction.name, notify):
            return run(transaction)

    setattr(driver, "run", timed)  # noqa: B010


@contextmanager
def _measured(name: str, notify: Notify) -> Iterator[None]:
    began, failed = time.perf_counter(), None
    try:
        yield
    except StoreError as error:
        failed = type(error).__name__
        raise
    finally:
        notify(Asked(name, time.perf_counter() - began, failed))
