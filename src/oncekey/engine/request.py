"""The request path as flows: begin, renew, settle, release.

Nothing here waits, reads a clock or talks to anything: each flow yields transactions and is sent their results.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, assert_never

from oncekey.core.errors import CommitAmbiguousError
from oncekey.core.model import Code, Discarded, Proceed, Refuse, Replay, Retryable
from oncekey.core.rulings import ClaimAgain, Doubt, Supersede, TakeOver, rule

if TYPE_CHECKING:
    from oncekey.core.model import Claim, Duration, Instant, Lease, Settled, Settlement, Snapshot, Verdict
    from oncekey.core.policy import Policy
    from oncekey.flow import Flow
    from oncekey.ports import Records

ROUNDS = 8
"""How often a request that loses race after race looks again before it is told to come back later."""

COMMIT_LOST = "commit_reply_lost"


def begin(records: Records, claim: Claim, policy: Policy) -> Flow[Verdict]:
    """Ask for the right to execute. Each round is one look and at most one compare-and-swap."""
    snapshot: Snapshot | None = None
    for _ in range(ROUNDS):
        if snapshot is None:
            snapshot = yield from records.claim(claim)
        ruled = rule(snapshot, claim, policy)
        match ruled:
            case Proceed() | Replay() | Refuse():
                return ruled
            case TakeOver(seen):
                snapshot = yield from _tried(records.take_over(claim, seen))
            case Supersede(seen):
                snapshot = yield from _tried(records.supersede(claim, seen))
            case Doubt(seen, last_error):
                snapshot = yield from _tried(records.doubt(seen, last_error))
            case ClaimAgain():
                snapshot = None
            case _:
                assert_never(ruled)
    return Refuse(Code.IN_PROGRESS, retry_after=1)


def renew(records: Records, lease: Lease, span: Duration) -> Flow[Instant | None]:
    """The heartbeat: the lease's new end, or None when it is not ours any more."""
    return (yield from records.renew(lease, span))


def settle(records: Records, lease: Lease, settlement: Settlement) -> Flow[Settled]:
    """Write what became of the operation, in a transaction of its own."""
    return (yield from records.settle(lease, settlement))


def release(records: Records, lease: Lease) -> Flow[Settled]:
    """Take back a claim whose handler was never entered: the key is as good as new."""
    return (yield from records.settle(lease, Discarded()))


def settle_lost_commit(records: Records, lease: Lease) -> Flow[Settled]:
    """Find out what became of a business transaction whose COMMIT got no reply (P7).

    That transaction updated the record's row before its COMMIT was sent, so this settlement waits for it to end:
    it finds either the committed answer, or the untouched claim, which it hands back. Reading alone could not
    tell a roll-back from a commit that is still under way.
    """
    return (yield from records.settle(lease, Retryable(COMMIT_LOST)))


def _tried(swap: Flow[Snapshot | None]) -> Flow[Snapshot | None]:
    """A swap whose reply was lost counts as lost: looking again tells whether the record names us."""
    try:
        return (yield from swap)
    except CommitAmbiguousError:
        return None
