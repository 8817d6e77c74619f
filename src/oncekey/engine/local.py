"""LOCAL in one commit, as rules and flows: how it is entered, and what is true when its own commit is not the end.

Nothing here waits, reads a clock or talks to anything.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias, assert_never

from oncekey.core.errors import CommitAmbiguousError, StoreError
from oncekey.core.model import Code, Lease, Proceed, Refuse, Replay
from oncekey.core.onecommit import Kind, Sealed, ground_for
from oncekey.core.rulings import ClaimAgain, Doubt, Supersede, TakeOver, rule
from oncekey.flow import Mode, Transaction

if TYPE_CHECKING:
    from oncekey.core.model import Claim, Completed, Instant, Snapshot
    from oncekey.core.onecommit import Ground, Locked
    from oncekey.core.policy import Policy
    from oncekey.flow import Flow, Steps
    from oncekey.ports import Inspect, Locks

LOSSES = 3
"""How many replies of the record's own small transaction may be lost before the outage is reported."""

BUSY = Refuse(Code.IN_PROGRESS, retry_after=1)
"""Somebody holds the lock, and how long for nobody knows: there is no row with a lease (L8)."""

ROLLED_BACK = Refuse(Code.STORE_UNAVAILABLE, retry_after=1)


@dataclass(frozen=True, slots=True)
class Go:
    """Execute: the lock is ours, and the finished record has a place."""

    lease: Lease
    ground: Ground
    begun: Instant


@dataclass(frozen=True, slots=True)
class ClaimFirst:
    """The record that is there is of another kind: it is followed its own way, by a claim (L3)."""


Entry: TypeAlias = Go | ClaimFirst | Replay | Refuse


def enter(look: Locked, claim: Claim, policy: Policy) -> Entry:
    """What the lock and the look mean; what the record says holds whether or not the lock was got (L1)."""
    said = _said(look.snapshot, claim, policy)
    if said is not None:
        return said
    if not look.got:
        return BUSY
    ground = ground_for(look.snapshot, claim)
    if ground is None:
        return ClaimFirst()
    return Go(_lease(claim, ground, look.snapshot.now), ground, look.begun)


def after(records: Inspect, claim: Claim, policy: Policy) -> Flow[Replay | Refuse | None]:
    """What the record says to a request that did not commit one itself (L2). None: nothing."""
    return _said((yield from records.find(claim.id)), claim, policy)


def lost_commit(locks: Locks, number: int, claim: Claim, policy: Policy) -> Flow[Replay | Refuse]:
    """What became of a COMMIT that got no reply (P7).

    No record proves a roll-back only to who holds the lock: until then the commit may be under way.
    """
    look = yield Transaction("lost_commit", Mode.ATOMIC, lambda: locks.locking(number, claim.id, claim.lease))
    said = _said(look.snapshot, claim, policy)
    if said is not None:
        return said
    return ROLLED_BACK if look.got else BUSY


def alone(
    locks: Locks, number: int, claim: Claim, policy: Policy, settlement: Completed
) -> Flow[Sealed | Replay | Refuse]:
    """The record by itself, after the business was rolled back (L6); what somebody else stored meanwhile wins."""

    def body() -> Steps[Sealed | Replay | Refuse]:
        entry = enter((yield from locks.locking(number, claim.id, claim.lease)), claim, policy)
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


def _said(snapshot: Snapshot, claim: Claim, policy: Policy) -> Replay | Refuse | None:
    """The record's own word. None: it leaves the key to whoever claims it next."""
    ruled = rule(snapshot, claim, policy)
    match ruled:
        case Replay() | Refuse():
            return ruled
        case Proceed() | TakeOver() | Supersede() | Doubt() | ClaimAgain():
            return None
        case _:
            assert_never(ruled)


def _lease(claim: Claim, ground: Ground, now: Instant) -> Lease:
    """What the handler is told about itself. The server's time-outs keep the lease, so there is no heartbeat (L4)."""
    seen = ground.seen
    again = seen if ground.kind is Kind.RETRYABLE else None
    return Lease(
        id=claim.id,
        incarnation=again.incarnation if again else claim.incarnation,
        fence=seen.fence + 1 if seen else 1,
        attempt=again.attempts + 1 if again else 1,
        effects=claim.effects,
        lease_until=now + claim.lease,
        deadline=now + claim.deadline,
        expires_at=now + claim.ttl,
        owner=claim.owner,
    )
