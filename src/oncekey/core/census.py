"""How many records and parcels a store has, and which of them wait for somebody."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from oncekey.core.model import Effects, Instant, ParcelKind, State


@dataclass(frozen=True, slots=True)
class Group:
    """Records of one operation in one state."""

    state: State
    effects: Effects
    operation: str
    records: int
    stale: int
    """In progress, with a lease that is over."""
    resumable: int
    """Handed back with work done, and not gone on with yet."""
    expired: int
    """Past their time, and not reaped yet."""
    oldest: Instant
    newest: Instant


@dataclass(frozen=True, slots=True)
class Queue:
    """Parcels of one topic that wait to be sent."""

    topic: str
    kind: ParcelKind
    parcels: int
    held: int
    oldest_due: Instant


@dataclass(frozen=True, slots=True)
class Letters:
    """Parcels of one topic that nobody tries any more."""

    topic: str
    kind: ParcelKind
    letters: int
    oldest: Instant


@dataclass(frozen=True, slots=True)
class Waiting:
    """What waits for somebody: how many, and since when the oldest does."""

    what: str
    count: int
    oldest: Instant | None


@dataclass(frozen=True, slots=True)
class Census:
    """All of it, at one look."""

    now: Instant
    groups: tuple[Group, ...]
    queues: tuple[Queue, ...]
    letters: tuple[Letters, ...]
    waiting: tuple[Waiting, ...]

    def waiting_for(self, what: str) -> Waiting:
        """One line of what waits: unknown, stale, resumable, expired, parcels_due, dead_letters."""
        return next((one for one in self.waiting if one.what == what), Waiting(what, 0, None))
