"""Sweeping and reaping a page: what the core finds due is written, one compare-and-swap each or one for a batch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from oncekey.core.audit import Note
from oncekey.core.model import State
from oncekey.core.policy import micros
from oncekey.core.rulings import LOCK_EXPIRED
from oncekey.core.transitions import Trigger
from oncekey.core.upkeep import ABANDONED, RESUMABLE_EXPIRED, Reaping, reaping_of, sweep_to, timed_out

if TYPE_CHECKING:
    from oncekey.core.audit import Mover
    from oncekey.core.model import Duration, Record
    from oncekey.core.policy import Policy
    from oncekey.core.upkeep import Page, Retention
    from oncekey.flow import Flow
    from oncekey.ports import Upkeep

EXPIRED = "expired"
"""Why a record was marked or deleted."""


@dataclass(frozen=True, slots=True)
class Swept:
    """A record as it was before a sweeper moved it, and where it is now."""

    record: Record
    to: State


@dataclass(frozen=True, slots=True)
class Reaped:
    """What became of a page of expired records."""

    purged: int = 0
    marked: int = 0
    parked: tuple[Record, ...] = ()
    abandoned: tuple[Record, ...] = ()

    @property
    def total(self) -> int:
        """How many records were moved."""
        return self.purged + self.marked + len(self.parked) + len(self.abandoned)


def sweep(upkeep: Upkeep, page: Page, policy: Policy, mover: Mover) -> Flow[tuple[Swept, ...]]:
    """Move what is stale (rows 14, 15). The handler is never run: whoever may go on with it finds it."""
    moved: list[Swept] = []
    for record in page.records:
        to = sweep_to(record, page.now, max_attempts=policy.max_attempts)
        if to is None:
            continue
        noting = _noting(policy, mover, Trigger.SWEEP, to, LOCK_EXPIRED)
        if (yield from upkeep.sweep(record, to, LOCK_EXPIRED, noting)):
            moved.append(Swept(record, to))
    return tuple(moved)


def reap(
    upkeep: Upkeep,
    page: Page,
    policy: Policy,
    retention: Retention,
    mover: Mover,
    *,
    trusted_for: Duration | None = None,
) -> Flow[Reaped]:
    """End what has expired (rows 18, 28, 29, 30); what was finished goes in one batch."""
    due: dict[Reaping, list[Record]] = {kind: [] for kind in Reaping}
    for record in page.records:
        kind = reaping_of(record, page.now, retention, trusted_for)
        if kind is not None:
            due[kind].append(record)
    noting = partial(_noting, policy, mover)
    purged = marked = 0
    if due[Reaping.PURGE]:
        noted = noting(Trigger.PURGE, None, EXPIRED)
        purged = yield from upkeep.purge(due[Reaping.PURGE], retention.grace, noted)
    if due[Reaping.MARK]:
        noted = noting(Trigger.EXPIRE, State.EXPIRED, EXPIRED)
        marked = yield from upkeep.mark(due[Reaping.MARK], retention.grace, noted)
    parked: list[Record] = []
    for record in due[Reaping.PARK]:
        noted = noting(Trigger.EXPIRE, State.UNKNOWN, RESUMABLE_EXPIRED)
        if (yield from upkeep.sweep(record, State.UNKNOWN, RESUMABLE_EXPIRED, noted)):
            parked.append(record)
    abandoned: list[Record] = []
    for record in due[Reaping.ABANDON]:
        noted = noting(Trigger.ABANDON, State.COMPLETED, ABANDONED)
        if (yield from upkeep.abandon(record, timed_out(policy), micros(policy.tombstone_ttl), noted)):
            abandoned.append(record)
    return Reaped(purged, marked, tuple(parked), tuple(abandoned))


def _noting(
    policy: Policy, mover: Mover, trigger: Trigger, to: State | None, why: str
) -> Callable[[Record], Note] | None:
    if not policy.audit:
        return None
    return lambda seen: Note.of(seen, to, trigger, mover, why)
