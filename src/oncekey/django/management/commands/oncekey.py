"""`manage.py oncekey ...`: the command `oncekey`, with the project's own `Once` and database."""

from __future__ import annotations

import os
import sys
from typing import Any

from django.core.management.base import BaseCommand, CommandError

from oncekey.core.errors import OncekeyError
from oncekey.django.passing_on import arguments_of, url_of
from oncekey.django.settings import once_of_project, place_of_once


class Command(BaseCommand):
    """Hands its arguments on; `--app` and `--store` are known here, and need not be said."""

    help = (
        "Looks after oncekey's keys: migrate, worker, keys, doctor, routes, audit and all other commands of `oncekey`."
    )
    requires_system_checks = ()

    def run_from_argv(self, argv: list[str]) -> None:
        """Take every argument after the command's own name as it is."""
        self._argv = argv[2:]
        super().run_from_argv(argv[:2])

    def handle(self, *_: Any, **__: Any) -> None:  # noqa: ANN401  (Django's signature)
        """Run the command that the arguments name."""
        from oncekey.cli.app import make_app  # noqa: PLC0415  (an optional package)

        try:
            once = once_of_project()
            url = url_of(once.store)
            if url is not None:
                os.environ.setdefault("ONCEKEY_STORE", url)
            app, place = make_app(), ":".join(place_of_once().rsplit(".", 1))
            app(args=arguments_of(app, self._argv, place), prog_name="manage.py oncekey")
        except OncekeyError as error:
            raise CommandError(str(error)) from error
        except SystemExit as ended:
            sys.exit(ended.code)
