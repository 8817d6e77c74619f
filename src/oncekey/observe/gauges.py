"""The state of the store, read when metrics are collected: what gauges show and no event contains."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Protocol, runtime_checkable

from oncekey.core.model import SECOND
from oncekey.flow import adrive, drive

if TYPE_CHECKING:
    from collections.abc import Mapping

    from oncekey.core.census import Standing
    from oncekey.flow import Flow
    from oncekey.ports import AsyncDriver, Driver, Store


TASKS: Final = ("relay", "completer", "sweeper", "reconciler", "reaper")
"""The tasks of workers: a task without a worker is shown, too."""


class Engine(Protocol):
    """The part of a blocking engine that is needed."""

    store: Store
    driver: Driver


class AsyncEngine(Protocol):
    """The part of an asyncio engine that is needed."""

    store: Store
    driver: AsyncDriver


class Engines(Protocol):
    """The part of `Once` that is needed: the engine of the running event loop, and the one for threads."""

    def asynchronous(self) -> AsyncEngine:
        """The engine of the running event loop."""

    def blocking(self) -> Engine:
        """The engine for threads."""


@runtime_checkable
class Page(Protocol):
    """An observer that has a page for a metrics collector."""

    @property
    def content_type(self) -> str:
        """The media type of the page."""

    async def page(self, once: Engines) -> bytes:
        """The page as it is now."""


@dataclass(frozen=True, slots=True)
class Gauges:
    """How many of each kind there are, and how long the oldest has been there, in seconds."""

    records: Mapping[str, int]
    """Unfinished records by state, and `finished` ones: an estimate where counting them would read them all."""
    waiting: Mapping[str, int]
    """What waits for a worker or an operator: unknown, stale, resumable, expired, parcels_due, dead_letters."""
    oldest: Mapping[str, float]
    """How long the oldest of each has waited; 0 if there is none."""
    workers: Mapping[str, int]
    """Living workers, by task."""


def gauges_of(store: Store) -> Flow[Gauges | None]:
    """The gauges; None for a store in the memory of its process."""
    if store.operate is None or store.upkeep is None:
        return None
    standing: Standing = yield from store.operate.standing()
    roll = yield from store.upkeep.workers()
    living = [one for one in roll.workers if one.is_alive(roll.now)]
    return Gauges(
        records=standing.records,
        waiting={one.what: one.count for one in standing.waiting},
        oldest={
            one.what: 0.0 if one.oldest is None else max(0, standing.now - one.oldest) / SECOND
            for one in standing.waiting
        },
        workers={task: sum(task in one.tasks for one in living) for task in TASKS},
    )


async def look(engines: Engines) -> Gauges | None:
    """Read the gauges under asyncio."""
    engine = engines.asynchronous()
    return await adrive(gauges_of(engine.store), engine.driver.run)


def look_blocking(engines: Engines) -> Gauges | None:
    """Read the gauges from a thread."""
    engine = engines.blocking()
    return drive(gauges_of(engine.store), engine.driver.run)
