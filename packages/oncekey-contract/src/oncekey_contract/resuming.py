"""Phased records: results of calls, handing back, and what the next owner finds."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from oncekey.core.model import SECOND, Discarded, Doubtful, Effects, HandedBack, Recovery, Retryable, State
from oncekey.testing.claims import DEADLINE, LEASE, TTL, a_claim, again, answered
from oncekey_contract.world import (
    CALL,
    CHARGE,
    ORDER,
    OTHER_CHARGE,
    REPEATABLE,
    REQUEST,
    WINDOW,
    World,
    announced,
    begun,
    forgeries,
    stolen,
)

_F, _U = State.FAILED_RETRYABLE, State.UNKNOWN


class Resulting:
    """The result of a call is the best evidence: the store accepts it from any owner that was not replaced."""

    def test_a_result_is_stored_and_closes_the_call(self, world: World) -> None:
        """From in progress, from unknown, and from a record that was handed back (6, U2, F35)."""
        for state, settlement in ((None, None), (_U, Doubtful("swept")), (_F, HandedBack("stopped"))):
            claim, lease = announced(world, REPEATABLE)
            if settlement is not None:
                assert world.settle(lease, settlement).ours
                assert world.record(claim.id).state is state
            before = world.record(claim.id)
            now = world.advance(SECOND)

            snapshot = world.go(world.store.phases.result(lease, (ORDER,), (ORDER, CHARGE), LEASE))

            expected = replace(
                before,
                state=State.IN_PROGRESS,
                version=before.version + 1,
                memo=(ORDER, CHARGE),
                recovery_point="charge",
                intent=None,
                owner=claim.owner,
                lease_until=now + LEASE,
                last_error=None,
                reconcile_after=None,
            )
            assert snapshot is not None, state
            assert (snapshot.record, snapshot.now) == (expected, now), state
            assert world.record(claim.id) == expected, state
            assert world.settle(lease, answered()).ours, state

    def test_a_late_result_does_not_extend_the_lease_past_the_deadline(self, world: World) -> None:
        """The store still accepts the result; another rule decides who resumes (P5)."""
        claim, lease = announced(world)
        world.advance(DEADLINE - SECOND)
        assert world.go(world.store.phases.result(lease, (ORDER,), (ORDER, CHARGE), LEASE)) is not None
        assert world.record(claim.id).lease_until == lease.deadline
        claim, lease = announced(world)
        now = world.advance(DEADLINE + SECOND)
        assert world.go(world.store.phases.result(lease, (ORDER,), (ORDER, CHARGE), LEASE)) is not None
        assert world.record(claim.id).lease_until == now

    def test_a_replaced_owner_cannot_store_a_result(self, world: World) -> None:
        """Its successor has made the call, or marked it unknown (P1, P3)."""
        claim, lease = announced(world, replace(CALL, repeatable=10 * DEADLINE))
        stolen(world, claim)
        before = world.record(claim.id)
        assert world.go(world.store.phases.result(lease, (ORDER,), (ORDER, CHARGE), LEASE)) is None
        assert world.record(claim.id) == before

    def test_a_result_does_not_overwrite_another_result(self, world: World) -> None:
        """A resolver stores a result without a new fence, and the late owner has a different one (20, F35)."""
        for settlement in (None, HandedBack("resolved"), Doubtful("again")):
            claim, lease = announced(world)
            assert world.go(world.store.phases.result(lease, (ORDER,), (ORDER, OTHER_CHARGE), LEASE)) is not None
            if settlement is not None:
                assert world.settle(lease, settlement).ours
            before = world.record(claim.id)
            assert world.go(world.store.phases.result(lease, (ORDER,), (ORDER, CHARGE), LEASE)) is None
            assert world.record(claim.id) == before

    def test_a_result_with_a_wrong_proof_is_refused(self, world: World) -> None:
        """Fence and incarnation; never over a response; only for phased records (P1, P2)."""
        result = world.store.phases.result
        claim, lease = announced(world)
        before = world.record(claim.id)
        for forged in forgeries(lease):
            assert world.go(result(forged, (ORDER,), (ORDER, CHARGE), LEASE)) is None
        assert world.record(claim.id) == before
        done, owner = begun(world)
        assert world.settle(owner, answered()).ours
        inline, caller = begun(world, effects=Effects.INLINE, recovery=Recovery.UNKNOWN)
        for claim, lease in ((done, owner), (inline, caller)):
            before = world.record(claim.id)
            assert world.go(result(lease, (), (CHARGE,), LEASE)) is None
            assert world.record(claim.id) == before

    def test_storing_a_result_succeeds_after_a_lost_reply(self, world: World) -> None:
        """The record already has the result that the owner writes (P7)."""
        for losses in (1, 3):
            claim, lease = announced(world)
            version = world.record(claim.id).version
            world.lose_reply("result", losses)
            snapshot = world.go(world.store.phases.result(lease, (ORDER,), (ORDER, CHARGE), LEASE))
            assert snapshot is not None
            assert world.record(claim.id).memo == (ORDER, CHARGE)
            assert world.record(claim.id).version in range(version + 1, version + 2 + losses)


class HandingBack:
    """The record keeps the finished steps, and the next owner resumes."""

    def test_handing_back_keeps_finished_steps_and_sets_the_resume_time(self, world: World) -> None:
        """With or without an open call that may be repeated (11, H6)."""
        for call in (None, REPEATABLE):
            claim, lease = begun(world) if call is None else announced(world, call)
            before = world.record(claim.id)
            now = world.advance(WINDOW - 1)

            settled = world.settle(lease, HandedBack("stopped", resume_after=7 * SECOND))

            expected = replace(
                before,
                state=_F,
                version=before.version + 1,
                owner=None,
                lease_until=None,
                last_error="stopped",
                reconcile_after=now + 7 * SECOND,
            )
            assert settled.ours
            assert (settled.snapshot.record, settled.snapshot.now) == (expected, now)
            assert world.record(claim.id) == expected

    def test_handing_back_is_refused_during_a_non_repeatable_call(self, world: World) -> None:
        """The outcome of the call is unknown, and its owner reports that (F23)."""
        for call, wait in ((CALL, 0), (REPEATABLE, WINDOW)):
            claim, lease = announced(world, call)
            world.advance(wait)
            before = world.record(claim.id)
            assert not world.settle(lease, HandedBack("stopped")).ours
            assert world.record(claim.id) == before
            assert world.settle(lease, Doubtful("call_uncertain")).ours

    def test_only_the_owner_of_a_phased_record_can_hand_it_back(self, world: World) -> None:
        """Records with other effects run again from the beginning, or not at all (P1, P2)."""
        claim, lease = begun(world)
        before = world.record(claim.id)
        for forged in forgeries(lease):
            assert not world.settle(forged, HandedBack("x")).ours
        assert world.record(claim.id) == before
        for effects, recovery in (
            (Effects.LOCAL, Recovery.RETRY),
            (Effects.INLINE, Recovery.UNKNOWN),
            (Effects.INLINE, Recovery.RESUME),
        ):
            claim, lease = begun(world, effects=effects, recovery=recovery)
            before = world.record(claim.id)
            assert not world.settle(lease, HandedBack("x")).ours
            assert world.record(claim.id) == before
        for settlement in (Doubtful("y"), answered()):
            claim, lease = begun(world)
            assert world.settle(lease, settlement).ours
            before = world.record(claim.id)
            assert not world.settle(lease, HandedBack("x")).ours
            assert world.record(claim.id) == before

    def test_handing_back_is_refused_for_a_record_that_cannot_be_resumed(self, world: World) -> None:
        """The claim stored what an expired lease means, and an owner cannot change it (P2)."""
        claim, lease = begun(world, recovery=Recovery.UNKNOWN)
        before = world.record(claim.id)
        assert not world.settle(lease, HandedBack("x")).ours
        assert world.record(claim.id) == before

    def test_an_uncounted_attempt_is_subtracted_once(self, world: World) -> None:
        """A stop does not count as an attempt, however often its reply is lost (H6)."""
        for counted, attempts in ((True, 1), (False, 0)):
            claim, lease = begun(world)
            world.lose_reply("settle", 2)
            assert world.settle(lease, HandedBack("stopped", counted=counted)).ours
            assert world.settle(lease, HandedBack("stopped", counted=counted)).ours
            assert (world.record(claim.id).attempts, world.record(claim.id).version) == (attempts, 2)
            assert world.owned(again(claim)).attempt == attempts + 1

    def test_the_next_owner_resumes_with_the_stored_memo_call_and_request(self, world: World) -> None:
        """Memo, open call and request are kept; the error is cleared (16)."""
        claim, lease = announced(world, REPEATABLE)
        assert world.settle(lease, HandedBack("stopped", resume_after=SECOND)).ours
        before = world.record(claim.id)

        successor = world.owned(again(claim, request=b"the client's own retry"))

        record = world.record(claim.id)
        kept = ("memo", "intent", "recovery_point", "request", "seed", "incarnation", "effects")
        for name in kept:
            assert getattr(record, name) == getattr(before, name), name
        assert (record.fence, record.attempts) == (2, 2)
        assert (record.last_error, record.reconcile_after) == (None, None)
        assert successor.owner == record.owner
        assert world.go(world.store.phases.announce(successor, (ORDER,), (ORDER,), replace(REPEATABLE, sends=2)))
        assert world.go(world.store.phases.result(successor, (ORDER,), (ORDER, CHARGE), LEASE))
        assert world.settle(successor, answered()).ours

    def test_a_record_cannot_be_completed_or_released_during_an_open_call(self, world: World) -> None:
        """Neither on time nor late, and nothing is deleted either (7, 8, 9, 10, F5, F6)."""
        for settlement in (None, Doubtful("x"), HandedBack("x")):
            claim, lease = announced(world, REPEATABLE)
            if settlement is not None:
                assert world.settle(lease, settlement).ours
            before = world.record(claim.id)
            for refused in (answered(), Retryable("y"), Discarded()):
                assert not world.settle(lease, refused).ours, (settlement, refused)
            assert world.record(claim.id) == before
        # Also before the first finished phase, when there is nothing else to lose.
        claim, lease = begun(world)
        assert world.go(world.store.phases.announce(lease, (), (), CALL)) is not None
        before = world.record(claim.id)
        for refused in (answered(), Retryable("y"), Discarded()):
            assert not world.settle(lease, refused).ours, refused
        assert world.record(claim.id) == before

    def test_a_record_with_finished_steps_cannot_be_released_or_settled_late(self, world: World) -> None:
        """A key with a finished phase is not released as new, and a resumable record is not settled late (8, 9, 10)."""
        claim, lease = begun(world)
        assert world.checkpoint(lease, (), (ORDER,), LEASE) is not None
        before = world.record(claim.id)
        for refused in (Retryable("y"), Discarded()):
            assert not world.settle(lease, refused).ours, refused
        assert world.record(claim.id) == before
        assert world.settle(lease, HandedBack("x")).ours
        assert not world.settle(lease, answered()).ours
        assert world.record(claim.id).state is _F


class Remembering:
    """The stored request, from which a retry or the completer resumes."""

    def test_the_request_is_kept_until_the_response_is_stored(self, world: World) -> None:
        """Byte for byte, through take-overs and unknown outcomes (H7)."""
        claim, lease = begun(world)
        assert world.record(claim.id).request == REQUEST
        assert world.settle(lease, HandedBack("x")).ours
        assert world.record(claim.id).request == REQUEST
        lease = world.owned(again(claim, request=b"another"))
        assert world.record(claim.id).request == REQUEST
        assert world.settle(lease, Doubtful("x")).ours
        assert world.record(claim.id).request == REQUEST
        assert world.settle(lease, answered()).ours
        assert world.record(claim.id).request is None

    def test_a_takeover_keeps_the_effects_of_a_record_with_finished_steps(self, world: World) -> None:
        """With a finished step the stored effects stay; without one the new owner's effects replace them (P2)."""
        changes: dict[str, Any] = {"effects": Effects.INLINE, "recovery": Recovery.UNKNOWN, "call_timeout": 1}
        for steps, kept in (((ORDER,), True), ((), False)):
            claim, lease = begun(world)
            if steps:
                assert world.checkpoint(lease, (), steps, LEASE) is not None
            assert world.settle(lease, HandedBack("x")).ours
            before = world.record(claim.id)
            world.owned(again(claim, **changes))
            after = world.record(claim.id)
            for name, value in changes.items():
                assert getattr(after, name) == (getattr(before, name) if kept else value), (steps, name)

    def test_a_new_incarnation_stores_its_own_request(self, world: World) -> None:
        """Or none, if the new claim has none."""
        for request in (b"the new one", None):
            claim, lease = begun(world)
            assert world.settle(lease, Retryable("x")).ours
            world.advance(TTL)
            world.owned(again(claim, request=request))
            assert world.record(claim.id).request == request

    def test_a_claim_without_a_request_stores_none(self, world: World) -> None:
        """The completer does not resume them."""
        claim = a_claim()
        world.owned(claim)
        assert world.record(claim.id).request is None
