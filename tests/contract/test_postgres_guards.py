"""What only PostgreSQL's statements guard: a record is two rows there, and one of them may have been read too early."""

from __future__ import annotations

import uuid
from dataclasses import replace

import pytest

from contract.test_sql_guards import (
    ANNOUNCED,
    ANSWER,
    INTENT,
    KINDS,
    LIFE,
    MEMO,
    NOTED,
    NOW,
    OF_STATE,
    OTHER_LIFE,
    OURS,
    OWNER,
    PLACE,
    REAPED,
    VERSION,
    Desk,
)
from contract.test_walk import postgres_world
from oncekey.core.flow import Statement
from oncekey.core.model import Deferred, Effects, Parcel, ParcelKind, RecordId, State
from oncekey.core.onecommit import WriteKind, WriteTarget
from oncekey.stores.rows import claim_params
from oncekey.testing.claims import a_claim
from oncekey_contract.proving import by_owner, chosen
from oncekey_contract.walking import MOVES
from oncekey_contract.world import _within

FACTS = ("request", "state", "effects", "recovery", "memo", "intent", "lease_until", "deadline", "expires_at")
CALLED = ("phase", "downstream_key", "digest", "sends", "send_window", "repeatable")
EMPTY = """
    SELECT record.state FROM oncekey.work AS work JOIN oncekey.record AS record USING (incarnation)
    WHERE num_nonnulls(work.memo, work.intent, work.request, work.reconcile_after) = 0 AND work.reconcile_tries = 0
"""
EMPTY_UNFINISHED = f"{EMPTY} AND record.state NOT IN ('completed', 'expired')"


@pytest.fixture(scope="session", params=["psycopg"])
def desk(postgres_server):
    with postgres_world(postgres_server) as world:
        yield Desk(world, "oncekey.")


@pytest.fixture(params=["claim", "claim_kept"])
def claimed(request, desk):
    """Which incarnation a claim finds, if there is this record."""

    def found(**changes):
        claim = a_claim(id=RecordId("s", "k"), request=b"r")
        rows = desk.found(desk.record(**changes), request.param, claim_params(claim, None))
        return [
            "ours" if str(row["incarnation"]) == str(claim.incarnation) else str(row["incarnation"]) for row in rows
        ]

    return found


def test_a_claim_finds_the_record_of_its_key(claimed):
    assert claimed() == [LIFE]
    assert claimed(id=RecordId("x", "k")) == claimed(id=RecordId("s", "x")) == ["ours"]


@pytest.mark.parametrize(
    "changes", [{"effects": Effects.OUTBOX, "memo": MEMO}, {"effects": Effects.PHASED}, {"state": State.UNKNOWN}]
)
def test_claim_returns_nothing_for_records_with_a_work_row(desk, changes):
    """A record that may have a row in `work` is read again, with that row."""
    claim = a_claim(id=RecordId("s", "k"))
    assert desk.found(desk.record(**changes), "claim", claim_params(claim, None)) == []


def kind(move, *, done):
    """A record on which the table allows the move, with something done or with nothing."""
    fits = (one for one in KINDS if bool(one.memo or one.intent) is done and move.expected(one, NOW))
    return next(fits, None)


def planted(desk, record, hot=None, cold=None):
    """Its rows, at places of the test's own; `hot` and `cold` are the versions of the memo that its two rows have."""
    rows = desk.record(**{name: getattr(record, name) for name in FACTS})
    versions = {"record": hot, "work": cold}
    return [
        (table, row if versions[table] is None else {**row, "memo_version": versions[table]}) for table, row in rows
    ]


def attempt(desk, move, record, rows):
    seen = replace(record, id=RecordId("s", "k"), incarnation=uuid.UUID(LIFE))
    return bool(desk.after(rows, _within(move.tried(desk.world.store, seen))))


OWNERS = [move for move in MOVES if by_owner(move)]
of_an_owner = pytest.mark.parametrize("move", OWNERS, ids=lambda move: move.name)
BLIND = {"renew"}
"""Moves of an owner that read nothing of the row in `work`, and leave it as it is."""


@of_an_owner
def test_an_owner_does_not_write_by_a_row_that_was_read_too_early(desk, move):
    """Another statement wrote both rows while this one waited for the record: it has the new record and the old row."""
    record = kind(move, done=True)
    if record is None:
        return  # it writes no such record at all
    assert attempt(desk, move, record, planted(desk, record))
    for cold in (6, 8):
        assert attempt(desk, move, record, planted(desk, record, cold=cold)) is (move.name in BLIND)


@of_an_owner
def test_owner_write_with_outdated_empty_work_row_is_rejected(desk, move):
    record = kind(move, done=False)
    if record is None:
        return
    record = replace(record, request=b"r")
    assert attempt(desk, move, record, planted(desk, record))
    assert attempt(desk, move, record, planted(desk, record, hot=7)) is (move.name in BLIND)


@of_an_owner
def test_work_row_of_another_record_does_not_block_the_owner(desk, move):
    record = kind(move, done=False)
    if record is not None:
        other = desk.record(id=RecordId("s", "x"), incarnation=uuid.UUID(OTHER_LIFE), memo=MEMO, intent=INTENT)
        assert attempt(desk, move, record, [*other, *planted(desk, record)])


@pytest.mark.parametrize(("memo_version", "written"), [(7, 1), (6, 0), (8, 0)])
def test_worker_result_requires_a_current_work_row(desk, memo_version, written):
    rows = desk.record(effects=Effects.OUTBOX, intent=INTENT)
    rows = [(table, {**row, "memo_version": memo_version} if table == "work" else row) for table, row in rows]
    result = {**OWNER, "memo": "[]", "recovery_point": "x", "owner": "w"}
    assert len(desk.found(rows, "deferred_result", result)) == written


def test_worker_ignores_the_work_row_of_another_record(desk):
    other = desk.record(id=RecordId("s", "x"), incarnation=uuid.UUID(OTHER_LIFE), memo=MEMO)
    result = {**OWNER, "memo": "[]", "recovery_point": "x", "owner": "w"}
    assert len(desk.found([*other, *desk.record(effects=Effects.OUTBOX)], "deferred_result", result)) == 1


@pytest.mark.parametrize(("memo", "calls"), [((), 1), (MEMO, 0)])
def test_a_call_that_has_its_result_is_not_entered_again(desk, memo, calls):
    call = {"owner": "w", **{name: ANNOUNCED[name] for name in CALLED}}

    def moved():
        assert (yield desk.world.store._statements.statement("take_up", {**VERSION, **call}))
        return (yield Statement("calls", "SELECT phase FROM oncekey.call"))

    assert len(desk.after(desk.record(state=State.PENDING, effects=Effects.OUTBOX, memo=memo), moved())) == calls


@pytest.mark.parametrize("move", MOVES, ids=lambda move: move.name)
def test_no_transition_leaves_an_empty_work_row(desk, move):
    """Other records pay for each such row with a look-up; a finished one may keep it until it is reaped.

    Another record keeps its row: `leftovers` reports a record without it.
    """
    world = desk.world
    other = desk.record(id=RecordId("s", "x"), incarnation=uuid.UUID(OTHER_LIFE), memo=MEMO, intent=INTENT)
    for record in chosen(move, KINDS, NOW):
        seen = replace(record, id=RecordId("s", "k"), incarnation=uuid.UUID(LIFE))

        def moved(seen=seen):
            flow = move.tried(world.store, seen)
            assert flow is not None
            assert (yield from _within(flow))
            broken = yield from _within(world.leftovers())
            return broken, (yield Statement("empty", EMPTY_UNFINISHED))

        assert desk.after([*other, *planted(desk, record)], moved()) == ({}, [])


SENT = {"effects": Effects.OUTBOX, "intent": INTENT}
FAILED_LEASE = {**VERSION, "last_error": "failed_lock_expired"}


@pytest.mark.parametrize(
    ("name", "has", "params"),
    [
        # No resolver is asked about a failed lease, so there is nothing to keep.
        ("mark_unknown", {"lease_until": NOW}, FAILED_LEASE),
        ("park_record", {"effects": Effects.OUTBOX}, FAILED_LEASE),
        # Nor is there of a call that was not sent.
        ("pend", SENT, {**OWNER, "error": "busy", "unsent": True}),
        ("pend", {"effects": Effects.OUTBOX}, {**OWNER, "error": "busy", "unsent": True}),
        ("operator_pend", {**SENT, "state": State.UNKNOWN, "lease_until": None}, {**VERSION, "forget": True}),
        # Nor of a record that is answered.
        (
            "abandon",
            {"effects": Effects.OUTBOX, "state": State.PENDING, "expires_at": NOW},
            {**VERSION, **ANSWER, "outcome": "failure", "kept": 1},
        ),
        (
            "operator_answer",
            {"effects": Effects.INLINE, "state": State.UNKNOWN},
            {**VERSION, **ANSWER, "outcome": "success"},
        ),
        ("operator_extend", {"state": State.COMPLETED, "expires_at": NOW + 1}, {**VERSION, "expires_at": NOW + 2}),
        ("reseal_record", {"state": State.COMPLETED}, {**VERSION, **ANSWER, "memo": None, "request": None}),
    ],
)
def test_work_row_is_deleted_when_it_becomes_empty(desk, name, has, params):
    others = [
        *desk.record(id=RecordId("s", "a"), incarnation=uuid.UUID(OTHER_LIFE), memo=MEMO, reconcile_tries=5),
        *desk.record(id=RecordId("a", "k"), incarnation=uuid.UUID(OURS), memo=MEMO, reconcile_tries=5),
    ]

    def moved():
        (row,) = yield desk.world.store._statements.statement(name, params)
        assert row.get("reconcile_tries", 0) == 0
        broken = yield from _within(desk.world.leftovers())
        return broken, (
            yield Statement("row", "SELECT memo FROM oncekey.work WHERE incarnation = :life::uuid", {"life": LIFE})
        )

    assert desk.after([*others, *desk.record(**has)], moved()) == ({}, [])


@pytest.mark.parametrize("change", [{"scope": "x"}, {"key": "x"}, {"incarnation": OTHER_LIFE}])
def test_resolver_ignores_the_work_row_of_another_record(desk, change):
    hot, (table, cold) = desk.record(state=State.UNKNOWN, reconcile_after=NOW)
    assert desk.finds([hot, (table, cold)], "unknown_due", PLACE) == 1
    assert desk.finds([hot, (table, {**cold, **change})], "unknown_due", PLACE) == 0


@pytest.mark.parametrize("kind", [WriteKind.NEW, WriteKind.REPLACE_EXPIRED])
def test_deferred_record_without_request_has_no_work_row(desk, kind):
    seen = replace(OF_STATE[State.EXPIRED], id=RecordId("s", "k"), expires_at=NOW)
    rows = desk.record(state=State.EXPIRED, incarnation=seen.incarnation, expires_at=NOW)
    claim = a_claim(id=RecordId("s", "k"), effects=Effects.OUTBOX)
    parcel = Parcel(uuid.uuid4(), ParcelKind.DEFER, claim.id, claim.incarnation, "mail", "{}", "d")
    new = kind is WriteKind.NEW

    def moved():
        target = WriteTarget(kind, None if new else seen)
        assert (yield from desk.world.store.locks.completing(claim, target, Deferred(parcel), None))
        return (yield Statement("empty", EMPTY))

    assert desk.after([] if new else rows, moved()) == []


@pytest.mark.parametrize("noted", [False, True])
@pytest.mark.parametrize(
    ("name", "state"),
    [("purge_expired", State.COMPLETED), ("purge_kept", State.EXPIRED), ("mark_expired", State.COMPLETED)],
)
def test_reaper_deletes_only_its_work_row_and_audits_if_configured(desk, name, state, noted):
    reaped = desk.record(state=state, expires_at=NOW - 10, request=b"r")
    other = desk.record(id=RecordId("s", "x"), incarnation=uuid.UUID(OTHER_LIFE), memo=MEMO)

    def moved():
        (row,) = yield desk.world.store._statements.statement(name, {**REAPED, **NOTED, "noted": noted})
        broken = yield from _within(desk.world.leftovers())
        lines = yield Statement("lines", "SELECT id FROM oncekey.audit")
        return row["moved"], broken, len(lines)

    assert desk.after([*reaped, *other], moved()) == (1, {}, int(noted))
