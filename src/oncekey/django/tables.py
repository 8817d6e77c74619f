"""The tables of the store in Django's own migrations: the same statements that `oncekey migrate up` runs."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, Final

from django.db import connections, migrations

from oncekey.django.database import Database, execute
from oncekey.django.settings import alias_of_project, once_of_project
from oncekey.drivers.within import Within
from oncekey.flow import Mode, drive
from oncekey.stores import postgres, sqlite

if TYPE_CHECKING:
    from collections.abc import Mapping

_TABLES: Final = {"postgresql": postgres.tables, "sqlite": sqlite.tables}
_RECORDS: Final = {"postgresql": '"oncekey"."record"', "sqlite": "oncekey_record"}


def database() -> Database | None:
    """Where the project's keys are kept, if that is one of its databases."""
    return once_of_project().threads.database


def records() -> tuple[str, str]:
    """The alias of that database and the table of its records, by the setting alone: models are loaded before views."""
    alias = alias_of_project()
    vendor = connections[alias].vendor if alias in connections.settings else "sqlite"  # which `manage.py check` reports
    return alias, _RECORDS.get(vendor, _RECORDS["sqlite"])


class MakeTables(migrations.RunPython):
    """Run the store's own migrations up to a number; what is there already stays as it is.

    A new migration of the store needs a new one of this app, because Django runs none twice.
    """

    def __init__(self, upto: Mapping[str, int]) -> None:
        super().__init__(partial(_make, upto=upto), migrations.RunPython.noop)
        self._upto = upto

    def deconstruct(self) -> tuple[str, list[Any], dict[str, Any]]:
        """How a squashed migration writes it."""
        return type(self).__qualname__, [self._upto], {}

    def describe(self) -> str:
        """What `manage.py migrate --plan` shows."""
        return "oncekey's own tables"


def _make(_: Any, schema_editor: Any, *, upto: Mapping[str, int]) -> None:  # noqa: ANN401  (Django has no types)
    connection, kept = schema_editor.connection, database()
    if kept is None or connection.alias != kept.alias:
        return
    schema, within = _TABLES[connection.vendor](), Within(partial(execute, connection, Mode.ATOMIC))
    for migration in schema.migrations[: upto[connection.vendor]]:
        drive(schema.migrate(migration), within.run)
