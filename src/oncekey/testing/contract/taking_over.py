"""Take-overs: what the next owner has to prove, and what it keeps."""

from __future__ import annotations

import uuid
from dataclasses import replace
from typing import TYPE_CHECKING

from oncekey.core.model import (
    Code,
    Effects,
    Proceed,
    Recovery,
    Refuse,
    Replay,
    Retryable,
    State,
)
from oncekey.core.rulings import LOCK_EXPIRED
from oncekey.testing.claims import DEADLINE, LEASE, OTHER_FINGERPRINT, TTL, a_claim, again, answered
from oncekey.testing.contract.standings import SETTLEMENTS, STATES, stand

if TYPE_CHECKING:
    from oncekey.testing.contract.world import World


class TakingOver:
    """The next owner proves which version it has read, and raises the fence."""

    def test_a_stale_lease_of_what_may_run_again_is_taken_over(self, world: World) -> None:
        """Same incarnation, next fence, next attempt, new lease; the rest is kept (13)."""
        claim = a_claim()
        world.owned(claim)
        before = world.record(claim.id)
        now = world.advance(LEASE)
        successor = again(claim)

        verdict = world.begin(successor)

        assert isinstance(verdict, Proceed)
        assert verdict.record == replace(
            before,
            fence=2,
            version=2,
            owner=successor.owner,
            attempts=2,
            lease_until=now + LEASE,
            deadline=now + DEADLINE,
            last_run_at=now,
        )
        assert world.record(claim.id) == verdict.record

    def test_a_stale_lease_of_what_nobody_may_repeat_becomes_unknown(self, world: World) -> None:
        """One request marks it unknown, and all get the same answer; the fence stays for the late owner (15)."""
        claim = a_claim(effects=Effects.INLINE, recovery=Recovery.UNKNOWN)
        world.owned(claim)
        before = world.record(claim.id)
        now = world.advance(LEASE)

        verdicts = [world.begin(again(claim)), world.begin(again(claim))]

        doubted = replace(
            before,
            state=State.UNKNOWN,
            version=2,
            owner=None,
            lease_until=None,
            last_error=LOCK_EXPIRED,
            reconcile_after=now,
        )
        for verdict in verdicts:
            assert isinstance(verdict, Refuse)
            assert (verdict.code, verdict.record) == (Code.OUTCOME_UNKNOWN, doubted)
        assert world.record(claim.id) == doubted

    def test_what_provably_did_not_happen_is_taken_over_at_once(self, world: World) -> None:
        """The error is forgotten, the fence is not (16)."""
        standing = stand(world, State.FAILED_RETRYABLE)

        verdict = world.begin(again(standing.claim))

        assert isinstance(verdict, Proceed)
        assert (verdict.lease.fence, verdict.lease.attempt) == (2, 2)
        assert verdict.record is not None
        assert verdict.record.last_error is None
        assert verdict.record.incarnation == standing.claim.incarnation

    def test_taking_over_keeps_the_first_fingerprint_and_takes_on_its_own_effects(self, world: World) -> None:
        """The successor works for the same request; nothing was done yet, so its own crash is what counts (P2)."""
        standing = stand(world, State.FAILED_RETRYABLE)
        seen = world.record(standing.claim.id)
        other = again(
            standing.claim,
            fingerprint=OTHER_FINGERPRINT,
            effects=Effects.INLINE,
            recovery=Recovery.UNKNOWN,
            seed=b"other",
            operation="another",
            ttl=1,
            call_timeout=1,
        )

        taken = world.go(world.store.take_over(other, seen))

        assert taken is not None
        assert taken.record is not None
        for name in ("fingerprint", "seed", "operation", "ttl", "incarnation"):
            assert getattr(taken.record, name) == getattr(seen, name), name
        for name in ("effects", "recovery", "call_timeout"):
            assert getattr(taken.record, name) == getattr(other, name), name

    def test_a_swap_that_saw_something_older_loses_and_writes_nothing(self, world: World) -> None:
        """Version and incarnation are compared in the statement that writes (P1)."""
        for state in STATES:
            standing = stand(world, state)
            world.advance(TTL)  # a lease and an expiry that are over would allow each of these
            now = world.find(standing.claim.id).record
            seen = now or world.record(stand(world, State.FAILED_RETRYABLE).claim.id)
            for blind in (
                replace(seen, version=seen.version - 1),
                replace(seen, version=seen.version + 1),
                replace(seen, incarnation=uuid.uuid4()),
            ):
                absent = replace(blind, id=standing.claim.id)
                ours = again(standing.claim)
                assert world.go(world.store.take_over(ours, absent)) is None, state
                assert world.go(world.store.supersede(ours, absent)) is None, state
                assert world.go(world.store.doubt(absent, "lost")) is None, state
            assert world.find(standing.claim.id).record == now, state

    def test_a_heartbeat_beats_a_taker_that_looked_before_it(self, world: World) -> None:
        """A lease that came back to life is not taken (4)."""
        claim = a_claim()
        lease = world.owned(claim)
        world.advance(LEASE)
        world.before("take_over", lambda: world.renew(lease, LEASE))

        verdict = world.begin(again(claim))

        assert isinstance(verdict, Refuse)
        assert verdict.code is Code.IN_PROGRESS
        assert world.record(claim.id).fence == 1

    def test_an_answer_beats_a_taker_that_looked_before_it(self, world: World) -> None:
        """What was stored after the look is not wiped; it is replayed (V in 13 and 16)."""
        claim = a_claim()
        lease = world.owned(claim)
        world.advance(LEASE)
        world.before("take_over", lambda: world.settle(lease, answered()))

        verdict = world.begin(again(claim))

        assert isinstance(verdict, Replay)
        assert verdict.record.response == answered().response

    def test_a_take_over_whose_reply_was_lost_is_ours(self, world: World) -> None:
        """A second read finds the request's own claim (P7)."""
        standing = stand(world, State.FAILED_RETRYABLE)
        world.lose_reply("take_over")

        lease = world.owned(again(standing.claim))

        assert (lease.fence, world.record(standing.claim.id).version) == (2, 3)

    def test_who_was_taken_over_writes_nothing(self, world: World) -> None:
        """The store refuses every write of the old owner (P1, F11)."""
        claim = a_claim()
        zombie = world.owned(claim)
        world.advance(LEASE)
        world.owned(again(claim))
        before = world.record(claim.id)

        assert world.renew(zombie, LEASE) is None
        for name, settlement in SETTLEMENTS.items():
            settled = world.settle(zombie, settlement)
            assert not settled.ours, name
            assert settled.snapshot.record == before, name
        assert world.record(claim.id) == before

    def test_each_failure_can_be_retried(self, world: World) -> None:
        """Fence, attempts and version count on."""
        claim = a_claim()
        lease = world.owned(claim)
        turns = 4
        for turn in range(1, turns + 1):
            assert (lease.fence, lease.attempt) == (turn, turn)
            assert world.settle(lease, Retryable(f"try {turn}")).ours
            assert world.record(claim.id).last_error == f"try {turn}"
            lease = world.owned(again(claim))
        assert world.record(claim.id).version == 2 * turns + 1
