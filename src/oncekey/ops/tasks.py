"""The tasks of a worker. The schedule, `oncekey worker --help`, the metrics and the doctor read this list."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from oncekey.ops.stats import StoreStats


@dataclass(frozen=True, slots=True)
class TaskKind:
    """One task: its name, and its descriptions for operators."""

    name: str
    """The name in `oncekey worker --only`, the metrics and the list of workers."""
    does: str
    """The description after its name in the help."""
    undone: str
    """The consequence if no live worker runs it."""
    needed: Callable[[StoreStats], bool]
    """Whether a store has work for it, as far as its statistics show."""


RELAY: Final = TaskKind(
    "relay",
    "makes the calls that requests deferred and delivers the messages that they emitted",
    "deferred calls are not made and messages not sent",
    lambda stats: bool(stats.queues),
)
COMPLETER: Final = TaskKind(
    "completer",
    "resumes phased requests whose client did not retry",
    "phased requests whose client is gone are not finished",
    lambda stats: bool(stats.waiting_for("resumable").count),
)
SWEEPER: Final = TaskKind(
    "sweeper", "releases keys whose owner died", "keys of dead owners are not released", lambda _: True
)
RECONCILER: Final = TaskKind(
    "reconciler",
    "checks unknown outcomes with resolvers",
    "unknown outcomes are not checked with resolvers",
    lambda _: False,  # the store does not show whether the application has resolvers
)
REAPER: Final = TaskKind("reaper", "removes expired records", "expired records are not removed", lambda _: True)

TASKS: Final = (RELAY, COMPLETER, SWEEPER, RECONCILER, REAPER)
NAMES: Final = tuple(task.name for task in TASKS)
