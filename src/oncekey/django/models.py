"""The records of keys as a model that only reads, for the administrators' pages; their table is the store's own."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any, ClassVar

from django.db import models

from oncekey.django.tables import records

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
        """It belongs to the store."""

        managed = False
        db_table = TABLE
        ordering: ClassVar[list[str]] = ["-created_at"]

    def __str__(self) -> str:
        return f"{self.operation} {self.key}"

    def save(self, *_: Any, **__: Any) -> None:  # noqa: ANN401
        """Refuse: a record that is changed by hand would say what did not happen."""
        raise TypeError("records are written by oncekey only: settle a key by `manage.py oncekey keys`")

    delete = save


def instant(micros: int | None) -> datetime | None:
    """An instant of the store's clock."""
    return None if micros is None else datetime.fromtimestamp(micros / 1_000_000, UTC)
