"""The tables of the store, and the model that reads its records."""

from __future__ import annotations

from typing import Any, ClassVar

from django.db import migrations, models

from oncekey.django.models import MakeTables, records

_, TABLE = records()


class Migration(migrations.Migration):
    """Creates the tables of the first version with Django support."""

    initial = True
    dependencies: ClassVar[list[Any]] = []
    operations: ClassVar[list[Any]] = [
        MakeTables({"postgresql": 11, "sqlite": 11}),
        migrations.CreateModel(
            name="Record",
            fields=[
                (
                    "incarnation",
                    models.UUIDField(primary_key=True, serialize=False)
                    if TABLE.startswith('"')
                    else models.TextField(primary_key=True, serialize=False),
                ),
                *((name, models.TextField()) for name in ("scope", "key", "operation", "effects", "method", "path")),
                ("state", models.TextField()),
                ("outcome", models.TextField(null=True)),
                ("response_status", models.IntegerField(null=True)),
                ("attempts", models.IntegerField()),
                ("last_error", models.TextField(null=True)),
                ("created_at", models.BigIntegerField()),
                ("finished_at", models.BigIntegerField(null=True)),
                ("expires_at", models.BigIntegerField()),
            ],
            options={"db_table": TABLE, "managed": False, "ordering": ["-created_at"]},
        ),
    ]
