"""`oncekey routes`, `audit` and `openapi`: an application's protected routes, for people, for CI and as OpenAPI."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from oncekey.cli import printing
from oncekey.cli.applications import named
from oncekey.core.errors import ConfigurationError
from oncekey.once.route_report import TODO, RouteLine, route_lines, summary

if TYPE_CHECKING:
    from oncekey.once import Once


NO_APPLICATION: Final = (
    "--app {app}: this Once is not installed in any application: import the module that calls install"
)
UNSEEN: Final = (
    "--app {app}: the routes of a {kind} cannot be listed: name the Once, or the framework's own application"
)

_HEAD: Final = ("method", "path", "verdict", "operation", "effects", "key", "front")

App = Annotated[
    str,
    typer.Option("--app", metavar="MODULE:NAME", help="The Once object, or the framework's application."),
]
Declared = Annotated[
    list[str] | None,
    typer.Option("--open", metavar="'POST /login'", help="Leave this route unprotected on purpose; repeatable."),
]


def register(app: typer.Typer) -> None:
    """Add the commands `routes`, `audit` and `openapi`."""
    app.command("routes")(routes)
    app.command("audit")(audit)
    app.command("openapi")(openapi)


def routes(
    app: App,
    *,
    declared: Declared = None,
    json_wanted: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """List the state-changing routes and functions, and how each is protected.

    Every step of a flow has to be protected, and a PUT or DELETE that publishes or calls other systems is not
    idempotent. A LOCAL or OUTBOX handler that takes neither op nor once.session or once.connection "writes apart": its
    key is protected, but rows that it writes on another connection do not commit with the key. Functions and consumers
    have the method CALL. `oncekey audit` compares the findings with a baseline. JSON: {"now", "items": [{"method",
    "path", "verdict", "operation", "effects", "key", "front"}], "next"}; `front` is what is read before the store:
    `replay_cache`, `lock_hint`. Exit code: 0 nothing to do; 1 a POST or PATCH is unprotected, a handler writes apart,
    or a PUT or DELETE publishes; 2 a usage error.
    """
    lines = route_lines(*applications(app), frozenset(declared or ()))
    if json_wanted:
        printing.as_list([asdict(line) for line in lines])
    else:
        head = _HEAD if any(line.front for line in lines) else _HEAD[:-1]
        rows = [[getattr(line, name) for name in head] for line in lines]
        printing.table(head, rows, empty="no state-changing routes", first=("path", "method", "verdict"))
        for line in lines:
            if line.verdict.is_finding:
                typer.echo(f"{line.named}: {TODO[line.verdict]}")
    if any(line.verdict.is_finding for line in lines):
        raise typer.Exit(1)


def applications(place: str) -> tuple[list[Once], list[Any]]:
    """The `Once` objects and the applications of `--app`."""
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


VERSION: Final = 1


@dataclass(frozen=True, slots=True)
class AuditFinding:
    """A route that has to be changed, as `verdict METHOD /path`, and what to do."""

    id: str
    todo: str


def audit(
    app: App,
    *,
    declared: Declared = None,
    baseline: Annotated[
        Path | None, typer.Option(help="A file of known findings, which do not cause exit code 1.", metavar="FILE")
    ] = None,
    write_baseline: Annotated[
        bool, typer.Option("--write-baseline", help="Write the current findings to --baseline FILE.")
    ] = False,
    json_wanted: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Check that every state-changing route is protected.

    Findings: a POST or PATCH without a key (open); a LOCAL or OUTBOX handler that takes no transaction (writes apart);
    a PUT or DELETE whose handler publishes or calls out (publishes), judged by the names in its own code, such as emit,
    publish, post and send. With a baseline only new findings fail, and findings that are gone are listed.

    JSON: {"lines": [{"method", "path", "verdict", "operation", "effects", "key", "front"}], "findings": [{"id", "todo",
    "known"}], "gone": [id]}. Exit code: 0 nothing new; 1 a new finding; 2 a usage error.
    """
    if write_baseline and baseline is None:
        raise ConfigurationError("--write-baseline needs --baseline FILE")
    lines = route_lines(*applications(app), frozenset(declared or ()))
    findings = [
        AuditFinding(f"{line.verdict} {line.named}", TODO[line.verdict]) for line in lines if line.verdict.is_finding
    ]
    if write_baseline and baseline is not None:
        ids = sorted({one.id for one in findings})
        baseline.write_text(json.dumps({"version": VERSION, "findings": ids}, indent=2) + "\n", "utf-8")
        typer.echo(f"{len(ids)} findings written to {baseline}")
        return
    known = frozenset() if baseline is None else _known_findings(baseline)
    gone = sorted(known - {one.id for one in findings})
    fresh = [one for one in findings if one.id not in known]
    if json_wanted:
        shown = [{**asdict(one), "known": one.id in known} for one in findings]
        printing.as_json({"lines": [asdict(line) for line in lines], "findings": shown, "gone": gone})
    else:
        _print_audit(lines, findings, known, gone)
    if fresh:
        raise typer.Exit(1)


def _print_audit(lines: list[RouteLine], findings: list[AuditFinding], known: frozenset[str], gone: list[str]) -> None:
    head = _HEAD[:-1]
    rows = [[getattr(line, name) for name in head] for line in lines]
    printing.table(head, rows, empty="no state-changing routes", first=("path", "method", "verdict"))
    typer.echo(summary(lines) + ".")
    for one in findings:
        typer.echo(f"{'known' if one.id in known else 'FINDING'}: {printing.plain(one.id)}\n  {one.todo}")
    for name in gone:
        typer.echo(f"gone: {printing.plain(name)}: remove it from the baseline (--write-baseline)")


def _known_findings(file: Path) -> frozenset[str]:
    try:
        shape: Any = json.loads(file.read_text("utf-8"))
        if shape["version"] != VERSION:
            raise ConfigurationError(
                f"--baseline {file} has version {shape['version']}; this oncekey reads version {VERSION}"
            )
        return frozenset(str(one) for one in shape["findings"])
    except OSError as error:
        raise ConfigurationError(f"--baseline {file} cannot be read: {error.strerror}") from None
    except (ValueError, KeyError, TypeError):
        raise ConfigurationError(f"--baseline {file} is not a baseline: create one with --write-baseline") from None


NO_DOCUMENT: Final = "--app {app} does not generate an OpenAPI document: pass the FILE of one"
NO_YAML: Final = "{file} is YAML, which needs another package: pip install pyyaml; or convert it to JSON"
LEFT: Final = 1


def openapi(
    file: Annotated[
        Path | None, typer.Argument(help="An OpenAPI 3.0 or 3.1 document, JSON or YAML.", metavar="[FILE]")
    ] = None,
    *,
    app: App,
) -> None:
    """Print an OpenAPI document as JSON, with the header, refusals and responses of every protected operation.

    The document is the application's own, as generated by FastAPI and Litestar, or FILE. Operations are matched by
    method and path, whatever the names of path parameters, with or without the path of a server. Nothing is removed.
    Exit code: 0 every protected route is described; 1 the document lacks some, which are listed; 2 a usage error.
    """
    from oncekey.frameworks.listing import listed
    from oncekey.frameworks.openapi import document_of, transformed

    _, apps = applications(app)
    document = next(filter(None, map(document_of, apps)), None) if file is None else _document(file)
    if document is None:
        raise ConfigurationError(NO_DOCUMENT.format(app=app))
    made, missing = transformed(document, [route for one in apps for route in listed(one) or ()])
    typer.echo(json.dumps(made, indent=2, ensure_ascii=False))
    for name in missing:
        typer.echo(f"oncekey: {printing.plain(name)} is protected, but not in the document", err=True)
    if missing:
        raise typer.Exit(LEFT)


def _document(file: Path) -> dict[str, Any]:
    try:
        text = file.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"{file} cannot be read: {getattr(error, 'strerror', None) or error}") from None
    try:
        found = _yaml(file, text) if file.suffix in {".yaml", ".yml"} else json.loads(text)
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise ConfigurationError(f"{file} is not an OpenAPI document")
    return found


def _yaml(file: Path, text: str) -> Any:
    try:
        yaml: Any = import_module("yaml")
    except ImportError:
        raise ConfigurationError(NO_YAML.format(file=file)) from None
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ValueError(str(error)) from None
