"""The table itself refuses what no record may be."""

from __future__ import annotations

import sqlite3

import pytest

from harness import flows
from oncekey.core.policy import Policy
from oncekey.databases.sqlite.blocking import SqliteDriver
from oncekey.databases.sqlite.store import SqliteStore
from oncekey.engine.shell import Engine
from oncekey.stores.rows import COLUMNS
from oncekey.testing.claims import a_claim, answered

INTENT = '{"phase":"charge"}'
PROMISED = {
    "scope", "key", "method", "path", "fingerprint", "state", "lease_until", "recovery_point", "last_error",
    "reconcile_after", "response_status", "response_headers", "response_body", "response_schema",
    "created_at", "last_run_at", "finished_at", "expires_at",
}  # fmt: skip
OF_THE_PROTOCOL = {
    "incarnation", "operation", "effects", "recovery", "seed", "outcome", "entered", "fence", "version", "owner",
    "deadline", "call_timeout", "ttl", "attempts", "memo", "intent", "reconcile_tries", "request",
}  # fmt: skip


@pytest.fixture
def connection(tmp_path):
    """A connection to a store with a record in progress (key `running`) and a completed one (key `done`)."""
    path = tmp_path / "keys.db"
    engine = Engine(SqliteStore(), SqliteDriver(path))
    engine.migrate()
    flows.begin(engine, a_claim("running"), Policy())
    flows.settle(engine, flows.begin(engine, a_claim("done"), Policy()).lease, answered())
    engine.close()
    connection = sqlite3.connect(path, isolation_level=None)
    yield connection
    connection.close()


def test_record_has_exactly_the_documented_columns():  # R56, R57
    assert set(COLUMNS) == PROMISED | OF_THE_PROTOCOL


def test_table_columns_match_the_record(connection):  # R56
    assert tuple(row[1] for row in connection.execute("PRAGMA table_info(oncekey_record)")) == COLUMNS


@pytest.mark.parametrize(
    ("key", "change", "constraint"),
    [
        ("running", "effects = 'magic'", "effects_known"),
        ("running", "recovery = 'hope'", "recovery_known"),
        ("running", "state = 'lost', owner = NULL, lease_until = NULL", "state_known"),
        ("running", "fence = 0", "counts_up"),
        ("running", "version = 0", "counts_up"),
        ("running", "attempts = -1", "counts_up"),
        ("running", "reconcile_tries = -1", "counts_up"),
        ("done", "response_status = NULL", "completed_has_answer"),
        ("done", "response_headers = NULL", "completed_has_answer"),
        ("done", "response_schema = NULL", "completed_has_answer"),
        ("done", "outcome = 'perhaps'", "completed_has_answer"),
        ("done", "outcome = NULL", "completed_has_answer"),
        ("done", "finished_at = NULL", "completed_has_answer"),
        ("done", f"intent = '{INTENT}'", "completed_has_no_intent"),  # F6
        ("running", "response_status = 200", "answer_only_when_done"),
        ("running", "outcome = 'success'", "answer_only_when_done"),
        ("running", "owner = NULL", "owned_in_progress"),
        ("running", "lease_until = NULL", "owned_in_progress"),
        ("done", "owner = 'somebody'", "owned_only_in_progress"),
        ("done", "lease_until = 1", "owned_only_in_progress"),
        ("running", "state = 'unknown', owner = NULL, lease_until = NULL", "unknown_has_ticket"),
    ],
)
def test_an_impossible_record_is_refused(connection, key, change, constraint):
    with pytest.raises(sqlite3.IntegrityError, match=constraint):
        connection.execute(f"UPDATE oncekey_record SET {change} WHERE key = ?", (key,))


def test_a_value_of_another_type_is_refused(connection):
    with pytest.raises(sqlite3.IntegrityError, match="TEXT"):
        connection.execute("UPDATE oncekey_record SET fence = 'one'")


def test_duplicate_key_is_rejected(connection):
    with pytest.raises(sqlite3.IntegrityError, match="UNIQUE"):
        connection.execute("UPDATE oncekey_record SET key = 'done'")


@pytest.mark.parametrize(
    "column",
    [
        name
        for name in COLUMNS
        if name
        not in {
            "outcome",
            "owner",
            "lease_until",
            "memo",
            "intent",
            "response_status",
            "response_headers",
            "response_body",
            "response_schema",
            "last_error",
            "reconcile_after",
            "finished_at",
            "request",
        }
    ],
)
def test_required_column_cannot_be_null(connection, column):  # R56
    with pytest.raises(sqlite3.IntegrityError, match="NOT NULL"):
        connection.execute(f"UPDATE oncekey_record SET {column} = NULL")
