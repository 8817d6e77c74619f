"""Counts of a store's records and parcels, and which of them wait for a worker or an operator."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from oncekey.core.model import Duration, Effects, Instant, ParcelKind, State

MISSED_BEATS: Final = 3
"""After how many missed heartbeats of its own a worker counts as dead."""


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
    """Handed back with finished steps, and not taken over yet."""
    expired: int
    """Expired, and not reaped yet."""
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
    """Dead letters of one topic: no worker tries them any more."""

    topic: str
    kind: ParcelKind
    letters: int
    oldest: Instant


@dataclass(frozen=True, slots=True)
class Waiting:
    """What waits for a worker or an operator: how many, and since when the oldest does."""

    what: str
    count: int
    oldest: Instant | None


@dataclass(frozen=True, slots=True)
class Standing:
    """The numbers of the gauges. Indexes serve all of them, so the cost does not grow with the finished records."""

    now: Instant
    records: Mapping[str, int]
    """Unfinished records by state, and `finished` ones: an estimate where counting them would read them all."""
    waiting: tuple[Waiting, ...]


@dataclass(frozen=True, slots=True)
class Census:
    """All counts of a store, read at one moment."""

    now: Instant
    groups: tuple[Group, ...]
    queues: tuple[Queue, ...]
    letters: tuple[Letters, ...]
    waiting: tuple[Waiting, ...]

    def waiting_for(self, what: str) -> Waiting:
        """One kind of what waits: unknown, stale, resumable, expired, parcels_due, dead_letters."""
        return next((one for one in self.waiting if one.what == what), Waiting(what, 0, None))


@dataclass(frozen=True, slots=True)
class Worker:
    """A worker process, as its last heartbeat described it."""

    name: str
    tasks: tuple[str, ...]
    started_at: Instant
    seen_at: Instant
    every: Duration
    """The interval in which the worker promises its next heartbeat."""
    calls: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """By operation, the calls of INLINE handlers, as the worker's application names them."""

    def is_alive(self, now: Instant, silence: Duration | None = None) -> bool:
        """Whether its last heartbeat is recent: within `silence`, or else within `MISSED_BEATS` of its intervals."""
        allowed = MISSED_BEATS * self.every if silence is None else silence
        return now - self.seen_at <= allowed


@dataclass(frozen=True, slots=True)
class Roll:
    """All workers that have registered and not left, with the store's clock."""

    now: Instant
    workers: tuple[Worker, ...]

    def inline_calls(self, operation: str) -> tuple[str, ...]:
        """The calls of an INLINE operation, as far as a worker's application names them."""
        return tuple(dict.fromkeys(name for one in self.workers for name in one.calls.get(operation, ())))
