"""The Django app: system checks, migrations, the management command and the admin pages."""

from __future__ import annotations

from django.apps import AppConfig
from django.core.checks import register


class OncekeyConfig(AppConfig):
    """`"oncekey.django"` in INSTALLED_APPS."""

    name = "oncekey.django"
    label = "oncekey"
    verbose_name = "oncekey"

    def ready(self) -> None:
        """Register the system checks for `manage.py check`."""
        from oncekey.django.checks import checks  # noqa: PLC0415  (models have to be loaded first)

        register(checks)
