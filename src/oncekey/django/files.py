"""The files that Django's connections to SQLite have opened: one may have been deleted or replaced since.

With a write-ahead log SQLite goes on writing to an unlinked file, and every commit is lost: see
`databases/sqlite/files.py`.
"""

from __future__ import annotations

from typing import Any

from django.db.backends.signals import connection_created

from oncekey.core.errors import StoreUnavailableError
from oncekey.databases.sqlite.files import GONE, OpenedFile


def vet(connection: Any) -> None:  # noqa: ANN401  (Django has no types)
    """Close a connection, outside of any transaction, if a new one would open another file; refuse if there is none."""
    if connection.vendor != "sqlite" or connection.in_atomic_block:
        return
    if connection.connection is not None and not hasattr(connection, "oncekey_opened"):
        _note(connection)  # it was opened before this module was imported
    opened: OpenedFile | None = getattr(connection, "oncekey_opened", None)
    if opened is None or not opened.is_outdated:
        return
    if opened.is_gone:  # a new connection would create the file
        raise StoreUnavailableError(GONE)
    connection.close()


def check(connection: Any) -> None:  # noqa: ANN401  (Django has no types)
    """Raise after a commit into a file that is not there any more."""
    opened: OpenedFile | None = getattr(connection, "oncekey_opened", None)
    if opened is not None and not connection.in_atomic_block:
        opened.check()


def _note(connection: Any, **_: object) -> None:  # noqa: ANN401  (Django has no types)
    """Note which file a new connection has opened; a database in memory has none."""
    if connection.vendor != "sqlite":
        return
    with connection.wrap_database_errors:
        databases = connection.connection.execute("PRAGMA database_list").fetchall()
    path = next((file for _, name, file in databases if name == "main"), "")
    connection.oncekey_opened = OpenedFile.at(path) if path else None


connection_created.connect(_note, dispatch_uid="oncekey")
