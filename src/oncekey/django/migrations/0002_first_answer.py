"""Returns stored responses in the reply to BEGIN, on PostgreSQL."""

from __future__ import annotations

from typing import Any, ClassVar

from django.db import migrations

from oncekey.django.models import MakeTables


class Migration(migrations.Migration):
    """Functions only: no row changes."""

    dependencies: ClassVar[list[Any]] = [("oncekey", "0001_tables")]
    operations: ClassVar[list[Any]] = [MakeTables({"postgresql": 13, "sqlite": 13})]
