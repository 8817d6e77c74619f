"""Phased records: what an owner writes between its claim and its settlement, and what a resumed one finds."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from oncekey.core.errors import CommitAmbiguousError
from oncekey.core.memo import FINISHED, STARTED
from oncekey.core.model import (
    SECOND,
    Announcement,
    Discarded,
    Doubtful,
    Effects,
    EntryKind,
    HandedBack,
    Intent,
    MemoEntry,
    Recovery,
    Retryable,
    State,
)
from oncekey.stores.phases import MARGIN
from oncekey.testing.claims import DEADLINE, LEASE, TTL, a_claim, again, answered
from oncekey.testing.contract.standings import forgeries

if TYPE_CHECKING:
    from oncekey.core.model import Claim, Lease, Record
    from oncekey.testing.contract.world import World

_F, _U = State.FAILED_RETRYABLE, State.UNKNOWN

ORDER = MemoEntry("order", EntryKind.PHASE, '{"id":7}')
CHARGE = MemoEntry("charge", EntryKind.CALL, '"ch_1 \\u0000 é"')
OTHER_CHARGE = replace(CHARGE, result='"ch_2"')
REQUEST = b"a request, sealed \x00\xff"
WINDOW = 60 * SECOND

CALL = Announcement(
    phase="charge",
    downstream_key="oncekey-7",
    digest="d1",
    sends=1,
    repeatable=None,
    send_window=5 * SECOND,
    call_timeout=30 * SECOND,
)
REPEATABLE = replace(CALL, repeatable=WINDOW)
BUSY = CALL.send_window + CALL.call_timeout + MARGIN


def begun(world: World, **changes: Any) -> tuple[Claim, Lease]:  # noqa: ANN401  (any field of a claim)
    """A phased record in progress, and its owner's lease."""
    claim = a_claim(**{"effects": Effects.PHASED, "recovery": Recovery.RESUME, "request": REQUEST, **changes})
    return claim, world.owned(claim)


def announced(world: World, call: Announcement = CALL, **changes: Any) -> tuple[Claim, Lease]:  # noqa: ANN401
    """The same after one finished phase, with a call that was announced."""
    claim, lease = begun(world, **changes)
    assert world.checkpoint(lease, (), (ORDER,), LEASE) is not None
    assert world.go(world.store.phases.announce(lease, (ORDER,), (ORDER,), call)) is not None
    return claim, lease


def stolen(world: World, claim: Claim) -> Lease:
    """Somebody else's lease, after ours ran out."""
    world.advance(2 * LEASE + DEADLINE)
    return world.owned(again(claim))


class Stepping:
    """A finished phase is stored with its rows, by its owner, once."""

    def test_a_finished_phase_moves_the_memo_the_recovery_point_and_the_lease(self, world: World) -> None:
        """In one write; everything else stays (5, R114)."""
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

    def test_a_phase_neither_shortens_its_lease_nor_passes_the_deadline(self, world: World) -> None:
        """A long phase keeps what it has; a hung handler does not live for ever (P5, F9)."""
        claim, lease = begun(world)
        assert world.checkpoint(lease, (), (ORDER,), 1) is not None
        assert world.record(claim.id).lease_until == lease.lease_until
        world.advance(DEADLINE - SECOND)
        assert world.checkpoint(lease, (ORDER,), (ORDER, CHARGE), LEASE) is not None
        assert world.record(claim.id).lease_until == lease.deadline

    def test_a_phase_is_rolled_back_with_its_transaction(self, world: World) -> None:
        """Where a driver shares one (H1)."""
        claim, lease = begun(world)
        before = world.record(claim.id)

        world.rolled_back(lambda: world.store.phases.checkpointing(lease, (), (ORDER,), LEASE))

        assert world.record(claim.id) == before
        assert world.checkpoint(lease, (), (ORDER,), LEASE) is not None

    def test_a_phase_is_written_over_what_was_seen_and_over_nothing_else(self, world: World) -> None:
        """Neither with a false proof, nor over another memo, nor beside an open call (P1, H1)."""
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

    def test_a_phase_is_for_a_record_in_progress(self, world: World) -> None:
        """Not after any settlement (P3)."""
        for settlement in (HandedBack("x"), Doubtful("x"), answered()):
            claim, lease = begun(world)
            assert world.settle(lease, settlement).ours
            before = world.record(claim.id)
            assert world.checkpoint(lease, (), (ORDER,), LEASE) is None, settlement
            assert world.record(claim.id) == before

    def test_the_recovery_point_goes_from_start_to_finish(self, world: World) -> None:
        """Step by step, and it is finished with its answer (R114)."""
        claim, lease = announced(world)
        points = [world.record(claim.id).recovery_point]
        assert world.go(world.store.phases.result(lease, (ORDER,), (ORDER, CHARGE), LEASE)) is not None
        points.append(world.record(claim.id).recovery_point)
        assert world.settle(lease, answered()).ours
        points.append(world.record(claim.id).recovery_point)
        assert points == ["order", "charge", FINISHED]
        assert world.record(claim.id).memo == (ORDER, CHARGE)

    def test_a_phase_whose_commit_got_no_reply_is_found_or_not(self, world: World) -> None:
        """What the record says is what happened, and who was replaced is told so (P7)."""
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
    """No call is made that is not announced, and no announcement that is open is passed over."""

    def test_a_first_announcement_says_when_it_may_be_sent_and_repeated(self, world: World) -> None:
        """By the store's clock; the lease lasts longer than the call (5, H2, H3)."""
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

    def test_an_announcement_does_not_shorten_a_lease_and_may_pass_the_deadline(self, world: World) -> None:
        """A call that was begun is waited for (H2)."""
        claim, lease = announced(world)
        assert world.record(claim.id).lease_until == lease.lease_until
        claim, lease = begun(world)
        now = world.advance(DEADLINE)
        assert world.go(world.store.phases.announce(lease, (), (), CALL)) is not None
        assert world.record(claim.id).lease_until == now + BUSY

    def test_a_repetition_is_counted_and_its_window_is_that_of_the_first(self, world: World) -> None:
        """Each send is announced; what is safe was decided by the first (H3, F23)."""
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

    def test_nothing_is_sent_twice_that_may_not_be(self, world: World) -> None:
        """Not without a window, not after it, not with other parameters, not instead of an open call (F23, H2)."""
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

    def test_an_announcement_proves_what_a_phase_proves(self, world: World) -> None:
        """Fence, incarnation, state, memo; and what was never announced has no second send (P1)."""
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

    def test_an_announcement_whose_reply_was_lost_is_ours_and_counts_once(self, world: World) -> None:
        """Nothing was sent in between, so saying it again is no second send (P7)."""
        for losses in (1, 3):
            claim, lease = begun(world)
            world.lose_reply("announce", losses)
            snapshot = world.go(world.store.phases.announce(lease, (), (), CALL))
            assert snapshot is not None
            assert snapshot.record == world.record(claim.id)
            assert (world.record(claim.id).version, _intent(world.record(claim.id)).sends) == (2, 1)

    def test_an_announcement_is_not_ours_once_the_record_was_doubted(self, world: World) -> None:
        """The same words are there, and yet nothing may be sent any more (U1)."""
        _, lease = begun(world)
        assert world.go(world.store.phases.announce(lease, (), (), REPEATABLE)) is not None
        world.before("announce", lambda: world.settle(lease, Doubtful("swept")))
        assert world.go(world.store.phases.announce(lease, (), (), REPEATABLE)) is None

    def test_a_first_announcement_is_taken_back_and_the_record_goes_on(self, world: World) -> None:
        """What was provably never sent leaves no doubt (33, R100, ADR 0011)."""
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

    def test_no_other_announcement_is_taken_back(self, world: World) -> None:
        """Not the second, not another owner's, not one that was settled, not of other effects (33, F24)."""
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

    def test_there_is_nothing_to_take_back_of_a_record_that_moved_on(self, world: World) -> None:
        """An owner that hears "gone" here goes on, so it must still be the owner of a record in progress."""
        for settlement in (HandedBack("x"), Doubtful("x"), answered()):
            _, lease = begun(world)
            assert world.settle(lease, settlement).ours
            assert world.go(world.store.phases.withdraw(lease)) is None, settlement


class Resulting:
    """A call's result is the best evidence there is, and is taken from whoever nobody replaced."""

    def test_a_result_is_stored_and_closes_the_call(self, world: World) -> None:
        """From in progress, from doubt, and from a record that was handed back (6, U2, F35)."""
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

    def test_a_late_result_gets_no_lease_past_the_deadline(self, world: World) -> None:
        """It is stored all the same; who goes on with it is another question (P5)."""
        claim, lease = announced(world)
        world.advance(DEADLINE - SECOND)
        assert world.go(world.store.phases.result(lease, (ORDER,), (ORDER, CHARGE), LEASE)) is not None
        assert world.record(claim.id).lease_until == lease.deadline
        claim, lease = announced(world)
        now = world.advance(DEADLINE + SECOND)
        assert world.go(world.store.phases.result(lease, (ORDER,), (ORDER, CHARGE), LEASE)) is not None
        assert world.record(claim.id).lease_until == now

    def test_a_replaced_owner_stores_no_result(self, world: World) -> None:
        """Its successor has made the call, or doubts it (P1, P3)."""
        claim, lease = announced(world, replace(CALL, repeatable=10 * DEADLINE))
        stolen(world, claim)
        before = world.record(claim.id)
        assert world.go(world.store.phases.result(lease, (ORDER,), (ORDER, CHARGE), LEASE)) is None
        assert world.record(claim.id) == before

    def test_a_result_is_not_written_over_another(self, world: World) -> None:
        """A resolver gives the result without a new fence, and the late owner has another (20, F35)."""
        for settlement in (None, HandedBack("resolved"), Doubtful("again")):
            claim, lease = announced(world)
            assert world.go(world.store.phases.result(lease, (ORDER,), (ORDER, OTHER_CHARGE), LEASE)) is not None
            if settlement is not None:
                assert world.settle(lease, settlement).ours
            before = world.record(claim.id)
            assert world.go(world.store.phases.result(lease, (ORDER,), (ORDER, CHARGE), LEASE)) is None
            assert world.record(claim.id) == before

    def test_a_result_proves_what_a_phase_proves(self, world: World) -> None:
        """Fence and incarnation; never over an answer; of phased records only (P1, P2)."""
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

    def test_a_result_whose_reply_was_lost_is_ours(self, world: World) -> None:
        """The record says what we wanted to say (P7)."""
        for losses in (1, 3):
            claim, lease = announced(world)
            version = world.record(claim.id).version
            world.lose_reply("result", losses)
            snapshot = world.go(world.store.phases.result(lease, (ORDER,), (ORDER, CHARGE), LEASE))
            assert snapshot is not None
            assert world.record(claim.id).memo == (ORDER, CHARGE)
            assert world.record(claim.id).version in range(version + 1, version + 2 + losses)


class HandingBack:
    """What is done is kept, and somebody else goes on."""

    def test_handing_back_keeps_what_is_done_and_says_when_to_go_on(self, world: World) -> None:
        """With or without a call that may be repeated (11, H6)."""
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

    def test_a_call_that_may_not_be_repeated_is_not_handed_back(self, world: World) -> None:
        """It is in doubt, and its owner says so (F23)."""
        for call, wait in ((CALL, 0), (REPEATABLE, WINDOW)):
            claim, lease = announced(world, call)
            world.advance(wait)
            before = world.record(claim.id)
            assert not world.settle(lease, HandedBack("stopped")).ours
            assert world.record(claim.id) == before
            assert world.settle(lease, Doubtful("call_uncertain")).ours

    def test_only_the_owner_of_a_phased_record_hands_it_back(self, world: World) -> None:
        """Others run again from their beginning, or not at all (P1, P2)."""
        claim, lease = begun(world)
        before = world.record(claim.id)
        for forged in forgeries(lease):
            assert not world.settle(forged, HandedBack("x")).ours
        assert world.record(claim.id) == before
        for effects, recovery in ((Effects.LOCAL, Recovery.RETRY), (Effects.INLINE, Recovery.UNKNOWN)):
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

    def test_a_spared_attempt_is_given_back_once(self, world: World) -> None:
        """A stop is not the handler's failure, however often its reply is lost (H6)."""
        for counted, attempts in ((True, 1), (False, 0)):
            claim, lease = begun(world)
            world.lose_reply("settle", 2)
            assert world.settle(lease, HandedBack("stopped", counted=counted)).ours
            assert world.settle(lease, HandedBack("stopped", counted=counted)).ours
            assert (world.record(claim.id).attempts, world.record(claim.id).version) == (attempts, 2)
            assert world.owned(again(claim)).attempt == attempts + 1

    def test_the_next_owner_finds_everything_and_goes_on(self, world: World) -> None:
        """Memo, open call and request are there; the error is not (16)."""
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

    def test_nothing_is_answered_while_a_call_is_open(self, world: World) -> None:
        """Neither now nor late, and nothing is forgotten either (7, 8, 9, 10, F5, F6)."""
        for settlement in (None, Doubtful("x"), HandedBack("x")):
            claim, lease = announced(world, REPEATABLE)
            if settlement is not None:
                assert world.settle(lease, settlement).ours
            before = world.record(claim.id)
            for refused in (answered(), Retryable("y"), Discarded()):
                assert not world.settle(lease, refused).ours, (settlement, refused)
            assert world.record(claim.id) == before
        # Also before the first finished phase, when there is nothing else to forget.
        claim, lease = begun(world)
        assert world.go(world.store.phases.announce(lease, (), (), CALL)) is not None
        before = world.record(claim.id)
        for refused in (answered(), Retryable("y"), Discarded()):
            assert not world.settle(lease, refused).ours, refused
        assert world.record(claim.id) == before

    def test_what_is_done_is_neither_forgotten_nor_answered_for(self, world: World) -> None:
        """A finished phase is no fresh key, and what is to be resumed is not settled late (8, 9, 10)."""
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
    """The request of a handler that somebody may go on with."""

    def test_a_request_is_kept_until_there_is_an_answer(self, world: World) -> None:
        """Byte for byte, over take-overs and doubt (H7)."""
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

    def test_whoever_takes_over_what_was_begun_takes_it_as_it_is(self, world: World) -> None:
        """With a step done, what a crash means stays what it was; with nothing done it is the new owner's word (P2)."""
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

    def test_a_key_that_starts_anew_has_its_own_request(self, world: World) -> None:
        """Or none."""
        for request in (b"the new one", None):
            claim, lease = begun(world)
            assert world.settle(lease, Retryable("x")).ours
            world.advance(TTL)
            world.owned(again(claim, request=request))
            assert world.record(claim.id).request == request

    def test_most_records_keep_no_request(self, world: World) -> None:
        """Nobody goes on with them."""
        claim = a_claim()
        world.owned(claim)
        assert world.record(claim.id).request is None


def _intent(record: Record) -> Intent:
    assert record.intent is not None
    return record.intent
