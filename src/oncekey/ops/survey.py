"""What a person looks through: walks over records, and numbers that are counted no further than they are read.

A walk goes along one index, the newest first. It looks at a bounded number of entries and passes over what does not
fit, so that a page costs the same whatever the size of the table; where it stopped it can be gone on with.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, TypeAlias

from oncekey.core.model import Outcome, ParcelKind, State

if TYPE_CHECKING:
    from uuid import UUID

    from oncekey.core.audit import AuditEntry
    from oncekey.core.model import Duration, Effects, Instant, Record


LOOKED: Final = 5000
"""How many entries of an index one page looks at."""
MOST: Final = 10_000
"""Nobody reads a larger number of what waits than this, so nobody counts further."""

Place: TypeAlias = tuple["Instant", str, str]
"""Where in a walk somebody is: the instant that it is ordered by, the scope and the key."""

START: Final[Place] = (2**63 - 1, "", "")
"""Before all that is newer than anything."""

UNFINISHED: Final = (State.UNKNOWN, State.FAILED_RETRYABLE, State.IN_PROGRESS, State.PENDING)
"""Walked by when they began."""
FINISHED: Final = (State.COMPLETED, State.EXPIRED)
"""Walked by when they end: there is no index of when finished ones began, for which every request would pay."""


@dataclass(frozen=True, slots=True)
class Walk:
    """Which records are looked for; None is any. All states are unfinished ones, or there is one finished."""

    states: tuple[State, ...] = UNFINISHED
    scope: str | None = None
    beginning: str | None = None
    """Of the key."""
    operation: str | None = None
    effects: Effects | None = None
    error: str | None = None
    older: Duration = 0
    """Begun at least so long ago; 0 is any."""
    younger: Duration = 0
    """Begun less than so long ago; 0 is any."""
    stale: bool = False
    """Only with a lease that is over."""


@dataclass(frozen=True, slots=True)
class Stretch:
    """A part of a walk."""

    now: Instant
    records: tuple[Record, ...]
    further: Mapping[State, Place]
    """By state, from where it can be gone on with; states that are not there have come to their end."""
    broken_off: bool
    """It ended because enough was looked at, and not because enough was found."""


@dataclass(frozen=True, slots=True)
class Count:
    """How many there are, counted up to MOST, and since when the oldest is there."""

    found: int = 0
    oldest: Instant | None = None

    @property
    def more(self) -> bool:
        """Whether there may be more than were counted."""
        return self.found >= MOST


@dataclass(frozen=True, slots=True)
class Tally:
    """What waits: unfinished records by state, and `stuck`, `due` and `dead` for leases, parcels and dead letters."""

    now: Instant
    counts: Mapping[str, Count]

    def of(self, what: str) -> Count:
        """One number; nothing found is no line."""
        return self.counts.get(what, _NONE)


_NONE: Final = Count()


@dataclass(frozen=True, slots=True)
class End:
    """How and when a request ended for now, and how long its last run took if that is known."""

    state: State
    outcome: Outcome | None
    operation: str
    at: Instant
    took: Duration


@dataclass(frozen=True, slots=True)
class ParcelView:
    """A parcel of a record with all that is known of it."""

    id: UUID
    kind: ParcelKind
    topic: str
    payload: str
    downstream_key: str
    attempts: int
    created_at: Instant
    due_at: Instant | None
    held_until: Instant | None
    first_error: str | None
    last_error: str | None
    died_at: Instant | None

    @property
    def is_dead(self) -> bool:
        """Whether it lies with the dead letters."""
        return self.died_at is not None


@dataclass(frozen=True, slots=True)
class Lines:
    """Some lines of the audit, the newest first."""

    entries: tuple[AuditEntry, ...]
    further: int | None
    """From before which line it can be gone on with; None: that was the end."""
