"""Parcels: each is taken by one worker at a time, in a fair order, and nobody acknowledges what is not his."""

from __future__ import annotations

import threading

import pytest

from oncekey.core.errors import StoreError
from oncekey.core.flow import Mode, Transaction
from oncekey.core.model import SECOND
from outbox.sending import LEASE, Post, alone


@pytest.fixture
def post(world):
    return Post(world)


class UndoneError(StoreError):
    pass


def test_a_rollback_leaves_no_parcel_and_a_commit_exactly_one(post):  # R123, R122
    kept, lost = post.parcel(), post.parcel()

    def undone():
        yield from post.box.putting((lost,))
        raise UndoneError("the business failed")

    with pytest.raises(UndoneError):
        post.go(alone(Transaction("put", Mode.ATOMIC, undone)))
    post.put(kept)

    assert [held.parcel for held in post.claim()] == [kept]
    assert post.claim() == ()


def test_a_claimed_parcel_equals_the_stored_one(post):
    parcel = post.parcel(order_by=post.line("order-7"), payload='{"text": "\\u0000 \\"é\\" \\\\"}', position=3)
    post.put(parcel)

    (held,) = post.claim()

    assert held.parcel == parcel
    assert (held.fence, held.attempts) == (1, 1)
    assert held.lease_until == post.world.clock.now + LEASE


def test_parcels_of_unknown_topics_are_not_claimed(post):
    post.put(post.parcel(topic="unheard-of"))

    assert post.claim() == ()


def test_the_oldest_parcels_are_claimed_first(post):
    first, second, third = post.parcel(), post.parcel(), post.parcel()
    for parcel in (first, second, third):
        post.put(parcel)
        post.world.advance(SECOND)

    assert [held.parcel for held in post.claim(2)] == [first, second]
    assert [held.parcel for held in post.claim(2)] == [third]


def test_many_claimers_get_each_parcel_once(post):  # R51, SKIP LOCKED
    parcels = post.put(*(post.parcel(position=n) for n in range(60)))
    got, start = [], threading.Barrier(6)

    def worker():
        start.wait()
        while held := post.claim(5):
            got.extend(held)

    threads = [threading.Thread(target=worker) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    # Who skips what another has locked may have stopped early; nobody holds a lock now.
    while held := post.claim(5):
        got.extend(held)

    assert sorted(str(held.parcel.id) for held in got) == sorted(str(parcel.id) for parcel in parcels)
    assert {held.fence for held in got} == {1}


def test_a_worker_that_was_overtaken_acknowledges_nothing(post):  # fencing, S8
    (parcel,) = post.put(post.parcel())
    (slow,) = post.claim()
    post.world.advance(LEASE)
    (quick,) = post.claim()

    assert (quick.fence, quick.attempts) == (2, 2)
    assert post.go(post.box.sent(slow)) == frozenset()
    assert post.go(post.box.again(slow, 0, "late")) is False
    assert post.go(post.box.bury(slow, "late")) is False
    assert post.go(post.box.hand_back(slow)) == frozenset()
    assert post.in_outbox(parcel) == quick
    assert post.go(post.box.sent(quick)) == {parcel.id}
    assert post.in_outbox(parcel) is None


def test_a_leased_parcel_is_not_claimed_again(post):
    post.put(post.parcel())
    post.claim()
    post.world.advance(LEASE - 1)

    assert post.claim() == ()


def test_a_batch_acknowledges_only_parcels_still_held(post):
    post.put(*(post.parcel(position=n) for n in range(5)))
    held = post.claim()
    post.world.advance(LEASE)
    (stolen,) = post.claim(1)
    mine = [one for one in held if one.parcel != stolen.parcel]

    assert post.go(post.box.sent(*held)) == {one.parcel.id for one in mine}
    assert post.in_outbox(stolen.parcel) == stolen


def test_an_acknowledgement_succeeds_after_a_lost_reply(post):  # P7
    parcels = post.put(post.parcel(), post.parcel())
    held = post.claim()
    post.world.lose_reply("sent")

    assert post.go(post.box.sent(*held)) == {parcel.id for parcel in parcels}


def test_a_parcel_claim_survives_a_lost_reply(post):  # P7
    (parcel,) = post.put(post.parcel())
    post.world.lose_reply("due")

    assert [held.parcel for held in post.claim()] == [parcel]


def test_postponing_keeps_the_first_and_last_error(post):
    (parcel,) = post.put(post.parcel())
    for error in ("first", "second"):
        (held,) = post.claim()
        post.world.lose_reply("again")
        assert post.go(post.box.again(held, 3 * SECOND, error))
        post.world.advance(3 * SECOND - 1)
        assert post.claim() == ()
        post.world.advance(1)

    there = post.in_outbox(parcel)
    assert (there.attempts, there.first_error, there.last_error) == (2, "first", "second")


def test_a_released_parcel_is_due_without_counting_an_attempt(post):
    post.put(post.parcel(), post.parcel())
    held = post.claim()

    assert post.go(post.box.hand_back(*held)) == {one.parcel.id for one in held}

    assert [one.attempts for one in post.claim()] == [1, 1]


def test_a_dead_letter_has_its_first_and_its_last_error(post):  # R128
    (parcel,) = post.put(post.parcel(order_by=post.line("line")))
    (held,) = post.claim()
    post.go(post.box.again(held, 0, "first"))
    (held,) = post.claim()
    post.world.lose_reply("bury")

    assert post.go(post.box.bury(held, "last"))

    dead = post.dead(parcel)
    assert (dead.parcel, dead.attempts, dead.first_error, dead.last_error) == (parcel, 2, "first", "last")
    assert post.in_outbox(parcel) is None
    assert post.claim() == ()


def test_dead_letters_are_listed_page_by_page(post):
    parcels = []
    for _ in range(5):
        (parcel,) = post.put(post.parcel())
        parcels.append(parcel)
        post.world.advance(SECOND)
    for held in post.claim():
        post.go(post.box.bury(held, "gone"))

    seen, after = [], None
    while page := post.go(post.box.dead_letters(2, after)):
        seen += [letter.parcel.id for letter in page if letter.parcel.topic == post.topic]
        after = page[-1]

    assert sorted(seen) == sorted(parcel.id for parcel in parcels)


class TestOrder:
    def test_only_the_first_parcel_of_a_line_is_claimed(self, post):
        first, second = post.put(
            post.parcel(order_by=post.line("a"), position=0), post.parcel(order_by=post.line("a"), position=1)
        )
        (other,) = post.put(post.parcel(order_by=post.line("b")))
        (free,) = post.put(post.parcel())

        held = post.claim()
        assert {one.parcel.id for one in held} == {first.id, other.id, free.id}
        assert post.claim() == ()

        post.go(post.box.sent(*held))
        assert [one.parcel for one in post.claim()] == [second]

    def test_a_postponed_first_parcel_blocks_its_line(self, post):
        first, _ = post.put(
            post.parcel(order_by=post.line("a"), position=0), post.parcel(order_by=post.line("a"), position=1)
        )
        (held,) = post.claim()
        post.go(post.box.again(held, 5 * SECOND, "busy"))

        assert post.claim() == ()
        post.world.advance(5 * SECOND)
        assert [one.parcel for one in post.claim()] == [first]

    def test_a_dead_letter_unblocks_its_line(self, post):  # R128
        _, second = post.put(
            post.parcel(order_by=post.line("a"), position=0), post.parcel(order_by=post.line("a"), position=1)
        )
        (held,) = post.claim()
        post.go(post.box.bury(held, "poison"))

        assert [one.parcel for one in post.claim()] == [second]

    def test_positions_order_parcels_of_one_transaction(self, post):
        last, first = post.put(
            post.parcel(order_by=post.line("a"), position=1), post.parcel(order_by=post.line("a"), position=0)
        )

        (held,) = post.claim()
        assert held.parcel == first
        post.go(post.box.sent(held))
        assert [one.parcel for one in post.claim()] == [last]

    def test_transactions_with_equal_timestamps_keep_their_order(self, post):
        parcels = [post.put(post.parcel(order_by=post.line("a")))[0] for _ in range(8)]

        got = []
        while held := post.claim():
            got += [one.parcel for one in held]
            post.go(post.box.sent(*held))

        assert got == parcels

    def test_a_long_line_does_not_block_other_parcels(self, post):
        """More wait in one line than a claim looks at; the head of another line and a free parcel stand behind it."""
        line = post.put(*(post.parcel(order_by=post.line("a"), position=n) for n in range(1100)))
        post.world.advance(1)
        (other,) = post.put(post.parcel(order_by=post.line("b")))
        (free,) = post.put(post.parcel())

        assert {one.parcel.id for one in post.claim()} == {line[0].id, other.id, free.id}
        assert post.claim() == ()
