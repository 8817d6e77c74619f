"""`oncekey check URL`: whether an API keeps the promises of its idempotency keys."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TextIO

import typer

from oncekey.conformance import CLAUSES, Address, Profile, Target, check, planned
from oncekey.conformance.report_html import to_html
from oncekey.conformance.report_json import to_json
from oncekey.conformance.report_junit import to_junit
from oncekey.conformance.report_text import dangers, missing, plain, rows, verdict_line

if TYPE_CHECKING:
    from oncekey.conformance import Clause, Report
    from oncekey.conformance.shots import Header

_STYLES = {"FAILED": "bold red", "advice": "yellow", "passed": "green", "skipped": "dim", "undecided": "cyan"}

Url = Annotated[str, typer.Argument(help="The operation's URL, such as https://api.example.com/orders.")]
Body = Annotated[str, typer.Option(help="A body that the operation takes; @FILE reads a file.", metavar="TEXT|@FILE")]
Headers = Annotated[
    list[str],
    typer.Option("--header", "-H", help="A header to send, 'Name: value'; may be repeated.", metavar="HEADER"),
]


def register(app: typer.Typer) -> None:
    """Add the command `check`."""
    app.command("check")(check_url)


def check_url(  # noqa: PLR0917  (typer reads the parameters)
    url: Url,
    body: Body = "{}",
    header: Headers = [],  # noqa: B006  (typer copies it)
    method: Annotated[str, typer.Option(help="The operation's method.")] = "POST",
    profile: Annotated[
        Profile,
        typer.Option(help="What to judge by: the IETF draft, what Stripe does, or what one wants before money moves."),
    ] = Profile.IETF,
    count_url: Annotated[
        str | None,
        typer.Option(help="A URL whose JSON tells how many effects there are, so that 'once' is seen.", metavar="URL"),
    ] = None,
    count_pointer: Annotated[
        str,
        typer.Option(help="Where the number or the list is in it, as a JSON pointer: /total. Empty: all of it."),
    ] = "",
    other_tenant_header: Annotated[
        list[str],
        typer.Option(help="The header that makes the caller somebody else; may be repeated.", metavar="HEADER"),
    ] = [],  # noqa: B006  (typer copies it)
    slow_header: Annotated[
        str | None,
        typer.Option(help="A header that makes the operation slow, so that requests meet in it.", metavar="HEADER"),
    ] = None,
    fail_header: Annotated[
        str | None,
        typer.Option(help="A header that makes the operation fail with 5xx.", metavar="HEADER"),
    ] = None,
    other_body: Annotated[
        str | None,
        typer.Option(
            help="Another body that is taken. Else a number or text in --body is changed.", metavar="TEXT|@FILE"
        ),
    ] = None,
    invalid_body: Annotated[
        str | None,
        typer.Option(help="A body that is refused. Else --body is broken.", metavar="TEXT|@FILE"),
    ] = None,
    other_url: Annotated[
        str | None, typer.Option(help="Another operation with keys that takes the same body.", metavar="URL")
    ] = None,
    openapi: Annotated[
        str | None, typer.Option(help="The OpenAPI description, if it is not at /openapi.json.", metavar="URL")
    ] = None,
    key_optional: Annotated[bool, typer.Option("--key-optional", help="Keys may be left out by design.")] = False,
    unsafe_methods: Annotated[
        bool, typer.Option("--unsafe-methods", help="Also send PUT and DELETE to the URL.")
    ] = False,
    patience: Annotated[
        float, typer.Option(min=0.1, max=600, help="Seconds in which an abandoned request must be over.")
    ] = 15.0,
    timeout: Annotated[float, typer.Option(min=0.1, max=600, help="Seconds to wait for one answer.")] = 30.0,
    time_limit: Annotated[float, typer.Option(min=1, help="Seconds after which no other clause is begun.")] = 600.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print the report as JSON.")] = False,
    junit: Annotated[
        Path | None, typer.Option(help="Write the report for continuous integration.", metavar="FILE")
    ] = None,
    html: Annotated[Path | None, typer.Option(help="Write the report as one page to mail.", metavar="FILE")] = None,
) -> None:
    """Try whether an API keeps the promises of its idempotency keys. Only for an API that is yours to try.

    It sends a few hundred real requests, each of which may have a real effect: use a test environment. Exit code
    0: no promise is broken; 1: at least one is; 2: it could not be checked.

    oncekey check http://127.0.0.1:8000/orders --body @order.json -H 'Authorization: Bearer demo-alpha'
    """
    headers = _with_media_type([_line("--header", text) for text in header], body)
    target = Target(
        address=Address.parse(url),
        method=method.upper(),
        body=_content("--body", body),
        headers=headers,
        is_json=_is_json(_content("--body", body)) and "json" in dict(_lowered(headers)).get("content-type", ""),
        other_body=None if other_body is None else _content("--other-body", other_body),
        invalid_body=None if invalid_body is None else _content("--invalid-body", invalid_body),
        other_tenant=tuple(_line("--other-tenant-header", text) for text in other_tenant_header),
        slow=None if slow_header is None else _line("--slow-header", slow_header),
        fail=None if fail_header is None else _line("--fail-header", fail_header),
        count_address=None if count_url is None else Address.parse(count_url),
        count_pointer=count_pointer,
        openapi=None if openapi is None else Address.parse(openapi),
        other_address=None if other_url is None else Address.parse(other_url),
        unsafe_methods=unsafe_methods,
        key_optional=key_optional,
        patience=patience,
        timeout=timeout,
    )
    typer.echo(f"{len(CLAUSES)} clauses, about {planned()} requests to {target.address}", err=True)
    report = check(target, profile=profile, time_limit=time_limit, progress=_progress)
    _clear()
    if junit is not None:
        _write("--junit", junit, to_junit(report))
    if html is not None:
        _write("--html", html, to_html(report))
    _print(report, as_json=as_json)
    if report.failed:
        raise typer.Exit(1)


def _content(option: str, text: str) -> bytes:
    if not text.startswith("@"):
        return text.encode()
    try:
        return Path(text[1:]).read_bytes()
    except OSError as error:
        raise typer.BadParameter(f"{text[1:]} cannot be read ({error.strerror})", param_hint=option) from None


def _write(option: str, path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise typer.BadParameter(f"{path} cannot be written ({error.strerror})", param_hint=option) from None


def _line(option: str, text: str) -> Header:
    name, colon, value = text.partition(":")
    if not colon or not name.strip() or not (text.isascii() and text.isprintable()):
        raise typer.BadParameter(f"{text!r} is no header: write 'Name: value'", param_hint=option)
    if name.strip().lower() == "idempotency-key":
        raise typer.BadParameter("keys are made by the check itself: leave it out", param_hint=option)
    return name.strip(), value.strip()


def _with_media_type(lines: list[Header], body: str) -> tuple[Header, ...]:
    """A body without a media type is JSON, or a mistake."""
    if any(name.lower() == "content-type" for name, _ in lines):
        return tuple(lines)
    if not _is_json(_content("--body", body)):
        raise typer.BadParameter(
            "the body is not JSON: correct it, or say what it is with --header 'Content-Type: …'", param_hint="--body"
        )
    return (("Content-Type", "application/json"), *lines)


def _lowered(lines: tuple[Header, ...]) -> list[Header]:
    return [(name.lower(), value.lower()) for name, value in lines]


def _is_json(body: bytes) -> bool:
    try:
        json.loads(body)
    except ValueError:
        return False
    return True


def _is_terminal(stream: TextIO) -> bool:
    return stream.isatty()


def _progress(clause: Clause, number: int, of: int) -> None:
    if _is_terminal(sys.stderr):
        sys.stderr.write(f"\r\x1b[K{number}/{of} {clause.id}")
        sys.stderr.flush()


def _clear() -> None:
    if _is_terminal(sys.stderr):
        sys.stderr.write("\r\x1b[K")
        sys.stderr.flush()


def _print(report: Report, *, as_json: bool) -> None:
    if as_json:
        typer.echo(to_json(report))
    elif _is_terminal(sys.stdout):
        _richly(report)
    else:
        typer.echo(plain(report))


def _richly(report: Report) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console(highlight=False)
    for told in dangers(report):
        console.print(Text(f"{told}\n", style="red" if report.failed else "yellow"), soft_wrap=True)
    for area, lines in rows(report):
        table = Table("result", "clause", "", title=area.value, title_justify="left", title_style="bold", expand=True)
        for word, title, note in lines:
            table.add_row(Text(word, style=_STYLES[word]), Text(title), Text(note, style="dim"))
        console.print(table)
    for line in missing(report):
        console.print(Text(line, style="dim"), soft_wrap=True)
    console.print(Text(verdict_line(report), style="bold red" if report.failed else "bold green"), soft_wrap=True)
