"""Each statement finds the rows that fit all of its guards, and no row that misses one of them.

A row that fits is planted, and then the same row with one thing changed at a time: the statement must find the first
and none of the others. All of it is one transaction that is rolled back.
"""

from __future__ import annotations

import json
import uuid
from dataclasses import dataclass, replace
from typing import Any, ClassVar
from uuid import UUID

import pytest

from contract.test_walk import postgres_world, sqlite_world
from oncekey.core.flow import Statement
from oncekey.core.model import (
    SECOND,
    Deferred,
    Effects,
    EntryKind,
    Intent,
    MemoEntry,
    Parcel,
    ParcelKind,
    RecordId,
    State,
)
from oncekey.core.onecommit import WriteKind, WriteTarget
from oncekey.stores.rows import COLUMNS, WORK
from oncekey.testing.claims import START, a_claim
from oncekey_contract.walking import cell_of, records

NOW = START
OURS, THEIRS = str(uuid.UUID(int=7)), str(uuid.UUID(int=8))
LIFE, OTHER_LIFE = str(uuid.UUID(int=17)), str(uuid.UUID(int=18))
KINDS = tuple(records(NOW))
OF_STATE = {state: next(one for one in KINDS if one.state is state) for state in State}


@dataclass(frozen=True)
class Desk:
    """A store without a row that the test did not plant."""

    world: Any
    prefix: str

    @property
    def override(self):
        """What lets a test say the number of a row itself."""
        return "OVERRIDING SYSTEM VALUE" if self.prefix == "oncekey." else ""

    def finds(self, rows, name, params, *, among=None):
        """How many rows it returns; a page that is empty is a row with nothing but the clock."""
        return sum(row.get("scope", among) is not None for row in self.found(rows, name, params))

    def found(self, rows, name, params):
        """The rows that a statement returns when there are these rows."""

        def asking():
            return (yield self.world.store._statements.statement(name, dict(params)))

        return [dict(one) for one in self.after(rows, asking())]

    def after(self, rows, steps):
        """What some statements result in when there are these rows."""

        def body():
            for table, row in rows:
                columns = ", ".join(f'"{column}"' for column in row)
                values = ", ".join(f":{column}" for column in row)
                text = f"INSERT INTO {self.prefix}{table} ({columns}) {self.override} VALUES ({values})"
                yield Statement("plant", text, dict(row))
            return (yield from steps)

        return self.world._share(body, False)

    def record(self, **changes):
        """The rows of a record."""
        kind = OF_STATE[changes.get("state", State.IN_PROGRESS)]
        cell = cell_of(replace(kind, **{"id": RecordId("s", "k"), "incarnation": UUID(LIFE), **changes}))
        if self.prefix != "oncekey.":
            return [("record", cell)]
        began = 7 if cell["memo"] or cell["intent"] else 0
        hot = {column: cell[column] for column in COLUMNS if column not in WORK}
        rows = [("record", {**hot, "memo_version": began})]
        cold = {column: cell[column] for column in WORK}
        if any(cold.values()):
            same = {column: cell[column] for column in ("incarnation", "scope", "key")}
            rows.append(("work", {**same, **cold, "memo_version": began}))
        return rows


@pytest.fixture(scope="session", params=["sqlite", "psycopg"])
def desk(request, tmp_path_factory):
    if request.param == "sqlite":
        made, prefix = sqlite_world(tmp_path_factory.mktemp("guards") / "keys.db"), "oncekey_"
    else:
        made, prefix = postgres_world(request.getfixturevalue("postgres_server")), "oncekey."
    with made as world:
        yield Desk(world, prefix)


PARCEL = {
    "id": OURS,
    "aggregatetype": "mail",
    "aggregateid": "a",
    "type": "mail",
    "payload": "{}",
    "kind": "emit",
    "scope": "s",
    "key": "k",
    "incarnation": LIFE,
    "downstream_key": "d",
    "position": 0,
    "order_by": None,
    "state": "held",
    "attempts": 1,
    "fence": 2,
    "owner": "worker",
    "lease_until": NOW + 1,
    "due_at": NOW + 1,
    "created_at": 1,
    "first_error": None,
    "last_error": None,
}
READY = {"state": "ready", "owner": None, "lease_until": None}
LETTER = {
    **{name: PARCEL[name] for name in PARCEL if name not in {"state", "owner", "lease_until", "due_at"}},
    "last_error": "refused",
    "died_at": 5,
}
EVIDENCE = {
    "id": 70,
    "at": 100,
    "source": "bank",
    "event_id": "e-1",
    "downstream_key": "d",
    "provider_id": "p",
    "said": "{}",
    "verdict": None,
}
CALL = {
    "incarnation": LIFE,
    "phase": "charge",
    "downstream_key": "d",
    "provider_id": "p",
    "scope": "s",
    "key": "k",
    "operation": "pay",
    "at": 100,
}
WORKER = {"name": "w", "tasks": "[]", "started_at": 1, "seen_at": NOW - 20, "every": 10, "calls": "{}"}
LINE = {
    "id": 70,
    "at": NOW - 10,
    "scope": "s",
    "key_digest": "k",
    "incarnation": LIFE,
    "operation": "pay",
    "fence": 1,
    "source": None,
    "target": None,
    "trigger": "claim",
    "actor": "owner",
    "who": "test",
    "why": "",
}
TABLES = {"outbox": PARCEL, "dead_letter": LETTER, "evidence": EVIDENCE, "call": CALL, "worker": WORKER, "audit": LINE}

HELD = {"id": OURS, "parcel_fence": 2}
THOSE_HELD = {"held": json.dumps([{"id": OURS, "fence": 2}])}
RETRY = {"after": 1, "spared": 0, "error": "busy"}
HOLDER = {"owner": "next", "lease": SECOND}
LATE = {"age": 10, "limit": 9}

CASES = [
    # statement, table, what the fitting row has, parameters, what makes a row one that does not fit
    ("again", "outbox", {}, {**HELD, **RETRY}, [{"id": THEIRS}, {"fence": 1}, READY]),
    ("bury", "outbox", {}, {**HELD, "error": "no"}, [{"id": THEIRS}, {"fence": 1}, READY]),
    ("drop_parcel", "outbox", {}, HELD, [{"id": THEIRS}, {"fence": 1}, READY]),
    ("hold_parcel", "outbox", {}, HELD, [{"id": THEIRS}, {"fence": 1}, READY]),
    ("extend_parcel", "outbox", {}, {**HELD, "lease": SECOND}, [{"id": THEIRS}, {"fence": 1}, READY]),
    ("sent", "outbox", {}, THOSE_HELD, [{"id": THEIRS}, {"fence": 1}, READY, {"kind": "defer"}]),
    ("hand_back", "outbox", {}, THOSE_HELD, [{"id": THEIRS}, {"fence": 1}, READY]),
    ("remaining", "outbox", {}, THOSE_HELD, [{"id": THEIRS}]),
    ("held_by", "outbox", {}, {"owner": "worker"}, [{"owner": "other"}, {"state": "ready", "lease_until": None}]),
    ("find_parcel", "outbox", {}, {"id": OURS}, [{"id": THEIRS}]),
    (
        "retake_parcel",
        "outbox",
        READY,
        {"id": OURS, "incarnation": LIFE, **HOLDER},
        [{"id": THEIRS}, {"incarnation": OTHER_LIFE}],
    ),
    (
        "drop_deferred",
        "outbox",
        {"kind": "defer"},
        {"seen_incarnation": LIFE},
        [{"incarnation": OTHER_LIFE}, {"kind": "emit"}],
    ),
    (
        "drop_unclaimed",
        "outbox",
        {"kind": "defer", "fence": 0, **READY},
        {"seen_incarnation": LIFE},
        [
            {"incarnation": OTHER_LIFE},
            {"kind": "emit"},
            {"fence": 1},
            {"state": "held", "owner": "worker", "lease_until": NOW},
        ],
    ),
    ("parcels_of", "outbox", {}, {"incarnation": LIFE}, [{"incarnation": OTHER_LIFE}]),
    ("parcels_of", "dead_letter", {}, {"incarnation": LIFE}, [{"incarnation": OTHER_LIFE}]),
    ("hold_parcels_of", "outbox", {}, {"incarnation": LIFE}, [{"incarnation": OTHER_LIFE}]),
    ("letters_of", "dead_letter", {}, {"incarnation": LIFE}, [{"incarnation": OTHER_LIFE}]),
    (
        "bring_back",
        "dead_letter",
        {},
        {"id": OURS, "kind": "emit", "attempts": 0, "died_at": 5},
        [{"id": THEIRS}, {"kind": "defer"}, {"died_at": 6}],
    ),
    (
        "drop_dead_letter",
        "dead_letter",
        {},
        {"id": OURS, "kind": "emit", "died_at": 5},
        [{"id": THEIRS}, {"kind": "defer"}, {"died_at": 6}],
    ),
    ("find_dead_letter", "dead_letter", {}, {"id": OURS}, [{"id": THEIRS}]),
    ("content_parcels", "outbox", {"id": THEIRS}, {"after": OURS, "limit": 9}, [{"id": OURS}]),
    ("content_parcels", "dead_letter", {"id": THEIRS}, {"after": OURS, "limit": 9}, [{"id": OURS}]),
    ("reseal_parcel", "outbox", {}, {"id": OURS, "seen": "{}", "payload": "x"}, [{"id": THEIRS}, {"payload": "[]"}]),
    (
        "reseal_letter",
        "dead_letter",
        {},
        {"id": OURS, "seen": "{}", "payload": "x"},
        [{"id": THEIRS}, {"payload": "[]"}],
    ),
    ("reseal_evidence", "evidence", {}, {"id": 70, "seen": "{}", "said": "x"}, [{"id": 71}, {"said": "[]"}]),
    ("content_evidence", "evidence", {}, {"after": 69, "limit": 9}, [{"id": 69}]),
    ("find_evidence", "evidence", {}, {"source": "bank", "event_id": "e-1"}, [{"source": "x"}, {"event_id": "x"}]),
    ("open_evidence", "evidence", {}, {"after": 69, "limit": 9}, [{"id": 69}, {"verdict": "agrees"}]),
    ("judge_evidence", "evidence", {}, {"id": 70, "verdict": "agrees"}, [{"id": 71}, {"verdict": "settled"}]),
    *(
        (
            "keys_named",
            "evidence",
            {"verdict": verdict},
            {"provider_id": "p", "source": "bank"},
            [{"provider_id": "x"}, {"source": "x"}, {"downstream_key": None}],
        )
        for verdict in (None, "agrees")
    ),
    ("name_call", "call", {"provider_id": None}, {"incarnation": LIFE, "phase": "charge", "provider_id": "p"}, [
        {"incarnation": OTHER_LIFE}, {"phase": "x"}, {"provider_id": "x"}]),
    ("find_calls", "call", {}, {"downstream_key": "d", "provider_id": "x"}, [{"downstream_key": "x"}]),
    ("find_calls", "call", {}, {"downstream_key": "x", "provider_id": "p"}, [{"provider_id": "x"}]),
    ("forget_calls", "call", {"at": NOW - 10}, LATE, [{"at": NOW - 9}]),
    ("forget_evidence", "evidence", {"at": NOW - 10}, LATE, [{"at": NOW - 9}]),
    ("forget_notes", "audit", {}, LATE, [{"at": NOW - 9}]),
    ("forget_workers", "worker", {}, {"age": 10}, [{"seen_at": NOW - 19}]),
    ("leave", "worker", {}, {"name": "w"}, [{"name": "v"}]),
]  # fmt: skip


@pytest.mark.parametrize(
    "case",
    CASES,
    ids=[f"{case[0]}-{case[1]}-{at}" for at, case in enumerate(CASES)],
)
def test_statement_finds_only_rows_that_satisfy_all_guards(desk, case):
    name, table, has, params, misses = case
    fits = {**TABLES[table], **has}
    assert len(desk.found([(table, fits)], name, params)) == 1
    for change in misses:
        assert desk.found([(table, {**fits, **change})], name, params) == [], change


ELSEWHERE = [{"id": RecordId("x", "k")}, {"id": RecordId("s", "x")}]
OTHERS = [*ELSEWHERE, {"incarnation": UUID(OTHER_LIFE)}]
MEMO = (MemoEntry("order", EntryKind.PHASE, "7"),)
INTENT = Intent("charge", "oncekey-7", "d1", 1, 1, 2, NOW + 1)
WHERE = {"scope": "s", "key": "k"}
OWNER = {**WHERE, "incarnation": LIFE, "fence": 3}
VERSION = {**WHERE, "seen_incarnation": LIFE, "seen_version": 7}
PLACE = {"after_at": 0, "after_scope": "", "after_key": "", "limit": 9}
WHERE_AFTER = {"after_scope": "s", "after_key": "k"}
BEHIND = {**PLACE, **WHERE_AFTER, "after_at": 1}
ANNOUNCED = {
    "memo": None,
    "seen_memo": None,
    "phase": "charge",
    "downstream_key": "oncekey-7",
    "digest": "d1",
    "sends": 2,
    "repeatable": 1,
    "send_window": 1,
    "busy": 1,
    "lease": 1,
    "call_timeout": 1,
    "recovery_point": "started",
}
ANSWER = {"response_status": 200, "response_headers": "[]", "response_body": b"", "response_schema": 1}
PHASED = {"effects": Effects.PHASED, "request": b"r"}
FAILED = {"state": State.FAILED_RETRYABLE, "lease_until": None, "owner": None}
EXPIRED = {"state": State.COMPLETED, "expires_at": NOW - 10}
AGED = {**PLACE, "age": 10}

RECORD_CASES = [
    ("find", {}, WHERE, ELSEWHERE),
    ("hold_record", {}, WHERE, ELSEWHERE),
    ("recall", {"state": State.COMPLETED}, WHERE, [*ELSEWHERE, {"state": State.EXPIRED}]),
    (
        "recall_all",
        {"state": State.COMPLETED},
        {"asked": json.dumps([WHERE])},
        [*ELSEWHERE, {"state": State.EXPIRED}],
    ),
    (
        "announce",
        {**PHASED, "intent": INTENT},
        {**OWNER, **ANNOUNCED},
        [
            {"intent": replace(INTENT, phase="x")},
            {"intent": replace(INTENT, digest="x")},
            {"intent": replace(INTENT, sends=2)},
            {"intent": replace(INTENT, repeatable_until=NOW)},
        ],
    ),
    (
        "deferred_result",
        {"effects": Effects.OUTBOX},
        {**OWNER, "memo": "[]", "recovery_point": "x", "owner": "w"},
        [*OTHERS, {"fence": 4}, {"effects": Effects.LOCAL}, FAILED, {"memo": MEMO}],
    ),
    (
        "reseal_record",
        {"state": State.COMPLETED},
        {**VERSION, **ANSWER, "memo": None, "request": None},
        [*OTHERS, {"version": 8}, {"state": State.IN_PROGRESS}],
    ),
    (
        "resumable",
        {**PHASED, "lease_until": NOW},
        {**PLACE, "after_created": 0},
        [
            {"effects": Effects.LOCAL},
            {"state": State.UNKNOWN, "lease_until": None},
            {"request": None},
            {"lease_until": NOW + 1},
        ],
    ),
    ("resumable", {**PHASED, "lease_until": NOW}, {**BEHIND, "after_created": 1}, [{}]),
    (
        "resumable",
        {**PHASED, **FAILED, "memo": MEMO, "reconcile_after": NOW},
        {**PLACE, "after_created": 0},
        [{"memo": ()}, {"reconcile_after": NOW + 1}, {"state": State.UNKNOWN}],
    ),
    (
        "expire_begun",
        {**FAILED, "memo": MEMO, "expires_at": NOW},
        {**VERSION, "last_error": "expired"},
        [*OTHERS, {"version": 8}, {"state": State.UNKNOWN}, {"memo": ()}, {"expires_at": NOW + 1}],
    ),
    ("lock_file", {}, WHERE, ELSEWHERE),
    (
        "settle_alone",
        {},
        {**OWNER, **ANSWER, "outcome": "success"},
        [*OTHERS, {"fence": 4}, FAILED, {"memo": MEMO}, {"effects": Effects.PHASED}],
    ),
    ("stale", {"lease_until": NOW}, PLACE, [{"lease_until": NOW + 1}]),
    ("expiring", EXPIRED, AGED, [{"state": State.EXPIRED}, {"expires_at": NOW - 9}]),
    ("kept_expired", {**EXPIRED, "state": State.EXPIRED}, AGED, [{"state": State.COMPLETED}, {"expires_at": NOW - 9}]),
    (
        "unknown_due",
        {"state": State.UNKNOWN, "reconcile_after": NOW},
        PLACE,
        [{"state": State.COMPLETED}, {"reconcile_after": NOW + 1}],
    ),
    ("content_records", {"request": b"r"}, {**PLACE}, [{"request": None}]),
    # Behind the place of the row itself.
    ("stale", {"lease_until": NOW}, BEHIND, [{}]),
    ("expiring", EXPIRED, {**AGED, **BEHIND, "after_at": NOW - 10}, [{}]),
    ("kept_expired", {**EXPIRED, "state": State.EXPIRED}, {**AGED, **BEHIND, "after_at": NOW - 10}, [{}]),
    ("unknown_due", {"state": State.UNKNOWN, "reconcile_after": NOW}, {**BEHIND, "after_at": NOW}, [{}]),
    ("content_records", {"request": b"r"}, BEHIND, [{}]),
]

ONLY = {"lock_file": "oncekey_", "settle_alone": "oncekey."}
"""Statements that one of the stores has, by the beginning of its tables' names."""

REAPED = {**PLACE, "until": NOW - 5, "age": 10, "trusted_for": None, "soft": False, "after_at": 0}
NOTED = {"trigger": "purge", "actor": "reaper", "who": "test", "why": "", "noted": False, "each": False}
TRUSTED = {**REAPED, "trusted_for": 50}
REAPER_CASES = [
    ("purge_expired", EXPIRED, REAPED, [{"expires_at": NOW - 9}, {"state": State.EXPIRED}, {"state": State.UNKNOWN}]),
    ("purge_expired", {**FAILED, "expires_at": NOW - 10}, REAPED, [{"memo": MEMO}, {"intent": INTENT}]),
    ("purge_expired", {**FAILED, "expires_at": NOW - 10}, {**REAPED, "soft": True}, [{"state": State.COMPLETED}]),
    *(
        case
        for name, has in (
            ("purge_expired", EXPIRED),
            ("purge_kept", {**EXPIRED, "state": State.EXPIRED}),
            ("mark_expired", EXPIRED),
        )
        for case in (
            (name, {**has, "ttl": 50}, TRUSTED, [{"ttl": 51}]),
            (name, has, {**REAPED, "age": 0, "until": NOW - 10}, [{"expires_at": NOW - 9}]),
            (name, {**has, "expires_at": 9}, {**REAPED, **WHERE_AFTER, "after_at": 8}, [{"expires_at": 8}]),
        )
    ),
    ("purge_kept", {**EXPIRED, "state": State.EXPIRED}, REAPED, [{"state": State.COMPLETED}]),
    ("mark_expired", EXPIRED, REAPED, [{"state": State.EXPIRED}, {**FAILED, "expires_at": NOW - 10}]),
]


@pytest.mark.parametrize(
    ("name", "has", "params", "misses"), REAPER_CASES, ids=[f"{case[0]}-{at}" for at, case in enumerate(REAPER_CASES)]
)
def test_reaper_moves_only_matching_records(desk, name, has, params, misses):
    def moved(change):
        rows = desk.found(desk.record(**{**has, **change}), name, {**params, **NOTED})
        return rows[0]["moved"] if rows and "moved" in rows[0] else len(rows)

    assert moved({}) == 1
    for change in misses:
        assert moved(change) == 0, change


def test_live_keys_counts_unexpired_records_of_the_scope(desk):
    def live(**changes):
        return desk.found(desk.record(**changes), "live_keys", {"scope": "s", "limit": 9})[0]["live"]

    assert live() == 1
    assert live(state=State.COMPLETED, expires_at=NOW + 1) == 1
    assert live(id=RecordId("x", "k")) == 0
    assert live(state=State.COMPLETED, expires_at=NOW) == 0
    assert live(state=State.EXPIRED, expires_at=NOW + 1) == 0


def test_a_call_is_forgotten_when_its_record_is_gone(desk):
    old = ("call", {**CALL, "at": NOW - 10})
    assert desk.found([old, *desk.record()], "forget_calls", LATE) == []
    for change in OTHERS:
        assert len(desk.found([old, *desk.record(**change)], "forget_calls", LATE)) == 1, change


def test_evidence_is_found_only_for_its_call(desk):
    asked = {"downstream_key": "d", "incarnation": LIFE, "since": 100}

    def about(called=(), **changes):
        call = ("call", {**CALL, **dict(called)})
        return len(desk.found([call, ("evidence", {**EVIDENCE, **changes})], "evidence_about", asked))

    assert about(provider_id="x") == 1
    assert about(at=99) == about(verdict="agrees") == about(downstream_key="x") == 0
    assert about(downstream_key=None) == 1
    assert about(downstream_key=None, provider_id="x") == 0
    assert about({"incarnation": OTHER_LIFE}, downstream_key=None) == 0
    assert about({"provider_id": None}, downstream_key=None) == 0


def test_history_contains_only_one_record(desk):
    asked = {"scope": "s", "key_digest": "k", "after": 69, "limit": 9}

    def lines(**changes):
        return len(desk.found([("audit", {**LINE, **changes})], "history", asked))

    assert lines() == 1
    assert lines(scope="x") == lines(key_digest="x") == lines(id=69) == 0


def test_deletions_are_audit_lines_of_the_scope_without_key(desk):
    def lines(**changes):
        return len(desk.found([("audit", {**LINE, **changes})], "deletions", {"scope": "s", "limit": 9}))

    assert lines(key_digest="") == 1
    assert lines() == lines(scope="x", key_digest="") == 0


@pytest.mark.parametrize("kind", [WriteKind.NEW, WriteKind.REPLACE_EXPIRED])
def test_only_outbox_responses_are_deferred(desk, kind):
    def deferred(effects):
        claim = a_claim(effects=effects)
        seen = None
        rows = []
        if kind is WriteKind.REPLACE_EXPIRED:
            seen = replace(OF_STATE[State.EXPIRED], id=claim.id, expires_at=NOW)
            rows = desk.record(state=State.EXPIRED, id=claim.id, incarnation=seen.incarnation, expires_at=NOW)
        parcel = Parcel(uuid.uuid4(), ParcelKind.DEFER, claim.id, claim.incarnation, "mail", "{}", "d")
        locks = desk.world.store.locks
        return desk.after(rows, locks.completing(claim, WriteTarget(kind, seen), Deferred(parcel), None))

    assert deferred(Effects.OUTBOX) is not None
    assert deferred(Effects.LOCAL) is None


class TestDue:
    """Which parcels a worker claims."""

    ASKED: ClassVar = {
        "topics": '["mail"]',
        "owner": "w",
        "lease": SECOND,
        "limit": 200,
        "careful": 200,
        "beginning": "1:-",
    }

    def claimed(self, desk, *parcels, **asked):
        rows = []
        for at, changes in enumerate(parcels):
            fresh = {**PARCEL, **READY, "due_at": NOW, "attempts": 0, "fence": 0, "id": str(uuid.UUID(int=at + 1))}
            rows.append(("outbox", {**fresh, **changes}))
        found = desk.found(rows, "due", {**self.ASKED, **asked})
        return sorted(uuid.UUID(str(row["id"])).int for row in found)

    def test_only_due_parcels_are_claimed(self, desk):
        assert self.claimed(desk, {}, {"due_at": NOW + 1}, {"aggregatetype": "x"}) == [1]

    def test_only_parcels_of_the_namespace_are_claimed(self, desk):
        scopes = ("1:-4:acme", "4:shop4:acme", "1:-4:shop", "9:elsewhere4:acme", "sha256:4711", "0:4:acme")
        parcels = [{"scope": scope} for scope in scopes]
        assert self.claimed(desk, *parcels) == [1, 3, 5]
        assert self.claimed(desk, *parcels, beginning="4:shop") == [2, 5]
        assert self.claimed(desk, *parcels, beginning="") == [1, 2, 3, 4, 5, 6]

    def test_first_parcel_of_each_order_is_claimed(self, desk):
        assert self.claimed(desk, {"order_by": "a"}, {"order_by": "b"}, {"order_by": "a"}, {}) == [1, 2, 4]

    def test_future_parcel_blocks_its_order(self, desk):
        assert self.claimed(desk, {"order_by": "a", "due_at": NOW + 1}, {"order_by": "a"}, {"order_by": "b"}) == [3]

    def test_limited_number_of_careful_parcels_is_claimed(self, desk):
        asked = [{"kind": "defer"}, {"attempts": 1}, {}, {"kind": "defer"}]
        assert self.claimed(desk, *asked, careful=1) == [1, 3]
        assert self.claimed(desk, *asked, careful=0) == [3]

    def test_claim_respects_the_limit(self, desk):
        assert self.claimed(desk, {}, {}, {}, limit=2) == [1, 2]
        assert self.claimed(desk, {"order_by": "a"}, {"order_by": "b"}, {}, limit=2) == [1, 2]

    def test_ordinary_parcels_do_not_count_as_careful(self, desk):
        assert self.claimed(desk, {}, {"kind": "defer"}, careful=1) == [1, 2]

    def test_parcels_behind_a_thousand_of_one_order_are_found(self, desk):
        """A worker looks further than the first thousand, and still at nothing that is not due."""
        long = [{"order_by": "a"}] * 1000
        others = [
            {"order_by": "b"},
            {"order_by": "b"},
            {"order_by": "c", "due_at": NOW + 1},
            {"order_by": "d", "aggregatetype": "x"},
            {"order_by": "e", "scope": "4:shop4:acme"},
            {},
            {"due_at": NOW + 1},
            {"aggregatetype": "x"},
            {"scope": "4:shop4:acme"},
        ]
        for limit in (3, 9):
            assert self.claimed(desk, *long, *others, limit=limit) == [1, 1001, 1006]


@pytest.mark.parametrize(
    ("name", "has", "params", "misses"), RECORD_CASES, ids=[f"{case[0]}-{at}" for at, case in enumerate(RECORD_CASES)]
)
def test_statement_finds_only_records_that_satisfy_all_guards(desk, name, has, params, misses):
    if ONLY.get(name, desk.prefix) != desk.prefix:
        assert not desk.world.store._statements.has(name)
        return
    if misses != [{}]:
        assert desk.finds(desk.record(**has), name, params, among="s") == 1
    for change in misses:
        assert desk.finds(desk.record(**{**has, **change}), name, params, among="s") == 0, change
