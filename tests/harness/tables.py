"""oncekey's tables in a PostgreSQL database of the test's own, and what other sessions are doing there."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from contextlib import contextmanager

import psycopg

from harness.databases import DatabaseServer
from harness.patience import wait_until
from oncekey import wire

_WAITING = """
    SELECT count(*) FROM pg_stat_activity
    WHERE datname = current_database() AND wait_event_type = 'Lock' AND pid <> pg_backend_pid()
"""
# A TRUNCATE makes new files for a table and its indexes, which takes longer than most tests: of those that have rows.
_EMPTY = """
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


def make_tables(dsn: str) -> str:
    """Make the tables, and return the address again."""
    with psycopg.connect(dsn, autocommit=True) as connection:
        connection.execute(wire.migrations_for(dsn).script().encode())
    return dsn


@contextmanager
def database_with_tables(server: DatabaseServer, purpose: str) -> Iterator[str]:
    """A database with the tables, as long as it is needed: what the tests of one folder share."""
    name = f"{purpose}_{uuid.uuid4().hex}"
    yield make_tables(server.create_database(name))
    server.drop_database(name)


def empty_tables(dsn: str) -> str:
    """Make the tables as empty as they were at first, and return the address again."""
    with psycopg.connect(dsn, autocommit=True) as connection:
        connection.execute(_EMPTY)
    return dsn


def await_waiters(dsn: str, count: int = 1) -> None:
    """Return when so many sessions of the database wait for a lock."""
    with psycopg.connect(dsn, autocommit=True) as connection:
        wait_until(
            lambda: connection.execute(_WAITING).fetchone() == (count,),
            f"there are no {count} sessions that wait for a lock",
        )
