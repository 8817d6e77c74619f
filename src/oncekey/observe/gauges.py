"""How the store stands, asked when somebody looks: what a gauge shows and no event could tell."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Protocol, runtime_checkable

from oncekey.core.model import SECOND
from oncekey.flow import adrive, drive

if TYPE_CHECKING:
    from collections.abc import Mapping

    from oncekey.flow import Flow
    from oncekey.ops.stats import Standing
    from oncekey.ports import AsyncDriver, Driver, Store


TASKS: Final = ("relay", "completer", "sweeper", "reconciler", "reaper")
"""What workers do: a task that nobody does is shown, too."""


class Engine(Protocol):
    """What is asked, from a thread."""

    store: Store
    driver: Driver


class AsyncEngine(Protocol):
    """What is asked, under asyncio."""

    store: Store
    driver: AsyncDriver


class Engines(Protocol):
    """What is asked of a `Once`: the engine of the running event loop, and the one for threads."""

    def asynchronous(self) -> AsyncEngine:
        """The engine of the running event loop."""

    def blocking(self) -> Engine:
        """The engine for threads."""


@runtime_checkable
class Page(Protocol):
    """An observer that has a page to show to whoever collects metrics."""

    @property
    def content_type(self) -> str:
        """The media type of the page."""

    async def page(self, once: Engines) -> bytes:
        """The page as it is now."""


@dataclass(frozen=True, slots=True)
class Gauges:
    """What there is, and how long the oldest of it has been there, in seconds."""

    records: Mapping[str, int]
    """Unfinished records by state, and `finished` ones: an estimate where counting them would read them all."""
    waiting: Mapping[str, int]
    """What waits for somebody: unknown, stale, resumable, expired, parcels_due, dead_letters."""
    oldest: Mapping[str, float]
    """How long the oldest of each has waited; 0 where nothing does."""
    workers: Mapping[str, int]
    """Living workers, by task."""


def gauges_of(store: Store) -> Flow[Gauges | None]:
    """The gauges; None for a store that lives and dies with its process."""
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
    """Ask under asyncio."""
    engine = engines.asynchronous()
    return await adrive(gauges_of(engine.store), engine.driver.run)


def look_blocking(engines: Engines) -> Gauges | None:
    """Ask from a thread."""
    engine = engines.blocking()
    return drive(gauges_of(engine.store), engine.driver.run)
