"""The sweeper and the reaper of a store, ready to be run by a service."""

from __future__ import annotations

from typing import TYPE_CHECKING

from oncekey.workers.reaper import Reaper
from oncekey.workers.sweeper import Sweeper

if TYPE_CHECKING:
    from collections.abc import Callable

    from oncekey.core.policy import Policy
    from oncekey.engine.shell import AsyncEngine
    from oncekey.observe.events import Notify
    from oncekey.workers.service import Task


def upkeep_tasks(
    engine: AsyncEngine, policy: Policy, *, healthy: Callable[[], bool] = lambda: True, notify: Notify | None = None
) -> list[Task]:
    """Both tasks, each with a watch of its own; none for a store that has no upkeep.

    `healthy` returns whether this process can renew its own leases: where it serves requests, its breaker knows.
    """
    store, run = engine.store, engine.driver.run
    if store.upkeep is None:
        return []
    return [
        Sweeper(store.upkeep, run, policy, healthy=healthy, notify=notify),
        Reaper(store.upkeep, store.audit, run, policy, notify=notify),
    ]
