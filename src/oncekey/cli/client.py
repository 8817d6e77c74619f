"""`oncekey client list|resume`: lists the operations in a client's journal, and sends those without an answer again."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from oncekey.cli.printing import as_list, table
from oncekey.core.errors import ConfigurationError

if TYPE_CHECKING:
    from oncekey.client.journal import Journal, JournalEntry

JournalFile = Annotated[Path, typer.Option("--journal", envvar="ONCEKEY_JOURNAL", help="The journal's file.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def register(app: typer.Typer) -> None:
    """Add the group `client`."""
    group = typer.Typer(help="Look into a client's journal, and finish what it began.", no_args_is_help=True)
    group.command("list")(show)
    group.command("resume")(resume)
    app.add_typer(group, name="client")


def show(journal: JournalFile, *, as_json: AsJson = False) -> None:
    """List the operations of a journal, the oldest first. Exit code 1 if any has no answer.

    JSON: {"now", "items": [{"key", "name", "state", "status", "begun", "request", "note"}], "next"}.
    """
    entries = _open(journal).entries()
    _say([_line(entry) for entry in entries], as_json=as_json)
    if any(entry.reply is None for entry in entries):
        raise typer.Exit(1)


def resume(
    journal: JournalFile,
    *,
    header: Annotated[
        list[str] | None,
        typer.Option(help="'Name: value' of a field that journals do not keep; may be given again.", metavar="FIELD"),
    ] = None,
    origin: Annotated[
        str | None, typer.Option(help="Only requests to this origin, such as https://api.example.com.")
    ] = None,
    deadline: Annotated[float, typer.Option(help="Seconds for each operation.")] = 60.0,
    max_age: Annotated[float, typer.Option(help="Hours after which a key is not sent any more.")] = 23.0,
    as_json: AsJson = False,
) -> None:
    """Send the operations without an answer again, with the same keys. Exit code 1 if any still has none.

    JSON: what `client list` shows of them.

    The fields of --header go to every origin that a request is sent to: name one with --origin if there are several.
    """
    from oncekey.client import PROFILES, RetryRules
    from oncekey.client.attempts import RetrySession
    from oncekey.client.httpx import OncekeyTransport

    book, fields = _open(journal), dict(_field(text) for text in header or ())
    unfinished = [entry for entry in book.unfinished() if origin is None or _origin(entry) == origin.rstrip("/")]
    if fields and len(origins := {_origin(entry) for entry in unfinished}) > 1:
        raise ConfigurationError(f"--header would go to {len(origins)} origins: name one of them with --origin")
    keys = {entry.key for entry in unfinished}
    failed: set[str] = set()
    for profile in {entry.profile for entry in unfinished}:
        if profile not in PROFILES:
            raise ConfigurationError("the journal has a profile of your own: resume from your program")
        rules = RetryRules(PROFILES[profile], deadline=deadline)
        with OncekeyTransport(session=RetrySession(rules=rules, journal=book, max_age=max_age * 3600)) as transport:
            done = transport.resume(lambda _: fields, only=keys)
        failed |= {entry.key for entry, outcome in done if isinstance(outcome, Exception)}
    after = [entry for entry in book.entries() if entry.key in keys]
    _say([_line(entry) for entry in after], as_json=as_json)
    if failed or any(entry.reply is None for entry in after):
        raise typer.Exit(1)


def _open(path: Path) -> Journal:
    from oncekey.client.journal import Journal

    if not path.is_file():
        raise ConfigurationError(f"there is no journal {path}")
    return Journal(path)


def _field(text: str) -> tuple[str, str]:
    name, colon, value = text.partition(":")
    if not colon or not name.strip():
        raise ConfigurationError("--header takes 'Name: value'")
    return name.strip(), value.strip()


def _origin(entry: JournalEntry) -> str:
    return "/".join(entry.call.url.split("/", 3)[:3])


def _line(entry: JournalEntry) -> dict[str, Any]:
    """An operation as `client list` shows it: without its body, and without what may be a secret in its address."""
    return {
        "key": entry.key,
        "name": entry.name,
        "state": entry.progress.value,
        "status": None if entry.reply is None else entry.reply.status,
        "begun": datetime.fromtimestamp(entry.begun_at, tz=UTC).isoformat(timespec="seconds"),
        "request": f"{entry.call.method} {entry.call.url.partition('?')[0]}",
        "note": entry.note,
    }


def _say(lines: list[dict[str, Any]], *, as_json: bool) -> None:
    if as_json:
        as_list(lines)
        return
    head = ("state", "status", "name", "key", "begun", "request", "note")
    rows = [[line[name] for name in head] for line in lines]
    table(head, rows, empty="the journal is empty", first=("key", "state", "status", "name", "request", "begun"))
