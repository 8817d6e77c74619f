"""Deferred calls: what a worker may do with an OUTBOX record and its parcel, decided by the table of moves (O1).

A handler that defers commits three things at once: its own rows, the record as PENDING, and a parcel with the call.
From then on the handler never runs again (O2). A worker makes the call in three writes, and a crash between any two
of them leaves something that the next worker can read:

    handler's commit       take up (24)              result (6)             deliver (7)
    record PENDING   ──▶   IN_PROGRESS, intent  ──▶  IN_PROGRESS, memo ──▶  COMPLETED, response
    parcel due             parcel leased             parcel leased          parcel removed
                                │    ▲
                  not sent, or  │    │ due again
                  repeatable    ▼    │
                           PENDING, parcel due later (26)

    call may have been made and may not be repeated (25, 27), or tried too often (27):
                           UNKNOWN, parcel is a dead letter

* Before the call the worker announces it in the record (`intent`). If it dies now, the next worker may call again only
  while the provider still remembers the downstream key (`repeatable_until`); otherwise the record is parked.
* After the call the worker stores the result alone. If it dies now, the next worker finds the result in the memo and
  settles without calling (F31).
* The response is stored and the parcel removed in one transaction. The parcel's lease is the only one: the sweeper
  leaves a deferred record alone (F32).

The store calls a `rule_...` function with the record and its parcel locked, and writes what it returns; the store
decides nothing. If the reply to a worker's write was lost, the worker writes once more; the rules then recognise its
own write (OURS) instead of refusing it. A parcel whose record is gone, or now belongs to another request, moves
no record: only the parcel becomes a dead letter.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from oncekey.core.guards import Facts
from oncekey.core.model import Completed, Effects, HeldParcel, Instant, Lease, MemoEntry, Record, Snapshot, State
from oncekey.core.transitions import Actor, Transition, Trigger, find_transition

DEAD_LETTER: Final = "dead_letter"
"""The error code of a record whose parcel was tried too often (O3)."""
UNCERTAIN: Final = "call_uncertain"
"""The error code of a record whose call may have been made, and may not be made again."""
RECORD_GONE: Final = "record_gone"
"""Why a parcel was buried: its record is gone, or belongs to another request."""


@dataclass(frozen=True, slots=True)
class TakenUp:
    """The worker owns the record: it makes the call, or only settles if `record.memo` has a result (row 24)."""

    lease: Lease
    held: HeldParcel
    record: Record
    now: Instant


@dataclass(frozen=True, slots=True)
class Parked:
    """No worker may make the call: the record is UNKNOWN, and its parcel is a dead letter (rows 25, 27)."""

    record: Record


@dataclass(frozen=True, slots=True)
class Postponed:
    """The record is PENDING again, and its parcel due later (row 26)."""

    record: Record


@dataclass(frozen=True, slots=True)
class Orphaned:
    """The parcel has no record to move; it is a dead letter."""

    why: str


@dataclass(frozen=True, slots=True)
class Kept:
    """The result is stored (row 6). `held` is None if another worker holds the parcel now; that worker settles."""

    snapshot: Snapshot
    held: HeldParcel | None


class Making(StrEnum):
    """What the store writes to a record and its parcel."""

    TAKE = "take"
    """The worker becomes the record's owner, and announces its call (row 24)."""
    OURS = "ours"
    """This attempt made the move before, and the reply was lost: the store writes nothing."""
    PARK = "park"
    """The record becomes UNKNOWN, and the parcel a dead letter (rows 25, 27)."""
    BURY = "bury"
    """The parcel has no record to move: only the parcel becomes a dead letter."""
    KEEP = "keep"
    """The result is stored; the parcel stays where it is (row 6)."""
    RETAKE = "retake"
    """The result is stored, and the worker holds the parcel again (row 6)."""
    PEND = "pend"
    """The record waits for the next attempt (row 26)."""
    PEND_UNSENT = "pend unsent"
    """Like PEND, and the announcement is removed: the worker proved that it sent nothing."""
    DELIVER = "deliver"
    """The response is stored, and the parcel removed (row 7)."""
    NOTHING = "nothing"
    """This worker may not move the record: the store writes nothing."""


@dataclass(frozen=True, slots=True)
class Ruled:
    """What the store writes, and the reason for a dead letter."""

    making: Making
    why: str = ""


def rule_taking_up(seen: Snapshot, held: HeldParcel, owner: str, digest: str) -> Ruled:
    """What follows when a worker holds the parcel and wants to make its call."""
    record = seen.record
    if record is None or record.incarnation != held.parcel.incarnation:
        return Ruled(Making.BURY, RECORD_GONE)
    if record.state is State.IN_PROGRESS and record.owner == owner:
        return Ruled(Making.OURS)
    row = find_transition(Trigger.WORKER_CLAIM, Actor.WORKER, facts_of(record, seen.now, digest))
    if not isinstance(row, Transition):
        return Ruled(Making.BURY, row.why)
    return Ruled(Making.PARK if row.to is State.UNKNOWN else Making.TAKE)


def rule_result(seen: Snapshot, lease: Lease, entry: MemoEntry) -> Making:
    """What follows when the call returned; the worker regains a parcel that was parked in the meantime."""
    record = seen.record
    if record is None or not is_owned(record, lease):
        return Making.NOTHING
    if record.memo == (entry,):
        return Making.OURS
    row = find_transition(Trigger.DEFERRED_RESULT, Actor.OWNER, facts_of(record, seen.now, "", phase=entry.name))
    if not isinstance(row, Transition):
        return Making.NOTHING
    return Making.RETAKE if "parcel" in row.sets else Making.KEEP


def rule_trying_again(seen: Snapshot, lease: Lease, digest: str, *, never_sent: bool) -> Making:
    """What follows when the call did not return: the worker makes it again later, or the record is parked."""
    record = seen.record
    if record is None or not is_owned(record, lease):
        return Making.NOTHING
    facts = facts_of(record, seen.now, digest, never_sent=never_sent)
    if isinstance(find_transition(Trigger.TRY_AGAIN, Actor.WORKER, facts), Transition):
        return Making.PEND_UNSENT if is_unsent(record, never_sent=never_sent) else Making.PEND
    return (
        Making.PARK if isinstance(find_transition(Trigger.DOUBT, Actor.WORKER, facts), Transition) else Making.NOTHING
    )


def rule_parking(seen: Snapshot, lease: Lease, trigger: Trigger) -> Making:
    """What follows when no worker may try again, for the reason in `trigger`."""
    record = seen.record
    if record is None or not is_owned(record, lease):
        return Making.NOTHING
    row = find_transition(trigger, Actor.WORKER, facts_of(record, seen.now, ""))
    return Making.PARK if isinstance(row, Transition) else Making.NOTHING


def rule_delivering(seen: Snapshot, lease: Lease) -> Making:
    """What follows when the result is stored and becomes the response."""
    record = seen.record
    if record is None or not is_owned(record, lease):
        return Making.NOTHING
    row = find_transition(Trigger.SETTLE, Actor.OWNER, facts_of(record, seen.now, ""))
    return Making.DELIVER if isinstance(row, Transition) else Making.NOTHING


def is_stored(record: Record | None, lease: Lease, settlement: Completed) -> bool:
    """Whether the record already has this response: this worker delivered it, and the reply was lost."""
    if record is None or not is_owned(record, lease):
        return False
    return record.state is State.COMPLETED and record.response == settlement.response


def ending_of_lost(record: Record | None, *, buried: bool, waiting: bool) -> Postponed | Parked | None:
    """How this worker gave up a parcel that it no longer holds; None if another worker did."""
    if record is None:
        return None
    if record.state is State.UNKNOWN and buried:
        return Parked(record)
    return Postponed(record) if record.state is State.PENDING and waiting else None


def is_owned(record: Record, lease: Lease) -> bool:
    """Whether the record is still this owner's."""
    return (record.incarnation, record.fence) == (lease.incarnation, lease.fence)


def facts_of(record: Record, now: Instant, digest: str, *, never_sent: bool = False, phase: str = "") -> Facts:
    """The facts for the table. That the second attempt sent nothing does not prove it for the first (F24)."""
    intent = record.intent
    until = intent.repeatable_until if intent is not None and intent.digest == digest else None
    unsent = intent is None or is_unsent(record, never_sent=never_sent)
    return Facts(
        record,
        now,
        effects=Effects.OUTBOX,
        phase=phase,
        never_sent=never_sent,
        parcel_claimed=True,
        parcel_sent=not unsent,
        parcel_repeatable=until is not None and now < until,
    )


def is_unsent(record: Record, *, never_sent: bool) -> bool:
    """Whether it is proven that no call followed the open announcement; only a first announcement allows that proof."""
    return never_sent and record.intent is not None and record.intent.sends <= 1
