"""Phased records: what an owner writes between its claim and its settlement."""

from __future__ import annotations

from dataclasses import replace

from oncekey.core.errors import CommitAmbiguousError
from oncekey.core.memo import FINISHED, STARTED
from oncekey.core.model import LONGEST_NAME, SECOND, Doubtful, Effects, HandedBack, Intent, Recovery, State
from oncekey.testing.claims import DEADLINE, LEASE, answered
from oncekey_contract.world import (
    BUSY,
    CALL,
    CHARGE,
    ORDER,
    OTHER_CHARGE,
    REPEATABLE,
    WINDOW,
    World,
    announced,
    begun,
    forgeries,
    intent_of,
    stolen,
)

_F, _U = State.FAILED_RETRYABLE, State.UNKNOWN


class Stepping:
    """A finished phase is stored with its rows, by its owner, once."""

    def test_a_finished_phase_updates_memo_recovery_point_and_lease(self, world: World) -> None:
        """One write changes all three; everything else stays (5)."""
        claim, lease = begun(world)
        before = world.record(claim.id)
        assert before.recovery_point == STARTED
        now = world.advance(SECOND)

        first = world.checkpoint(lease, (), (ORDER,), LEASE)
        second = world.checkpoint(lease, (ORDER,), (ORDER, CHARGE), LEASE)

        expected = replace(before, version=2, memo=(ORDER,), recovery_point="order", lease_until=now + LEASE)
        assert first is not None
        assert (first.record, first.now) == (expected, now)
        assert second is not None
        assert second.record == replace(expected, version=3, memo=(ORDER, CHARGE), recovery_point="charge")
        assert world.record(claim.id) == second.record

    def test_a_phase_never_shortens_the_lease_or_extends_it_past_the_deadline(self, world: World) -> None:
        """A long phase keeps its lease; a hung handler does not keep it forever (P5, F9)."""
        claim, lease = begun(world)
        assert world.checkpoint(lease, (), (ORDER,), 1) is not None
        assert world.record(claim.id).lease_until == lease.lease_until
        world.advance(DEADLINE - SECOND)
        assert world.checkpoint(lease, (ORDER,), (ORDER, CHARGE), LEASE) is not None
        assert world.record(claim.id).lease_until == lease.deadline

    def test_a_phase_is_rolled_back_with_its_transaction(self, world: World) -> None:
        """If the driver shares one with the application (H1)."""
        claim, lease = begun(world)
        before = world.record(claim.id)

        world.rolled_back(lambda: world.store.phases.checkpointing(lease, (), (ORDER,), LEASE))

        assert world.record(claim.id) == before
        assert world.checkpoint(lease, (), (ORDER,), LEASE) is not None

    def test_a_phase_is_refused_over_another_memo_or_an_open_call(self, world: World) -> None:
        """Refused with a wrong proof, over another memo, or while a call is open (P1, H1)."""
        claim, lease = begun(world)
        assert world.checkpoint(lease, (), (ORDER,), LEASE) is not None
        before = world.record(claim.id)
        for forged in forgeries(lease):
            assert world.checkpoint(forged, (ORDER,), (ORDER, CHARGE), LEASE) is None
        for seen in ((), (CHARGE,), (ORDER, CHARGE), (replace(ORDER, result="8"),)):
            assert world.checkpoint(lease, seen, (*seen, OTHER_CHARGE), LEASE) is None, seen
        assert world.record(claim.id) == before

        assert world.go(world.store.phases.announce(lease, (ORDER,), (ORDER,), REPEATABLE)) is not None
        before = world.record(claim.id)
        assert world.checkpoint(lease, (ORDER,), (ORDER, CHARGE), LEASE) is None
        assert world.record(claim.id) == before

    def test_a_phase_is_refused_after_a_settlement(self, world: World) -> None:
        """Not after any settlement (P3)."""
        for settlement in (HandedBack("x"), Doubtful("x"), answered()):
            claim, lease = begun(world)
            assert world.settle(lease, settlement).ours
            before = world.record(claim.id)
            assert world.checkpoint(lease, (), (ORDER,), LEASE) is None, settlement
            assert world.record(claim.id) == before

    def test_the_recovery_point_advances_with_each_step(self, world: World) -> None:
        """It advances step by step, and finishes with the response."""
        claim, lease = announced(world)
        points = [world.record(claim.id).recovery_point]
        assert world.go(world.store.phases.result(lease, (ORDER,), (ORDER, CHARGE), LEASE)) is not None
        points.append(world.record(claim.id).recovery_point)
        assert world.settle(lease, answered()).ours
        points.append(world.record(claim.id).recovery_point)
        assert points == ["order", "charge", FINISHED]
        assert world.record(claim.id).memo == (ORDER, CHARGE)

    def test_the_longest_phase_name_is_stored(self, world: World) -> None:
        """It is the record's recovery point, and is read back unchanged."""
        claim, lease = begun(world)
        phase = replace(ORDER, name="ü" * LONGEST_NAME)

        assert world.checkpoint(lease, (), (phase,), LEASE) is not None

        record = world.record(claim.id)
        assert (record.memo, record.recovery_point) == ((phase,), phase.name)

    def test_after_lost_commit_returns_whether_the_phase_was_stored(self, world: World) -> None:
        """The record shows which, and an owner that was replaced gets an error (P7)."""
        phases = world.store.phases
        claim, lease = begun(world)
        world.lose_reply("checkpoint")
        try:
            world.checkpoint(lease, (), (ORDER,), LEASE)
        except CommitAmbiguousError:
            assert world.go(phases.after_lost_commit(lease, (ORDER,), LEASE)) is True
        else:
            raise AssertionError("the reply was not lost")
        assert world.go(phases.after_lost_commit(lease, (ORDER, CHARGE), LEASE)) is False
        world.lose_reply("after_lost_commit", 2)
        assert world.go(phases.after_lost_commit(lease, (ORDER,), LEASE)) is True
        stolen(world, claim)
        assert world.go(phases.after_lost_commit(lease, (ORDER,), LEASE)) is None


class Announcing:
    """An owner announces each call before making it, and cannot continue while the announcement is open."""

    def test_the_first_announcement_sets_the_send_and_repeat_windows(self, world: World) -> None:
        """Both times are by the store's clock; the lease outlasts the call (5, H2, H3)."""
        for call, until in ((CALL, None), (REPEATABLE, WINDOW)):
            claim, lease = begun(world, lease=SECOND)
            before = world.record(claim.id)
            now = world.advance(SECOND // 2)

            snapshot = world.go(world.store.phases.announce(lease, (), (ORDER,), call))

            expected = replace(
                before,
                version=2,
                memo=(ORDER,),
                recovery_point="order",
                intent=Intent("charge", "oncekey-7", "d1", 1, now, now + call.send_window, until and now + until),
                lease_until=now + BUSY,
            )
            assert snapshot is not None
            assert (snapshot.record, snapshot.now) == (expected, now)
            assert world.record(claim.id) == expected

    def test_an_announcement_can_extend_the_lease_past_the_deadline(self, world: World) -> None:
        """A call that has started is allowed to end (H2)."""
        claim, lease = announced(world)
        assert world.record(claim.id).lease_until == lease.lease_until
        claim, lease = begun(world)
        now = world.advance(DEADLINE)
        assert world.go(world.store.phases.announce(lease, (), (), CALL)) is not None
        assert world.record(claim.id).lease_until == now + BUSY

    def test_a_repeated_announcement_is_counted_and_keeps_the_first_window(self, world: World) -> None:
        """Each send is announced; the first one fixed until when repeating is safe (H3, F23)."""
        claim, lease = announced(world, REPEATABLE)
        before = world.record(claim.id)
        assert before.intent is not None
        now = world.advance(WINDOW - 1)

        assert world.go(world.store.phases.announce(lease, (ORDER,), (ORDER,), replace(REPEATABLE, sends=2)))

        assert world.record(claim.id) == replace(
            before,
            version=before.version + 1,
            intent=replace(before.intent, sends=2, send_by=now + CALL.send_window),
            lease_until=max(before.lease_until or 0, now + BUSY),
        )

    def test_an_unsafe_repeated_announcement_is_refused(self, world: World) -> None:
        """Refused without a window, after it, with other parameters, or in place of an open call (F23, H2)."""
        second = replace(REPEATABLE, sends=2)
        for name, first, wait, wanted in (
            ("no window", CALL, 0, second),
            ("at its end", REPEATABLE, WINDOW, second),
            ("after it", REPEATABLE, WINDOW + 1, second),
            ("other parameters", REPEATABLE, 0, replace(second, digest="d2")),
            ("another call", REPEATABLE, 0, replace(second, phase="refund")),
            ("another first call", REPEATABLE, 0, replace(REPEATABLE, phase="refund")),
            ("one too many", REPEATABLE, 0, replace(second, sends=3)),
        ):
            claim, lease = announced(world, first)
            world.advance(wait)
            before = world.record(claim.id)
            assert world.go(world.store.phases.announce(lease, (ORDER,), (ORDER,), wanted)) is None, name
            assert world.record(claim.id) == before, name

    def test_an_announcement_with_a_wrong_proof_is_refused(self, world: World) -> None:
        """Fence, incarnation, state and memo; and a call that was never announced has no second send (P1)."""
        claim, lease = begun(world)
        before = world.record(claim.id)
        announce = world.store.phases.announce
        for forged in forgeries(lease):
            assert world.go(announce(forged, (), (), CALL)) is None
        assert world.go(announce(lease, (ORDER,), (ORDER,), CALL)) is None
        assert world.go(announce(lease, (), (), replace(REPEATABLE, sends=2))) is None
        assert world.record(claim.id) == before
        for settlement in (HandedBack("x"), Doubtful("x"), answered()):
            claim, lease = begun(world)
            assert world.settle(lease, settlement).ours
            before = world.record(claim.id)
            assert world.go(announce(lease, (), (), CALL)) is None, settlement
            assert world.record(claim.id) == before

    def test_an_announcement_counts_once_after_a_lost_reply(self, world: World) -> None:
        """The owner sent nothing in between, so repeating the announcement does not count as a second send (P7)."""
        for losses in (1, 3):
            claim, lease = begun(world)
            world.lose_reply("announce", losses)
            snapshot = world.go(world.store.phases.announce(lease, (), (), CALL))
            assert snapshot is not None
            assert snapshot.record == world.record(claim.id)
            assert (world.record(claim.id).version, intent_of(world.record(claim.id)).sends) == (2, 1)

    def test_an_announcement_fails_after_the_record_was_marked_unknown(self, world: World) -> None:
        """The record has the same announcement, but the owner may no longer send anything (U1)."""
        _, lease = begun(world)
        assert world.go(world.store.phases.announce(lease, (), (), REPEATABLE)) is not None
        world.before("announce", lambda: world.settle(lease, Doubtful("swept")))
        assert world.go(world.store.phases.announce(lease, (), (), REPEATABLE)) is None

    def test_a_withdrawn_first_announcement_leaves_the_record_in_progress(self, world: World) -> None:
        """A call that was provably never sent does not make the outcome unknown (33, ADR 0011)."""
        for losses in (0, 1, 3):
            claim, lease = announced(world)
            before = world.record(claim.id)
            world.lose_reply("withdraw", losses)

            snapshot = world.go(world.store.phases.withdraw(lease))

            expected = replace(before, version=before.version + 1, intent=None)
            assert snapshot is not None
            assert snapshot.record == expected
            assert world.record(claim.id) == expected
            assert world.settle(lease, HandedBack("not_executed")).ours

    def test_only_the_first_announcement_of_the_owner_can_be_withdrawn(self, world: World) -> None:
        """Not a second one, another owner's, a settled one, or one of a record with other effects (33, F24)."""
        withdraw = world.store.phases.withdraw
        second, owner = announced(world, REPEATABLE)
        assert world.go(world.store.phases.announce(owner, (ORDER,), (ORDER,), replace(REPEATABLE, sends=2)))
        doubted, doubter = announced(world)
        assert world.settle(doubter, Doubtful("x")).ours
        back, giver = announced(world, REPEATABLE)
        assert world.settle(giver, HandedBack("x")).ours
        inline, caller = announced(world, effects=Effects.INLINE, recovery=Recovery.UNKNOWN)
        for claim, lease in ((second, owner), (doubted, doubter), (back, giver), (inline, caller)):
            before = world.record(claim.id)
            for one in (lease, *forgeries(lease)):
                assert world.go(withdraw(one)) is None
            assert world.record(claim.id) == before
        claim, lease = announced(world)
        before = world.record(claim.id)
        for forged in forgeries(lease):
            assert world.go(withdraw(forged)) is None
        assert world.record(claim.id) == before

    def test_a_withdrawal_after_a_settlement_is_refused(self, world: World) -> None:
        """An owner that gets "gone" here continues, so it must still own a record in progress."""
        for settlement in (HandedBack("x"), Doubtful("x"), answered()):
            _, lease = begun(world)
            assert world.settle(lease, settlement).ours
            assert world.go(world.store.phases.withdraw(lease)) is None, settlement
