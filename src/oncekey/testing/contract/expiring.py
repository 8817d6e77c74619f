"""Expiry: which records a store may replace after their ttl, and which never."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from oncekey.core.choices import OnExpired
from oncekey.core.memo import STARTED
from oncekey.core.model import HOUR, Code, Effects, Proceed, Recovery, Refuse, Replay, State
from oncekey.core.policy import Policy
from oncekey.testing.claims import LEASE, OTHER_FINGERPRINT, TTL, a_claim, again, answered
from oncekey.testing.contract.standings import SETTLEMENTS, stand

if TYPE_CHECKING:
    from oncekey.testing.contract.world import World

EXPIRING = (State.COMPLETED, State.FAILED_RETRYABLE)


class Expiring:
    """Only finished records expire; a key that is used again is another incarnation."""

    def test_an_answer_is_replayed_until_its_last_microsecond(self, world: World) -> None:
        """And not a moment longer."""
        standing = stand(world, State.COMPLETED)
        world.advance(TTL - 1)
        assert isinstance(world.begin(again(standing.claim)), Replay)
        world.advance(1)
        assert isinstance(world.begin(again(standing.claim)), Proceed)

    def test_an_expired_key_starts_anew_and_its_fence_goes_on(self, world: World) -> None:
        """New incarnation and new request; nothing of the old one is left but the counters (31, F1)."""
        for state in EXPIRING:
            standing = stand(world, state)
            before = world.record(standing.claim.id)
            now = world.advance(TTL)
            claim = again(
                standing.claim,
                fingerprint=OTHER_FINGERPRINT,
                effects=Effects.INLINE,
                recovery=Recovery.UNKNOWN,
                operation="another",
                method="PATCH",
                path="/elsewhere",
                seed=b"\x00\xff",
                lease=7,
                deadline=70,
                call_timeout=5,
                ttl=700,
                entered=False,
            )

            verdict = world.begin(claim)

            assert isinstance(verdict, Proceed), state
            assert verdict.record == replace(
                before,
                incarnation=claim.incarnation,
                fingerprint=OTHER_FINGERPRINT,
                effects=Effects.INLINE,
                recovery=Recovery.UNKNOWN,
                operation="another",
                method="PATCH",
                path="/elsewhere",
                seed=b"\x00\xff",
                state=State.IN_PROGRESS,
                outcome=None,
                entered=False,
                fence=before.fence + 1,
                version=before.version + 1,
                owner=claim.owner,
                lease_until=now + 7,
                deadline=now + 70,
                call_timeout=5,
                ttl=700,
                attempts=1,
                recovery_point=STARTED,
                response=None,
                last_error=None,
                created_at=now,
                last_run_at=now,
                finished_at=None,
                expires_at=now + 700,
            ), state
            assert world.record(claim.id) == verdict.record, state

    def test_an_owner_of_an_earlier_incarnation_writes_nothing(self, world: World) -> None:
        """Neither after a new start nor after the row went and came back with the same fence (F1)."""
        expired, taken_back = stand(world, State.FAILED_RETRYABLE), stand(world, None)
        world.advance(TTL)
        for standing in (expired, taken_back):
            world.owned(again(standing.claim))
            before = world.record(standing.claim.id)

            assert world.renew(standing.lease, LEASE) is None
            for name, settlement in SETTLEMENTS.items():
                assert world.settle(standing.lease, settlement).ours == (name == "discarded"), name
            assert world.record(standing.claim.id) == before

    def test_what_is_unfinished_does_not_expire(self, world: World) -> None:
        """Time proves nothing: a running record stays running, an unknown one stays unknown (P6, F3)."""
        unknown = stand(world, State.UNKNOWN)
        inline = stand(world, State.IN_PROGRESS, effects=Effects.INLINE, recovery=Recovery.UNKNOWN)
        local = stand(world, State.IN_PROGRESS, deadline=10 * TTL)
        world.advance(2 * TTL)

        for standing in (unknown, inline):
            verdict = world.begin(again(standing.claim))
            assert isinstance(verdict, Refuse)
            assert verdict.code is Code.OUTCOME_UNKNOWN
            assert world.record(standing.claim.id).incarnation == standing.claim.incarnation
        assert world.renew(local.lease, LEASE) is not None
        verdict = world.begin(again(local.claim))
        assert isinstance(verdict, Refuse)
        assert verdict.code is Code.IN_PROGRESS
        world.advance(LEASE)
        taken = world.owned(again(local.claim))
        assert (taken.incarnation, taken.fence) == (local.claim.incarnation, 2)

    def test_another_request_does_not_get_an_unfinished_key_by_waiting(self, world: World) -> None:
        """A different body is refused a day later too (F3)."""
        for state in (State.IN_PROGRESS, State.UNKNOWN):
            standing = stand(world, state)
            world.advance(2 * TTL)
            verdict = world.begin(again(standing.claim, fingerprint=OTHER_FINGERPRINT))
            assert verdict == Refuse(Code.KEY_REUSED), state

    def test_no_answer_is_born_expired(self, world: World) -> None:
        """However late the answer comes, it is kept for a whole ttl (P6, F2)."""
        for settled_from in (State.IN_PROGRESS, State.FAILED_RETRYABLE, State.UNKNOWN):
            standing = stand(world, settled_from)
            now = world.advance(TTL + HOUR)

            assert world.settle(standing.lease, answered()).ours, settled_from

            assert world.record(standing.claim.id).expires_at == now + TTL, settled_from
            assert isinstance(world.begin(again(standing.claim)), Replay), settled_from

    def test_no_answer_expires_earlier_than_its_claim_said(self, world: World) -> None:
        """Expiry moves forward only: max(expires_at, now + ttl) (P6)."""
        claim = a_claim()
        lease = world.owned(claim)
        world.advance(-HOUR)

        assert world.settle(lease, answered()).ours

        assert world.record(claim.id).expires_at == lease.expires_at

    def test_an_expired_key_can_be_gone_for_good(self, world: World) -> None:
        """Where the policy says so, and nothing is written."""
        gone = Policy(on_expired=OnExpired.GONE)
        for state in EXPIRING:
            standing = stand(world, state)
            before = world.record(standing.claim.id)
            world.advance(TTL)
            assert world.begin(again(standing.claim), gone) == Refuse(Code.KEY_EXPIRED), state
            assert world.record(standing.claim.id) == before, state

    def test_a_new_start_whose_reply_was_lost_is_ours(self, world: World) -> None:
        """A second read finds the request's own claim (P7)."""
        standing = stand(world, State.COMPLETED)
        world.advance(TTL)
        world.lose_reply("supersede")

        lease = world.owned(again(standing.claim))

        assert (lease.fence, world.record(standing.claim.id).version) == (2, 3)

    def test_a_late_answer_beats_a_new_start(self, world: World) -> None:
        """The read was older than the answer, so the answer is replayed (V in 31)."""
        standing = stand(world, State.FAILED_RETRYABLE)
        world.advance(TTL)
        world.before("supersede", lambda: world.settle(standing.lease, answered()))

        assert isinstance(world.begin(again(standing.claim)), Replay)
