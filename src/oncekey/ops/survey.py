"""Listings for the console and the commands: walks over records, and counts that stop at a limit.

A walk follows one index, the newest first. It reads a bounded number of entries and skips those that do not match, so
that a page costs the same whatever the size of the table; the next page goes on where it stopped.
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
"""How many entries of an index one page reads."""
MOST: Final = 10_000
"""Counts of what waits stop here: a larger number tells an operator nothing more."""

WalkPosition: TypeAlias = tuple["Instant", str, str]
"""A position in a walk: the instant that it is ordered by, the scope and the key."""

START: Final[WalkPosition] = (2**63 - 1, "", "")
"""The position before the newest record."""

UNFINISHED: Final = (State.UNKNOWN, State.FAILED_RETRYABLE, State.IN_PROGRESS, State.PENDING)
"""States that are walked by when the records began."""
FINISHED: Final = (State.COMPLETED, State.EXPIRED)
"""Walked by when they expire: an index of when finished records began would cost every request a write."""


@dataclass(frozen=True, slots=True)
class Walk:
    """Which records are looked for; None is any. All states are unfinished ones, or there is one finished."""

    states: tuple[State, ...] = UNFINISHED
    scope: str | None = None
    beginning: str | None = None
    """Of the key's text."""
    operation: str | None = None
    effects: Effects | None = None
    error: str | None = None
    older: Duration = 0
    """Begun at least so long ago; 0 is any."""
    younger: Duration = 0
    """Begun less than so long ago; 0 is any."""
    stale: bool = False
    """Only records whose lease is over."""


@dataclass(frozen=True, slots=True)
class Stretch:
    """A part of a walk."""

    now: Instant
    records: tuple[Record, ...]
    further: Mapping[State, WalkPosition]
    """By state, where the next page goes on; a state that is missing has been walked to its end."""
    broken_off: bool
    """Whether the walk stopped because it read enough entries, and not because it found enough records."""


@dataclass(frozen=True, slots=True)
class Count:
    """A number, counted up to MOST, and the instant of the oldest one."""

    found: int = 0
    oldest: Instant | None = None

    @property
    def more(self) -> bool:
        """Whether there may be more than were counted."""
        return self.found >= MOST


@dataclass(frozen=True, slots=True)
class Tally:
    """Counts of what waits: unfinished records by state, and `stuck` leases, `due` parcels and `dead` letters."""

    now: Instant
    counts: Mapping[str, Count]

    def of(self, what: str) -> Count:
        """One count; 0 if there is none of that kind."""
        return self.counts.get(what, _NONE)


_NONE: Final = Count()


@dataclass(frozen=True, slots=True)
class End:
    """How and when a request ended for now, and how long its last run took, if known."""

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
    """The line that the next page ends before; None: this was the last page."""
