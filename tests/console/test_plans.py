"""Every list and count of the console goes along an index, whatever the size of the table."""

from __future__ import annotations

import sqlite3

import psycopg
import pytest

from harness.filling import fill_beside, fill_postgres
from harness.plans import check_plan, explained
from oncekey.core.flow import drive
from oncekey.databases.sqlite.blocking import SqliteDriver
from oncekey.databases.sqlite.store import SqliteStore
from oncekey.engine import migrating
from oncekey.ops.stats import LOOKED, MOST
from oncekey.stores import survey

DAY = 86_400_000_000
ANY = {
    "within": None,
    "beginning": None,
    "operation": None,
    "effects": None,
    "error": None,
    "older": 0,
    "younger": 0,
    "stale": False,
    "incarnation": None,
    "limit": 51,
    "looked": LOOKED,
    "skipped": LOOKED - 1,
    "place_at": 2**62,
    "place_scope": "",
    "place_key": "",
}
NAMED = {"first": "key-12", "last": "key-13", "within": None, "limit": 21}
LETTERS = {
    "within": None,
    "topic": None,
    "kind": None,
    "error": None,
    "older": 0,
    "younger": 0,
    "limit": 51,
    "looked": LOOKED,
    "skipped": LOOKED - 1,
    "place_at": -1,
    "id": "00000000-0000-4000-8000-000000000000",
}
INCARNATION = "00000000-0000-4000-8000-000000000000"
WANTED = {
    "walk_unknown": (ANY, {"record_waiting"}),
    "walk_unknown_oldest": (ANY | {"place_at": -1}, {"record_waiting"}),
    "walk_letters": (LETTERS, {"dead_letter_died"}),
    "walk_failed_retryable": (ANY, {"record_waiting"}),
    "walk_pending": (ANY, {"record_waiting"}),
    "walk_in_progress": (ANY, {"record_running"}),
    "walk_completed": (ANY, {"record_expiring"}),
    "walk_expired": (ANY, {"record_expired"}),
    "find_key": (NAMED | {"scope": None}, {"record_pkey"}),
    "find_open_keys": (NAMED, {"record_key"}),
    "tally": ({"most": MOST}, {"record_waiting", "record_running", "outbox_due"}),
    "ended": ({"limit": 2000}, {"record_expiring", "record_waiting"}),
    "calls_of_record": ({"incarnation": INCARNATION, "limit": 9}, {"call_pkey"}),
    "evidence_of_key": ({"downstream_key": "dk", "limit": 9}, {"evidence_open_key", "evidence_judged_key"}),
    "evidence_of_provider": ({"provider_id": "ch", "limit": 9}, {"evidence_open_provider", "evidence_judged_provider"}),
    "parcels_in_full": ({"incarnation": INCARNATION, "limit": 9}, {"outbox_incarnation"}),
    "latest_notes": ({"before": 2**62, "actor": None, "limit": 51, "looked": LOOKED}, {"audit_pkey"}),
    "notes_edge": ({"before": 2**62, "looked": LOOKED, "skipped": LOOKED - 1}, {"audit_pkey"}),
}
# An answer to every question that fills in as much of the form as can be filled in.
NARROW = (
    ANY
    | LETTERS
    | {
        "incarnation": INCARNATION,
        "topic": "receipt",
        "kind": "emit",
        "scope": "shop|tenant-7",
        "within": "shop|tenant-7",
        "beginning": "ab",
        "operation": "create_order",
        "effects": "local",
        "error": "time_out",
        "older": DAY,
        "younger": 3 * DAY,
        "place_at": 4_000_000_000_000_000,
        "place_scope": "shop|tenant-9",
        "place_key": "abc",
    }
)


def test_every_console_statement_has_an_expected_plan():
    assert set(WANTED) == set(survey.STATEMENTS)


@pytest.fixture(scope="module")
def full(console_dsn):
    """100,000 records of two days in all states, with parcels, calls, evidence and lines of the audit."""
    with psycopg.connect(console_dsn, autocommit=True) as connection:
        connection.execute(
            "TRUNCATE oncekey.record, oncekey.work, oncekey.outbox, oncekey.dead_letter, oncekey.audit,"
            " oncekey.call, oncekey.evidence"
        )
        fill_postgres(connection, 1, 50_000)
        fill_postgres(connection, 50_001, 100_000, age=DAY)
        fill_beside(connection, 20_000)
        connection.execute("VACUUM ANALYZE")
        yield connection


@pytest.mark.parametrize("narrow", [False, True], ids=["any", "narrow"])
@pytest.mark.parametrize("name", WANTED)
def test_postgres_uses_the_index(full, name, narrow):
    params, indexes = WANTED[name]
    params = {word: NARROW.get(word, value) for word, value in params.items()} if narrow else params
    check_plan(explained(full, name, params), indexes)


@pytest.mark.parametrize("name", [name for name in WANTED if name.startswith("walk_")])
def test_list_page_reads_only_its_limit_without_sorting(full, name):
    plan = explained(full, name, NARROW | {"looked": 500, "skipped": 499, "operation": "none such"}, analyze=True)
    table = "dead_letter" if name == "walk_letters" else "record"
    rows = max(node["Actual Rows"] for node in plan if node.get("Relation Name") == table)
    assert rows <= 500
    plan = explained(full, name, WANTED[name][0], analyze=True)
    sorted_rows = [node["Actual Rows"] for node in plan if "Sort" in node["Node Type"]]
    assert all(rows <= ANY["limit"] for rows in sorted_rows)


@pytest.mark.parametrize("name", WANTED)
def test_sqlite_uses_the_index(tmp_path, name):
    path = tmp_path / "plans.db"
    driver = SqliteDriver(path)
    drive(migrating.up(SqliteStore().schema), driver.run)
    driver.close()
    params, indexes = WANTED[name]
    command = SqliteStore()._statements._commands[name]
    connection = sqlite3.connect(path)
    rows = connection.execute(f"EXPLAIN QUERY PLAN {command}", {**params, "now": None}).fetchall()
    connection.close()
    plan = "\n".join(row[3] for row in rows)
    known = {
        "record_pkey": "sqlite_autoindex_oncekey_record_",
        "record_key": "sqlite_autoindex_oncekey_record_",
        "call_pkey": "USING PRIMARY KEY",
        "audit_pkey": "INTEGER PRIMARY KEY",
    }
    for index in indexes:
        assert known.get(index, f"oncekey_{index}") in plan, plan
    # A table is called by its alias; "SCAN ... USING INDEX" goes along an index from its end.
    tables = {"entry", "record", "one", "parcel", "letter", "line", "call", "open", "judged"}
    words = [line.split() for line in plan.splitlines() if line.startswith("SCAN ")]
    assert [line for line in words if line[1] in tables and len(line) == 2] == [], plan
