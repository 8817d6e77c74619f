"""Databases on a PostgreSQL server, whoever runs it."""

from __future__ import annotations

from typing import Protocol

import psycopg
from psycopg import sql

from harness.dsn import with_database

DSN_VARIABLE = "ONCEKEY_TEST_POSTGRES_DSN"

_CREATE = sql.SQL("CREATE DATABASE {} TEMPLATE template0")
_DROP = sql.SQL("DROP DATABASE IF EXISTS {} WITH (FORCE)")


class DatabaseServer(Protocol):
    """A server that hands out databases."""

    def dsn(self, database: str = "postgres") -> str:
        """Return a database's address."""
        ...

    def create_database(self, name: str) -> str:
        """Create an empty database and return its address."""
        ...

    def drop_database(self, name: str) -> None:
        """Remove a database, with whoever is still connected to it."""
        ...


class ForeignServer:
    """A server that the environment names: it lends databases and is not ours to kill."""

    def __init__(self, dsn: str) -> None:
        self._dsn = dsn

    def dsn(self, database: str = "postgres") -> str:
        """Return a database's address."""
        return with_database(self._dsn, database)

    def create_database(self, name: str) -> str:
        """Create an empty database and return its address."""
        return create_database(self._dsn, name)

    def drop_database(self, name: str) -> None:
        """Remove a database, with whoever is still connected to it."""
        drop_database(self._dsn, name)


def create_database(dsn: str, name: str) -> str:
    """Create an empty database by way of another one and return its address."""
    _administer(dsn, _CREATE.format(sql.Identifier(name)))
    return with_database(dsn, name)


def drop_database(dsn: str, name: str) -> None:
    """Remove a database by way of another one, with whoever is still connected to it."""
    _administer(dsn, _DROP.format(sql.Identifier(name)))


def _administer(dsn: str, statement: sql.Composed) -> None:
    with psycopg.connect(dsn, autocommit=True) as connection:
        connection.execute(statement)
