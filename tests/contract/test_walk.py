"""The walk over the table, on the shipped stores: each accepts exactly what the store's guards allow."""

from __future__ import annotations

import re
import sqlite3
import uuid
from contextlib import contextmanager
from functools import partial

import psycopg
import pytest

from harness.tables import sqlite_with_tables
from oncekey.core.flow import drive
from oncekey.core.transitions import ROWS
from oncekey.databases.memory import MemoryDriver
from oncekey.databases.postgres.generated.psycopg import PsycopgDriver
from oncekey.databases.postgres.store import PostgresStore
from oncekey.databases.sqlite.blocking import SqliteDriver
from oncekey.databases.sqlite.store import SqliteStore
from oncekey.engine import migrating
from oncekey.stores.keystore import KeyStore
from oncekey.stores.memory import COMMANDS, MemoryStore, roll_commands
from oncekey.stores.rows import COLUMNS, WORK
from oncekey.stores.upkeep import UpkeepStore
from oncekey_contract import Walk, blocking
from oncekey_contract.walking import EXCEPTIONS, UNWALKED, walked_rows
from proof.sim.broken_statements import pretending


class TestMemory(Walk):
    @pytest.fixture
    def world(self):
        driver = MemoryDriver()

        def plant(cells):
            driver.table.update({(cell["scope"], cell["key"]): dict(cell) for cell in cells})

        with blocking(MemoryStore, driver, plant=plant) as world:
            yield world


@contextmanager
def sqlite_world(path):
    """A file with the tables, and a way to plant records in it."""
    driver = SqliteDriver(sqlite_with_tables(path))

    def plant(cells):
        names = ", ".join(f":{name}" for name in COLUMNS)
        with sqlite3.connect(path) as connection:
            connection.executemany(f"INSERT INTO oncekey_record ({', '.join(COLUMNS)}) VALUES ({names})", cells)
        connection.close()

    with blocking(partial(SqliteStore, writer=driver.writer), driver, plant=plant) as world:
        yield world


class TestSqlite(Walk):
    @pytest.fixture
    def world(self, tmp_path):
        with sqlite_world(tmp_path / "keys.db") as world:
            yield world


@contextmanager
def postgres_world(server):
    """A database with the tables, and a way to plant records in it."""
    name = f"walk_{uuid.uuid4().hex}"
    dsn = server.create_database(name)
    # Sixteen thousand statements: planning each anew would take most of the time, so they are prepared.
    options = "options=-c%20plan_cache_mode%3Dforce_generic_plan"
    driver = PsycopgDriver(f"{dsn}?{options}", pool_size=1, prepare_threshold=0)
    drive(migrating.up(PostgresStore().schema), driver.run)
    hot = [*(column for column in COLUMNS if column not in WORK), "memo_version"]
    cold = ["incarnation", "scope", "key", "memo_version", *sorted(WORK)]

    def plant(cells):
        with psycopg.connect(dsn) as connection, connection.cursor() as cursor:
            begun = [
                {**cell, "memo_version": cell["version"] if cell["memo"] or cell["intent"] else 0} for cell in cells
            ]
            # Records of one incarnation, which only a walk plants, share their row of `work`.
            worked = {cell["incarnation"]: cell for cell in reversed(begun) if any(cell[name] for name in WORK)}
            for table, columns, rows in (("record", hot, begun), ("work", cold, [*worked.values()])):
                names = ", ".join(f"%({column})s" for column in columns)
                cursor.executemany(f"INSERT INTO oncekey.{table} ({', '.join(columns)}) VALUES ({names})", rows)

    with blocking(PostgresStore, driver, plant=plant) as world:
        yield world
    server.drop_database(name)


class TestPostgres(Walk):
    @pytest.fixture
    def world(self, postgres_server):
        with postgres_world(postgres_server) as world:
            yield world


def test_every_row_is_walked_over_or_named():
    assert walked_rows() | set(UNWALKED) == {row.number for row in ROWS}
    assert not walked_rows() & set(UNWALKED)


def test_the_lists_of_exceptions_only_become_shorter():
    """Whoever adds a cell here has to mend a store instead."""
    assert set(UNWALKED) <= set()
    assert set(EXCEPTIONS) <= set()


FAR = {"now": 1 << 62, "until": 1 << 62}


def test_walk_reports_every_flaw():
    """A statement that asks for less than the table, one that asks for more, and a purge of too much."""
    driver = MemoryDriver()
    flaws = {
        "mark_unknown": pretending(lease_until=0)(COMMANDS["mark_unknown"]),
        "renew": lambda _table, **_params: [],
        "purge_expired": lambda table, **params: COMMANDS["purge_expired"](table, **{**params, **FAR}),
    }

    def make_store(*, clock=None):
        store = KeyStore({**COMMANDS, **flaws, **roll_commands()}, clock=clock)
        store.upkeep = UpkeepStore(store._statements, None)
        return store

    def plant(cells):
        driver.table.update({(cell["scope"], cell["key"]): dict(cell) for cell in cells})

    with blocking(make_store, driver, plant=plant) as world:
        with pytest.raises(AssertionError) as caught:
            Walk().test_every_move_follows_the_transition_table(world)
        named = set(re.findall(r"([a-z_ ]+) is (written|refused) \d+ times", str(caught.value)))
        wrong = {("mark_unknown", "written"), ("renew", "refused"), ("sweep to unknown", "written")}
        assert {(name.strip(), how) for name, how in named} == wrong
        driver.table.clear()
        with pytest.raises(AssertionError, match="purge"):
            Walk().test_every_batch_move_follows_the_transition_table(world)
