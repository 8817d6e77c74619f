"""The claim finds what is due by its index, however long the queue is."""

from __future__ import annotations

import json
import sqlite3
from contextlib import closing

import psycopg
import pytest

from oncekey.core.flow import drive
from oncekey.databases.placeholders import pyformat
from oncekey.databases.postgres.generated.psycopg import PsycopgDriver
from oncekey.databases.postgres.store import PostgresStore
from oncekey.databases.sqlite.blocking import SqliteDriver
from oncekey.databases.sqlite.store import SqliteStore
from oncekey.engine import migrating

ROWS = 100_000
COLUMNS = """id, aggregatetype, aggregateid, type, payload, kind, scope, key, incarnation, downstream_key, position,
    order_by, state, attempts, fence, due_at, created_at"""


def said(store, name):
    """The statement as it is said, with its parameters."""
    transaction = next(store.outbox.due("owner", ("charge",), 100, 60_000_000))
    statement = next(transaction.body())
    assert statement.name == name
    return statement


def nodes(plan):
    yield plan
    for child in plan.get("Plans", ()):
        yield from nodes(child)


@pytest.fixture
def postgres(postgres_dsn):
    driver = PsycopgDriver(postgres_dsn, pool_size=1)
    drive(migrating.up(PostgresStore().schema), driver.run)
    driver.close()
    with closing(psycopg.connect(postgres_dsn, autocommit=True)) as connection:
        # One in ten keeps an order; all are due.
        connection.execute(
            f"""INSERT INTO oncekey.outbox ({COLUMNS})
            SELECT gen_random_uuid(), 'charge', n::text, 'charge', '{{}}', 'emit', 's', 'k', gen_random_uuid(), 'd', 0,
                   CASE WHEN n % 10 = 0 THEN 'line-' || n % 1000 END, 'ready', 0, 0, n, n
            FROM generate_series(1, {ROWS}) AS n"""
        )
        connection.execute("ANALYZE oncekey.outbox")
        yield connection


@pytest.mark.parametrize("analysed", [True, False])
def test_the_postgresql_claim_uses_its_indexes(postgres, analysed):  # 2.4
    if not analysed:
        postgres.execute("DELETE FROM pg_statistic WHERE starelid = 'oncekey.outbox'::regclass")
    statement = said(PostgresStore(clock=lambda: 2 * ROWS), "due")

    (found,) = postgres.execute(
        "EXPLAIN (FORMAT JSON, ANALYZE, BUFFERS) " + pyformat(statement.command), statement.params
    ).fetchone()

    plan = (found if isinstance(found, list) else json.loads(found))[0]["Plan"]
    everything = list(nodes(plan))
    used = {node["Index Name"] for node in everything if node["Actual Loops"] and "Index Name" in node}
    assert {"outbox_due", "outbox_order"} <= used
    assert "Tid Scan" in {
        node["Node Type"] for node in everything
    }  # what was found is locked and written where it lies
    assert not [node for node in everything if node["Node Type"] == "Seq Scan"]
    # It reads the front of the queue, and not the queue.
    assert max(node["Actual Rows"] for node in everything) <= 1000


@pytest.mark.parametrize("name", ["sent", "hand_back"])
def test_batch_updates_use_the_primary_key_on_postgresql(postgres, name):
    """None is held when they are made, so a join would expect one row, and search for it once for each of the batch."""
    postgres.execute("DELETE FROM oncekey.outbox WHERE due_at > 2000")
    postgres.execute("VACUUM FULL ANALYZE oncekey.outbox")  # a queue that is short enough to be searched
    ids = postgres.execute("SELECT id FROM oncekey.outbox WHERE order_by IS NULL LIMIT 500").fetchall()
    postgres.execute(
        "UPDATE oncekey.outbox SET state = 'held', fence = 1, owner = 'w', lease_until = 1 WHERE id = ANY(%s)",
        [[one for (one,) in ids]],
    )
    held = json.dumps([{"id": str(one), "fence": 1} for (one,) in ids])
    command = PostgresStore()._statements._commands[name]

    (found,) = postgres.execute(
        "EXPLAIN (FORMAT JSON, ANALYZE) " + pyformat(command), {"held": held, "now": None}
    ).fetchone()

    everything = list(nodes((found if isinstance(found, list) else json.loads(found))[0]["Plan"]))
    assert "outbox_pkey" in {node.get("Index Name") for node in everything}
    assert not [node for node in everything if node["Node Type"] == "Seq Scan"]
    # Each node reads the batch once, and nobody compares each of it with each.
    assert max(node["Actual Rows"] * node["Actual Loops"] for node in everything) == 500
    assert not [node for node in everything if node.get("Rows Removed by Join Filter", 0)]


def test_the_sqlite_claim_uses_its_indexes(tmp_path):
    driver = SqliteDriver(tmp_path / "many.db")
    drive(migrating.up(SqliteStore().schema), driver.run)
    driver.close()
    statement = said(SqliteStore(clock=lambda: 2 * ROWS), "due")
    with closing(sqlite3.connect(tmp_path / "many.db")) as connection:
        plan = connection.execute("EXPLAIN QUERY PLAN " + statement.command, statement.params).fetchall()

    text = "\n".join(row[3] for row in plan)
    assert "USING INDEX oncekey_outbox_due (due_at<?)" in text
    assert "oncekey_outbox_order" in text
    assert "SCAN oncekey_outbox" not in text.replace("SCAN parcel", "SCAN oncekey_outbox")
    # Only the few that were found are sorted, and not the queue.
    sorting = {parent for _, parent, _, step in plan if "TEMP B-TREE" in step}
    assert {step for _, parent, _, step in plan if parent in sorting and step.startswith(("SCAN", "SEARCH"))} == {
        "SCAN next"
    }
