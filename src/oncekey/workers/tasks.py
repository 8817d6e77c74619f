"""Which tasks an application needs; each task is one line here."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, Protocol

from oncekey.core.errors import ConfigurationError
from oncekey.core.model import Effects
from oncekey.workers.completer import CompletedApplication, Completer
from oncekey.workers.declared import inline_calls_of
from oncekey.workers.presence import Presence
from oncekey.workers.reconciler import Reconciler
from oncekey.workers.relay import CONCURRENCY, Relay
from oncekey.workers.service import Pace
from oncekey.workers.upkeep import upkeep_tasks

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from oncekey.core.policy import Policy
    from oncekey.observe.events import Notify
    from oncekey.resolvers import Resolvers
    from oncekey.topics import Topics
    from oncekey.workers.service import Task

NO_OUTBOX = "topics need a store with an outbox: `oncekey stores` says which have one"


class Application(CompletedApplication, Protocol):
    """The part of `Once` that a worker needs."""

    topics: Topics
    resolvers: Resolvers
    policy: Policy
    enrolled: dict[str, Callable[..., Any]]
    notify: Notify | None

    @property
    def reconciles(self) -> bool:
        """Whether it has resolvers or webhooks."""

    def policy_of(self, operation: str) -> Policy:
        """The policy of an operation."""

    def healthy(self) -> bool:
        """Whether this process can renew its own leases: if it cannot, it must not take other owners for dead."""


NAMES: Final = ("relay", "completer", "sweeper", "reconciler", "reaper")
"""The tasks by their names, as `oncekey worker --only` and `--without` take them."""


def tasks_for(
    once: Application,
    *,
    topics: tuple[str, ...] | None = None,
    concurrency: int = CONCURRENCY,
    wanted: frozenset[str] = frozenset(NAMES),
) -> list[Task]:
    """The tasks of an application; `topics` are those that its relay delivers, if not all."""
    tasks: list[Task] = []
    if once.topics.names:
        tasks.append(_relay(once, topics, concurrency))
    if _phased(once):
        pace = Pace(longest=once.policy.complete_interval.total_seconds())
        tasks.append(Completer(once, pace=pace, notify=once.notify))
    if once.reconciles:
        tasks.append(reconciler_of(once))
    tasks += upkeep_tasks(once.asynchronous(), once.policy, healthy=once.healthy, notify=once.notify)
    return [task for task in tasks if task.name in wanted]


def presence_of(once: Application, tasks: Sequence[Task]) -> Presence | None:
    """The task that writes the heartbeat of these tasks; None for a store that has no list of workers."""
    engine = once.asynchronous()
    if engine.store.upkeep is None:
        return None
    return Presence(engine.store.upkeep, engine.driver.run, tasks, calls=inline_calls_of(once), notify=once.notify)


def chosen(only: str | None, without: str | None) -> frozenset[str]:
    """Reads `--only a,b` and `--without a,b`."""
    named, left_out = _words(only), _words(without)
    for name in (*named, *left_out):
        if name not in NAMES:
            raise ConfigurationError(f"there is no task {name!r}; there are {', '.join(NAMES)}")
    return frozenset(named or NAMES) - frozenset(left_out)


def _words(text: str | None) -> tuple[str, ...]:
    return tuple(word.strip() for word in (text or "").split(",") if word.strip())


def reconciler_of(once: Application) -> Reconciler:
    """The task that settles unknown outcomes."""
    engine = once.asynchronous()
    return Reconciler(
        engine.store, engine.driver.run, once.resolvers, once.policy, policy_of=once.policy_of, notify=once.notify
    )


def _phased(once: Application) -> bool:
    enrolments = map(once.enrolment_of, once.enrolled)
    return any(one is not None and one.effects is Effects.PHASED and one.policy.complete for one in enrolments)


def _relay(once: Application, only: tuple[str, ...] | None, concurrency: int) -> Relay:
    for name in only or ():
        if name not in once.topics:
            raise ConfigurationError(f"there is no topic {name!r}; there is {', '.join(once.topics.names)}")
    if concurrency < 1:
        raise ConfigurationError(f"concurrency={concurrency}: a relay works on at least one parcel at a time")
    engine = once.asynchronous()
    if engine.store.outbox is None:
        raise ConfigurationError(NO_OUTBOX)
    return Relay(
        engine.store.outbox,
        engine.driver.run,
        once.topics,
        once.policy,
        only=only,
        concurrency=concurrency,
        notify=once.notify,
    )
