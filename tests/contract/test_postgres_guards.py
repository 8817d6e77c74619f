"""What only PostgreSQL's statements guard: a record is two rows there, and one of them may have been read too early."""

from __future__ import annotations

import uuid
from dataclasses import replace

import pytest

from contract.test_sql_guards import INTENT, LIFE, MEMO, OWNER, Desk
from contract.test_walk import postgres_world
from oncekey.core.model import Effects, RecordId, State
from oncekey.flow import Statement
from oncekey.stores.rows import claim_params
from oncekey.testing.claims import a_claim
from oncekey.testing.contract.proving import by_owner, chosen
from oncekey.testing.contract.walking import MOVES, records
from oncekey.testing.contract.world import _within

FACTS = ("state", "effects", "recovery", "memo", "intent", "lease_until", "deadline", "expires_at")
EMPTY = """
    SELECT record.state FROM oncekey.work AS work JOIN oncekey.record AS record USING (incarnation)
    WHERE num_nonnulls(work.memo, work.intent, work.request, work.reconcile_after) = 0 AND work.reconcile_tries = 0
      AND record.state NOT IN ('completed', 'expired')
"""


@pytest.fixture(scope="module", params=["psycopg"])
def desk(postgres_server):
    with postgres_world(postgres_server) as world:
        yield Desk(world, "oncekey.")


@pytest.fixture(params=["claim", "claim_kept"])
def claimed(request, desk):
    """Which incarnation a claim finds, if there is this record."""

    def found(**changes):
        claim = a_claim(id=RecordId("s", "k"), request=b"r")
        rows = desk.found(desk.record(**changes), request.param, claim_params(claim))
        return ["ours" if str(row["incarnation"]) == str(claim.incarnation) else str(row["incarnation"]) for row in rows]

    return found


def test_a_claim_finds_the_record_of_its_key(claimed):
    assert claimed() == [LIFE]
    assert claimed(id=RecordId("x", "k")) == claimed(id=RecordId("s", "x")) == ["ours"]


@pytest.mark.parametrize(
    "changes", [{"effects": Effects.OUTBOX, "memo": MEMO}, {"effects": Effects.PHASED}, {"state": State.UNKNOWN}]
)
def test_a_claim_does_not_answer_by_half_a_record(desk, changes):
    """A record that may have a row in `work` is read again, with that row."""
    claim = a_claim(id=RecordId("s", "k"))
    assert desk.found(desk.record(**changes), "claim", claim_params(claim)) == []


def begun(move, now):
    """A record with something done, on which the table allows the move."""
    return next((one for one in records(now) if (one.memo or one.intent) and move.expected(one, now)), None)


BLIND = {"renew"}
"""Moves of an owner that read nothing of the row in `work`, and leave it as it is."""


@pytest.mark.parametrize("move", [move for move in MOVES if by_owner(move)], ids=lambda move: move.name)
@pytest.mark.parametrize("stale", [6, 8])
def test_an_owner_does_not_write_by_a_row_that_was_read_too_early(desk, move, stale):
    """Another statement wrote both rows while this one waited for the record: it then has the new record and the old row."""
    world = desk.world
    record = begun(move, world.clock.now)
    if record is None:
        assert move.name in {"settle as retryable", "discard", "settle as deferred"}  # they write no such record at all
        return

    def written(memo_version):
        rows = desk.record(**{name: getattr(record, name) for name in FACTS})
        rows = [(table, {**row, **({"memo_version": memo_version} if table == "work" else {})}) for table, row in rows]
        seen = replace(record, id=RecordId("s", "k"), incarnation=uuid.UUID(LIFE))
        return desk.after(rows, _within(move.tried(world.store, seen)))

    assert written(7)
    assert bool(written(stale)) is (move.name in BLIND)


@pytest.mark.parametrize(("memo_version", "written"), [(7, 1), (6, 0), (8, 0)])
def test_nor_does_a_worker_that_has_a_result(desk, memo_version, written):
    rows = desk.record(effects=Effects.OUTBOX, intent=INTENT)
    rows = [(table, {**row, "memo_version": memo_version} if table == "work" else row) for table, row in rows]
    result = {**OWNER, "memo": "[]", "recovery_point": "x", "owner": "w"}
    assert len(desk.found(rows, "deferred_result", result)) == written


@pytest.mark.parametrize("move", MOVES, ids=lambda move: move.name)
def test_a_row_of_work_has_something_in_it(desk, move):
    """Other records pay for each such row with a look-up; a finished one may keep it until it is reaped."""
    world = desk.world
    kinds = tuple(records(world.clock.now))
    for record in chosen(move, kinds, world.clock.now):
        seen = replace(record, id=RecordId("s", "k"), incarnation=uuid.UUID(LIFE))
        rows = desk.record(**{name: getattr(record, name) for name in (*FACTS, "reconcile_tries")})

        def moved(seen=seen):
            flow = move.tried(world.store, seen)
            assert flow is not None
            assert (yield from _within(flow))
            return (yield Statement("empty", EMPTY))

        assert desk.after(rows, moved()) == []
