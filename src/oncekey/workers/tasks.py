"""Which tasks an application needs: each is added here by one line."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from oncekey.core.errors import ConfigurationError
from oncekey.workers.relay import CONCURRENCY, Relay

if TYPE_CHECKING:
    from oncekey.core.policy import Policy
    from oncekey.engine.shell import AsyncEngine
    from oncekey.topics import Topics
    from oncekey.workers.service import Task

NO_OUTBOX = "topics need a store with an outbox: SQLite or PostgreSQL"


class Application(Protocol):
    """What a worker needs of `Once`."""

    topics: Topics
    policy: Policy

    def asynchronous(self) -> AsyncEngine:
        """The engine of the running event loop."""


def tasks_for(
    once: Application, *, topics: tuple[str, ...] | None = None, concurrency: int = CONCURRENCY
) -> list[Task]:
    """The tasks of an application; `topics` are those that its relay works on, if not all."""
    tasks: list[Task] = []
    if once.topics.names:
        tasks.append(_relay(once, topics, concurrency))
    return tasks


def _relay(once: Application, only: tuple[str, ...] | None, concurrency: int) -> Relay:
    for name in only or ():
        if name not in once.topics:
            raise ConfigurationError(f"there is no topic {name!r}; there is {', '.join(once.topics.names)}")
    if concurrency < 1:
        raise ConfigurationError(f"concurrency={concurrency}: a relay works on at least one parcel at a time")
    engine = once.asynchronous()
    if engine.store.outbox is None:
        raise ConfigurationError(NO_OUTBOX)
    return Relay(engine.store.outbox, engine.driver.run, once.topics, once.policy, only=only, concurrency=concurrency)
