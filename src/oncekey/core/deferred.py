"""A request's own call in a worker's hands: what became of an attempt to move it, and the facts that decide (O1)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from oncekey.core.guards import Facts
from oncekey.core.model import Effects, HeldParcel, Lease, Record, Snapshot

if TYPE_CHECKING:
    from oncekey.core.model import Instant

DEAD_LETTER: Final = "dead_letter"
"""The error code of a record whose parcel was tried too often (O3)."""
UNCERTAIN: Final = "call_uncertain"
"""The error code of a record whose call may have been made, and may not be made again."""
RECORD_GONE: Final = "record_gone"
"""Why a parcel was buried whose record is not there any more, or is another request's."""


@dataclass(frozen=True, slots=True)
class TakenUp:
    """The call is ours to make, or, where `record.memo` has its result, ours to settle without calling (row 24)."""

    lease: Lease
    held: HeldParcel
    record: Record
    now: Instant


@dataclass(frozen=True, slots=True)
class Parked:
    """Nobody may make the call now: the record is UNKNOWN, and its parcel lies with the dead letters (rows 25, 27)."""

    record: Record


@dataclass(frozen=True, slots=True)
class Postponed:
    """The record is PENDING again, and its parcel due later (row 26)."""

    record: Record


@dataclass(frozen=True, slots=True)
class Orphaned:
    """There is no record that this parcel could move; it lies with the dead letters."""

    why: str


@dataclass(frozen=True, slots=True)
class Kept:
    """The result is stored (row 6). `held` is None if another worker has the parcel by now, and settles it."""

    snapshot: Snapshot
    held: HeldParcel | None


def facts_of(record: Record, now: Instant, digest: str, *, never_sent: bool = False, phase: str = "") -> Facts:
    """What the table may look at. A second attempt that was not made says nothing about the first (F24)."""
    intent = record.intent
    until = intent.repeatable_until if intent is not None and intent.digest == digest else None
    unsent = intent is None or is_unsent(record, never_sent=never_sent)
    return Facts(
        record,
        now,
        effects=Effects.OUTBOX,
        phase=phase,
        never_sent=never_sent,
        item_claimed=True,
        item_sent=not unsent,
        item_repeatable=until is not None and now < until,
    )


def is_unsent(record: Record, *, never_sent: bool) -> bool:
    """Whether the open announcement is proven to have been followed by nothing: only a first one can be."""
    return never_sent and record.intent is not None and record.intent.sends <= 1
