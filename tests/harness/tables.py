"""oncekey's tables in a PostgreSQL database of the test's own, and what other sessions are doing there."""

from __future__ import annotations

import psycopg

from harness.patience import wait_until
from oncekey import wire

_WAITING = """
    SELECT count(*) FROM pg_stat_activity
    WHERE datname = current_database() AND wait_event_type = 'Lock' AND pid <> pg_backend_pid()
"""


def make_tables(dsn: str) -> str:
    """Make the tables, and return the address again."""
    with psycopg.connect(dsn, autocommit=True) as connection:
        connection.execute(wire.migrations_for(dsn).script().encode())
    return dsn


def await_waiters(dsn: str, count: int = 1) -> None:
    """Return when so many sessions of the database wait for a lock."""
    with psycopg.connect(dsn, autocommit=True) as connection:
        wait_until(
            lambda: connection.execute(_WAITING).fetchone() == (count,),
            f"there are no {count} sessions that wait for a lock",
        )
