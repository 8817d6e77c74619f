"""Alembic: oncekey's tables in a revision of the application, ignored by autogenerate. Alembic is not imported."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, Protocol

from oncekey.core.errors import ConfigurationError
from oncekey.databases.mariadb import store as mariadb
from oncekey.databases.postgres import store as postgres
from oncekey.databases.sqlite import store as sqlite

if TYPE_CHECKING:
    from collections.abc import Mapping

    from oncekey.stores.sql import SqlSchema

SCHEMA: Final = "oncekey"
"""The schema of the tables on PostgreSQL; elsewhere it is the prefix of their names."""

_TABLES: Final = {
    "postgresql": postgres.tables,
    "sqlite": sqlite.tables,
    "mariadb": mariadb.tables,
    "mysql": mariadb.tables,
}


class Operations(Protocol):
    """The part of Alembic's `op` that `run` needs."""

    def get_context(self) -> Any:  # noqa: ANN401  (Alembic's MigrationContext)
        """The context of the running migration."""

    def execute(self, sqltext: str) -> None:
        """Run a statement, or print it if Alembic is offline."""


def include_name(name: str | None, type_: str, parent_names: Mapping[Any, str | None]) -> bool:
    """False for oncekey's own tables; pass it to `context.configure(include_name=...)`.

    Alembic calls it before it reads the database, so autogenerate does not propose to drop oncekey's tables.
    """
    if type_ == "schema":
        return name != SCHEMA
    if type_ == "table":
        return parent_names.get("schema_name") != SCHEMA and not (name or "").startswith(f"{SCHEMA}_")
    return True


def run(op: Operations, first: int, last: int) -> None:
    """Run oncekey's migrations `first` to `last` in a revision's `upgrade()`.

    A revision names the numbers of `oncekey migrate status`, so it does the same with any later version of oncekey.

    Raises:
        ConfigurationError: This version has no such migration, or oncekey does not support the database.
    """
    name = op.get_context().dialect.name
    if name not in _TABLES:
        raise ConfigurationError(f"oncekey has no tables for {name}: it supports PostgreSQL, SQLite, MariaDB and MySQL")
    schema: SqlSchema = _TABLES[name]()
    newest = len(schema.migrations)
    if not 1 <= first <= last <= newest:
        raise ConfigurationError(f"oncekey's migrations are 1 to {newest} in this version, not {first} to {last}")
    for statement in schema.statements(first, last):
        op.execute(statement.replace(":", r"\:"))  # a colon marks a parameter there
