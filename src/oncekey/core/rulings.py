"""RULINGS: what a request receives, by the situation of its key's record and whether it is the same request.

`situate` checks the state first, so an unfinished record never counts as expired (P6). In every live situation the
fingerprint is compared before anything else: a different request never takes a lease,
never resumes work, and learns only that the key is taken.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from types import MappingProxyType
from typing import TYPE_CHECKING, assert_never

from oncekey.canonical.fingerprint import same
from oncekey.core.answers import retry_after
from oncekey.core.envelopes import check_open, check_steps
from oncekey.core.guards import Facts, is_past_expiry, is_plain
from oncekey.core.model import (
    SEALED_SCHEMA,
    UNAVAILABLE,
    Claim,
    Code,
    Finished,
    Instant,
    Lease,
    Proceed,
    Record,
    Recovery,
    Refuse,
    Replay,
    Snapshot,
    State,
    Verdict,
)
from oncekey.core.policy import OnExpired, Policy
from oncekey.core.transitions import TRANSITIONS, Actor, Table, Transition, Trigger, find_transition

if TYPE_CHECKING:
    from oncekey.core.fronts import Held


class Situation(StrEnum):
    """The condition of a record for a request that finds it."""

    ABSENT = "absent"
    """The key has no record."""
    PENDING = "pending"
    """The request was accepted, and waits for a worker."""
    LIVE = "live"
    """An owner is executing it, and its lease has not expired."""
    STALE = "stale"
    """An owner began it, and its lease has expired: the owner crashed, hangs or cannot reach the store."""
    COMPLETED = "completed"
    """It has ended, and the record has the response."""
    RETRYABLE = "retryable"
    """It failed, and a retry may succeed: the next request with the key may execute it."""
    UNKNOWN = "unknown"
    """It may have been executed, and no retry may execute it again."""
    EXPIRED = "expired"
    """It has ended, and its response is no longer kept."""


class Ruling(StrEnum):
    """What the flow does in a situation."""

    CLAIM = "claim"
    REFUSE_IN_PROGRESS = "refuse_in_progress"
    RECOVER = "recover"
    REPLAY = "replay"
    TAKE_OVER = "take_over"
    OUTCOME_UNKNOWN = "outcome_unknown"
    SUPERSEDE = "supersede"
    MISMATCH = "mismatch"


SAME, OTHER = True, False
"""Whether the request has the fingerprint of the record."""

RULINGS: Mapping[Situation, Mapping[bool, Ruling]] = MappingProxyType(
    {
        Situation.ABSENT: {SAME: Ruling.CLAIM, OTHER: Ruling.CLAIM},
        Situation.PENDING: {SAME: Ruling.REFUSE_IN_PROGRESS, OTHER: Ruling.MISMATCH},
        Situation.LIVE: {SAME: Ruling.REFUSE_IN_PROGRESS, OTHER: Ruling.MISMATCH},
        Situation.STALE: {SAME: Ruling.RECOVER, OTHER: Ruling.MISMATCH},
        Situation.COMPLETED: {SAME: Ruling.REPLAY, OTHER: Ruling.MISMATCH},
        Situation.RETRYABLE: {SAME: Ruling.TAKE_OVER, OTHER: Ruling.MISMATCH},
        Situation.UNKNOWN: {SAME: Ruling.OUTCOME_UNKNOWN, OTHER: Ruling.MISMATCH},
        Situation.EXPIRED: {SAME: Ruling.SUPERSEDE, OTHER: Ruling.SUPERSEDE},
    }
)


def situate(record: Record | None, now: Instant) -> Situation:
    """The situation of a record. Time alone never turns an unfinished record into a free key (P6, F3)."""
    if record is None:
        return Situation.ABSENT
    match record.state:
        case State.PENDING:
            return Situation.PENDING
        case State.IN_PROGRESS:
            # An outbox record that a worker owns has no separate lease: the parcel's lease decides (O1).
            over = record.lease_until is not None and record.lease_until <= now
            return Situation.STALE if over else Situation.LIVE
        case State.COMPLETED:
            return Situation.EXPIRED if is_past_expiry(record, now) else Situation.COMPLETED
        case State.FAILED_RETRYABLE:
            free = is_past_expiry(record, now) and is_plain(record)
            return Situation.EXPIRED if free else Situation.RETRYABLE
        case State.UNKNOWN:
            return Situation.UNKNOWN
        case State.EXPIRED:
            return Situation.EXPIRED
        case _:
            assert_never(record.state)


@dataclass(frozen=True, slots=True)
class TakeOver:
    """Try to become the next owner of `seen`."""

    seen: Record


@dataclass(frozen=True, slots=True)
class Supersede:
    """Try to begin a new incarnation in the row of the expired `seen`."""

    seen: Record


@dataclass(frozen=True, slots=True)
class MarkUnknown:
    """No retry may run `seen`: make it UNKNOWN."""

    seen: Record
    last_error: str


@dataclass(frozen=True, slots=True)
class ClaimAgain:
    """The row was removed after it was read: claim once more."""


Next = Proceed | Replay | Refuse | TakeOver | Supersede | MarkUnknown | ClaimAgain
"""What the flow does with a snapshot: end with a verdict, or try one more compare-and-swap."""

LEASE_RAN_OUT = "in_progress_lock_expired"
"""The error code of a record whose owner's lease expired."""
FAILED_BY_LEASE = "failed_lock_expired"
"""The same with `on_lease_expired="fail"`: no resolver is called, and an operator has to check at once."""


def lease_error(record: Record) -> str:
    """The error code of a record that is swept or doubted because its lease expired."""
    return FAILED_BY_LEASE if record.recovery is Recovery.FAIL else LEASE_RAN_OUT


def rule(snapshot: Snapshot, claim: Claim, policy: Policy, table: Table = TRANSITIONS) -> Next:
    """The verdict for a request, or the write that must be tried before there is one."""
    record, now = snapshot.record, snapshot.now
    situation = situate(record, now)
    if record is None:
        return ClaimAgain()
    if record.state is State.IN_PROGRESS and record.owner == claim.owner:
        # Our own claim: it was written, and only the reply was lost (P7).
        return Proceed(Lease.of(record), record, now)
    ruling = RULINGS[situation][same(record.fingerprint, claim.fingerprint)]
    match ruling:
        case Ruling.CLAIM:
            # Not reached: only a key without a record is ABSENT, which has returned above.
            return ClaimAgain()
        case Ruling.REFUSE_IN_PROGRESS:
            return Refuse(Code.IN_PROGRESS, retry_after=_retry_after(record, now), record=record)
        case Ruling.RECOVER:
            _check_steps(record)
            return _recover(record, now, policy, table)
        case Ruling.REPLAY:
            return _replay(record, now)
        case Ruling.TAKE_OVER:
            _check_steps(record)
            return TakeOver(record)
        case Ruling.OUTCOME_UNKNOWN:
            return doubtful(record, now)
        case Ruling.SUPERSEDE:
            return Refuse(Code.KEY_EXPIRED) if policy.on_expired is OnExpired.GONE else Supersede(record)
        case Ruling.MISMATCH:
            return Refuse(Code.KEY_REUSED)
        case _:
            assert_never(ruling)


def rule_finished(
    finished: Record | Finished, now: Instant, fingerprint: str, policy: Policy
) -> Replay | Refuse | None:
    """`rule` for a completed record, from the part that a repeat has read. None: it expired and the key is free."""
    situation = Situation.EXPIRED if is_past_expiry(finished, now) else Situation.COMPLETED
    ruling = RULINGS[situation][same(finished.fingerprint, fingerprint)]
    if ruling is Ruling.REPLAY:
        response = finished.response
        if response is not None and response.schema_version == SEALED_SCHEMA:
            check_open(finished)  # the schema number is compared first, because most answers are not sealed
        return Replay(finished, now)
    if ruling is Ruling.MISMATCH:
        return Refuse(Code.KEY_REUSED)
    assert ruling is Ruling.SUPERSEDE
    return Refuse(Code.KEY_EXPIRED) if policy.on_expired is OnExpired.GONE else None


def rule_held(held: Held, now: Instant, fingerprint: str) -> Refuse | None:
    """The refusal for a key that is in progress according to a front. None: another request, so read the store."""
    if not same(held.fingerprint, fingerprint):
        return None
    left = 0 if held.lease_until is None else held.lease_until - now
    return Refuse(Code.IN_PROGRESS, retry_after=retry_after(left, running_for=now - held.begun))


def answer_from(snapshot: Snapshot, lease: Lease) -> Verdict:
    """The verdict for a request whose own settlement was not written (P3, L2, P7)."""
    record, now = snapshot.record, snapshot.now
    if record is None:
        return UNAVAILABLE
    if record.incarnation != lease.incarnation:
        return Refuse(Code.OUTCOME_UNKNOWN)  # another request's record proves nothing about ours
    match record.state:
        case State.COMPLETED:
            return _replay(record, now)
        case State.UNKNOWN | State.EXPIRED:
            return doubtful(record, now)
        case State.PENDING | State.IN_PROGRESS | State.FAILED_RETRYABLE:
            return Refuse(Code.IN_PROGRESS, retry_after=_retry_after(record, now), record=record)
        case _:
            assert_never(record.state)


def doubtful(record: Record, now: Instant) -> Refuse:
    """The refusal for an unknown outcome. `Retry-After` does not end before the next query to the provider."""
    after = record.reconcile_after
    wait = None if after is None or after <= now else retry_after(after - now, running_for=after - now)
    return Refuse(Code.OUTCOME_UNKNOWN, retry_after=wait, record=record)


def _replay(record: Record, now: Instant) -> Replay:
    """The replay of the stored response, if it can be read."""
    if record.response is not None:
        check_open(record)
    return Replay(record, now)


def _check_steps(record: Record) -> None:
    """Refuse to resume a record whose steps cannot be read."""
    if record.memo:
        check_steps(record)


def _recover(record: Record, now: Instant, policy: Policy, table: Table) -> Next:
    """The move for a stale lease: the stored effects and recovery decide, not the route's current ones (P2, F4)."""
    facts = Facts(record, now, max_attempts=policy.max_attempts)
    if isinstance(find_transition(Trigger.TAKE_OVER, Actor.REQUESTER, facts, table), Transition):
        return TakeOver(record)
    return MarkUnknown(record, lease_error(record))


def _retry_after(record: Record, now: Instant) -> int:
    """How long the client should wait for the owner: never past its lease."""
    left = 0 if record.lease_until is None else record.lease_until - now
    return retry_after(left, running_for=now - record.last_run_at)
