"""The tables of the store in Django: created by migrations, with the records as a read-only model.

The migrations run the same statements as `oncekey migrate up`; the model is for the admin pages.
"""

from __future__ import annotations

from datetime import UTC, datetime
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, Final

from django.db import connections, migrations, models

from oncekey.core.flow import Mode, drive
from oncekey.databases.postgres import store as postgres
from oncekey.databases.sqlite import store as sqlite
from oncekey.databases.within import Within
from oncekey.django.database import Database, execute
from oncekey.django.project import alias_of_project, once_of_project

if TYPE_CHECKING:
    from collections.abc import Mapping

_TABLES: Final = {"postgresql": postgres.tables, "sqlite": sqlite.tables}
_RECORDS: Final = {"postgresql": '"oncekey"."record"', "sqlite": "oncekey_record"}


def database() -> Database | None:
    """The project's database that stores the keys; None if keys are stored at a URL."""
    return once_of_project().threads.database


def records() -> tuple[str, str]:
    """The alias of that database and its table of records, from settings alone: models are loaded before views."""
    alias = alias_of_project()
    vendor = connections[alias].vendor if alias in connections.settings else "sqlite"  # `manage.py check` reports it
    return alias, _RECORDS.get(vendor, _RECORDS["sqlite"])


class MakeTables(migrations.RunPython):
    """Run the store's own migrations up to a number; existing tables are left unchanged.

    A new migration of the store needs a new one of this app, because Django runs each only once.
    """

    def __init__(self, upto: Mapping[str, int]) -> None:
        super().__init__(partial(_make, upto=upto), migrations.RunPython.noop)
        self._upto = upto

    def deconstruct(self) -> tuple[str, list[Any], dict[str, Any]]:
        """The form in which a squashed migration writes it."""
        return type(self).__qualname__, [self._upto], {}

    def describe(self) -> str:
        """The line in `manage.py migrate --plan`."""
        return "oncekey's own tables"


def _make(_: Any, schema_editor: Any, *, upto: Mapping[str, int]) -> None:  # noqa: ANN401  (Django has no types)
    connection, kept = schema_editor.connection, database()
    if kept is None or connection.alias != kept.alias:
        return
    schema, within = _TABLES[connection.vendor](), Within(partial(execute, connection, Mode.ATOMIC))
    drive(schema.migrate(*schema.migrations[: upto[connection.vendor]]), within.run)


ALIAS, TABLE = records()


class Record(models.Model):
    """The record of one key."""

    incarnation = models.UUIDField(primary_key=True) if TABLE.startswith('"') else models.TextField(primary_key=True)
    scope = models.TextField()
    key = models.TextField()
    operation = models.TextField()
    effects = models.TextField()
    method = models.TextField()
    path = models.TextField()
    state = models.TextField()
    outcome = models.TextField(null=True)  # noqa: DJ001  (the store's own column)
    response_status = models.IntegerField(null=True)
    attempts = models.IntegerField()
    last_error = models.TextField(null=True)  # noqa: DJ001  (the store's own column)
    created_at = models.BigIntegerField()
    finished_at = models.BigIntegerField(null=True)
    expires_at = models.BigIntegerField()

    class Meta:
        """The store owns the table."""

        managed = False
        db_table = TABLE
        ordering: ClassVar[list[str]] = ["-created_at"]

    def __str__(self) -> str:
        return f"{self.operation} {self.key}"

    def save(self, *_: Any, **__: Any) -> None:  # noqa: ANN401
        """Raise: oncekey alone writes records."""
        raise TypeError("records are written by oncekey only: change a key with `manage.py oncekey keys`")

    delete = save


def instant(micros: int | None) -> datetime | None:
    """A timestamp of the store's clock."""
    return None if micros is None else datetime.fromtimestamp(micros / 1_000_000, UTC)
