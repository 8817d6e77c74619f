"""oncekey's tables in a PostgreSQL database of the test's own, and what other sessions are doing there."""

from __future__ import annotations

import time

import psycopg

from oncekey import wire

_WAITING = """
    SELECT count(*) FROM pg_stat_activity
    WHERE datname = current_database() AND wait_event_type = 'Lock' AND pid <> pg_backend_pid()
"""
_PATIENCE = 10.0


def make_tables(dsn: str) -> str:
    """Make the tables, and return the address again."""
    with psycopg.connect(dsn, autocommit=True) as connection:
        connection.execute(wire.migrations_for(dsn).script().encode())
    return dsn


def await_waiters(dsn: str, count: int = 1) -> None:
    """Return when so many sessions of the database wait for a lock."""
    deadline = time.monotonic() + _PATIENCE
    with psycopg.connect(dsn, autocommit=True) as connection:
        while connection.execute(_WAITING).fetchone() != (count,):
            if time.monotonic() > deadline:
                raise TimeoutError(f"there are no {count} sessions that wait for a lock")
