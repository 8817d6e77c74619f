"""`oncekey routes`, `audit` and `openapi`: show what an application protects, to people, to CI, and as a document."""

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
from oncekey.once.surveying import TODO, RouteLine, summary, survey

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
    """List the routes and functions that change something, and which of them a key protects.

    Every step of a flow has to be protected, and a PUT or DELETE that publishes or calls out is not idempotent. A LOCAL
    or OUTBOX handler that takes neither op nor once.session or once.connection "writes apart": its key is protected,
    and rows that it writes by itself do not commit with the key. Functions and consumers have the method CALL.
    `oncekey audit` compares the findings with a baseline.
    JSON: {"now", "items": [{"method", "path", "verdict", "operation", "effects", "key", "front"}], "next"};
    `front` is what is asked before the store: `replay_cache`, `lock_hint`.
    Exit code: 0 nothing to do; 1 a POST or PATCH is open, a handler writes apart, or a PUT or DELETE publishes; 2 a
    mistake.
    """
    lines = survey(*applications(app), frozenset(declared or ()))
    if json_wanted:
        printing.as_list([asdict(line) for line in lines])
    else:
        rows = [
            (line.method, line.path, line.verdict, line.operation, line.effects, line.key, line.front) for line in lines
        ]
        head = ("method", "path", "verdict", "operation", "effects", "key", "front")
        printing.table(head, rows, empty="no route changes anything", first=("path", "method", "verdict"))
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
        Path | None, typer.Option(help="Findings that are known, and are not to fail.", metavar="FILE")
    ] = None,
    write_baseline: Annotated[
        bool, typer.Option("--write-baseline", help="Write today's findings into --baseline FILE.")
    ] = False,
    json_wanted: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Check that every route that changes something is protected.

    Findings: a POST or PATCH without a key (open); a LOCAL or OUTBOX handler that takes no transaction (writes apart);
    a PUT or DELETE whose handler publishes or calls out (publishes), by the names in its own code, such as emit,
    publish, post and send. With a baseline only new findings fail, and those that are gone are named.

    JSON: {"lines": [{"method", "path", "verdict", "operation", "effects", "key", "front"}], "findings": [{"id", "todo",
    "known"}], "gone": [id]}. Exit code: 0 nothing new; 1 a new finding; 2 a mistake.
    """
    if write_baseline and baseline is None:
        raise ConfigurationError("--write-baseline needs --baseline FILE")
    lines = survey(*applications(app), frozenset(declared or ()))
    findings = [
        AuditFinding(f"{line.verdict} {line.named}", TODO[line.verdict]) for line in lines if line.verdict.is_finding
    ]
    if write_baseline and baseline is not None:
        ids = sorted({one.id for one in findings})
        baseline.write_text(json.dumps({"version": VERSION, "findings": ids}, indent=2) + "\n", "utf-8")
        typer.echo(f"{len(ids)} findings are known now: {baseline}")
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
    rows = [(line.method, line.path, line.verdict, line.operation, line.effects, line.key) for line in lines]
    head = ("method", "path", "verdict", "operation", "effects", "key")
    printing.table(head, rows, empty="nothing changes anything", first=("path", "method", "verdict"))
    typer.echo(summary(lines) + ".")
    for one in findings:
        typer.echo(f"{'known' if one.id in known else 'FINDING'}: {printing.plain(one.id)}\n  {one.todo}")
    for name in gone:
        typer.echo(f"gone: {printing.plain(name)}: take it out of the baseline (--write-baseline)")


def _known_findings(file: Path) -> frozenset[str]:
    try:
        shape: Any = json.loads(file.read_text("utf-8"))
        if shape["version"] != VERSION:
            raise ConfigurationError(f"--baseline {file} is of version {shape['version']}, and {VERSION} is known here")
        return frozenset(str(one) for one in shape["findings"])
    except OSError as error:
        raise ConfigurationError(f"--baseline {file} cannot be read: {error.strerror}") from None
    except (ValueError, KeyError, TypeError):
        raise ConfigurationError(f"--baseline {file} is no baseline: --write-baseline makes one") from None


NO_DOCUMENT: Final = "--app {app} makes no OpenAPI document of its own: name the FILE that has one"
NO_YAML: Final = "{file} is YAML, which one more package reads: pip install pyyaml; or convert it to JSON"
LEFT: Final = 1


def openapi(
    file: Annotated[
        Path | None, typer.Argument(help="A document of OpenAPI 3.0 or 3.1, JSON or YAML.", metavar="[FILE]")
    ] = None,
    *,
    app: App,
) -> None:
    """Print an OpenAPI document as JSON in which every protected operation has its header, refusals and answers.

    The document is the application's own, as FastAPI and Litestar make one, or FILE. Operations are found by method
    and path, whatever the parts of the path are called, with or without the path of a server. Nothing is taken away.
    Exit code: 0 every protected route is described; 1 the document lacks some, which are named; 2 a mistake.
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
        typer.echo(f"oncekey: {printing.plain(name)} is protected, and the document does not have it", err=True)
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
        raise ConfigurationError(f"{file} is no OpenAPI document")
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
