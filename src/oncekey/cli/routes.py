"""`oncekey routes`: every state-changing route and function of an application, and how it is protected."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from oncekey.cli.printing import as_list, table
from oncekey.cli.worker import named
from oncekey.core.errors import ConfigurationError
from oncekey.surveying import TODO, survey

if TYPE_CHECKING:
    from oncekey.once import Once

NO_APPLICATION: Final = (
    "--app {app}: this Once is not installed in any application: import the module that calls install"
)
UNSEEN: Final = "--app {app}: what a {kind} serves cannot be seen: name the Once, or the framework's own application"

App = Annotated[
    str,
    typer.Option("--app", metavar="MODULE:NAME", help="Where the Once object is, or the framework's application."),
]
Declared = Annotated[
    list[str] | None,
    typer.Option("--open", metavar="'POST /login'", help="Leave this route open on purpose; may be repeated."),
]


def register(app: typer.Typer) -> None:
    """Add the command `routes`."""
    app.command("routes")(routes)


def routes(
    app: App,
    *,
    declared: Declared = None,
    json_wanted: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """List the routes and functions that change something, and which of them a key protects.

    Every step of a flow has to be protected, and a PUT or DELETE that publishes messages is not idempotent. Functions
    and consumers have the method CALL. `oncekey audit` looks into the handlers, too.
    JSON: {"now", "items": [{"method", "path", "verdict", "operation", "effects", "key", "front"}], "next"};
    `front` is what is asked before the store: `replay_cache`, `lock_hint`.
    Exit code: 0 nothing to do; 1 a POST or PATCH is open, or a PUT or DELETE publishes; 2 a mistake.
    """
    lines = [one.line for one in survey(*applications(app), frozenset(declared or ()))]
    if json_wanted:
        as_list([asdict(line) for line in lines])
    else:
        rows = [
            (line.method, line.path, line.verdict, line.operation, line.effects, line.key, line.front) for line in lines
        ]
        head = ("method", "path", "verdict", "operation", "effects", "key", "front")
        table(head, rows, empty="no route changes anything", first=("path", "method", "verdict"))
        for line in lines:
            if line.verdict.is_finding:
                typer.echo(f"{line.named}: {TODO[line.verdict]}")
    if any(line.verdict.is_finding for line in lines):
        raise typer.Exit(1)


def applications(place: str) -> tuple[list[Once], list[Any]]:
    """The `Once` objects and the applications that `--app` means."""
    from oncekey.frameworks.listing import listed
    from oncekey.once import _ALL, Once

    found = named(place, "--app")
    if isinstance(found, Once):
        if not found.served and not found.functions:
            raise ConfigurationError(NO_APPLICATION.format(app=place))
        return [found], list(found.served)
    onces, routes = [once for once in _ALL if found in once.served], listed(found)
    if routes is None and not onces:
        raise ConfigurationError(UNSEEN.format(app=place, kind=type(found).__name__))
    return onces, [found]
