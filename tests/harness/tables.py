"""oncekey's tables in a database of the test's own: made, emptied, and with time that passes for them."""

from __future__ import annotations

import re
import sqlite3
import tempfile
import uuid
from collections.abc import Iterator
from contextlib import closing, contextmanager
from functools import cache
from pathlib import Path
from types import ModuleType

import psycopg

from harness.databases import DatabaseServer
from harness.patience import PATIENCE, wait_until
from oncekey import wire
from oncekey.core.flow import drive
from oncekey.databases.sqlite.blocking import SqliteDriver
from oncekey.databases.sqlite.store import SqliteStore
from oncekey.engine import migrating

_WAITING = """
    SELECT count(*) FROM pg_stat_activity
    WHERE datname = current_database() AND wait_event_type = 'Lock' AND pid <> pg_backend_pid()
"""
# A TRUNCATE makes new files for a table and its indexes, which takes longer than most tests: of those that have rows.
EMPTY = """
    DO $$
    DECLARE
        one text;
        has_rows boolean;
    BEGIN
        FOR one IN SELECT tablename FROM pg_tables WHERE schemaname = 'oncekey' AND tablename <> 'migration' LOOP
            EXECUTE format('SELECT EXISTS (SELECT FROM oncekey.%I)', one) INTO has_rows;
            IF has_rows THEN
                EXECUTE format('TRUNCATE oncekey.%I', one);
            END IF;
        END LOOP;
    END
    $$
"""
_OVER = (
    "UPDATE {schema}record SET lease_until = 1 WHERE lease_until IS NOT NULL",
    "UPDATE {schema}outbox SET due_at = 1",
)


def make_tables(dsn: str) -> str:
    """Make the tables, and return the address again."""
    with psycopg.connect(dsn, autocommit=True) as connection:
        connection.execute(wire.migrations_for(dsn).script().encode())
    return dsn


def sqlite_with_tables(path: Path, module: ModuleType = sqlite3) -> Path:
    """Make a file with the tables, and return its path again: a copy, for migrating takes longer than most tests."""
    path.write_bytes(_migrated_by(module))
    return path


@cache
def _migrated_by(module: ModuleType) -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        driver = SqliteDriver(Path(folder, "keys.db"), module=module)
        drive(migrating.up(SqliteStore().schema), driver.run)
        driver.close()  # its write-ahead log is in the file then
        return Path(folder, "keys.db").read_bytes()


@contextmanager
def database_with_tables(server: DatabaseServer, purpose: str) -> Iterator[str]:
    """A database with the tables, as long as it is needed: what the tests of one folder share."""
    name = f"{purpose}_{uuid.uuid4().hex}"
    yield make_tables(server.create_database(name))
    server.drop_database(name)


def empty_tables(dsn: str) -> str:
    """Make the tables as empty as they were at first, and return the address again."""
    with psycopg.connect(dsn, autocommit=True) as connection:
        connection.execute(EMPTY)
    return dsn


def leases_run_out(url: str) -> None:
    """Let time pass for a store of SQLite or PostgreSQL: the dead do not renew their leases."""
    if url.startswith("sqlite:///"):
        with closing(sqlite3.connect(url.removeprefix("sqlite:///"), timeout=PATIENCE)) as file, file:
            for statement in _OVER:
                file.execute(statement.format(schema="oncekey_"))
        return
    with psycopg.connect(re.sub(r"^postgresql\+\w+:", "postgresql:", url)) as connection:
        for statement in _OVER:
            connection.execute(statement.format(schema="oncekey.").encode())


def await_waiters(dsn: str, count: int = 1) -> None:
    """Return when so many sessions of the database wait for a lock."""
    with psycopg.connect(dsn, autocommit=True) as connection:
        wait_until(
            lambda: connection.execute(_WAITING).fetchone() == (count,),
            f"there are no {count} sessions that wait for a lock",
        )
