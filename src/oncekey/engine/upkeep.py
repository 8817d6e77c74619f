"""Sweeping and reaping a page of records, as flows: one compare-and-swap for each record that the core finds due."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from oncekey.core.model import HOUR, Duration, Record, State
from oncekey.core.policy import Policy
from oncekey.core.rulings import lease_error
from oncekey.core.transitions import Mover, Note, Trigger
from oncekey.core.upkeep import ABANDONED, RESUMABLE_EXPIRED, Page, Reaping, Retention, reaping_of, sweep_to, timed_out

if TYPE_CHECKING:
    from oncekey.core.flow import Flow
    from oncekey.ports.store import Upkeep

ABANDONED_FOR: Final = 24 * HOUR
"""How long the response of an abandoned request is kept: clients retry for a day; no `ttl` applies, as nothing ran."""


@dataclass(frozen=True, slots=True)
class SweptRecord:
    """A record as it was before the sweeper moved it, and its new state."""

    record: Record
    to: State


@dataclass(frozen=True, slots=True)
class ReapedUnfinished:
    """The expired records that were never finished, by how the reaper ended them."""

    parked: tuple[Record, ...] = ()
    abandoned: tuple[Record, ...] = ()


def sweep(upkeep: Upkeep, page: Page, policy: Policy, mover: Mover) -> Flow[tuple[SweptRecord, ...]]:
    """Move stale records. No handler runs here: a retry or the completer resumes them."""
    moved: list[SweptRecord] = []
    for record in page.records:
        to = sweep_to(record, page.now, max_attempts=policy.max_attempts)
        if to is None:
            continue
        why = lease_error(record)
        noting = _noting(policy, mover, Trigger.SWEEP, to, why)
        if (yield from upkeep.sweep(record, to, why, noting)):
            moved.append(SweptRecord(record, to))
    return tuple(moved)


def reap(
    upkeep: Upkeep,
    page: Page,
    policy: Policy,
    retention: Retention,
    mover: Mover,
    *,
    trusted_for: Duration | None = None,
) -> Flow[ReapedUnfinished]:
    """End expired records that were never finished, one by one; finished ones are handled in one statement."""
    parked: list[Record] = []
    abandoned: list[Record] = []
    for record in page.records:
        match reaping_of(record, page.now, retention, trusted_for):
            case Reaping.PARK:
                noted = _noting(policy, mover, Trigger.EXPIRE, State.UNKNOWN, RESUMABLE_EXPIRED)
                if (yield from upkeep.sweep(record, State.UNKNOWN, RESUMABLE_EXPIRED, noted)):
                    parked.append(record)
            case Reaping.ABANDON:
                noted = _noting(policy, mover, Trigger.ABANDON, State.COMPLETED, ABANDONED)
                if (yield from upkeep.abandon(record, timed_out(policy), ABANDONED_FOR, noted)):
                    abandoned.append(record)
            case Reaping.PURGE | Reaping.MARK | None:
                continue  # another transaction holds the lock, or it is not due
    return ReapedUnfinished(tuple(parked), tuple(abandoned))


def _noting(
    policy: Policy, mover: Mover, trigger: Trigger, to: State | None, why: str
) -> Callable[[Record], Note] | None:
    if not policy.audit:
        return None
    return lambda seen: Note.of(seen, to, trigger, mover, why)
