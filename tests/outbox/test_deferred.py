"""A request's own call: its record and its parcel move together, and only the owner of both moves them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from oncekey.core.deferred import DEAD_LETTER, RECORD_GONE, UNCERTAIN, Kept, Orphaned, Parked, Postponed, TakenUp
from oncekey.core.errors import StoreError
from oncekey.core.flow import Mode, Transaction
from oncekey.core.model import SECOND, Deferred, Effects, EntryKind, MemoEntry, Outcome, ParcelKind, State
from oncekey.core.transitions import Trigger
from oncekey.testing.claims import a_claim, answered
from outbox.sending import DIGEST, LEASE, WINDOW, Post, alone, announcement

ENTRY = MemoEntry("charge", EntryKind.CALL, '{"id":"ch_1"}')


@pytest.fixture
def post(world):
    return Post(world)


@pytest.fixture
def parcel(post):
    return post.deferred()


@pytest.fixture
def taken(post, parcel):
    (held,) = post.claim()
    return post.take_up(held)


def try_again(post, taken, **said):
    return post.go(post.box.try_again(taken.lease, taken.held, SECOND, "busy", DIGEST, **said))


def test_taking_up_a_parcel_announces_the_call(post, parcel, taken):  # row 24, O1, F32
    record = post.record(parcel)
    assert isinstance(taken, TakenUp)
    assert taken.record == record
    assert (record.state, record.fence, record.lease_until) == (State.IN_PROGRESS, 2, None)
    assert record.owner == taken.lease.owner
    assert (record.intent.sends, record.intent.downstream_key, record.intent.repeatable_until) == (1, "k-1", None)
    assert taken.held.lease_until == post.world.clock.now + LEASE


def test_taking_up_a_parcel_renews_its_lease(post, parcel):
    """The lease counts from the announcement, not from the claim before a pause."""
    (held,) = post.claim()
    post.world.advance(LEASE - 1)

    taken = post.take_up(held)

    assert post.in_outbox(parcel).lease_until == taken.held.lease_until == post.world.clock.now + LEASE


def test_take_up_succeeds_after_a_lost_reply(post, parcel):  # P7: sent once, so announced once
    (held,) = post.claim()
    post.world.lose_reply("take_up")

    taken = post.take_up(held)

    assert isinstance(taken, TakenUp)
    assert (taken.record.fence, taken.record.intent.sends) == (2, 1)


def test_a_worker_that_lost_the_parcel_cannot_take_it_up(post, parcel):
    (slow,) = post.claim()
    post.world.advance(LEASE)
    (quick,) = post.claim()

    assert post.take_up(slow) is None
    assert post.record(parcel).state is State.PENDING
    assert isinstance(post.take_up(quick), TakenUp)


def test_a_nonrepeatable_call_is_parked_after_a_crash(post, parcel, taken):  # row 25, F31
    post.world.advance(LEASE)
    (held,) = post.claim()
    post.world.lose_reply("take_up")

    assert isinstance(post.take_up(held), Parked)

    record = post.record(parcel)
    assert (record.state, record.last_error, record.fence) == (State.UNKNOWN, UNCERTAIN, 2)
    assert record.reconcile_after == post.world.clock.now
    assert record.intent is not None
    assert post.in_outbox(parcel) is None
    assert post.dead(parcel).last_error == UNCERTAIN


def test_a_repeatable_deferred_call_is_announced_again(post, parcel):  # H3, F23, row 24
    (held,) = post.claim()
    first = post.take_up(held, repeatable=WINDOW)
    until = first.record.intent.repeatable_until
    assert until == post.world.clock.now + WINDOW
    post.world.advance(LEASE)

    (held,) = post.claim()
    second = post.take_up(held, repeatable=10 * WINDOW)

    assert (second.record.fence, second.record.intent.sends) == (3, 2)
    assert (second.record.intent.first_sent_at, second.record.intent.repeatable_until) == (until - WINDOW, until)
    post.world.advance(until - post.world.clock.now)
    (held,) = post.claim()
    assert isinstance(post.take_up(held, repeatable=WINDOW), Parked)


def test_a_changed_call_digest_parks_the_parcel(post, parcel):  # H2
    (held,) = post.claim()
    post.take_up(held, repeatable=WINDOW)
    post.world.advance(LEASE)
    (held,) = post.claim()
    other = replace(announcement(post.topic, WINDOW), digest="d2")

    assert isinstance(post.go(post.box.take_up(held, "w", other, LEASE)), Parked)


def test_a_parcel_with_a_stored_result_is_not_called_again(post, parcel, taken):  # O1, R127, ADR 0009 row 24
    assert isinstance(post.go(post.box.result(taken.lease, taken.held, ENTRY, LEASE)), Kept)
    post.world.advance(LEASE)
    (held,) = post.claim()

    again = post.take_up(held)

    assert isinstance(again, TakenUp)
    assert (again.record.memo, again.record.intent, again.record.fence) == ((ENTRY,), None, 3)


def test_storing_result_and_response_survives_lost_replies(post, parcel, taken):  # rows 6, 7
    post.world.lose_reply("deferred_result")
    kept = post.go(post.box.result(taken.lease, taken.held, ENTRY, LEASE))
    assert (kept.snapshot.record.memo, kept.snapshot.record.intent) == ((ENTRY,), None)
    assert post.in_outbox(parcel) is not None
    post.world.lose_reply("deliver")

    settled = post.go(post.box.deliver(taken.lease, kept.held, answered()))

    assert settled.ours
    record = post.record(parcel)
    assert (record.state, record.outcome, record.response) == (
        State.COMPLETED,
        Outcome.SUCCESS,
        answered().response,
    )
    assert post.in_outbox(parcel) is None


def test_delivery_requires_a_stored_result(post, parcel, taken):  # R127, F6
    settled = post.go(post.box.deliver(taken.lease, taken.held, answered()))

    assert not settled.ours
    assert post.record(parcel).state is State.IN_PROGRESS
    assert post.in_outbox(parcel) is not None


def test_a_postponed_call_keeps_its_announcement(post, parcel):  # row 26
    (held,) = post.claim()
    taken = post.take_up(held, repeatable=WINDOW)
    post.world.lose_reply("try_again")

    assert isinstance(try_again(post, taken), Postponed)

    record = post.record(parcel)
    assert (record.state, record.intent.sends, record.owner) == (State.PENDING, 1, None)
    assert post.claim() == ()
    post.world.advance(SECOND)
    (held,) = post.claim()
    assert (held.attempts, held.last_error) == (2, "busy")


def test_a_first_send_that_was_not_made_is_withdrawn(post, parcel, taken):  # H2, row 26
    assert isinstance(try_again(post, taken, never_sent=True, counted=False), Postponed)

    assert post.record(parcel).intent is None
    assert post.in_outbox(parcel).attempts == 0


def test_an_unsent_repeat_keeps_the_first_announcement(post, parcel):  # F24
    (held,) = post.claim()
    post.take_up(held, repeatable=WINDOW)
    post.world.advance(LEASE)
    (held,) = post.claim()
    taken = post.take_up(held, repeatable=WINDOW)

    assert isinstance(try_again(post, taken, never_sent=True), Postponed)

    assert post.record(parcel).intent.sends == 2


def test_an_uncertain_call_that_is_not_repeatable_is_parked(post, parcel, taken):  # row 27
    post.world.lose_reply("try_again")

    assert isinstance(try_again(post, taken), Parked)

    assert (post.record(parcel).state, post.record(parcel).last_error) == (State.UNKNOWN, UNCERTAIN)
    assert post.dead(parcel).last_error == "busy"


def test_a_dead_letter_makes_the_record_unknown(post, parcel, taken):  # row 27, O3, F33
    post.world.lose_reply("park")

    parked = post.go(post.box.park(taken.lease, taken.held, Trigger.DEAD_LETTER, DEAD_LETTER, "busy"))

    assert isinstance(parked, Parked)
    assert (post.record(parcel).state, post.record(parcel).last_error) == (State.UNKNOWN, DEAD_LETTER)
    assert post.in_outbox(parcel) is None
    assert (post.dead(parcel).first_error, post.dead(parcel).last_error) == ("busy", "busy")


def test_a_late_result_restores_a_dead_letter(post, parcel, taken):  # row 6, ADR 0009
    post.world.advance(LEASE)
    (held,) = post.claim()
    assert isinstance(post.take_up(held), Parked)
    post.world.lose_reply("deferred_result")

    kept = post.go(post.box.result(taken.lease, taken.held, ENTRY, LEASE))

    assert post.record(parcel).state is State.IN_PROGRESS
    assert kept.held == post.in_outbox(parcel)
    assert kept.held.fence > held.fence
    assert post.dead(parcel) is None
    # The worker dies here: its parcel is due again, and nothing is called.
    post.world.advance(LEASE)
    (next_one,) = post.claim()
    again = post.take_up(next_one)
    assert again.record.memo == (ENTRY,)
    assert post.go(post.box.deliver(again.lease, again.held, answered())).ours


def test_a_worker_that_was_overtaken_writes_nothing(post, parcel):  # P1, F11
    (held,) = post.claim()
    slow = post.take_up(held, repeatable=WINDOW)
    post.world.advance(LEASE)
    (held,) = post.claim()
    quick = post.take_up(held, repeatable=WINDOW)
    before = post.record(parcel)

    assert post.go(post.box.result(slow.lease, slow.held, ENTRY, LEASE)) is None
    assert try_again(post, slow) is None
    assert post.go(post.box.park(slow.lease, slow.held, Trigger.DOUBT, UNCERTAIN, "late")) is None
    assert not post.go(post.box.deliver(slow.lease, slow.held, answered())).ours

    assert post.record(parcel) == before
    assert post.in_outbox(parcel) == quick.held


def test_a_result_is_stored_after_another_worker_claimed(post, parcel, taken):
    """The next worker finds the result, and settles without calling."""
    post.world.advance(LEASE)
    (held,) = post.claim()

    kept = post.go(post.box.result(taken.lease, taken.held, ENTRY, LEASE))

    assert kept.held is None
    assert not post.go(post.box.deliver(taken.lease, taken.held, answered())).ours
    again = post.take_up(held)
    assert again.record.memo == (ENTRY,)


def test_a_parcel_without_its_record_becomes_a_dead_letter(post):
    orphan = post.parcel(kind="defer", record_id=post.parcel().record_id)
    post.put(replace(orphan, kind=post.deferred().kind))
    held = next(one for one in post.claim() if one.parcel.id == orphan.id)

    assert isinstance(post.take_up(held), Orphaned)
    assert post.dead(orphan).last_error == RECORD_GONE


def test_a_failed_parcel_insert_aborts_the_settlement(post):  # R122, R123: one commit for both
    lease = post.world.owned(a_claim(effects=Effects.OUTBOX))
    parcel = post.parcel(kind=ParcelKind.DEFER, record_id=lease.id, incarnation=lease.incarnation)
    post.put(post.parcel(id=parcel.id))  # so that the parcel cannot be written

    with pytest.raises(StoreError):
        post.world.settle(lease, Deferred(parcel))

    assert post.record(parcel).state is State.IN_PROGRESS


def test_a_rollback_leaves_no_parcel_and_no_settlement(post):  # R123
    lease = post.world.owned(a_claim(effects=Effects.OUTBOX))
    parcel = post.parcel(kind=ParcelKind.DEFER, record_id=lease.id, incarnation=lease.incarnation)

    def undone():
        yield from post.world.store.settling(lease, Deferred(parcel))
        raise StoreError("the business failed")

    with pytest.raises(StoreError):
        post.go(alone(Transaction("settle", Mode.ATOMIC, undone)))

    assert post.record(parcel).state is State.IN_PROGRESS
    assert post.in_outbox(parcel) is None


def test_a_deferral_with_a_lost_reply_is_written_once(post):  # P7
    post.world.lose_reply("settle")

    post.deferred()

    assert len(post.claim()) == 1
