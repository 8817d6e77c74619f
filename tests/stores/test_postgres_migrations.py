"""PostgreSQL's migrations, run by real servers."""

from __future__ import annotations

import os
import subprocess
import sys

import psycopg
import pytest

from harness import flows
from oncekey import wire
from oncekey.core.errors import SchemaError, StoreError
from oncekey.core.flow import adrive, drive
from oncekey.core.migrations import Migration, MigrationPhase, MigrationState
from oncekey.core.model import RecordId, State
from oncekey.core.sqltext import Dialect
from oncekey.databases.postgres import store as postgres
from oncekey.engine import migrating
from oncekey.stores.rows import COLUMNS, WORK
from oncekey.stores.sql import SqlSchema

CATALOGUE = """
    SELECT table_schema, table_name, ordinal_position, column_name, data_type, is_nullable
    FROM information_schema.columns WHERE table_schema = 'oncekey' ORDER BY 1, 2, 3
"""
CONSTRAINTS = """
    SELECT conname, pg_get_constraintdef(oid) FROM pg_constraint
    WHERE connamespace = 'oncekey'::regnamespace ORDER BY 1
"""


def look(dsn: str) -> list[list[tuple]]:
    with psycopg.connect(dsn) as connection:
        return [connection.execute(sql).fetchall() for sql in (CATALOGUE, CONSTRAINTS)]


@pytest.fixture
def engine(postgres_dsn):
    engine = wire.connect(postgres_dsn)
    yield engine
    engine.close()


def test_up_makes_the_tables(engine, postgres_dsn):  # R237
    schema = postgres.tables()
    with pytest.raises(SchemaError, match="no oncekey tables"):
        engine.check()
    assert {entry.state for entry in drive(migrating.status(schema), engine.driver.run)} == {MigrationState.PENDING}

    assert drive(migrating.up(schema), engine.driver.run) == schema.migrations
    assert drive(migrating.up(schema), engine.driver.run) == ()

    engine.check()
    columns = {row[3] for row in look(postgres_dsn)[0] if row[1] == "record"}
    assert columns == {*COLUMNS, "memo_version"} - WORK  # R56
    assert {row[3] for row in look(postgres_dsn)[0] if row[1] == "whole"} == set(COLUMNS)


@pytest.mark.parametrize("scheme", ["postgresql+asyncpg", "postgresql+psycopg"])
async def test_up_under_asyncio_makes_the_same_tables(postgres_dsn, scheme):
    engine = wire.aconnect(postgres_dsn.replace("postgresql", scheme, 1))
    with pytest.raises(SchemaError, match="no oncekey tables"):
        await engine.check()

    await engine.migrate()

    await engine.check()
    assert await adrive(migrating.up(postgres.tables()), engine.driver.run) == ()
    await engine.close()


def test_the_printed_script_makes_the_same_store(engine, postgres_dsn, postgres_server):
    engine.migrate()
    by_hand = postgres_server.create_database("by_hand")
    try:
        with psycopg.connect(by_hand, autocommit=True) as connection:
            connection.execute(postgres.tables().script())

        assert look(by_hand) == look(postgres_dsn)
        other = wire.connect(by_hand)
        other.check()
        other.close()
    finally:
        postgres_server.drop_database("by_hand")


def test_a_migration_that_fails_leaves_nothing_behind(engine, postgres_dsn):
    known = postgres.tables().migrations
    text = "CREATE TABLE oncekey.more (a int); INSERT INTO oncekey.nowhere VALUES (1);"
    broken = Migration.read(f"{len(known) + 1:04}_pre_broken.sql", text)
    schema = SqlSchema("oncekey.databases.postgres", Dialect.POSTGRES, migrations=(*known, broken))
    engine.migrate()

    with pytest.raises(StoreError):
        drive(migrating.up(schema), engine.driver.run)

    assert not [row for row in look(postgres_dsn)[0] if row[1] == "more"]
    engine.check()  # the one before it is in


def test_a_migration_may_hold_a_function(engine):
    known = postgres.tables().migrations
    text = """
        CREATE FUNCTION oncekey.one() RETURNS int LANGUAGE plpgsql AS $$ BEGIN RETURN 1; END; $$;
        CREATE FUNCTION oncekey.two() RETURNS int BEGIN ATOMIC SELECT 1; SELECT 2; END;
        COMMENT ON FUNCTION oncekey.two() IS '100% of :it; really'; -- :nothing
    """
    more = Migration.read(f"{len(known) + 1:04}_pre_functions.sql", text)
    schema = SqlSchema("oncekey.databases.postgres", Dialect.POSTGRES, migrations=(*known, more))

    assert drive(migrating.up(schema), engine.driver.run) == schema.migrations


def test_postgres_store_with_changed_checksum_is_rejected(engine, postgres_dsn):
    engine.migrate()
    with psycopg.connect(postgres_dsn) as connection:
        connection.execute("UPDATE oncekey.migration SET checksum = 'tampered'")

    with pytest.raises(SchemaError, match="not the one"):
        engine.check()
    with pytest.raises(SchemaError, match="not the one"):
        engine.migrate()


FIRST = SqlSchema("oncekey.databases.postgres", Dialect.POSTGRES, migrations=postgres.tables().migrations[:1])

# A row in every state, as version 0001 has them.
EVERY_STATE = """
    INSERT INTO oncekey.record (
        scope, key, incarnation, operation, effects, recovery, method, path, fingerprint, seed, state, outcome, entered,
        fence, version, owner, lease_until, deadline, call_timeout, ttl, attempts, recovery_point, memo, intent,
        response_status, response_headers, response_body, response_schema, last_error, reconcile_after,
        reconcile_tries, created_at, last_run_at, finished_at, expires_at)
    SELECT 'shop|t1', state, gen_random_uuid(), 'pay', effects, 'resume', 'POST', '/', 'f', '\\x0073', state,
        CASE WHEN done THEN 'failure' END, true, 4, 9, CASE WHEN runs THEN 'somebody' END, CASE WHEN runs THEN 77 END,
        1, 2, 3, 4, 'started', CASE WHEN effects = 'phased' THEN '[["a","phase","1"]]' END,
        CASE WHEN state = 'unknown' THEN '{"phase":"charge"}' END,
        CASE WHEN done THEN 402 END, CASE WHEN done THEN '[]' END, CASE WHEN done THEN '\\x00ff'::bytea END,
        CASE WHEN done THEN 1 END, CASE WHEN state = 'unknown' THEN 'timeout' END,
        CASE WHEN state = 'unknown' THEN 5 END, 3, 5, 6, CASE WHEN done THEN 9 END, 7
    FROM (SELECT state, effects, state IN ('completed', 'expired') AS done, state = 'in_progress' AS runs
          FROM (VALUES ('pending', 'outbox'), ('in_progress', 'phased'), ('completed', 'local'),
                       ('failed_retryable', 'phased'), ('unknown', 'inline'), ('expired', 'local')
               ) AS kinds (state, effects)
         ) AS rows
"""


def test_a_store_with_records_keeps_them(engine, postgres_dsn):  # R237
    """In every state; the table is not written anew, so nobody waits for a large one."""
    drive(migrating.up(FIRST), engine.driver.run)
    with psycopg.connect(postgres_dsn, autocommit=True) as connection:
        connection.execute(EVERY_STATE)
        old = connection.execute("SELECT * FROM oncekey.record ORDER BY key").fetchall()
        file = connection.execute("SELECT pg_relation_filenode('oncekey.record')").fetchone()

        assert [one.number for one in drive(migrating.up(postgres.tables()), engine.driver.run)] == [
            one.number for one in postgres.tables().migrations[1:]
        ]

        names = ", ".join(column for column in COLUMNS if column != "request")
        there = connection.execute(f"SELECT {names}, request FROM oncekey.whole ORDER BY key".encode()).fetchall()
        assert connection.execute("SELECT pg_relation_filenode('oncekey.record')").fetchone() == file
    assert there == [(*row, None) for row in old]
    assert {row[COLUMNS.index("state")] for row in old} == {state.value for state in State}
    engine.check()
    found = flows.find(engine, RecordId("shop|t1", "completed")).record
    assert (found.response.status, found.response.body, found.request) == (402, b"\x00\xff", None)


def test_code_of_the_first_version_runs_until_post(engine):  # R237
    """During a rolling deploy the old code is still there."""
    drive(migrating.up(postgres.tables(), only=MigrationPhase.PRE), engine.driver.run)
    drive(migrating.check(FIRST), engine.driver.run)

    drive(migrating.up(postgres.tables()), engine.driver.run)
    with pytest.raises(SchemaError, match="0009_post_split, which may have removed"):
        drive(migrating.check(FIRST), engine.driver.run)


UP = """
import sys
from oncekey import wire

engine = wire.connect(sys.argv[1])
input()
engine.migrate()
engine.check()
engine.close()
"""


def test_many_processes_may_migrate_at_once(postgres_dsn, engine):
    crowd = [
        subprocess.Popen(
            [sys.executable, "-c", UP, postgres_dsn],
            stdin=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(part for part in sys.path if part)},
        )
        for _ in range(4)
    ]
    for process in crowd:
        process.stdin.write(b"\n")
        process.stdin.flush()
    errors = [process.communicate()[1] for process in crowd]

    assert [(process.returncode, error) for process, error in zip(crowd, errors, strict=True)] == [(0, b"")] * 4
    engine.check()
