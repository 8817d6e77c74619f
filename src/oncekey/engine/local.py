"""LOCAL in one commit: the handler's rows and its record are written in one transaction, under a lock on the key.

    BEGIN + lock + read ──────▶ handler ──────▶ record + COMMIT
    │ lock taken by us          writes its      both, or neither
    │ record read after         rows in the
    │ the lock                  same transaction
    │
    ├─ a record has the response           ──▶ replay it, with or without the lock
    ├─ another request has the lock        ──▶ in progress, or key reused if its mark shows another request
    └─ a record of another kind exists     ──▶ claim it first

There is no claim and no lease: until COMMIT nothing is written, and after a crash the server rolls back. The server's
time-outs, set by the first statement, end a transaction whose host is gone. A key in progress is visible only through
its lock (`peek`).

Three ends are not an acknowledged COMMIT of our own record:

* The handler's rows are rolled back and its response is final (a 4xx, or any after `op.rollback()`): the record is
  stored in a second transaction, which takes the lock again. If another request has stored a response in between, that
  one counts (`store_record_only`).
* COMMIT was sent and got no reply: the request takes the lock again. With the lock, "no record" proves a roll-back;
  without it the first transaction may still be committing (`lost_commit`).
* Everything else was rolled back: the request reads the record before it responds, and the record decides
  (`answer_of_record`).

Nothing here waits, reads a clock or does I/O: the rules are functions, and the rest are flows.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, TypeAlias, assert_never

from oncekey.core.errors import CommitAmbiguousError, ConfigurationError, StoreError
from oncekey.core.flow import Body, Flow, Mode, Transaction
from oncekey.core.model import UNAVAILABLE, Code, Lease, Proceed, Record, Refuse, Replay, State, value
from oncekey.core.onecommit import Holder, Lock, Locked, Stored, WriteKind, WriteTarget, write_target_for
from oncekey.core.rulings import ClaimAgain, MarkUnknown, Situation, Supersede, TakeOver, rule, rule_finished, situate
from oncekey.engine.request import NO_OUTBOX

if TYPE_CHECKING:
    from oncekey.core.model import Claim, Completed, Deferred, Instant, Parcel, Snapshot
    from oncekey.core.policy import Policy
    from oncekey.ports.store import Inspect, Locks, ParcelWriter, Recalls

LOSSES = 3
"""How many replies of the record's own small transaction may be lost before the outage is reported."""

TAKEN = Refuse(Code.KEY_REUSED)
"""A different request with the same key is running: the first one keeps the key, whatever its outcome."""

BUSY = Refuse(Code.IN_PROGRESS, retry_after=1)
"""Another connection holds the lock, for an unknown time: there is no row with a lease."""

NEW = WriteTarget(WriteKind.NEW, None)
"""The write target of a new key, whatever its effects; a constant saves a lookup in the table of moves."""


@value
class LockHeld:
    """The handler may run: we hold the lock, and it is known where the record goes. Nothing is written yet."""

    proceed: Proceed
    target: WriteTarget
    begun: int


@value
class ClaimFirst:
    """The existing record is of another kind, and has to be claimed first."""


Entry: TypeAlias = LockHeld | ClaimFirst | Replay | Refuse


def enter(look: Locked, claim: Claim, policy: Policy) -> Entry:
    """Decide what a request does after lock and read; a record's ruling counts with or without the lock."""
    now = look.snapshot.now
    if look.got and look.snapshot.record is None:
        return LockHeld(Proceed(Lease.new(claim, now), None, now), NEW, look.begun)
    ruled = ruling_of(look.snapshot, claim, policy)
    if ruled is not None:
        return ruled
    if not look.got:
        return TAKEN if look.other and _leaves_room(look.snapshot) else BUSY
    target = write_target_for(look.snapshot, claim)
    if target is None:
        return ClaimFirst()
    record = record_as_claimed(claim, target, now)
    return LockHeld(Proceed(Lease.of(record), record, now, target.seen), target, look.begun)


def store_finished(
    locks: Locks,
    writer: ParcelWriter | None,
    claim: Claim,
    lock_held: LockHeld,
    settlement: Completed | Deferred,
    *,
    parcels: tuple[Parcel, ...] = (),
) -> Body[Stored | None]:
    """Write the finished record and the handler's parcels, as the last statements of the business transaction."""
    stored_now = yield from locks.completing(claim, lock_held.target, settlement, lock_held.begun)
    if stored_now is not None and parcels:
        if writer is None:
            raise ConfigurationError(NO_OUTBOX)
        yield from writer.putting(parcels)
    return stored_now


def answer_of_record(records: Inspect, claim: Claim, policy: Policy) -> Flow[Replay | Refuse | None]:
    """The record's ruling on a request that did not commit one itself. None: the key is free."""
    return ruling_of((yield from records.find(claim.id)), claim, policy)


def stored(records: Recalls, claim: Claim, policy: Policy) -> Flow[Replay | Refuse | None]:
    """The ruling of a completed record, by the short read of a retry; None: there is none, or it has expired."""
    glimpse = yield from records.recall(claim.id)
    return None if glimpse is None else rule_finished(glimpse.finished, glimpse.now, claim.fingerprint, policy)


def peek(records: Inspect, locks: Locks, lock: Lock, claim: Claim, policy: Policy) -> Flow[Replay | Refuse | None]:
    """The verdict on a request, without taking the lock. None: the key is free, so try to lock."""
    ruled = yield from answer_of_record(records, claim, policy)
    if ruled is not None:
        return ruled
    holder = yield from locks.holder(lock)
    match holder:
        case Holder.NOBODY:
            return None
        case Holder.UNKNOWN_HOLDER:
            return BUSY
        case Holder.OTHER:
            # A record may have been committed after the first read and before the holder was read.
            snapshot = yield from records.find(claim.id)
            ruled = ruling_of(snapshot, claim, policy)
            return ruled or (TAKEN if _leaves_room(snapshot) else BUSY)
        case _:
            assert_never(holder)


def lost_commit(locks: Locks, lock: Lock, claim: Claim, policy: Policy) -> Flow[Replay | Refuse]:
    """The verdict on a request whose COMMIT got no reply; a missing record proves a roll-back only under the lock."""
    look = yield Transaction("lost_commit", Mode.ATOMIC, lambda: locks.locking(lock, claim))
    ruled = ruling_of(look.snapshot, claim, policy)
    if ruled is not None:
        return ruled
    return UNAVAILABLE if look.got else BUSY


def store_record_only(
    locks: Locks, lock: Lock, claim: Claim, policy: Policy, settlement: Completed
) -> Flow[Stored | Replay | Refuse]:
    """Store the record after the handler's rows were rolled back; a response stored in between takes precedence."""

    def body() -> Body[Stored | Replay | Refuse]:
        # This request came first: a different request between its two transactions does not take the key from it.
        look = replace((yield from locks.locking(lock, claim)), other=False)
        entry = enter(look, claim, policy)
        match entry:
            case LockHeld(_, target, begun):
                return (yield from locks.completing(claim, target, settlement, begun)) or BUSY
            case Replay() | Refuse():
                return entry
            case ClaimFirst():
                return BUSY
            case _:
                assert_never(entry)

    lost: CommitAmbiguousError | None = None
    for _ in range(LOSSES):
        try:
            result: Stored | Replay | Refuse = yield Transaction("alone", Mode.ATOMIC, body)
        except CommitAmbiguousError as error:
            lost = error  # the next attempt finds its own record, and replays it
        except StoreError as error:
            if lost is None:
                raise
            raise lost from error
        else:
            return result
    assert lost is not None
    raise lost


def _leaves_room(snapshot: Snapshot) -> bool:
    """Whether no live record decides who owns the key: then the request that holds the lock does."""
    return situate(snapshot.record, snapshot.now) in (Situation.ABSENT, Situation.EXPIRED)


def ruling_of(snapshot: Snapshot, claim: Claim, policy: Policy) -> Replay | Refuse | None:
    """The record's ruling on this request. None: the request may claim the key."""
    ruled = rule(snapshot, claim, policy)
    match ruled:
        case Replay() | Refuse():
            return ruled
        case Proceed() | TakeOver() | Supersede() | MarkUnknown() | ClaimAgain():
            return None
        case _:
            assert_never(ruled)


def record_as_claimed(claim: Claim, target: WriteTarget, now: Instant) -> Record:
    """The record as a claim would have created it; never written. Its lease is enforced by the server's time-outs."""
    seen = target.seen
    if seen is not None and target.kind is WriteKind.RETRYABLE:
        return replace(
            seen,
            state=State.IN_PROGRESS,
            fence=seen.fence + 1,
            owner=claim.owner,
            lease_until=now + claim.lease,
            deadline=now + claim.deadline,
            attempts=seen.attempts + 1,
            last_run_at=now,
            last_error=None,
        )
    return Record(
        id=claim.id,
        incarnation=claim.incarnation,
        operation=claim.operation,
        effects=claim.effects,
        recovery=claim.recovery,
        method=claim.method,
        path=claim.path,
        fingerprint=claim.fingerprint,
        seed=claim.seed,
        state=State.IN_PROGRESS,
        outcome=None,
        entered=claim.entered,
        fence=1 if seen is None else seen.fence + 1,
        version=1 if seen is None else seen.version + 1,
        owner=claim.owner,
        lease_until=now + claim.lease,
        deadline=now + claim.deadline,
        call_timeout=claim.call_timeout,
        ttl=claim.ttl,
        attempts=1,
        recovery_point="started",
        memo=(),
        intent=None,
        response=None,
        last_error=None,
        reconcile_after=None,
        reconcile_tries=0,
        created_at=now,
        last_run_at=now,
        finished_at=None,
        expires_at=now + claim.ttl,
    )
