"""Claims: the first caller of a key, and the callers after it."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from oncekey.core.model import (
    SECOND,
    Code,
    Discarded,
    Effects,
    Lease,
    Proceed,
    Record,
    Recovery,
    Refuse,
    State,
)
from oncekey.testing.claims import DEADLINE, LEASE, OTHER_FINGERPRINT, TTL, a_claim, again
from oncekey.testing.contract.standings import stand

if TYPE_CHECKING:
    from oncekey.testing.contract.world import World


class Claiming:
    """The first caller of an unused key owns it, and no other caller does."""

    def test_a_key_that_was_never_used_has_no_record(self, world: World) -> None:
        """The store's clock comes with the answer all the same."""
        snapshot = world.find(a_claim().id)

        assert snapshot.record is None
        assert snapshot.now == world.clock.now

    def test_the_first_claim_stores_everything_it_says(self, world: World) -> None:
        """Every field, and the instants by the store's clock."""
        claim, now = a_claim(), world.clock.now

        verdict = world.begin(claim)

        assert isinstance(verdict, Proceed)
        assert verdict.record == Record(
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
            entered=True,
            fence=1,
            version=1,
            owner=claim.owner,
            lease_until=now + LEASE,
            deadline=now + DEADLINE,
            call_timeout=claim.call_timeout,
            ttl=TTL,
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
            expires_at=now + TTL,
        )
        assert verdict.lease == Lease.of(verdict.record)
        assert world.record(claim.id) == verdict.record

    def test_effects_and_recovery_are_the_claims_own(self, world: World) -> None:
        """A crash means what was stored, not what the route says later (P2)."""
        for effects in Effects:
            for recovery in Recovery:
                claim = a_claim(effects=effects, recovery=recovery, entered=False)
                world.owned(claim)
                record = world.record(claim.id)
                assert (record.effects, record.recovery, record.entered) == (effects, recovery, False)

    def test_a_repeated_claim_is_ours_and_writes_nothing(self, world: World) -> None:
        """A record in progress that names our owner is ours (P7)."""
        claim = a_claim()
        first = world.begin(claim)
        assert isinstance(first, Proceed)

        now = world.advance(SECOND)

        assert world.begin(claim) == replace(first, now=now)
        assert world.record(claim.id).version == 1

    def test_a_claim_whose_reply_was_lost_is_ours(self, world: World) -> None:
        """The claim is sent again, and finds its own record (P7, F8)."""
        claim = a_claim()
        world.lose_reply("claim")

        lease = world.owned(claim)

        assert (lease.fence, lease.incarnation) == (1, claim.incarnation)
        assert world.record(claim.id).version == 1

    def test_a_duplicate_waits_and_changes_nothing(self, world: World) -> None:
        """A record stays in progress until its lease is over."""
        claim = a_claim()
        world.owned(claim)
        before = world.record(claim.id)
        world.advance(LEASE - 1)

        verdict = world.begin(again(claim))

        assert isinstance(verdict, Refuse)
        assert (verdict.code, verdict.record) == (Code.IN_PROGRESS, before)
        assert world.record(claim.id) == before

    def test_another_request_under_the_same_key_is_told_so_in_every_state(self, world: World) -> None:
        """The fingerprint comes first, whatever the record is doing, and nothing is written."""
        for state in (State.IN_PROGRESS, State.COMPLETED, State.FAILED_RETRYABLE, State.UNKNOWN):
            for wait in (0, LEASE, DEADLINE):
                standing = stand(world, state)
                before = world.record(standing.claim.id)
                world.advance(wait)

                verdict = world.begin(again(standing.claim, fingerprint=OTHER_FINGERPRINT))

                assert verdict == Refuse(Code.KEY_REUSED), (state, wait)
                assert world.record(standing.claim.id) == before, (state, wait)

    def test_scopes_and_keys_do_not_meet(self, world: World) -> None:
        """The same key of another tenant is another key, and the border cannot be shifted."""
        claim = a_claim("order-1")
        strangers = [
            replace(claim.id, scope="shop|tenant-2"),
            replace(claim.id, key="order-2"),
            replace(claim.id, scope=claim.id.scope + "order", key="-1"),
            replace(claim.id, key="ORDER-1"),
            replace(claim.id, key="order-1 "),
        ]
        world.owned(claim)

        for record_id in strangers:
            world.owned(again(claim, id=record_id))

    def test_a_row_that_appears_before_our_insert_wins(self, world: World) -> None:
        """The insert finds the record and reads it, without an error."""
        claim = a_claim()
        world.before("claim", lambda: world.owned(again(claim)))

        verdict = world.begin(claim)

        assert isinstance(verdict, Refuse)
        assert verdict.code is Code.IN_PROGRESS
        assert world.record(claim.id).version == 1

    def test_a_row_that_vanishes_before_our_swap_is_claimed_anew(self, world: World) -> None:
        """Its owner took it back while we looked."""
        claim = a_claim()
        lease = world.owned(claim)
        world.advance(LEASE)
        world.before("take_over", lambda: world.settle(lease, Discarded()))
        ours = again(claim)

        assert world.owned(ours).fence == 1
        assert world.record(claim.id).incarnation == ours.incarnation
