"""Every order against every kind of row: allowed exactly where the table says, and otherwise nothing changes at all."""

from __future__ import annotations

from dataclasses import replace
from uuid import uuid4

import pytest

from oncekey.core.guards import Facts
from oncekey.core.model import HOUR, SECOND, Completed, Effects, Outcome, ParcelKind, Snapshot, State, StoredResponse
from oncekey.core.operate import (
    Forbidden,
    Move,
    Moved,
    OperatorCommand,
    Order,
    ParcelLocation,
    audited_as,
    decide,
    possible,
)
from oncekey.core.transitions import Actor, Fence, Illegal, Mover, Note, Transition, Trigger, find_transition
from oncekey.engine import operate
from oncekey.ops.explain_retry import prospect
from oncekey.stores.cells_operate import LoggedMoves
from operate.rows import NOW, a_parcel, copy_of, every_row, look, write

ANN = Mover(Actor.OPERATOR, "ann")
YES = Completed(StoredResponse(201, ((b"content-type", b"application/json"),), b'{"by":"hand"}'), Outcome.SUCCESS)
NO = Completed(StoredResponse(402, (), b"no"), Outcome.FAILURE)
LAG = 60 * SECOND

WISHES = (
    OperatorCommand(Order.EXECUTED, "asked", answer=YES),
    OperatorCommand(Order.EXECUTED, "asked", result='"ch_1"'),
    OperatorCommand(Order.EXECUTED, "asked"),
    OperatorCommand(Order.DECLINED, "asked", answer=NO),
    OperatorCommand(Order.DECLINED, "asked", result='{"$":"rejected","v":"no"}'),
    OperatorCommand(Order.NOT_EXECUTED, "asked"),
    OperatorCommand(Order.NOT_EXECUTED, "asked", closed=True),
    OperatorCommand(Order.RELEASE, "stuck"),
    OperatorCommand(Order.BUST, "mended"),
    OperatorCommand(Order.BUST, "mended", runs_again=True),
    OperatorCommand(Order.EXTEND, "audited", life=400 * 24 * 3600 * SECOND),
    OperatorCommand(Order.RETRY, "mended"),
    OperatorCommand(Order.DISCARD, "given up", answer=NO),
)

# What each row may change, beside the version that it always puts up.
CHANGES = {
    14: {"state", "owner", "lease_until", "last_error"},
    15: {"state", "owner", "lease_until", "last_error", "reconcile_after"},
    19: {
        "state", "outcome", "response_status", "response_headers", "response_body", "response_schema", "finished_at",
        "expires_at", "recovery_point", "intent", "last_error", "reconcile_after",
    },
    20: {"state", "memo", "recovery_point", "intent", "reconcile_after", "expires_at"},
    21: {"state", "intent", "reconcile_after", "expires_at"},
    34: {"state", "memo", "fence", "recovery_point", "reconcile_after", "expires_at"},
    22: {"state", "intent", "reconcile_after"},
    32: {
        "state", "outcome", "response_status", "response_headers", "response_body", "response_schema", "finished_at",
        "recovery_point", "last_error", "fence", "expires_at",
    },
    35: {"expires_at"},
}  # fmt: skip

TRIGGERS = {
    Order.EXECUTED: Trigger.EXECUTED,
    Order.DECLINED: Trigger.EXECUTED,
    Order.DISCARD: Trigger.EXECUTED,
    Order.NOT_EXECUTED: Trigger.NOT_EXECUTED,
    Order.BUST: Trigger.BUST,
    Order.EXTEND: Trigger.EXTEND,
    Order.RETRY: Trigger.DLQ_RETRY,
}


AUDITED = {Order.DECLINED: Trigger.DECLINED, Order.DISCARD: Trigger.DISCARD}


def expected(command, row) -> Transition | Illegal:
    """What the table says of it, asked for by hand and not by the code under test."""
    trigger = TRIGGERS.get(command.order)
    if command.order is Order.RELEASE:  # A1: 14, 15 and 21
        trigger = Trigger.NOT_EXECUTED if row.state is State.UNKNOWN else Trigger.SWEEP
    resumable = row.effects is Effects.PHASED and row.intent is None and row.memo
    if command.order in {Order.EXECUTED, Order.DECLINED} and (
        row.state is State.FAILED_RETRYABLE or (row.state is State.UNKNOWN and resumable)
    ):
        trigger = Trigger.REPLACE
    intent = row.intent
    waited = command.closed or (
        (intent is not None and intent.send_by + row.call_timeout + LAG <= NOW)
        or (intent is None and row.effects is not Effects.INLINE)
    )
    repeatable = intent is not None and intent.repeatable_until is not None and intent.repeatable_until > NOW
    facts = Facts(
        row,
        NOW,
        waited=waited and command.order is Order.NOT_EXECUTED,
        result_given=command.result is not None,
        parcel_repeatable=repeatable or bool(row.memo),
        reason=True,
        runs_again=command.runs_again,
    )
    said = find_transition(trigger, Actor.OPERATOR, facts)
    if isinstance(said, Illegal):
        return said
    if said.number == 19 and command.answer is None:
        return Illegal("an answer is missing")
    if said.number in {20, 34} and command.answer is not None:
        return Illegal("a phased handler computes its answer itself")
    if said.number == 22 and command.order is Order.RELEASE:
        return Illegal("A1: release is 14, 15 and 21")
    return said


def go(world, row, command):
    return world.go(operate.act(world.store, row.id, command, ANN))


def history(world, row):
    return world.go(world.store.audit.history(row.id))


LEAVING = (State.IN_PROGRESS, State.COMPLETED, State.UNKNOWN)


def test_every_order_follows_the_table_on_every_state(world, request):
    # R106, R138, R143, A1, F39: the product of rows and orders, compared with the table
    # For the other client library of the same statements, the states that something leaves will do.
    states = LEAVING if "asyncpg" in request.node.name else tuple(State)
    rows = [row for row in every_row() if row.state in states]
    counts = dict.fromkeys(CHANGES, 0)
    for row in rows:
        deferred = row.effects is Effects.OUTBOX and (row.memo or row.intent) and row.state is State.UNKNOWN
        letters = (a_parcel(row),) if deferred else ()
        write(world, row, *letters)
        before = look(world, row)
        for command in WISHES:
            said = expected(command, row)
            if isinstance(said, Illegal):
                done = go(world, row, command)
                assert isinstance(done, Forbidden), (row, command)
                assert done.why
                continue
            fresh = copy_of(row)
            parcels = (a_parcel(fresh),) if deferred else ()
            write(world, fresh, *parcels)
            was = look(world, fresh)
            done = go(world, fresh, command)
            assert isinstance(done, Moved), (row, command, done)
            counts[said.number] += 1
            _check_moved(world, was, done, said, command)
        # Whatever was refused left the row byte for byte as it was, on PostgreSQL the very same tuple.
        assert look(world, row) == before
        assert history(world, row) == ()
    assert all(counts.values()), counts


def _check_moved(world, was, done, said, command):
    row = done.move.seen
    after = look(world, row)
    changed = {name for name in was if was[name] != after[name]} - {"xmin"}
    assert done.move.row is said
    assert "version" in changed
    assert changed - {"version"} <= CHANGES[said.number], (said.number, changed)
    assert after["version"] == was["version"] + 1
    assert after["fence"] == was["fence"] + (1 if said.fence is Fence.UP else 0)
    assert after["state"] == said.to
    assert done.snapshot.record.state is said.to
    # R173: who, when, why, from, to, under which fence
    (entry,) = history(world, row)
    note = entry.note
    assert (note.who, note.actor, note.source, note.to, note.trigger) == (
        "ann", Actor.OPERATOR, row.state, said.to, AUDITED.get(command.order, said.trigger),
    )  # fmt: skip
    assert note.why.startswith(command.reason)
    assert (entry.at, note.fence, note.incarnation) == (NOW, row.fence, row.incarnation)


def test_a_store_without_an_audit_logs_what_was_found(caplog):
    record = next(one for one in every_row() if (one.state, one.effects) == (State.UNKNOWN, Effects.INLINE))
    for order, word in ((Order.EXECUTED, "executed"), (Order.DECLINED, "declined"), (Order.DISCARD, "discard")):
        note = Note.of(record, State.COMPLETED, audited_as(order, record), ANN, "asked")
        assert list(LoggedMoves().noting((note,))) == []
        assert f"operator ann: {word} of {record.operation} (digest " in caplog.messages[-1]
        assert caplog.messages[-1].endswith("), unknown to completed, because asked")


def test_suggested_orders_are_those_the_table_allows():
    # A forbidden order says what is possible instead: the table, walked for this record.
    best = {
        **{order: OperatorCommand(order, "-", answer=YES) for order in (Order.EXECUTED, Order.DECLINED, Order.DISCARD)},
        Order.NOT_EXECUTED: OperatorCommand(Order.NOT_EXECUTED, "-", closed=True),
        Order.RELEASE: OperatorCommand(Order.RELEASE, "-"),
        Order.BUST: OperatorCommand(Order.BUST, "-", runs_again=True),
        Order.EXTEND: OperatorCommand(Order.EXTEND, "-", life=365 * 24 * HOUR),
        Order.RETRY: OperatorCommand(Order.RETRY, "-"),
    }
    for row in every_row():
        dead = row.effects is Effects.OUTBOX and (row.memo or row.intent) and row.state is State.UNKNOWN
        parcels = (ParcelLocation(uuid4(), ParcelKind.DEFER, dead=True),) if dead else ()
        offered = {one.order: one for one in possible(row, NOW, parcels)}
        for order, command in best.items():
            if row.effects is Effects.PHASED and command.answer is not None:
                command = replace(command, answer=None, result="null")
            if order is Order.DISCARD and row.effects is not Effects.OUTBOX:
                assert order not in offered
                continue
            said = expected(command, row)
            assert (order in offered) == isinstance(said, Transition), (row, order)
            if isinstance(said, Transition):
                assert (offered[order].row, offered[order].to) == (said.number, said.to)
        for refused in (decide(command, Snapshot(row, NOW), parcels) for command in WISHES):
            assert isinstance(refused, Move) or refused.instead == tuple(offered.values())
        again = offered.get(Order.BUST)
        assert again is None or again.advisable is not (row.outcome is Outcome.SUCCESS)


@pytest.mark.parametrize("command", WISHES, ids=lambda command: f"{command.order}")
def test_an_order_without_a_reason_is_rejected(command):
    for row in every_row():
        said = decide(replace(command, reason=" "), Snapshot(row, NOW))
        assert isinstance(said, Forbidden)
        assert "--reason" in said.why


def test_an_order_for_an_unknown_key_is_rejected(world):
    row = next(every_row())
    done = go(world, row, WISHES[0])
    assert isinstance(done, Forbidden)
    assert "no record" in done.why


def test_every_record_has_a_description_of_its_retry():
    sentences = {prospect(row, NOW) for row in every_row()} | {prospect(None, NOW)}
    assert all(sentence.endswith(".") for sentence in sentences)
    assert len(sentences) >= 10
