"""`oncekey-client list|resume` lists the operations in a client's journal, and resends those without a response.

If the library is also installed, the same commands are `oncekey client list|resume`.
"""

from __future__ import annotations

import json
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any, Final

import typer
from typer.core import TyperGroup

from oncekey_client.attempts import RetryRules, RetrySession
from oncekey_client.exchange import ClientConfigurationError, ClientError
from oncekey_client.journal import Journal, JournalEntry
from oncekey_client.profiles import PROFILES

JournalFile = Annotated[Path, typer.Option("--journal", envvar="ONCEKEY_JOURNAL", help="The journal's file.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]


HELP: Final = "Inspect a client's journal, and finish interrupted requests."
COLUMNS: Final = ("state", "status", "name", "key", "begun", "request", "note")


class Commands(TyperGroup):
    """The group of commands. An error of the client is one line, whichever program runs it."""

    def invoke(self, ctx: Any) -> Any:
        """Run a command; exit code 2 if it cannot begin."""
        try:
            return super().invoke(ctx)
        except ClientError as error:
            typer.echo(f"{ctx.find_root().info_name}: {error}", err=True)
            raise typer.Exit(2) from None


def register(app: typer.Typer) -> None:
    """Add the group `client`."""
    app.add_typer(_commands(), name="client")


def _commands() -> typer.Typer:
    group = typer.Typer(
        cls=Commands,
        help=HELP,
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
        rich_markup_mode=None,
    )
    group.command("list")(show)
    group.command("resume")(resume)
    return group


def run() -> None:
    """Run the program `oncekey-client`."""
    app = _commands()
    app.callback()(_options)
    app(prog_name="oncekey-client")


def _options(
    *,
    show_version: Annotated[
        bool,
        typer.Option(
            "--version", is_eager=True, callback=lambda asked: _version(asked=asked), help="Print the version."
        ),
    ] = False,
) -> None:
    pass


def _version(*, asked: bool) -> None:
    if asked:
        typer.echo(f"oncekey-client {version('oncekey-client')}")
        raise typer.Exit


def show(journal: JournalFile, *, as_json: AsJson = False) -> None:
    """List the operations of a journal, oldest first. Exit code 1 if any has no response.

    JSON: {"now", "items": [{"key", "name", "state", "status", "begun", "request", "note"}], "next"}.
    """
    entries = _open(journal).entries()
    _print([_line(entry) for entry in entries], as_json=as_json)
    if any(entry.reply is None for entry in entries):
        raise typer.Exit(1)


def resume(
    journal: JournalFile,
    *,
    header: Annotated[
        list[str] | None,
        typer.Option(help="'Name: value' of a header that journals do not store; repeatable.", metavar="FIELD"),
    ] = None,
    origin: Annotated[
        str | None, typer.Option(help="Only requests to this origin, such as https://api.example.com.")
    ] = None,
    deadline: Annotated[float, typer.Option(help="Seconds for each operation.")] = 60.0,
    max_age: Annotated[float, typer.Option(help="Hours after which a key is no longer sent.")] = 23.0,
    as_json: AsJson = False,
) -> None:
    """Resend the operations without a response, with the same keys. Exit code 1 if any still has none.

    JSON: the fields of `client list`.

    The headers of --header go to every origin that a request is sent to: pass --origin if there are several.
    """
    from oncekey_client.httpx import OncekeyTransport

    book, fields = _open(journal), dict(_field(text) for text in header or ())
    unfinished = [entry for entry in book.unfinished() if origin is None or _origin(entry) == origin.rstrip("/")]
    if fields and len(origins := {_origin(entry) for entry in unfinished}) > 1:
        raise ClientConfigurationError(f"--header would go to {len(origins)} origins: name one of them with --origin")
    keys = {entry.key for entry in unfinished}
    failed: set[str] = set()
    for profile in {entry.profile for entry in unfinished}:
        if profile not in PROFILES:
            raise ClientConfigurationError("the journal has a custom profile: resume it from your program")
        rules = RetryRules(PROFILES[profile], deadline=deadline)
        with OncekeyTransport(session=RetrySession(rules=rules, journal=book, max_age=max_age * 3600)) as transport:
            done = transport.resume(lambda _: fields, only=keys)
        failed |= {entry.key for entry, outcome in done if isinstance(outcome, Exception)}
    after = [entry for entry in book.entries() if entry.key in keys]
    _print([_line(entry) for entry in after], as_json=as_json)
    if failed or any(entry.reply is None for entry in after):
        raise typer.Exit(1)


def _open(path: Path) -> Journal:
    if not path.is_file():
        raise ClientConfigurationError(f"the journal {path} does not exist")
    return Journal(path)


def _field(text: str) -> tuple[str, str]:
    name, colon, value = text.partition(":")
    if not colon or not name.strip():
        raise ClientConfigurationError("--header takes 'Name: value'")
    return name.strip(), value.strip()


def _origin(entry: JournalEntry) -> str:
    return "/".join(entry.call.url.split("/", 3)[:3])


def _line(entry: JournalEntry) -> dict[str, Any]:
    """An operation for `client list`: without its body, and without possible secrets in its URL."""
    return {
        "key": entry.key,
        "name": entry.name,
        "state": entry.progress.value,
        "status": None if entry.reply is None else entry.reply.status,
        "begun": datetime.fromtimestamp(entry.begun_at, tz=UTC).isoformat(timespec="seconds"),
        "request": f"{entry.call.method} {entry.call.url.partition('?')[0]}",
        "note": entry.note,
    }


def _print(lines: list[dict[str, Any]], *, as_json: bool) -> None:
    """Print the operations; a terminal wraps long lines, and nothing is truncated."""
    if as_json:
        now = datetime.now(tz=UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
        typer.echo(json.dumps({"now": now, "items": lines, "next": None}, indent=2))
        return
    if not lines:
        typer.echo("the journal is empty")
        return
    rows = [COLUMNS, *([_shown(line[name]) for name in COLUMNS] for line in lines)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(COLUMNS))]
    for row in rows:
        typer.echo("  ".join(cell.ljust(wide) for cell, wide in zip(row, widths, strict=True)).rstrip())


def _shown(value: object) -> str:
    """A value as text without terminal control characters: other programs wrote the journal."""
    text = "" if value is None else str(value)
    return "".join(letter if letter.isprintable() else letter.encode("unicode_escape").decode() for letter in text)
