"""The request path as flows: begin, renew, settle, and read the state of a key. No waiting, no clock, no I/O."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, assert_never
from uuid import uuid5

from oncekey.core.errors import CommitAmbiguousError, ConfigurationError, StoreError
from oncekey.core.guards import Facts
from oncekey.core.model import Code, Lease, Proceed, Refuse, Replay, Retryable, State
from oncekey.core.rulings import (
    FAILED_BY_LEASE,
    LEASE_RAN_OUT,
    ClaimAgain,
    MarkUnknown,
    Situation,
    Supersede,
    TakeOver,
    answer_from,
    rule,
    situate,
)
from oncekey.core.transitions import Actor, Mover, Note, Transition, Trigger, find_transition

if TYPE_CHECKING:
    from oncekey.core.flow import Body, Flow
    from oncekey.core.model import (
        Claim,
        Duration,
        Instant,
        Parcel,
        Record,
        RecordId,
        Settled,
        Settlement,
        Snapshot,
        Verdict,
    )
    from oncekey.core.operate import ParcelLocation
    from oncekey.core.policy import Policy
    from oncekey.core.resolution import Evidence
    from oncekey.ports.store import Records, Store

ROUNDS = 8
"""How many rounds of lost races a request tries before it is refused as in progress."""

LOSSES = 3
"""How many replies may be lost before the outage is reported: each may have taken a full time-out."""

_WITHOUT_ROW = (Situation.ABSENT, Situation.EXPIRED)
COMMIT_LOST = "commit_reply_lost"
RETRYABLE = "retryable"
NO_OUTBOX = "parcels need a store with an outbox: `oncekey stores` lists them"


def begin(records: Records, claim: Claim, policy: Policy) -> Flow[Verdict]:
    """Claim the right to execute. Each round is one read and at most one compare-and-swap.

    A write whose reply was lost may have been executed, or may still be. So the next round reads again: a record that
    names our owner is ours. It writes under another incarnation, because no incarnation is used twice.
    """
    snapshot: Snapshot | None = None
    met: Record | None = None
    lost: CommitAmbiguousError | None = None
    rounds = losses = 0
    while rounds < ROUNDS and losses < LOSSES:
        rounds += 1
        try:
            if snapshot is None:
                snapshot = yield from records.claim(claim)
            ruled = rule(snapshot, claim, policy)
            match ruled:
                case Proceed() | Replay() | Refuse():
                    return ruled if met is None else _having_met(ruled, met)
                case TakeOver(seen):
                    met = seen
                    snapshot = yield from records.take_over(claim, seen, _taken(seen, claim, policy))
                case Supersede(seen):
                    met = seen
                    note = _note(seen, State.IN_PROGRESS, Trigger.SUPERSEDE, claim, policy, str(claim.incarnation))
                    snapshot = yield from records.supersede(claim, seen, note)
                case MarkUnknown(seen, last_error):
                    met = seen
                    note = _note(seen, State.UNKNOWN, Trigger.SWEEP, claim, policy, last_error)
                    snapshot = yield from records.mark_unknown(seen, last_error, note)
                case ClaimAgain():
                    snapshot = None
                case _:
                    assert_never(ruled)
            met = None if snapshot is None else met  # another request was first
        except CommitAmbiguousError as error:
            lost, snapshot, losses = error, None, losses + 1
            claim = replace(claim, incarnation=uuid5(claim.incarnation, str(losses)))
        except StoreError as error:
            if lost is None:
                raise
            raise lost from error
    if lost is not None:
        raise lost
    return Refuse(Code.IN_PROGRESS, retry_after=1)


def _having_met(ruled: Proceed | Replay | Refuse, met: Record) -> Verdict:
    """The verdict with the record that this request moved; after a lost reply another request may have moved it."""
    if isinstance(ruled, Proceed) or (isinstance(ruled, Refuse) and ruled.code is Code.OUTCOME_UNKNOWN):
        return replace(ruled, met=met)
    return ruled


def resume(store: Store, claim: Claim, policy: Policy) -> Flow[Verdict]:
    """Take over a record without its client: a completer never claims, supersedes or waits."""
    met: Record | None = None
    snapshot = yield from store.find(claim.id)
    for _ in range(LOSSES):
        record = snapshot.record
        if record is None or record.incarnation != claim.incarnation:
            return Refuse(Code.KEY_NOT_FOUND)
        if record.state is State.IN_PROGRESS and record.owner == claim.owner:
            return Proceed(Lease.of(record), record, snapshot.now, met)
        facts = Facts(record, snapshot.now, max_attempts=policy.max_attempts)
        if not isinstance(find_transition(Trigger.TAKE_OVER, Actor.COMPLETER, facts), Transition):
            return answer_from(snapshot, Lease.of(record))
        met = record
        try:
            taken = yield from store.take_over(claim, record, _taken(record, claim, policy, Actor.COMPLETER))
        except CommitAmbiguousError:
            taken = None
        snapshot = taken or (yield from store.find(claim.id))
    return Refuse(Code.IN_PROGRESS, retry_after=1)


def _taken(seen: Record, claim: Claim, policy: Policy, actor: Actor = Actor.REQUESTER) -> Note | None:
    """The audit line about a take-over.

    An expired lease is its reason only while the record is in progress. A retryable record with that error has been
    swept or settled since, which has a separate line.
    """
    why = seen.last_error or LEASE_RAN_OUT
    if seen.state is State.FAILED_RETRYABLE and why in {LEASE_RAN_OUT, FAILED_BY_LEASE}:
        why = RETRYABLE
    return _note(seen, State.IN_PROGRESS, Trigger.TAKE_OVER, claim, policy, why, actor)


def _note(  # noqa: PLR0917  (a line of the audit reads by position)
    seen: Record,
    to: State,
    trigger: Trigger,
    claim: Claim,
    policy: Policy,
    why: str,
    actor: Actor = Actor.REQUESTER,
) -> Note | None:
    """The audit line about a move that follows a crash, a failure or an expiry; ordinary moves have none (ADR 0014)."""
    return Note.of(seen, to, trigger, Mover(actor, claim.owner), why) if policy.audit else None


def renew(records: Records, lease: Lease, span: Duration) -> Flow[Instant | None]:
    """Extend the lease (the heartbeat): its new end, or None if it is lost."""
    return (yield from records.renew(lease, span))


def settle(records: Records, lease: Lease, settlement: Settlement) -> Flow[Settled]:
    """Write the outcome of the operation, in a separate transaction."""
    return (yield from records.settle(lease, settlement))


def settling(store: Store, lease: Lease, settlement: Settlement, parcels: tuple[Parcel, ...]) -> Body[Settled]:
    """Settle inside the business transaction, with the handler's parcels; if it is refused, no parcel is written."""
    settled = yield from store.settling(lease, settlement)
    if settled.ours and parcels:
        if store.parcels is None:
            raise ConfigurationError(NO_OUTBOX)
        yield from store.parcels.putting(parcels)
    return settled


def settle_lost_commit(records: Records, lease: Lease) -> Flow[Settled]:
    """Find out whether a business transaction whose COMMIT got no reply was committed.

    That transaction updated the record's row before its COMMIT was sent, so this settlement waits for it to end: it
    finds either the committed response, or the unchanged claim, which it makes retryable. A read alone could not
    distinguish a roll-back from a commit that is still in progress.
    """
    return (yield from records.settle(lease, Retryable(COMMIT_LOST)))


@dataclass(frozen=True, slots=True)
class KeyView:
    """The state of a key. `busy`: a LOCAL request is running, which has no row yet."""

    snapshot: Snapshot
    busy: bool
    parcels: tuple[ParcelLocation, ...] = ()
    evidence: tuple[Evidence, ...] = ()
    """Evidence about its open call that has settled nothing yet."""


def look(store: Store, record_id: RecordId, lock: int | None) -> Flow[KeyView]:
    """The record, and whether a LOCAL request in one commit is running, which has no row yet."""
    snapshot, locks = (yield from store.find(record_id)), store.locks
    if lock is None or locks is None or situate(snapshot.record, snapshot.now) not in _WITHOUT_ROW:
        return KeyView(snapshot, busy=False)
    if (yield from locks.held(lock)):
        return KeyView(snapshot, busy=True)
    # It may have committed between the two reads.
    return KeyView((yield from store.find(record_id)), busy=False)
