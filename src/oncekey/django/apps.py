"""The Django app: its system checks, its migrations, its command and its pages for administrators."""

from __future__ import annotations

from django.apps import AppConfig
from django.core.checks import register


class OncekeyConfig(AppConfig):
    """`"oncekey.django"` in INSTALLED_APPS."""

    name = "oncekey.django"
    label = "oncekey"
    verbose_name = "oncekey"

    def ready(self) -> None:
        """Let `manage.py check` find the mistakes of a project."""
        from oncekey.django.checks import checks  # noqa: PLC0415  (models have to be loaded first)

        register(checks)
