"""Detects that the file behind a SQLite connection of Django was deleted or replaced.

With a write-ahead log, SQLite keeps writing to an unlinked file, and every commit is lost: see
`databases/sqlite/files.py`.
"""

from __future__ import annotations

from typing import Any

from django.db.backends.signals import connection_created

from oncekey.core.errors import StoreUnavailableError
from oncekey.databases.sqlite.files import GONE, OpenedFile


def vet(connection: Any) -> None:  # noqa: ANN401  (Django has no types)
    """Close an idle connection if a new one would open a different file; raise if the file is missing."""
    if connection.vendor != "sqlite" or connection.in_atomic_block:
        return
    if connection.connection is not None and not hasattr(connection, "oncekey_opened"):
        _note(connection)  # opened before this module was imported
    opened: OpenedFile | None = getattr(connection, "oncekey_opened", None)
    if opened is None or not opened.is_outdated:
        return
    if opened.is_gone:  # a new connection would create the file
        raise StoreUnavailableError(GONE)
    connection.close()


def check(connection: Any) -> None:  # noqa: ANN401  (Django has no types)
    """Raise after a commit into a file that no longer exists."""
    opened: OpenedFile | None = getattr(connection, "oncekey_opened", None)
    if opened is not None and not connection.in_atomic_block:
        opened.check()


def _note(connection: Any, **_: object) -> None:  # noqa: ANN401  (Django has no types)
    """Record which file a new connection has opened; an in-memory database has none."""
    if connection.vendor != "sqlite":
        return
    with connection.wrap_database_errors:
        databases = connection.connection.execute("PRAGMA database_list").fetchall()
    path = next((file for _, name, file in databases if name == "main"), "")
    connection.oncekey_opened = OpenedFile.at(path) if path else None


connection_created.connect(_note, dispatch_uid="oncekey")
