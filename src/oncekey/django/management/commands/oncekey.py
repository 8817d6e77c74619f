"""`manage.py oncekey ...`: the `oncekey` command, with the project's own `Once` and database."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import quote, urlencode

from django.core.management.base import BaseCommand, CommandError
from django.db import connections

from oncekey.core.errors import OncekeyError
from oncekey.django.database import Database
from oncekey.django.project import once_of_project, place_of_once

if TYPE_CHECKING:
    from oncekey.wire import Source

APP: Final = "--app"
_LIBPQ: Final = frozenset(
    {
        *("sslmode", "sslcert", "sslkey", "sslrootcert", "sslcrl", "service", "passfile", "connect_timeout"),
        *("target_session_attrs", "application_name", "options", "keepalives", "keepalives_idle", "channel_binding"),
    }
)
"""Connection parameters that belong to PostgreSQL itself rather than to a Python package."""


class Command(BaseCommand):
    """Passes its arguments to `oncekey` and fills in `--app` and `--store`."""

    help = "Runs every oncekey command for this project: migrate, worker, keys, doctor, routes, audit and the others."
    requires_system_checks = ()

    def run_from_argv(self, argv: list[str]) -> None:
        """Take every argument after the command's own name unchanged."""
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


def url_of(store: Source) -> str | None:
    """The URL of a store, for commands that open their own connection; None if it has no URL."""
    if not isinstance(store, Database):
        return store if isinstance(store, str) else None
    given: dict[str, Any] = connections[store.alias].get_connection_params()
    if store.dialect == "sqlite":
        return f"sqlite:///{quote(str(Path(given['database']).absolute()))}"
    user, password = quote(str(given.get("user") or ""), safe=""), quote(str(given.get("password") or ""), safe="")
    whom = f"{user}:{password}@" if password else f"{user}@" if user else ""
    others = {name: given[name] for name in ("host", "port") if given.get(name)}
    others |= {name: value for name, value in given.items() if name in _LIBPQ and value}
    query = f"?{urlencode(others, quote_via=quote)}" if others else ""
    return f"postgresql://{whom}/{quote(str(given.get('dbname') or ''), safe='')}{query}"


def arguments_of(app: Any, given: Sequence[str], place: str) -> list[str]:  # noqa: ANN401  (typer's application)
    """The arguments, with `--app` added after a command that accepts it and was not given one."""
    import typer  # noqa: PLC0415  (an optional package)

    command: Any = typer.main.get_command(app)
    words = list(given)
    context = command.make_context("oncekey", ["--help"], resilient_parsing=True) if words else None
    for word in words:
        found = command.get_command(context, word) if hasattr(command, "get_command") else None
        if found is None:
            break
        command = found
    takes = any(APP in getattr(one, "opts", ()) for one in command.params)
    told = any(word == APP or word.startswith(f"{APP}=") for word in words)
    return [*words, APP, place] if takes and not told and "--help" not in words else words
