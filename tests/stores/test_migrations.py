"""The packaged migrations: that they are in order, run once, run together with their line, and survive a crowd."""

from __future__ import annotations

import os
import re
import sqlite3
import subprocess
import sys
from contextlib import closing

import pytest

from oncekey import wire
from oncekey.core.errors import SchemaError, StoreError
from oncekey.core.flow import drive
from oncekey.core.migrations import Migration, MigrationPhase, MigrationState
from oncekey.core.model import RecordId, State
from oncekey.core.sqltext import Dialect
from oncekey.databases.postgres import store as postgres
from oncekey.databases.sqlite import store as sqlite
from oncekey.databases.sqlite.blocking import SqliteDriver
from oncekey.databases.sqlite.store import SqliteStore
from oncekey.engine import migrating
from oncekey.engine.shell import Engine
from oncekey.stores.memory import MemoryStore
from oncekey.stores.rows import COLUMNS
from oncekey.stores.sql import SqlSchema

PACKAGE = "oncekey.databases.sqlite"


@pytest.fixture
def path(tmp_path):
    return tmp_path / "keys.db"


@pytest.fixture
def driver(path):
    driver = SqliteDriver(path)
    yield driver
    driver.close()


def extended(*texts: tuple[str, str]) -> SqlSchema:
    """The real migrations, and some of tomorrow."""
    known = list(sqlite.tables().migrations)
    for phase, text in texts:
        known.append(Migration.read(f"{len(known) + 1:04}_{phase}_tomorrow.sql", text))
    return SqlSchema(PACKAGE, Dialect.SQLITE, migrations=tuple(known))


def look(path) -> list[tuple]:
    """Everything that makes up a schema."""
    with closing(sqlite3.connect(path)) as connection:
        return connection.execute("SELECT type, name, tbl_name, sql FROM sqlite_schema ORDER BY name").fetchall()


def change(path, sql) -> None:
    with closing(sqlite3.connect(path, isolation_level=None)) as connection:
        connection.execute(sql)


@pytest.mark.parametrize("schema", [sqlite.tables(), postgres.tables()], ids=("sqlite", "postgres"))
def test_the_wheel_has_numbered_migrations(schema):  # R237
    assert [one.number for one in schema.migrations] == list(range(1, len(schema.migrations) + 1))
    assert schema.migrations[0].label == "0001_pre_records"


def test_both_databases_have_the_same_migrations():
    assert [one.label for one in sqlite.tables().migrations] == [one.label for one in postgres.tables().migrations]


def test_up_creates_tables_and_returns_applied_migrations(driver):  # R237
    schema = sqlite.tables()
    with pytest.raises(SchemaError, match="no oncekey tables"):
        drive(migrating.check(schema), driver.run)
    assert {entry.state for entry in drive(migrating.status(schema), driver.run)} == {MigrationState.PENDING}

    assert drive(migrating.up(schema), driver.run) == schema.migrations
    assert drive(migrating.up(schema), driver.run) == ()

    drive(migrating.check(schema), driver.run)
    assert {entry.state for entry in drive(migrating.status(schema), driver.run)} == {MigrationState.APPLIED}


def test_the_engine_checks_and_migrates(driver):
    engine = Engine(SqliteStore(), driver)
    with pytest.raises(SchemaError):
        engine.check()
    engine.migrate()
    engine.check()


def test_the_printed_script_makes_the_same_store(driver, path, tmp_path):
    drive(migrating.up(sqlite.tables()), driver.run)
    by_hand = tmp_path / "by_hand.db"
    with closing(sqlite3.connect(by_hand)) as connection:
        connection.executescript(sqlite.tables().script())

    assert look(by_hand) == look(path)
    other = SqliteDriver(by_hand)
    drive(migrating.check(sqlite.tables()), other.run)
    assert drive(migrating.up(sqlite.tables()), other.run) == ()
    other.close()


def test_incremental_and_full_migration_give_the_same_schema(driver, path, tmp_path):
    tomorrow = extended(("pre", "CREATE TABLE oncekey_more (a INTEGER); CREATE INDEX oncekey_i ON oncekey_more (a);"))
    drive(migrating.up(sqlite.tables()), driver.run)
    drive(migrating.up(tomorrow), driver.run)
    other = SqliteDriver(tmp_path / "fresh.db")
    drive(migrating.up(tomorrow), other.run)

    assert look(path) == look(tmp_path / "fresh.db")
    other.close()


def test_a_migration_that_fails_leaves_nothing_behind(driver, path):
    broken = extended(("pre", "CREATE TABLE oncekey_more (a INTEGER); INSERT INTO nowhere VALUES (1);"))
    drive(migrating.up(sqlite.tables()), driver.run)

    with pytest.raises(StoreError):
        drive(migrating.up(broken), driver.run)

    assert not [row for row in look(path) if "more" in row[1]]
    assert [entry.state for entry in drive(migrating.status(broken), driver.run)][-1] is MigrationState.PENDING
    drive(migrating.check(sqlite.tables()), driver.run)  # the one before it is in


def test_a_migration_may_hold_a_trigger(driver):
    trigger = "CREATE TRIGGER oncekey_t AFTER DELETE ON oncekey_record BEGIN SELECT 1; SELECT ';'; END;"
    more = extended(("pre", f"{trigger} CREATE TABLE oncekey_more (a INTEGER);"))

    assert len(drive(migrating.up(more), driver.run)) == len(more.migrations)


def test_post_migration_waits_until_old_code_is_gone(driver):
    tomorrow = extended(("pre", "CREATE TABLE oncekey_a (a INTEGER)"), ("post", "DROP TABLE oncekey_a"))

    drive(migrating.up(sqlite.tables()), driver.run)
    ran = drive(migrating.up(tomorrow, only=MigrationPhase.PRE), driver.run)
    assert [one.phase for one in ran] == [MigrationPhase.PRE]
    drive(migrating.check(tomorrow), driver.run)  # new code runs
    drive(migrating.check(sqlite.tables()), driver.run)  # and old code still does

    drive(migrating.up(tomorrow), driver.run)
    drive(migrating.check(tomorrow), driver.run)
    with pytest.raises(SchemaError, match="update oncekey"):
        drive(migrating.check(sqlite.tables()), driver.run)


def test_store_with_changed_migration_checksum_is_rejected(driver, path):
    schema = sqlite.tables()
    drive(migrating.up(schema), driver.run)
    driver.close()
    change(path, "UPDATE oncekey_migration SET checksum = 'tampered'")
    driver = SqliteDriver(path)

    with pytest.raises(SchemaError, match="not the one"):
        drive(migrating.check(schema), driver.run)
    with pytest.raises(SchemaError, match="not the one"):
        drive(migrating.up(schema), driver.run)
    with pytest.raises(SchemaError, match="not the one"):
        drive(schema.migrate(schema.migrations[0]), driver.run)
    driver.close()


def test_existing_table_without_migration_row_is_not_overwritten(driver, path):
    change(path, "CREATE TABLE oncekey_record (a)")

    with pytest.raises(StoreError):
        drive(migrating.up(sqlite.tables()), driver.run)

    assert [row[1] for row in look(path)] == ["oncekey_record"]


def test_memory_needs_no_tables():
    engine = Engine(MemoryStore(), SqliteDriver("never-opened.db"))
    engine.check()
    engine.migrate()
    with pytest.raises(SchemaError, match="no tables"):
        drive(engine.store.schema.migrate(sqlite.tables().migrations[0]), engine.driver.run)


# A row in every state, as version 0001 has them: columns that are not named here are the same in all.
EVERY_STATE = {
    "pending": {"effects": "outbox"},
    "in_progress": {"owner": "somebody", "lease_until": 77, "effects": "phased", "recovery": "resume"},
    "completed": {
        "outcome": "failure",
        "response_status": 402,
        "response_headers": '[["etag","x"]]',
        "response_body": b"\x00\xff",
        "response_schema": 1,
        "finished_at": 9,
    },
    "failed_retryable": {"last_error": "x", "memo": '[["a","phase","1"]]', "effects": "phased", "recovery": "resume"},
    "unknown": {"last_error": "timeout", "reconcile_after": 5, "reconcile_tries": 3, "intent": '{"phase":"charge"}'},
    "expired": {"outcome": "success", "response_status": 201, "response_headers": "[]", "response_schema": 1},
}


def a_row(state: str) -> dict[str, object]:
    """A record of 0001 in this state."""
    plain = {
        "scope": "shop|t1",
        "key": state,
        "incarnation": "00000000-0000-0000-0000-000000000007",
        "operation": "pay",
        "effects": "local",
        "recovery": "retry",
        "method": "POST",
        "path": "/payments",
        "fingerprint": "f",
        "seed": b"\x00seed",
        "state": state,
        "entered": 1,
        "fence": 4,
        "version": 9,
        "deadline": 1,
        "call_timeout": 2,
        "ttl": 3,
        "attempts": 4,
        "recovery_point": "started",
        "reconcile_tries": 0,
        "created_at": 5,
        "last_run_at": 6,
        "expires_at": 7,
    }
    return {**dict.fromkeys(COLUMNS[:-1]), **plain, **EVERY_STATE[state]}


def test_a_store_with_records_keeps_them(driver, path):  # R237
    """0002 makes SQLite's table anew: every column of every row, in every state, is there again."""
    now = sqlite.tables()
    before = SqlSchema(PACKAGE, Dialect.SQLITE, migrations=now.migrations[:1])
    drive(migrating.up(before), driver.run)
    columns = COLUMNS[:-1]
    with closing(sqlite3.connect(path, isolation_level=None)) as connection:
        places = ", ".join("?" * len(columns))
        for state in EVERY_STATE:
            connection.execute(
                f"INSERT INTO oncekey_record ({', '.join(columns)}) VALUES ({places})",
                [a_row(state)[name] for name in columns],
            )
        old = connection.execute("SELECT * FROM oncekey_record ORDER BY key").fetchall()

    assert [one.number for one in drive(migrating.up(now), driver.run)] == [one.number for one in now.migrations[1:]]

    with closing(sqlite3.connect(path)) as connection:
        assert connection.execute("SELECT * FROM oncekey_record ORDER BY key").fetchall() == [
            (*row, None) for row in old
        ]
    assert {row[0] for row in old} == {"shop|t1"}
    assert {row[COLUMNS.index("state")] for row in old} == {state.value for state in State}
    drive(migrating.check(now), driver.run)
    found = drive(SqliteStore().find(RecordId("shop|t1", "completed")), driver.run).record
    assert (found.response.status, found.response.body, found.request) == (402, b"\x00\xff", None)


def test_recreated_table_keeps_its_constraints(driver, path):  # R56
    """A table that is made anew could forget a constraint; only `counts_up` is meant to differ."""
    constraint = re.compile(r"CONSTRAINT (\w+) CHECK \((.*?)\)(?=,\n|\n\))", re.DOTALL)

    def constraints() -> dict[str, str]:
        [text] = [sql for _, name, _, sql in look(path) if name == "oncekey_record"]
        return {name: " ".join(rule.split()) for name, rule in constraint.findall(text)}

    now = sqlite.tables()
    drive(migrating.up(SqlSchema(PACKAGE, Dialect.SQLITE, migrations=now.migrations[:1])), driver.run)
    before = constraints()
    drive(migrating.up(now), driver.run)
    after = constraints()

    assert len(before) == 10
    assert {name for name in before | after if before.get(name) != after.get(name)} == {"counts_up"}


@pytest.mark.parametrize("server", ["sqlite", "postgres_dsn", "mariadb_url", "mysql_url"])
def test_new_store_is_never_taken_for_one_of_an_older_version(server, request, path):
    """At a first start several processes create the tables; one that sees half of them would run no `post`."""
    url = f"sqlite:///{path}" if server == "sqlite" else request.getfixturevalue(server)
    first, second = wire.connect(url), wire.connect(url)
    meanwhile = []

    def run(transaction):
        result = first.driver.run(transaction)
        meanwhile.append(drive(migrating.at_start(second.store.schema), second.driver.run))
        second.check()
        return result

    try:
        assert drive(migrating.at_start(first.store.schema), run) == first.store.schema.migrations
        assert meanwhile == [()]
        first.check()
    finally:
        first.close()
        second.close()


def test_new_store_is_complete_or_empty_after_a_failure(driver, path):
    with pytest.raises(StoreError):
        drive(migrating.up(extended(("pre", "INSERT INTO nowhere VALUES (1);"))), driver.run)

    assert look(path) == []


UP = """
import sys
from oncekey import wire

engine = wire.connect(sys.argv[1])
input()
engine.migrate()
engine.check()
"""


def test_many_processes_may_migrate_at_once(path):
    crowd = [
        subprocess.Popen(
            [sys.executable, "-c", UP, f"sqlite:///{path}"],
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
    driver = SqliteDriver(path)
    assert {entry.state for entry in drive(migrating.status(sqlite.tables()), driver.run)} == {MigrationState.APPLIED}
    driver.close()
