"""`manage.py oncekey ...`: the `oncekey` command, with the project's own `Once` and database."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Sequence
from contextlib import redirect_stderr, redirect_stdout
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

_LIBPQ: Final = frozenset(
    {
        *("sslmode", "sslcert", "sslkey", "sslrootcert", "sslcrl", "service", "passfile", "connect_timeout"),
        *("target_session_attrs", "application_name", "options", "keepalives", "keepalives_idle", "channel_binding"),
    }
)
"""Connection parameters that belong to PostgreSQL itself rather than to a Python package."""
NAME: Final = "manage.py oncekey"


class Command(BaseCommand):
    """Passes its arguments to `oncekey`, with defaults for `--app` and `--store`."""

    help = "Runs every oncekey command for this project: migrate, worker, keys, doctor, routes, audit and the others."
    requires_system_checks = ()

    def run_from_argv(self, argv: list[str]) -> None:
        """Take every argument after the command's own name unchanged."""
        self._argv = argv[2:]
        super().run_from_argv(argv[:2])

    def handle(self, *_: Any, **__: Any) -> None:  # noqa: ANN401  (Django's signature)
        """Run the command that the arguments name."""
        from oncekey.cli.app import COMMANDS, make_app  # noqa: PLC0415  (an optional package)

        commands = "|".join(COMMANDS.keys() - {"stores"})  # which is mostly a verb
        ours = re.compile(rf"(?<!manage\.py )\boncekey (?=(?:{commands})\b)")

        def renamed(text: str) -> str:
            """A text for people, with the commands as they are typed in this project."""
            return ours.sub(f"{NAME} ", text)

        try:
            once = once_of_project()
            url = url_of(once.store)
            if url is not None:
                os.environ.setdefault("ONCEKEY_STORE", url)
            app, place = make_app(), ":".join(place_of_once().rsplit(".", 1))
            with redirect_stdout(_Renamed(sys.stdout, renamed)), redirect_stderr(_Renamed(sys.stderr, renamed)):
                app(args=self._argv, prog_name=NAME, default_map=defaults_of(app, self._argv, place))
        except OncekeyError as error:
            raise CommandError(renamed(str(error))) from error
        except SystemExit as ended:
            sys.exit(ended.code)


class _Renamed:
    """A stream that writes every text with the names of this project's commands."""

    def __init__(self, stream: Any, renamed: Callable[[str], str]) -> None:  # noqa: ANN401  (a stream of text)
        self._stream = stream
        self._renamed = renamed

    def write(self, text: str) -> int:
        return int(self._stream.write(self._renamed(text)))

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401
        return getattr(self._stream, name)


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


def defaults_of(app: Any, words: Sequence[str], place: str) -> dict[str, Any]:  # noqa: ANN401  (typer's application)
    """The default of `--app` for the command that is typed, wherever the options before it end."""
    import typer  # noqa: PLC0415  (an optional package)

    from oncekey.cli.app import COMMANDS  # noqa: PLC0415  (it needs that package)

    def below(command: Any) -> dict[str, Any]:  # noqa: ANN401  (click's)
        return {"app": place, **{name: below(one) for name, one in getattr(command, "commands", {}).items()}}

    typed = next((word for word in words if word in COMMANDS), None)
    return {} if typed is None else {typed: below(typer.main.get_command(app).get_command(None, typed))}  # type: ignore[attr-defined]
