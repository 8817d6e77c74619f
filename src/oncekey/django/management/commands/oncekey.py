"""`manage.py oncekey ...`: the `oncekey` command, with the project's own `Once` and database."""

from __future__ import annotations

import argparse
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
_DJANGOS: Final = ("--settings", "--pythonpath", "--verbosity")
_WITH_VALUES: Final = tuple(f"{name}=" for name in _DJANGOS)
_LEVEL: Final = re.compile("-v[0-3]")
_FLAGS: Final = frozenset({"--no-color", "--force-color", "--traceback"})


class Command(BaseCommand):
    """Passes its arguments to `oncekey`, with defaults for `--app` and `--store`."""

    help = "Runs an oncekey command for this project. List them: manage.py oncekey --help"
    requires_system_checks = ()
    _argv: list[str] | None = None
    """The arguments of the command line; None for `call_command`."""

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Take the words of `call_command("oncekey", "worker", "--once")`."""
        parser.add_argument("words", nargs=argparse.REMAINDER)

    def run_from_argv(self, argv: list[str]) -> None:
        """Take every argument after the command's own name, except the options that Django has used already."""
        self._argv = without_djangos(argv[2:])
        super().run_from_argv(argv[:2])

    def handle(self, *_: Any, **options: Any) -> None:  # noqa: ANN401  (Django's signature)
        """Run the command that the arguments name."""
        from oncekey.cli.app import MANAGE, PROJECT, as_typed, make_app  # noqa: PLC0415  (an optional package)

        words = options["words"] if self._argv is None else self._argv
        out, err = options.get("stdout") or sys.stdout, options.get("stderr") or sys.stderr
        try:
            once = once_of_project()
            url = url_of(once.store)
            PROJECT.update({"app": ":".join(place_of_once().rsplit(".", 1))} | ({} if url is None else {"store": url}))
            with redirect_stdout(_Renamed(out, as_typed)), redirect_stderr(_Renamed(err, as_typed)):
                make_app()(args=words, prog_name=MANAGE)
        except OncekeyError as error:
            raise CommandError(as_typed(str(error))) from error
        except SystemExit as ended:
            if self._argv is not None:
                sys.exit(ended.code)
            if ended.code:
                failed = f"{MANAGE} {' '.join(words)} failed: see what it printed"
                raise CommandError(failed, returncode=int(ended.code)) from None
        finally:
            PROJECT.clear()


def without_djangos(words: Sequence[str]) -> list[str]:
    """The arguments without the options that `manage.py` has for every command."""
    kept, rest = list[str](), iter(words)
    for word in rest:
        is_before = all(one.startswith("-") for one in kept)  # after the command `-v` is its own `--verbose`
        if word in _DJANGOS or (word == "-v" and is_before):
            next(rest, None)
        elif word not in _FLAGS and not word.startswith(_WITH_VALUES) and not (is_before and _LEVEL.fullmatch(word)):
            kept.append(word)
    return kept


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
