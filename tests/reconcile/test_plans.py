"""What is to be asked about, and what was heard of it, is found by an index, however much is kept."""

from __future__ import annotations

import json
import sqlite3
from contextlib import closing

import psycopg
import pytest

from harness.filling import DOUBTED, fill_postgres
from harness.tables import empty_tables
from oncekey.core.flow import drive
from oncekey.databases.placeholders import pyformat
from oncekey.databases.postgres.store import PostgresStore
from oncekey.databases.sqlite.blocking import SqliteDriver
from oncekey.databases.sqlite.store import SqliteStore
from oncekey.engine import migrating

ROWS = 100_000
NO_ONE = "00000000-0000-0000-0000-000000000000"
QUESTIONS = {
    "unknown_due": {"limit": 100, "after_at": -1, "after_scope": "", "after_key": "", "now": 1},
    "evidence_about": {"downstream_key": "d7", "incarnation": NO_ONE, "since": 0},
    "open_evidence": {"after": 0, "limit": 100},
    "find_calls": {"downstream_key": "d7", "provider_id": "p7"},
    "keys_named": {"source": "webhook", "provider_id": "p7"},
    "list_calls": {
        "since": ROWS - 10,
        "after_at": -1,
        "after_incarnation": NO_ONE,
        "after_phase": "",
        "limit": 100,
        "now": 1,
    },
}
FILL = """
INSERT INTO {call} (incarnation, phase, downstream_key, provider_id, scope, key, operation, at)
    SELECT {uuid}, 'charge', 'd' || n, 'p' || n, 's', 'k' || n, 'pay', n FROM {series};
INSERT INTO {evidence} (at, source, event_id, downstream_key, provider_id, said, verdict)
    SELECT n, 'webhook', 'e' || n, 'd' || n, 'p' || n, '{{}}', CASE WHEN n % 1000 <> 7 THEN 'agrees' END FROM {series}
"""


@pytest.fixture(scope="module")
def postgres(reconcile_dsn):
    names = {
        "call": "oncekey.call",
        "evidence": "oncekey.evidence",
        "uuid": "gen_random_uuid()",
        "series": f"generate_series(1, {ROWS}) AS n",
    }
    with closing(psycopg.connect(empty_tables(reconcile_dsn), autocommit=True)) as connection:
        for statement in FILL.format_map(names).split(";"):
            connection.execute(statement)
        # A provider was away for an hour: many records are unknown, and the reconciler takes them page by page.
        fill_postgres(connection, 1, 5_000, finished=True)
        connection.execute("UPDATE oncekey.record SET state = 'unknown'")
        connection.execute(DOUBTED, {"now": 0})
        connection.execute("ANALYZE oncekey.call, oncekey.evidence, oncekey.record, oncekey.work")
        yield connection


def nodes(plan):
    yield plan
    for child in plan.get("Plans", ()):
        yield from nodes(child)


@pytest.mark.parametrize("name", QUESTIONS)
def test_reconcile_queries_use_indexes_on_postgresql(postgres, name):
    command = PostgresStore()._statements._commands[name]
    (found,) = postgres.execute("EXPLAIN (FORMAT JSON) " + pyformat(command), QUESTIONS[name]).fetchone()
    plan = (found if isinstance(found, list) else json.loads(found))[0]["Plan"]
    assert [node["Relation Name"] for node in nodes(plan) if node["Node Type"] == "Seq Scan"] == []
    used = {node["Index Name"] for node in nodes(plan) if "Index Name" in node}
    expected = {
        "unknown_due": {"work_due"},
        "evidence_about": {"evidence_open_key"},
        "open_evidence": {"evidence_open"},
        "find_calls": {"call_downstream_key", "call_provider_id"},
        "keys_named": {"evidence_judged_provider"},
        "list_calls": {"call_at"},
    }
    # What is open is little: any of the indexes that hold only that will do.
    assert expected[name] <= used or (name == "evidence_about" and any("evidence_open" in index for index in used))


@pytest.mark.parametrize("name", QUESTIONS)
def test_reconcile_queries_use_indexes_on_sqlite(tmp_path, name):
    driver = SqliteDriver(tmp_path / "many.db")
    drive(migrating.up(SqliteStore().schema), driver.run)
    driver.close()
    command = SqliteStore()._statements._commands[name]
    with closing(sqlite3.connect(tmp_path / "many.db")) as connection:
        plan = connection.execute("EXPLAIN QUERY PLAN " + command, QUESTIONS[name]).fetchall()
    steps = [row[3] for row in plan]
    whole = [step for step in steps if step.startswith("SCAN") and "USING INDEX" not in step and "clock" not in step]
    assert [step for step in whole if not step.startswith(("SCAN page", "SCAN call", "SCAN CONSTANT"))] == []
    index = {
        "unknown_due": "oncekey_record_unknown",
        "evidence_about": "oncekey_evidence_open",
        "open_evidence": "oncekey_evidence",
        "find_calls": "oncekey_call_downstream_key",
        "keys_named": "oncekey_evidence_judged_provider",
        "list_calls": "oncekey_call_at",
    }
    text = "\n".join(steps)
    assert index[name] in text, text
