"""`oncekey audit`: what somebody has to do about the routes and handlers of an application, for CI."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from oncekey.cli.printing import as_json as as_json_document
from oncekey.cli.printing import plain, table
from oncekey.cli.routes import App, Declared, applications
from oncekey.core.errors import ConfigurationError
from oncekey.surveying import TODO, UNANNOUNCED, summary, survey

if TYPE_CHECKING:
    from oncekey.surveying import Surveying

UNSEEN: Final = (
    "Outside calls are seen in a handler and in the functions of its own module, through packages that are known; what "
    "other modules do, or objects that are passed in without an annotation, is not seen."
)
VERSION: Final = 1


@dataclass(frozen=True, slots=True)
class Finding:
    """Something to be done, by a name that stays the same while lines move."""

    id: str
    where: str
    todo: str


def register(app: typer.Typer) -> None:
    """Add the command `audit`."""
    app.command("audit")(audit)


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
    json_wanted: Annotated[bool, typer.Option("--json", help="For programs to read.")] = False,
) -> None:
    """Check that every route that changes something is protected, and that handlers announce their outside calls.

    Findings: a POST or PATCH without a key (open), a PUT or DELETE that publishes, a call through httpx, requests,
    stripe or the like that a LOCAL, PHASED or OUTBOX handler makes beside op.call and op.defer (unannounced). With a
    baseline only new ones fail, and those that are gone are named.

    JSON: {"lines": [{"method", "path", "verdict", "operation", "effects", "key", "calls": [{"what", "file", "line",
    "announced"}]}], "findings": [{"id", "where", "todo", "known"}], "gone": [id]}. Exit code: 0 nothing new; 1 a new
    finding; 2 a mistake.
    """
    if write_baseline and baseline is None:
        raise ConfigurationError("--write-baseline needs --baseline FILE")
    surveyed = survey(*applications(app), frozenset(declared or ()))
    findings = [finding for one in surveyed for finding in _findings(one)]
    if write_baseline and baseline is not None:
        ids = sorted({one.id for one in findings})
        baseline.write_text(json.dumps({"version": VERSION, "findings": ids}, indent=2) + "\n", "utf-8")
        typer.echo(f"{len(ids)} findings are known now: {baseline}")
        return
    known = frozenset() if baseline is None else _read(baseline)
    gone = sorted(known - {one.id for one in findings})
    fresh = [one for one in findings if one.id not in known]
    if json_wanted:
        _tell_programs(surveyed, findings, known, gone)
    else:
        _tell(surveyed, findings, known, gone)
    if fresh:
        raise typer.Exit(1)


def _findings(one: Surveying) -> Iterator[Finding]:
    line = one.line
    if line.verdict.is_finding:
        yield Finding(f"{line.verdict} {line.named}", line.named, TODO[line.verdict])
    for call in one.unannounced:
        assert one.enrolment is not None
        todo = UNANNOUNCED[one.enrolment.effects]
        yield Finding(f"unannounced {line.named} {call.what}", f"{call.file}:{call.line}", todo)


def _tell_programs(surveyed: list[Surveying], findings: list[Finding], known: frozenset[str], gone: list[str]) -> None:
    from oncekey.outside_calls import outside_calls

    def calls(one: Surveying) -> list[dict[str, Any]]:
        return [] if one.handler is None else [asdict(call) for call in outside_calls(one.handler)]

    as_json_document(
        {
            "lines": [{**asdict(one.line), "calls": calls(one)} for one in surveyed],
            "findings": [{**asdict(one), "known": one.id in known} for one in findings],
            "gone": gone,
        }
    )


def _tell(surveyed: list[Surveying], findings: list[Finding], known: frozenset[str], gone: list[str]) -> None:
    lines = [one.line for one in surveyed]
    rows = [(line.method, line.path, line.verdict, line.operation, line.effects, line.key) for line in lines]
    head = ("method", "path", "verdict", "operation", "effects", "key")
    table(head, rows, empty="nothing changes anything", first=("path", "method", "verdict"))
    typer.echo(summary(lines) + ".")
    for one in findings:
        typer.echo(f"{'known' if one.id in known else 'FINDING'}: {plain(one.id)} ({plain(one.where)})\n  {one.todo}")
    for name in gone:
        typer.echo(f"gone: {plain(name)}: take it out of the baseline (--write-baseline)")
    typer.echo(UNSEEN)


def _read(file: Path) -> frozenset[str]:
    try:
        shape: Any = json.loads(file.read_text("utf-8"))
        if shape["version"] != VERSION:
            raise ConfigurationError(f"--baseline {file} is of version {shape['version']}, and {VERSION} is known here")
        return frozenset(str(one) for one in shape["findings"])
    except OSError as error:
        raise ConfigurationError(f"--baseline {file} cannot be read: {error.strerror}") from None
    except (ValueError, KeyError, TypeError):
        raise ConfigurationError(f"--baseline {file} is no baseline: --write-baseline makes one") from None
