"""LOCAL in one commit, as rules and flows: how it is entered, and what is true when its own commit is not the end.

Nothing here waits, reads a clock or talks to anything.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, TypeAlias, assert_never

from oncekey.core.errors import CommitAmbiguousError, ConfigurationError, StoreError
from oncekey.core.model import UNAVAILABLE, Code, Lease, Proceed, Record, Refuse, Replay, State
from oncekey.core.onecommit import Ground, Holder, Kind, Sealed, ground_for
from oncekey.core.rulings import ClaimAgain, Doubt, Situation, Supersede, TakeOver, rule, rule_finished, situate
from oncekey.engine.request import NO_OUTBOX
from oncekey.flow import Mode, Transaction

if TYPE_CHECKING:
    from oncekey.core.locks import Lock
    from oncekey.core.model import Claim, Completed, Deferred, Instant, Parcel, Snapshot
    from oncekey.core.onecommit import Locked
    from oncekey.core.policy import Policy
    from oncekey.flow import Flow, Steps
    from oncekey.ports import Inspect, Locks, Outbox, Recalls

LOSSES = 3
"""How many replies of the record's own small transaction may be lost before the outage is reported."""

TAKEN = Refuse(Code.KEY_REUSED)
"""Another request under the same key is under way: the first one is in the right, whatever becomes of it."""

BUSY = Refuse(Code.IN_PROGRESS, retry_after=1)
"""Somebody holds the lock, and how long for nobody knows: there is no row with a lease (L8)."""

NEW = Ground(Kind.NEW, None)
"""What the table says of a key without a record, whatever its effects: asking it each time would cost as much again."""


@dataclass(frozen=True, slots=True)
class Go:
    """Execute: the lock is ours, and the finished record has a place. What proceeds is not written anywhere yet."""

    proceed: Proceed
    ground: Ground
    begun: int


@dataclass(frozen=True, slots=True)
class ClaimFirst:
    """The record that is there is of another kind: it is followed its own way, by a claim (L3)."""


Entry: TypeAlias = Go | ClaimFirst | Replay | Refuse


def enter(look: Locked, claim: Claim, policy: Policy) -> Entry:
    """What the lock and the look mean; what the record says holds whether or not the lock was got (L1)."""
    now = look.snapshot.now
    if look.got and look.snapshot.record is None:
        return Go(Proceed(Lease.new(claim, now), None, now), NEW, look.begun)
    said = word_of(look.snapshot, claim, policy)
    if said is not None:
        return said
    if not look.got:
        return TAKEN if look.other and _leaves_room(look.snapshot) else BUSY
    ground = ground_for(look.snapshot, claim)
    if ground is None:
        return ClaimFirst()
    record = as_claimed(claim, ground, now)
    return Go(Proceed(Lease.of(record), record, now, ground.seen), ground, look.begun)


def sealing(
    locks: Locks,
    outbox: Outbox | None,
    claim: Claim,
    go: Go,
    settlement: Completed | Deferred,
    *,
    parcels: tuple[Parcel, ...] = (),
) -> Steps[Sealed | None]:
    """The finished record and what the handler emitted, as the last statements of the business transaction."""
    sealed = yield from locks.completing(claim, go.ground, settlement, go.begun)
    if sealed is not None and parcels:
        if outbox is None:
            raise ConfigurationError(NO_OUTBOX)
        yield from outbox.putting(parcels)
    return sealed


def after(records: Inspect, claim: Claim, policy: Policy) -> Flow[Replay | Refuse | None]:
    """What the record says to a request that did not commit one itself (L2). None: nothing."""
    return word_of((yield from records.find(claim.id)), claim, policy)


def stored(records: Recalls, claim: Claim, policy: Policy) -> Flow[Replay | Refuse | None]:
    """What a completed record says, by the short read of a repeat; None: there is no such, or it has expired."""
    glimpse = yield from records.recall(claim.id)
    return None if glimpse is None else rule_finished(glimpse.finished, glimpse.now, claim.fingerprint, policy)


def glance(records: Inspect, locks: Locks, lock: Lock, claim: Claim, policy: Policy) -> Flow[Replay | Refuse | None]:
    """Whether there is news for a request that waits, without taking anything (L8). None: it is worth a try."""
    said = yield from after(records, claim, policy)
    if said is not None:
        return said
    holder = yield from locks.holder(lock)
    match holder:
        case Holder.NOBODY:
            return None
        case Holder.SOMEBODY:
            return BUSY
        case Holder.OTHER:
            # What was committed before the holder was seen must not stay unseen.
            snapshot = yield from records.find(claim.id)
            said = word_of(snapshot, claim, policy)
            return said or (TAKEN if _leaves_room(snapshot) else BUSY)
        case _:
            assert_never(holder)


def lost_commit(locks: Locks, lock: Lock, claim: Claim, policy: Policy) -> Flow[Replay | Refuse]:
    """What became of a COMMIT that got no reply (P7).

    No record proves a roll-back only to who holds the lock: until then the commit may be under way.
    """
    look = yield Transaction("lost_commit", Mode.ATOMIC, lambda: locks.locking(lock, claim))
    said = word_of(look.snapshot, claim, policy)
    if said is not None:
        return said
    return UNAVAILABLE if look.got else BUSY


def alone(
    locks: Locks, lock: Lock, claim: Claim, policy: Policy, settlement: Completed
) -> Flow[Sealed | Replay | Refuse]:
    """The record by itself, after the business was rolled back (L6); what somebody else stored meanwhile wins."""

    def body() -> Steps[Sealed | Replay | Refuse]:
        # This request was here first, so one that came between its two transactions does not make it another's.
        look = replace((yield from locks.locking(lock, claim)), other=False)
        entry = enter(look, claim, policy)
        match entry:
            case Go(_, ground, begun):
                return (yield from locks.completing(claim, ground, settlement, begun)) or BUSY
            case Replay() | Refuse():
                return entry
            case ClaimFirst():
                return BUSY
            case _:
                assert_never(entry)

    lost: CommitAmbiguousError | None = None
    for _ in range(LOSSES):
        try:
            result: Sealed | Replay | Refuse = yield Transaction("alone", Mode.ATOMIC, body)
        except CommitAmbiguousError as error:
            lost = error  # said again it finds its own record, and replays it
        except StoreError as error:
            if lost is None:
                raise
            raise lost from error
        else:
            return result
    assert lost is not None
    raise lost


def _leaves_room(snapshot: Snapshot) -> bool:
    """Whether the record has no say in whose key it is: then who is under way has."""
    return situate(snapshot.record, snapshot.now) in (Situation.ABSENT, Situation.EXPIRED)


def word_of(snapshot: Snapshot, claim: Claim, policy: Policy) -> Replay | Refuse | None:
    """The record's own word. None: it leaves the key to whoever claims it next."""
    ruled = rule(snapshot, claim, policy)
    match ruled:
        case Replay() | Refuse():
            return ruled
        case Proceed() | TakeOver() | Supersede() | Doubt() | ClaimAgain():
            return None
        case _:
            assert_never(ruled)


def as_claimed(claim: Claim, ground: Ground, now: Instant) -> Record:
    """The record as a claim would have made it, for the handler to know itself by; nobody else ever sees it.

    The server's time-outs keep the lease, so there is no heartbeat (L4).
    """
    seen = ground.seen
    if seen is not None and ground.kind is Kind.RETRYABLE:
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
