"""Dead letters by hand: a request's own call moves with its record, a message by itself (O3, F39)."""

from __future__ import annotations

import uuid

import pytest

from oncekey.console.dossier import gather
from oncekey.core.deferred import DEAD_LETTER, TakenUp
from oncekey.core.model import HOUR, MINUTE, SECOND, Completed, Effects, Outcome, ParcelKind, State, StoredResponse
from oncekey.core.operate import Forbidden, Moved, OperatorCommand, Order
from oncekey.core.transitions import Actor, Mover, Trigger
from oncekey.engine import operate
from oncekey.engine.operate import LetterMoved
from operate.rows import NOW, a_parcel, a_row, an_intent, look, write
from outbox.sending import WINDOW, Post

ANN = Mover(Actor.OPERATOR, "ann")
NO = Completed(StoredResponse(500, (), b"given up"), Outcome.FAILURE)
RETRY = OperatorCommand(Order.RETRY, "the provider is back")
DISCARD = OperatorCommand(Order.DISCARD, "the order was cancelled", answer=NO)


@pytest.fixture
def post(world):
    return Post(world)


def buried(post, *, repeatable=None):
    """A request's own call that was made once, and then given up by its worker."""
    parcel = post.deferred()
    (held,) = post.claim()
    taken = post.take_up(held, repeatable=repeatable)
    assert isinstance(taken, TakenUp)
    post.go(post.box.park(taken.lease, taken.held, Trigger.DEAD_LETTER, DEAD_LETTER, "time-out"))
    assert post.record(parcel).state is State.UNKNOWN
    assert post.dead(parcel) is not None
    return parcel


def retry(post, parcel, command=RETRY):
    return post.go(operate.retry(post.world.store, parcel.id, command, ANN))


def discard(post, parcel, command=DISCARD):
    return post.go(operate.discard(post.world.store, parcel.id, command, ANN))


def notes(post, parcel):
    """What the audit says of operators; workers have lines of their own."""
    entries = post.go(post.world.store.audit.history(parcel.record_id))
    return [entry.note for entry in entries if entry.note.actor is Actor.OPERATOR]


def test_a_dead_call_can_be_retried_within_its_window(post):
    # row 22, O3: pending and due again in one transaction; the window goes on, it does not begin anew (F23)
    parcel = buried(post, repeatable=WINDOW)
    before = post.record(parcel).intent
    done = retry(post, parcel)
    assert isinstance(done, Moved)
    record = post.record(parcel)
    assert (record.state, record.intent, record.fence) == (State.PENDING, before, 2)
    assert post.dead(parcel) is None
    assert post.in_outbox(parcel).attempts == 0
    (held,) = post.claim()
    again = post.take_up(held, repeatable=WINDOW)
    assert (again.record.intent.sends, again.record.intent.first_sent_at) == (2, before.first_sent_at)
    assert [(note.trigger, note.who, note.why) for note in notes(post, parcel)] == [
        (Trigger.DLQ_RETRY, "ann", RETRY.reason)
    ]


@pytest.mark.parametrize(("window", "wait"), [(None, 0), (WINDOW, WINDOW)])
def test_a_dead_call_cannot_be_retried_after_its_window(post, window, wait):
    # F39, F23: `dlq retry` past the window is a double run by hand
    parcel = buried(post, repeatable=window)
    post.world.advance(wait)
    before = look(post.world, post.record(parcel))
    done = retry(post, parcel)
    assert isinstance(done, Forbidden)
    assert "not known to be safe" in done.why
    assert {one.order for one in done.instead} == {
        Order.EXECUTED, Order.DECLINED, Order.DISCARD, Order.NOT_EXECUTED,
    }  # fmt: skip
    assert look(post.world, post.record(parcel)) == before
    assert post.dead(parcel) is not None
    assert post.in_outbox(parcel) is None
    assert notes(post, parcel) == []


def test_not_executed_requeues_the_call_without_its_intent(post):
    # row 22 by U1: the operator asked after the waiting time, so it is a first send again
    parcel = buried(post)
    command = OperatorCommand(Order.NOT_EXECUTED, "not in the provider's list")
    too_early = post.go(operate.act(post.world.store, parcel.record_id, command, ANN))
    assert isinstance(too_early, Forbidden)
    assert "--closed" in too_early.why
    post.world.advance(5 * SECOND + 30 * SECOND + MINUTE)
    assert isinstance(post.go(operate.act(post.world.store, parcel.record_id, command, ANN)), Moved)
    assert post.record(parcel).intent is None
    (held,) = post.claim()
    assert post.take_up(held).record.intent.sends == 1


def test_a_call_that_was_sent_before_it_was_declared_not_executed_is_not_counted_as_one(post):
    parcel = buried(post)
    first = post.world.clock.now
    first_page = post.go(gather(post.world.store, parcel.record_id, None))
    assert (first_page.resent_after, first_page.queued_again) == (None, None)
    post.world.advance(HOUR)
    command = OperatorCommand(Order.NOT_EXECUTED, "not in the provider's list")
    assert isinstance(post.go(operate.act(post.world.store, parcel.record_id, command, ANN)), Moved)
    declared = post.world.clock.now
    post.world.advance(MINUTE)
    (held,) = post.claim()
    taken = post.take_up(held)
    assert taken.record.intent.sends == 1
    post.go(post.box.park(taken.lease, taken.held, Trigger.DEAD_LETTER, DEAD_LETTER, "time-out"))
    page = post.go(gather(post.world.store, parcel.record_id, None))
    assert (page.resent_after, page.queued_again) == (declared, declared)
    made = [(event.at, event.what) for event in page.timeline if "announced" in event.what]
    call = f"call {post.topic} announced"
    assert made == [(first, call), (declared + MINUTE, f"{call} again")]


def test_discarding_a_dead_call_stores_its_response(post):
    # row 19, O3: the client's retry gets it; the letter is gone in the same transaction
    parcel = buried(post)
    done = discard(post, parcel)
    assert isinstance(done, Moved)
    record = post.record(parcel)
    assert (record.state, record.outcome, record.response, record.intent) == (
        State.COMPLETED, Outcome.FAILURE, NO.response, None,
    )  # fmt: skip
    assert post.dead(parcel) is None
    assert [note.to for note in notes(post, parcel)] == [State.COMPLETED]


def test_settling_a_record_removes_its_dead_letter(post):
    parcel = buried(post)
    command = OperatorCommand(
        Order.EXECUTED, "seen there", answer=Completed(StoredResponse(201, (), b"yes"), Outcome.SUCCESS)
    )
    assert isinstance(post.go(operate.act(post.world.store, parcel.record_id, command, ANN)), Moved)
    assert post.dead(parcel) is None
    assert post.record(parcel).response == command.answer.response
    assert isinstance(retry(post, parcel), Forbidden)
    assert isinstance(discard(post, parcel), Forbidden)


@pytest.mark.parametrize("order", ["retry", "discard"])
def test_a_dead_message_is_moved_without_a_record(post, order):
    # O3: `emit` items never touch the record
    (parcel,) = post.put(post.parcel())
    (held,) = post.claim()
    post.go(post.box.bury(held, "gone"))
    done = retry(post, parcel) if order == "retry" else discard(post, parcel)
    assert isinstance(done, LetterMoved)
    assert post.dead(parcel) is None
    assert (post.in_outbox(parcel) is not None) == (order == "retry")
    (note,) = notes(post, parcel)
    assert (note.actor, note.source, note.to, note.operation) == (Actor.OPERATOR, None, None, post.topic)


def test_a_dead_letter_without_a_request_can_only_be_discarded(post):
    row = a_row(State.COMPLETED, Effects.OUTBOX)
    parcel = a_parcel(row)
    write(post.world, row, parcel)
    before = look(post.world, row)
    refused = retry(post, parcel)
    assert isinstance(refused, Forbidden)
    assert "dlq discard" in refused.why
    assert isinstance(discard(post, parcel), LetterMoved)
    assert post.dead(parcel) is None
    assert look(post.world, row) == before


def test_retrying_an_unknown_dead_letter_is_rejected(post):
    done = post.go(operate.retry(post.world.store, uuid.uuid4(), RETRY, ANN))
    assert isinstance(done, Forbidden)


def test_a_leased_parcel_blocks_every_operator_order(post):
    # A1: each refuses while an item is leased, and the moment the lease is over it does not
    row = a_row(State.UNKNOWN, Effects.OUTBOX, intent=an_intent(sent=NOW - HOUR))
    parcel = a_parcel(row)
    write(post.world, row, parcel, held_until=NOW + MINUTE)
    before = look(post.world, row)
    yes = Completed(StoredResponse(201, (), b"yes"), Outcome.SUCCESS)
    for order in Order:
        command = OperatorCommand(order, "why", answer=yes, closed=True, runs_again=True)
        done = post.go(operate.act(post.world.store, row.id, command, ANN))
        assert isinstance(done, Forbidden)
        assert "holds a parcel" in done.why
        assert done.instead == ()
    assert look(post.world, row) == before
    post.world.advance(MINUTE)
    command = OperatorCommand(Order.EXECUTED, "why", answer=yes)
    assert isinstance(post.go(operate.act(post.world.store, row.id, command, ANN)), Moved)
    assert post.in_outbox(parcel) is None


def test_a_deferred_request_never_becomes_retryable(post):
    # O2, F29: even where the record itself does not tell that its call was deferred
    row = a_row(State.UNKNOWN, Effects.OUTBOX)
    write(post.world, row, a_parcel(row))
    for order in (Order.RELEASE, Order.NOT_EXECUTED):
        done = post.go(operate.act(post.world.store, row.id, OperatorCommand(order, "why", closed=True), ANN))
        assert isinstance(done, Forbidden)
        assert "must not run again" in done.why


def test_a_response_with_undelivered_messages_cannot_be_busted(post):
    row = a_row(State.COMPLETED, Effects.LOCAL)
    parcel = a_parcel(row, ParcelKind.EMIT)
    write(post.world, row, parcel)
    command = OperatorCommand(Order.BUST, "why", runs_again=True)
    assert "not delivered" in post.go(operate.act(post.world.store, row.id, command, ANN)).why
    discard(post, parcel)
    assert isinstance(post.go(operate.act(post.world.store, row.id, command, ANN)), Moved)
