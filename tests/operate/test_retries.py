"""What a retry does after an operator's hand, by a retry; and what two hands at once come to."""

from __future__ import annotations

import threading
from dataclasses import replace

import psycopg
import pytest

from oncekey.core.errors import CommitAmbiguousError
from oncekey.core.model import (
    HOUR,
    MINUTE,
    SECOND,
    Code,
    Completed,
    Effects,
    EntryKind,
    Lease,
    MemoEntry,
    Outcome,
    Proceed,
    Refuse,
    Replay,
    State,
    StoredResponse,
)
from oncekey.core.onecommit import lock_number
from oncekey.core.operate import Forbidden, Moved, OperatorCommand, Order, Search
from oncekey.core.policy import Policy
from oncekey.core.transitions import Actor, Mover, Trigger
from oncekey.databases.postgres.store import PostgresStore
from oncekey.engine import operate
from oncekey.engine import request as requests
from oncekey.ops.explain_retry import prospect
from oncekey.testing.claims import a_claim
from operate.rows import MEMO, NOW, a_row, an_intent, copy_of, write

ANN = Mover(Actor.OPERATOR, "ann")
YES = Completed(StoredResponse(201, ((b"location", b"/payments/7"),), b'{"id":7}'), Outcome.SUCCESS)


def act(world, row, order, **said):
    return world.go(operate.act(world.store, row.id, OperatorCommand(order, "because", **said), ANN))


def retried(world, row):
    """The same request once more."""
    claim = a_claim(
        row.id.key, id=row.id, effects=row.effects, recovery=row.recovery, fingerprint=row.fingerprint,
        operation=row.operation,
    )  # fmt: skip
    return world.go(requests.begin(world.store, claim, Policy()))


def test_a_retry_runs_a_released_local_request(world):
    # row 14
    row = write(world, a_row(State.IN_PROGRESS, lease_until=NOW))
    done = act(world, row, Order.RELEASE)
    assert done.snapshot.record.last_error == "in_progress_lock_expired"  # R143
    assert "executes" in prospect(done.snapshot.record, done.snapshot.now)
    ruled = retried(world, row)
    assert isinstance(ruled, Proceed)
    assert ruled.lease.fence == row.fence + 1


def test_a_live_lease_is_never_released(world):
    # A1, F39
    row = write(world, a_row(State.IN_PROGRESS, lease_until=NOW + 1))
    done = act(world, row, Order.RELEASE)
    assert isinstance(done, Forbidden)
    assert "alive" in done.why
    assert done.instead == ()
    world.advance(1)
    assert isinstance(act(world, row, Order.RELEASE), Moved)


def test_a_released_inline_request_is_unknown(world):
    # row 15
    row = write(world, a_row(State.IN_PROGRESS, Effects.INLINE, lease_until=NOW))
    done = act(world, row, Order.RELEASE)
    assert done.move.row.number == 15
    ruled = retried(world, row)
    assert isinstance(ruled, Refuse)
    assert ruled.code is Code.OUTCOME_UNKNOWN
    assert "Nothing is executed" in prospect(done.snapshot.record, done.snapshot.now)


def test_a_released_owner_may_still_settle(world):
    # row 8: released is not taken over (P1)
    row = write(world, a_row(State.IN_PROGRESS, Effects.INLINE, lease_until=NOW))
    act(world, row, Order.RELEASE)
    assert world.settle(Lease.of(row), YES).ours


def test_a_resolved_record_is_replayed_for_a_full_ttl(world):
    # row 19, F2: resolved at ttl + 1 h, the next retry replays
    row = write(world, a_row(State.UNKNOWN, Effects.INLINE))
    world.advance(row.ttl + HOUR)
    done = act(world, row, Order.EXECUTED, answer=YES)
    ruled = retried(world, row)
    assert isinstance(ruled, Replay)
    assert ruled.record.response == YES.response
    assert ruled.record.expires_at == world.clock() + row.ttl
    assert "stored response (201)" in prospect(done.snapshot.record, done.snapshot.now)


def test_a_result_by_an_operator_lets_a_retry_resume(world):
    # row 20, H5, F22
    row = write(world, a_row(State.UNKNOWN, Effects.PHASED, memo=MEMO, intent=an_intent()))
    world.advance(row.ttl + HOUR)
    refused = act(world, row, Order.EXECUTED, answer=YES, result='"ch_1"')
    assert isinstance(refused, Forbidden)
    assert "--result" in refused.why
    done = act(world, row, Order.EXECUTED, result='"ch_1"')
    record = done.snapshot.record
    assert record.memo == (*MEMO, MemoEntry("charge", EntryKind.CALL, '"ch_1"', by_hand=True))
    assert (record.recovery_point, record.intent) == ("charge", None)
    assert record.expires_at == world.clock() + row.ttl  # or the reaper would park it again at once
    assert "after the step 'charge'" in prospect(record, done.snapshot.now)
    ruled = retried(world, row)
    assert isinstance(ruled, Proceed)
    assert ruled.record.memo == record.memo


@pytest.mark.parametrize(
    ("effects", "intent", "wait"),
    [
        (Effects.PHASED, an_intent(sent=NOW), 5 * SECOND + 30 * SECOND + 60 * SECOND),
        (Effects.INLINE, None, 5 * MINUTE + 60 * SECOND - MINUTE),  # in doubt since a minute
    ],
)
def test_operator_not_executed_requires_the_waiting_time(world, effects, intent, wait):
    # U1, F34
    row = write(world, a_row(State.UNKNOWN, effects, intent=intent))
    world.advance(wait - 1)
    assert isinstance(act(world, row, Order.NOT_EXECUTED), Forbidden)
    assert isinstance(act(world, row, Order.NOT_EXECUTED, asked_at=world.clock() + HOUR), Forbidden)
    world.advance(1)
    # The question must have started after the waiting time, not only the answer been written.
    assert isinstance(act(world, row, Order.NOT_EXECUTED, asked_at=world.clock() - 1), Forbidden)
    assert isinstance(act(world, row, Order.RELEASE), Forbidden)  # a release says nothing about the call
    assert isinstance(act(world, row, Order.NOT_EXECUTED), Moved)
    assert isinstance(retried(world, row), Proceed)


def test_closed_at_the_provider_needs_no_waiting(world):
    # U1
    row = write(world, a_row(State.UNKNOWN, Effects.PHASED, intent=an_intent(sent=NOW)))
    assert isinstance(act(world, row, Order.NOT_EXECUTED, closed=True), Moved)
    (entry,) = world.go(world.store.audit.history(row.id))
    assert "closed at the provider" in entry.note.why


def test_a_busted_record_runs_again_without_its_old_owner(world):
    # row 32, R106
    row = write(world, a_row(State.COMPLETED))
    assert "made twice" in act(world, row, Order.BUST).why
    done = act(world, row, Order.BUST, runs_again=True)
    assert "from the beginning" in prospect(done.snapshot.record, done.snapshot.now)
    assert not world.settle(Lease.of(row), YES).ours
    assert isinstance(retried(world, row), Proceed)


def test_a_busted_phased_record_keeps_its_steps(world):
    # row 32: memo kept
    row = write(world, a_row(State.COMPLETED, Effects.PHASED, memo=MEMO))
    record = act(world, row, Order.BUST, runs_again=True).snapshot.record
    assert (record.memo, record.recovery_point, record.last_error) == (MEMO, "order_created", "busted")
    assert "finished steps are not repeated" in prospect(record, NOW)


def test_an_extended_response_is_replayed_after_its_expiry(world):
    # row 35, R268
    row = write(world, a_row(State.COMPLETED))
    week = 7 * 24 * HOUR
    assert "already kept until" in act(world, row, Order.EXTEND, life=SECOND).why
    done = act(world, row, Order.EXTEND, life=week)
    assert done.snapshot.record.expires_at == world.clock() + week
    world.advance(week - SECOND)
    assert isinstance(retried(world, row), Replay)
    (entry,) = world.go(world.store.audit.history(row.id))
    assert (entry.note.trigger, entry.note.who, entry.note.why) == (Trigger.EXTEND, "ann", "because")
    world.advance(SECOND)
    assert "it has expired" in act(world, row, Order.EXTEND, life=week).why
    assert isinstance(retried(world, row), Proceed)


def test_an_extended_phased_response_keeps_its_steps(world):
    # row 35
    row = write(world, a_row(State.COMPLETED, Effects.PHASED, memo=MEMO))
    record = act(world, row, Order.EXTEND, life=7 * 24 * HOUR).snapshot.record
    assert (record.memo, record.response, record.fence) == (MEMO, row.response, row.fence)


@pytest.mark.parametrize("state", [State.IN_PROGRESS, State.UNKNOWN, State.FAILED_RETRYABLE])
def test_an_unfinished_record_cannot_be_extended(world, state):
    row = write(world, a_row(state, Effects.INLINE))
    assert "an unfinished key does not expire" in act(world, row, Order.EXTEND, life=7 * 24 * HOUR).why


def test_an_order_for_an_outdated_version_is_rejected(world):
    row = write(world, a_row(State.UNKNOWN, Effects.INLINE))
    done = act(world, row, Order.EXECUTED, answer=YES, version=row.version - 1)
    assert isinstance(done, Forbidden)
    assert "changed since" in done.why
    assert isinstance(act(world, row, Order.EXECUTED, answer=YES, version=row.version), Moved)


def test_two_concurrent_operators_settle_a_record_once(world):
    # first write wins, the loser changes nothing
    rows = [write(world, copy_of(a_row(State.UNKNOWN, Effects.INLINE))) for _ in range(10)]
    no = Completed(StoredResponse(402, (), b"no"), Outcome.FAILURE)
    for row in rows:
        done = []
        both = threading.Barrier(2)

        def one(order, answer, row=row, done=done, both=both):
            both.wait()
            done.append((answer, act(world, row, order, answer=answer)))

        threads = [threading.Thread(target=one, args=two) for two in ((Order.EXECUTED, YES), (Order.DECLINED, no))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        (winner,) = [answer for answer, result in done if isinstance(result, Moved)]
        assert world.record(row.id).response == winner.response
        assert len(world.go(world.store.audit.history(row.id))) == 1


def test_an_order_with_a_lost_reply_raises_without_repeating(world):
    # P7: the move was made once, and so was its line
    row = write(world, a_row(State.UNKNOWN, Effects.INLINE))
    world.lose_reply("operate")
    with pytest.raises(CommitAmbiguousError):
        act(world, row, Order.EXECUTED, answer=YES)
    assert world.record(row.id).state is State.COMPLETED
    assert len(world.go(world.store.audit.history(row.id))) == 1


def test_a_local_request_in_flight_is_seen_by_its_lock(world, request):
    # L8, F21
    row = a_row(State.COMPLETED)
    number = lock_number("oncekey", row.id, None)
    if isinstance(world.store, PostgresStore):
        with psycopg.connect(request.getfixturevalue("operate_dsn")) as connection:
            connection.execute("SELECT pg_advisory_xact_lock(%s)", (number,))
            assert world.go(operate.look(world.store, row.id, number)).busy
    assert not world.go(operate.look(world.store, row.id, number)).busy


def test_search_filters_and_pages_records(world):
    scope = f"scope-{a_row(State.PENDING).id.key}"
    states = [State.COMPLETED, State.UNKNOWN, State.IN_PROGRESS, State.UNKNOWN, State.COMPLETED]
    rows = []
    for place, state in enumerate(states):
        row = a_row(state, Effects.INLINE, created_at=NOW - place * HOUR)
        row = replace(row, id=replace(row.id, scope=scope))
        rows.append(write(world, row))

    def found(limit=10, before=None, **wanted):
        page = world.go(world.store.operate.search(Search(scope=scope, **wanted), limit, before))
        assert page.now == world.clock()
        return [one.id.key for one in page.records]

    keys = [row.id.key for row in rows]
    assert found() == keys  # the newest first
    assert found(limit=2) == keys[:2]
    second = rows[1]
    assert found(before=(second.created_at, second.id.scope, second.id.key)) == keys[2:]
    assert found(state=State.UNKNOWN) == [keys[1], keys[3]]
    assert found(older_than=3 * HOUR) == keys[3:]
    assert found(effects=Effects.LOCAL) == found(operation="other") == found(stale=True) == []
    world.advance(MINUTE)
    assert found(stale=True) == [keys[2]]


@pytest.mark.parametrize("memo", [MEMO, None], ids=["after a step", "no step"])
@pytest.mark.parametrize("called", [True, False], ids=["open call", "no call"])
def test_the_prospect_of_an_interrupted_phased_request_is_a_sentence(memo, called):
    intent = an_intent() if called else None
    row = a_row(State.FAILED_RETRYABLE, effects=Effects.PHASED, memo=memo, intent=intent)
    wanted = {
        (True, True): "A retry resumes it after the step 'started'; finished steps are not repeated; the open call",
        (True, False): "A retry resumes it after the step 'started'; finished steps are not repeated.",
        (False, True): "A retry resumes it; the open call",
        (False, False): "A retry executes the operation, from the beginning.",
    }
    assert wanted[memo is not None, called] in prospect(row, NOW)
