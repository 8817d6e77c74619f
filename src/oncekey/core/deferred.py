"""A request's own call in a worker's hands: what may be made of its record and its parcel, and what became of it (O1).

The rulings are asked with the record and its parcel locked. They decide by the table, and recognise what a worker whose
reply was lost has written itself; a store does what they say, and decides nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Final

from oncekey.core.guards import Facts
from oncekey.core.model import Effects, HeldParcel, Lease, Record, Snapshot, State
from oncekey.core.transitions import Actor, Row, Trigger, judge

if TYPE_CHECKING:
    from oncekey.core.model import Completed, Instant, MemoEntry

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


class Making(StrEnum):
    """What is to be made of a record and its parcel."""

    TAKE = "take"
    """The worker becomes the record's owner, and announces its call (row 24)."""
    OURS = "ours"
    """This very attempt has made the move before, and did not hear of it."""
    PARK = "park"
    """The record becomes UNKNOWN, and the parcel a dead letter (rows 25, 27)."""
    BURY = "bury"
    """There is no record that the parcel could move: it becomes a dead letter alone."""
    KEEP = "keep"
    """The result is stored; the parcel stays where it is (row 6)."""
    RETAKE = "retake"
    """The result is stored, and the parcel comes back into the worker's hands (row 6)."""
    PEND = "pend"
    """The record waits for the next attempt (row 26)."""
    PEND_UNSENT = "pend unsent"
    """The same, and its announcement is forgotten: no call followed it."""
    DELIVER = "deliver"
    """The answer is stored, and the parcel ends (row 7)."""
    NOTHING = "nothing"
    """It is not ours to move."""


@dataclass(frozen=True, slots=True)
class Ruled:
    """What is to be made, and why where that is told."""

    making: Making
    why: str = ""


def rule_taking_up(seen: Snapshot, held: HeldParcel, owner: str, digest: str) -> Ruled:
    """A worker holds the parcel and wants to make its call."""
    record = seen.record
    if record is None or record.incarnation != held.parcel.incarnation:
        return Ruled(Making.BURY, RECORD_GONE)
    if record.state is State.IN_PROGRESS and record.owner == owner:
        return Ruled(Making.OURS)
    row = judge(Trigger.WORKER_CLAIM, Actor.WORKER, facts_of(record, seen.now, digest))
    if not isinstance(row, Row):
        return Ruled(Making.BURY, row.why)
    return Ruled(Making.PARK if row.to is State.UNKNOWN else Making.TAKE)


def rule_result(seen: Snapshot, lease: Lease, entry: MemoEntry) -> Making:
    """The call returned; a parcel that was parked meanwhile comes back."""
    record = seen.record
    if record is None or not is_owned(record, lease):
        return Making.NOTHING
    if record.memo == (entry,):
        return Making.OURS
    row = judge(Trigger.DEFERRED_RESULT, Actor.OWNER, facts_of(record, seen.now, "", phase=entry.name))
    if not isinstance(row, Row):
        return Making.NOTHING
    return Making.RETAKE if "item" in row.sets else Making.KEEP


def rule_trying_again(seen: Snapshot, lease: Lease, digest: str, *, never_sent: bool) -> Making:
    """The call did not return: it is made again later, or nobody may make it any more."""
    record = seen.record
    if record is None or not is_owned(record, lease):
        return Making.NOTHING
    facts = facts_of(record, seen.now, digest, never_sent=never_sent)
    if isinstance(judge(Trigger.TRY_AGAIN, Actor.WORKER, facts), Row):
        return Making.PEND_UNSENT if is_unsent(record, never_sent=never_sent) else Making.PEND
    return Making.PARK if isinstance(judge(Trigger.DOUBT, Actor.WORKER, facts), Row) else Making.NOTHING


def rule_parking(seen: Snapshot, lease: Lease, trigger: Trigger) -> Making:
    """Nobody is to try any more."""
    record = seen.record
    if record is None or not is_owned(record, lease):
        return Making.NOTHING
    row = judge(trigger, Actor.WORKER, facts_of(record, seen.now, ""))
    return Making.PARK if isinstance(row, Row) else Making.NOTHING


def rule_delivering(seen: Snapshot, lease: Lease) -> Making:
    """The result is stored, and becomes the answer."""
    record = seen.record
    if record is None or not is_owned(record, lease):
        return Making.NOTHING
    row = judge(Trigger.SETTLE, Actor.OWNER, facts_of(record, seen.now, ""))
    return Making.DELIVER if isinstance(row, Row) else Making.NOTHING


def said_before(record: Record | None, lease: Lease, settlement: Completed) -> bool:
    """Whether the record has this answer already: the worker delivered it, and did not hear of it."""
    if record is None or not is_owned(record, lease):
        return False
    return record.state is State.COMPLETED and record.response == settlement.response


def what_became(record: Record | None, *, buried: bool, waiting: bool) -> Postponed | Parked | None:
    """What this worker has made of a parcel that it does not hold any more, if it was this worker."""
    if record is None:
        return None
    if record.state is State.UNKNOWN and buried:
        return Parked(record)
    return Postponed(record) if record.state is State.PENDING and waiting else None


def is_owned(record: Record, lease: Lease) -> bool:
    """Whether the record is still this owner's."""
    return (record.incarnation, record.fence) == (lease.incarnation, lease.fence)


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
