"""Databases that tests hand on to each other: making and dropping one takes the server longer than most tests.

A database is emptied between two tests. What cannot be emptied, such as settings of the database itself, drops it.
"""

from __future__ import annotations

import uuid
from typing import Any

import psycopg

from harness.databases import DatabaseServer
from harness.tables import EMPTY, make_tables

_ALONE = """
    SELECT count(pg_terminate_backend(pid, 5000)) FROM pg_stat_activity
    WHERE datname = current_database() AND pid <> pg_backend_pid()
"""
_TOUCHED = """
    SELECT EXISTS (SELECT FROM pg_db_role_setting AS setting WHERE setting.setdatabase = base.oid)
        OR base.datacl IS NOT NULL OR base.datconnlimit <> -1
        OR EXISTS (SELECT FROM pg_extension WHERE extname <> 'plpgsql')
        OR EXISTS (SELECT FROM pg_default_acl) OR EXISTS (SELECT FROM pg_event_trigger)
        OR EXISTS (SELECT FROM pg_publication) OR EXISTS (SELECT FROM pg_largeobject_metadata)
    FROM pg_database AS base WHERE base.datname = current_database()
"""
_OTHERS = """
    DO $$
    DECLARE
        one text;
    BEGIN
        FOR one IN SELECT nspname FROM pg_namespace
                   WHERE nspname <> 'oncekey' AND nspname <> 'information_schema' AND nspname !~ '^pg_' LOOP
            EXECUTE format('DROP SCHEMA %I CASCADE', one);
        END LOOP;
    END
    $$;
    CREATE SCHEMA public AUTHORIZATION pg_database_owner;
    GRANT USAGE ON SCHEMA public TO PUBLIC;
"""
# A TRUNCATE writes the row of its table in pg_class anew, so that row is compared by what tests change in it.
_SHAPE = """
    SELECT md5(string_agg(line, ' ' ORDER BY line)) FROM (
        SELECT concat_ws('|', oid, relname, relowner, relacl, reloptions, relrowsecurity, relhastriggers) AS line
        FROM pg_class WHERE relnamespace = 'oncekey'::regnamespace
        UNION ALL SELECT concat_ws('|', oid, xmin) FROM pg_proc WHERE pronamespace = 'oncekey'::regnamespace
        UNION ALL SELECT concat_ws('|', oid, xmin) FROM pg_constraint WHERE connamespace = 'oncekey'::regnamespace
        UNION ALL SELECT concat_ws('|', oid, xmin) FROM pg_type WHERE typnamespace = 'oncekey'::regnamespace
        UNION ALL SELECT concat_ws('|', oid, xmin) FROM pg_trigger
        UNION ALL SELECT concat_ws('|', oid, xmin) FROM pg_policy
        UNION ALL SELECT concat_ws('|', nspname, nspowner, nspacl) FROM pg_namespace WHERE nspname = 'oncekey'
        UNION ALL SELECT concat_ws('|', attrelid, attnum, attribute.xmin)
        FROM pg_attribute AS attribute JOIN pg_class ON pg_class.oid = attrelid
        WHERE relnamespace = 'oncekey'::regnamespace
        UNION ALL SELECT concat_ws('|', number, checksum) FROM oncekey.migration) AS lines
"""
_RESTART = """
    SELECT setval(seqrelid::regclass, seqstart, false) FROM pg_sequence
    WHERE pg_sequence_last_value(seqrelid) IS NOT NULL
"""


class SpareDatabases:
    """The databases of one server that no test uses at the moment."""

    def __init__(self, server: DatabaseServer) -> None:
        self._server = server
        self._empty: list[str] = []
        self._with_tables: list[str] = []
        self._shapes: dict[str, str | None] = {}
        """What the tables of a database looked like when they were new."""

    def empty(self) -> str:
        """The address of an empty database."""
        if self._empty:
            return self._empty.pop()
        if self._with_tables:
            dsn = self._with_tables.pop()
            with psycopg.connect(dsn, autocommit=True) as connection:
                _without_tables(connection)
            return dsn
        return self._server.create_database(f"oncekey_{uuid.uuid4().hex}")

    def with_tables(self) -> str:
        """The address of a database that has oncekey's tables and nothing else."""
        if self._with_tables:
            return self._with_tables.pop()
        dsn = make_tables(self.empty())
        with psycopg.connect(dsn, autocommit=True) as connection:
            self._shapes[dsn] = _shape(connection)
        return dsn

    def give_back(self, dsn: str) -> None:
        """Empty a database for the next test, and end whoever is still connected to it."""
        with psycopg.connect(dsn, autocommit=True) as connection:
            connection.execute(_ALONE)
            [[touched]] = connection.execute(_TOUCHED).fetchall()
            if not touched:
                connection.execute(_OTHERS)
                if dsn in self._shapes and _shape(connection) == self._shapes[dsn]:
                    connection.execute(EMPTY)
                    connection.execute(_RESTART)
                    self._with_tables.append(dsn)
                else:
                    self._shapes.pop(dsn, None)
                    _without_tables(connection)
                    self._empty.append(dsn)
                return
        self._shapes.pop(dsn, None)
        self._server.drop_database(dsn.rpartition("/")[2])


def _shape(connection: psycopg.Connection[Any]) -> str | None:
    try:
        [[shape]] = connection.execute(_SHAPE).fetchall()
    except (psycopg.errors.UndefinedTable, psycopg.errors.InvalidSchemaName):
        return None
    return str(shape)


def _without_tables(connection: psycopg.Connection[Any]) -> None:
    connection.execute("DROP SCHEMA IF EXISTS oncekey CASCADE")
