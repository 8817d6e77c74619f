"""The indexes are used: pages of sweepers and reapers do not grow with the table (R152 in part, R170)."""

from __future__ import annotations

import sqlite3

import psycopg
import pytest

from harness.filling import fill_postgres
from oncekey.core.flow import drive
from oncekey.databases.placeholders import numbered
from oncekey.databases.postgres.store import PostgresStore
from oncekey.databases.sqlite.blocking import SqliteDriver
from oncekey.databases.sqlite.store import SqliteStore
from oncekey.engine import migrating

DAY = 86_400_000_000
AFTER = {"after_at": -1, "after_scope": "", "after_key": "", "limit": 1000}
ENDING = {
    **AFTER,
    "age": 300_000_000,
    "until": 4_000_000_000_000_000,
    "soft": False,
    "trusted_for": None,
    "noted": True,
    "each": False,
    "trigger": "purge",
    "actor": "reaper",
    "who": "w",
    "why": "expired",
}
SEARCH = {
    "within": "shop|tenant-1",
    "state": None,
    "operation": None,
    "effects": None,
    "age": 0,
    "stale": False,
    "limit": 51,
    "before_at": 2**62,
    "before_scope": "",
    "before_key": "",
}
WANTED = {
    "stale": (AFTER, "record_running"),
    "expiring": ({**AFTER, "age": 300_000_000}, "record_expiring"),
    "kept_expired": ({**AFTER, "age": 300_000_000}, "record_expired"),
    "runs": ({"limit": 1000}, "record_expiring"),
    "purge_expired": (ENDING, "record_expiring"),
    "purge_kept": (ENDING, "record_expired"),
    "mark_expired": (ENDING, "record_expiring"),
    "history": ({"scope": "s", "key_digest": "d", "after": 0, "limit": 10}, "audit_key"),
    "deletions": ({"scope": "s", "limit": 10}, "audit_key"),
    "forget_notes": ({"age": DAY, "limit": 1000}, "audit_pkey"),
    "find_key": ({"first": "key-12", "last": "key-13", "scope": None, "within": None, "limit": 21}, "record_pkey"),
    "find_done_keys": ({"first": "key-12", "last": "key-13", "within": "shop|tenant-1", "limit": 21}, "record_pkey"),
    "live_keys": ({"scope": "shop|tenant-1", "limit": 1000}, "record_pkey"),
}


@pytest.fixture(scope="module")
def full(upkeep_dsn):
    """100,000 records of yesterday and today, and as many lines of the audit."""
    with psycopg.connect(upkeep_dsn, autocommit=True) as connection:
        connection.execute("TRUNCATE oncekey.record, oncekey.work, oncekey.outbox, oncekey.dead_letter, oncekey.audit")
        fill_postgres(connection, 1, 50_000)
        fill_postgres(connection, 50_001, 100_000, age=DAY)
        connection.execute(
            "INSERT INTO oncekey.audit (at, scope, key_digest, incarnation, operation, fence, trigger, actor, who, why)"
            " SELECT n, 'shop|tenant-' || n % 100, md5(n::text), md5(n::text)::uuid, 'o', 1, 'purge', 'reaper', 'w', ''"
            " FROM generate_series(1, 100000) AS n"
        )
        connection.execute("VACUUM ANALYZE oncekey.record")
        connection.execute("VACUUM ANALYZE oncekey.audit")
        yield connection


def nodes(plan):
    yield plan
    for child in plan.get("Plans", ()):
        yield from nodes(child)


def explained(connection, store, name, params):
    said = numbered(store._statements._commands[name])
    text, values = said.text, said.arguments({**params, "now": None})
    types = ", ".join(["unknown"] * len(values))
    connection.execute(f"PREPARE one ({types}) AS {text}")
    literals = ", ".join("NULL" if value is None else psycopg.sql.quote(value) for value in values)
    try:
        [[[plan]]] = connection.execute(f"EXPLAIN (FORMAT JSON) EXECUTE one({literals})").fetchall()
    finally:
        connection.execute("DEALLOCATE one")
    return list(nodes(plan["Plan"]))


# R152 in part, R170
@pytest.mark.parametrize("name", [*WANTED, "list_records"])
def test_postgres_uses_the_index(full, name):
    params, index = WANTED.get(name) or (SEARCH, "record_pkey")
    plan = explained(full, PostgresStore(), name, params)
    assert index in {node.get("Index Name") for node in plan}
    scanned = {node.get("Relation Name") for node in plan if node["Node Type"] == "Seq Scan"}
    assert not scanned & {"record", "audit"}


def test_the_sweeper_index_holds_only_running_records(full):
    """The index has those in progress only, so its size is what runs now, whatever the table's is."""
    # R152 in part
    [[entries]] = full.execute("SELECT reltuples FROM pg_class WHERE relname = 'record_running'").fetchall()
    [[rows]] = full.execute("SELECT count(*) FROM oncekey.record").fetchall()
    assert 0 < entries < rows / 100  # an estimate from a sample, of 200


def test_a_heartbeat_touches_no_index(full):
    # R152 in part
    [[before]] = full.execute("SELECT pg_relation_size('oncekey.record_running')").fetchall()
    columns = full.execute(
        "SELECT DISTINCT a.attname FROM pg_index i JOIN pg_attribute a ON a.attrelid = i.indrelid"
        " WHERE i.indrelid = 'oncekey.record'::regclass AND (a.attnum = ANY (i.indkey)"
        " OR pg_get_expr(i.indpred, i.indrelid) LIKE '%' || a.attname || '%')"
    ).fetchall()
    assert not {name for (name,) in columns} & {"lease_until", "version", "owner"}
    assert before > 0


def test_prefix_search_of_unfinished_keys_uses_an_index(full):
    params = {"first": "key-12", "last": "key-13", "within": None, "limit": 21}
    plan = explained(full, PostgresStore(), "find_open_keys", params)
    assert "record_key" in {node.get("Index Name") for node in plan}
    assert "Seq Scan" not in {node["Node Type"] for node in plan if node.get("Relation Name") == "record"}
    [[entries]] = full.execute("SELECT reltuples FROM pg_class WHERE relname = 'record_key'").fetchall()
    [[rows]] = full.execute("SELECT count(*) FROM oncekey.record").fetchall()
    assert entries < rows / 2  # finished keys are not in it, so that requests do not pay for it


@pytest.fixture
def sqlite_file(tmp_path):
    path = tmp_path / "plans.db"
    driver = SqliteDriver(path)
    drive(migrating.up(SqliteStore().schema), driver.run)
    driver.close()
    return path


# R152 in part, R170
@pytest.mark.parametrize("name", WANTED)
def test_sqlite_uses_the_index(sqlite_file, name):
    params, index = WANTED[name]
    wanted = {"record_pkey": "sqlite_autoindex_oncekey_record_", "audit_pkey": "oncekey_audit"}
    command = SqliteStore()._statements._commands[name]
    with sqlite3.connect(sqlite_file) as connection:
        rows = connection.execute(f"EXPLAIN QUERY PLAN {command}", {**params, "now": None}).fetchall()
    connection.close()
    steps = [row[3] for row in rows]
    assert any(wanted.get(index, f"oncekey_{index}") in one for one in steps), steps
    assert not [one for one in steps if one.startswith("SCAN record") and "USING" not in one], steps
