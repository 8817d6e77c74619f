"""`oncekey check URL`: tests whether an API keeps the promises of its idempotency keys.

Its options may come from a TOML file, so that a pipeline needs one short command.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import sys
import tomllib
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final, TextIO

import typer

from oncekey.conformance import Address, Clause, Failed, Profile, Report, Target, check, chosen, planned, reports
from oncekey.conformance.carrier import IN_URL, KEY, MARKER, BadKeyFormatError, Carrier, Header, KeyFormat, Place
from oncekey.conformance.running import BadBaselineError, Baseline, written
from oncekey.conformance.scripts import script

if TYPE_CHECKING:
    from collections.abc import Mapping


_VARIABLE: Final = re.compile(r"\$\{([A-Za-z_][A-Za-z0-9_]*)\}")
_OWN: Final = frozenset({"config", "help"})
_INTERRUPTED: Final = 130


def configure(context: typer.Context, path: Path | None) -> Path | None:
    """Use the values of the file as defaults; options on the command line override them."""
    # For help and completion click calls this without running the command.
    if path is None or context.resilient_parsing:
        return path
    try:
        given = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise typer.BadParameter(f"{path} cannot be read ({error.strerror})") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise typer.BadParameter(f"{path} is no TOML: {error}") from None
    context.default_map = {**(context.default_map or {}), **_values(context, given)}
    return path


def _values(context: typer.Context, given: Mapping[str, object]) -> dict[str, object]:
    """The values by the names of the command's parameters."""
    names: dict[str, tuple[str, bool]] = {}
    for parameter in context.command.params:
        if parameter.name not in _OWN:
            longest = max(parameter.opts, key=len).lstrip("-")
            names[longest] = parameter.name, bool(getattr(parameter, "multiple", False))
    values: dict[str, object] = {}
    for option, value in given.items():
        if option not in names:
            raise typer.BadParameter(f"there is no option {option!r}; its options are {', '.join(sorted(names))}")
        name, multiple = names[option]
        if isinstance(value, dict) or (isinstance(value, list) and not multiple):
            raise typer.BadParameter(f"{option} takes one value")
        values[name] = [_filled(one) for one in value] if isinstance(value, list) else _filled(value)
        if multiple and not isinstance(value, list):
            values[name] = [_filled(value)]
    return values


def _filled(value: object) -> object:
    """The value with `${NAME}` taken from the environment: credentials have no place in a file."""
    if not isinstance(value, str):
        return value

    def taken(met: re.Match[str]) -> str:
        if met[1] not in os.environ:
            raise typer.BadParameter(f"the environment has no {met[1]}")
        return os.environ[met[1]]

    return _VARIABLE.sub(taken, value)


_TOKEN: Final = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
_STYLES = {
    "FAILED": "bold red",
    "advice": "yellow",
    "passed": "green",
    "allowed": "dim green",
    "skipped": "dim",
    "undecided": "cyan",
    "known": "magenta",
}

Url = Annotated[
    str | None,
    typer.Argument(
        help="The operation's URL, such as https://api.example.com/orders.", metavar="URL", show_default=False
    ),
]
Body = Annotated[str, typer.Option(help="A body that the operation accepts; @FILE reads a file.", metavar="TEXT|@FILE")]
Headers = Annotated[
    list[str],
    typer.Option("--header", "-H", help="A header to send, 'Name: value'; may be repeated.", metavar="HEADER"),
]


def register(app: typer.Typer) -> None:
    """Add the command `check`."""
    app.command("check")(check_url)


def check_url(  # noqa: PLR0917  (typer reads the parameters)
    url: Url = None,
    body: Body = "{}",
    header: Headers = [],  # noqa: B006  (typer copies it)
    method: Annotated[str, typer.Option(help="The operation's method.")] = "POST",
    profile: Annotated[
        Profile,
        typer.Option(
            help="What to judge by: the IETF draft, what Stripe does, the same with 409 for another body, or what one "
            "wants before money moves."
        ),
    ] = Profile.IETF,
    key_header: Annotated[str, typer.Option(help="The header in which this API expects the key.")] = KEY,
    key_field: Annotated[
        str | None,
        typer.Option(help="The member of the JSON body in which this API expects the key instead.", metavar="NAME"),
    ] = None,
    marker_header: Annotated[
        str,
        typer.Option(help="The header that marks a replay: 'Name', or 'Name: value' if it is not 'true'."),
    ] = MARKER,
    count_url: Annotated[
        str | None,
        typer.Option(help="A URL whose JSON tells how many effects there are, so that 'once' is seen.", metavar="URL"),
    ] = None,
    count_pointer: Annotated[
        str,
        typer.Option(
            help="Where the number or the list is in the answer of --count-url, as a JSON pointer: /total. "
            "Empty: all of it."
        ),
    ] = "",
    other_tenant_header: Annotated[
        list[str],
        typer.Option(help="The header that makes the caller another tenant; may be repeated.", metavar="HEADER"),
    ] = [],  # noqa: B006  (typer copies it)
    same_caller_header: Annotated[
        list[str],
        typer.Option(
            help="Other credentials of the same caller, such as a renewed token; may be repeated.", metavar="HEADER"
        ),
    ] = [],  # noqa: B006  (typer copies it)
    slow_header: Annotated[
        str | None,
        typer.Option(help="A header that makes the operation slow, so that requests meet in it.", metavar="HEADER"),
    ] = None,
    fail_header: Annotated[
        str | None,
        typer.Option(help="A header that makes the operation fail with 5xx.", metavar="HEADER"),
    ] = None,
    large_header: Annotated[
        str | None,
        typer.Option(help="A header that makes the answer larger than 64 KiB.", metavar="HEADER"),
    ] = None,
    other_body: Annotated[
        str | None,
        typer.Option(
            help="Another body that it accepts. Else a number or text in --body is changed.", metavar="TEXT|@FILE"
        ),
    ] = None,
    invalid_body: Annotated[
        str | None,
        typer.Option(help="A body that is refused. Default: --body, made invalid.", metavar="TEXT|@FILE"),
    ] = None,
    declined_body: Annotated[
        str | None,
        typer.Option(help="A body that is refused for good with 4xx, as a declined card is.", metavar="TEXT|@FILE"),
    ] = None,
    other_url: Annotated[
        str | None, typer.Option(help="Another operation with keys that takes the same body.", metavar="URL")
    ] = None,
    also_url: Annotated[
        str | None, typer.Option(help="The same operation at a second instance of the API.", metavar="URL")
    ] = None,
    openapi: Annotated[
        str | None, typer.Option(help="The OpenAPI description, if it is not at /openapi.json.", metavar="URL")
    ] = None,
    lease: Annotated[
        float | None,
        typer.Option(
            min=0.1,
            max=300,
            help="The API's lease in seconds. A request is made to run longer, by the number in --slow-header.",
        ),
    ] = None,
    crash_command: Annotated[
        str | None,
        typer.Option(
            help="A command that kills the server with SIGKILL and starts it again. It is run without a shell.",
            metavar="COMMAND",
        ),
    ] = None,
    store_down_command: Annotated[
        str | None,
        typer.Option(help="A command that stops the store of the keys. It is run without a shell.", metavar="COMMAND"),
    ] = None,
    store_up_command: Annotated[
        str | None, typer.Option(help="The command that starts the store again.", metavar="COMMAND")
    ] = None,
    command_limit: Annotated[
        float,
        typer.Option(min=1, max=600, help="Seconds that a command may take, and the server's return after it."),
    ] = 60.0,
    cacert: Annotated[
        Path | None,
        typer.Option(help="Certificates to trust instead of the system's, as PEM.", metavar="FILE"),
    ] = None,
    key_format: Annotated[
        str,
        typer.Option(
            help="The form of the keys that the API accepts, with {{uuid}}, {{hex:N}} or {{digits:N}} in it.",
            metavar="TEXT",
        ),
    ] = "{{uuid}}",
    key_optional: Annotated[bool, typer.Option("--key-optional", help="Keys may be left out by design.")] = False,
    unothers: Annotated[bool, typer.Option("--unsafe-methods", help="Also send PUT and DELETE to the URL.")] = False,
    only: Annotated[
        list[str],
        typer.Option(help="Try these clauses only: an id, an area such as races, or a pattern.", metavar="CLAUSE"),
    ] = [],  # noqa: B006  (typer copies it)
    skip: Annotated[list[str], typer.Option(help="Leave these clauses out; may be repeated.", metavar="CLAUSE")] = [],  # noqa: B006  (typer copies it)
    show_list: Annotated[
        bool, typer.Option("--list", help="List the clauses and what they need, and send nothing.")
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
    sarif: Annotated[
        Path | None, typer.Option(help="Write the findings as SARIF, for a code host.", metavar="FILE")
    ] = None,
    html: Annotated[Path | None, typer.Option(help="Write the report as one page to mail.", metavar="FILE")] = None,
    scripts: Annotated[
        Path | None,
        typer.Option(help="Write into this folder, for each finding, a script that repeats it.", metavar="FOLDER"),
    ] = None,
    baseline: Annotated[
        Path | None,
        typer.Option(help="Known findings: the exit code is 1 for new or worse ones only.", metavar="FILE"),
    ] = None,
    write_baseline: Annotated[
        Path | None, typer.Option(help="Write the findings of this run as a baseline.", metavar="FILE")
    ] = None,
    config: Annotated[  # noqa: ARG001  (its callback has read it)
        Path | None,
        typer.Option(
            help="A TOML file with any of these options, such as count-url = '…'. The command line overrides it.",
            metavar="FILE",
            is_eager=True,
            callback=configure,
        ),
    ] = None,
) -> None:
    """Test whether an API keeps the promises of its idempotency keys. Only for an API that you may test.

    It sends a few hundred real requests, each of which may have a real effect: use a test environment. In a body,
    {{uuid}}, {{key}} and "{{n}}" are other values for each key, for fields that must be unique; in the URL, {{key}} is
    the key. Exit code 0: the API breaks no promise; 1: it breaks at least one; 2: it could not be checked, or not to
    the end; 130: interrupted. Reports are written in any case, as far as the run came.

    oncekey check http://127.0.0.1:8000/orders --body @order.json -H 'Authorization: Bearer demo-alpha'
    """
    clauses = chosen(only, skip)
    if show_list:
        _list(clauses)
        return
    if url is None:
        raise typer.BadParameter("the operation's URL is missing", param_hint="URL")
    if (store_down_command is None) != (store_up_command is None):
        raise typer.BadParameter("the store must be stopped and started: give both commands", param_hint="--store-…")
    if lease is not None and timeout <= 2 * lease:
        raise typer.BadParameter(
            "a request that is slower than its lease needs a --timeout of more than two leases", param_hint="--lease"
        )
    trusted = None if cacert is None else _readable("--cacert", cacert)

    def address(text: str | None) -> Address | None:
        return None if text is None else Address.parse(text, trusted)

    def optional(option: str, text: str | None) -> bytes | None:
        return None if text is None else _content(option, text)

    def line(option: str, text: str | None) -> Header | None:
        return None if text is None else _line(option, text, key_header)

    headers = _with_media_type([_line("--header", text, key_header) for text in header], body)
    sent = _content("--body", body)
    is_json = _is_json(sent) and "json" in dict(_lowered(headers)).get("content-type", "")
    target = Target(
        address=Address.parse(url, trusted),
        method=method.upper(),
        body=sent,
        headers=headers,
        is_json=is_json,
        other_body=optional("--other-body", other_body),
        invalid_body=optional("--invalid-body", invalid_body),
        declined_body=optional("--declined-body", declined_body),
        other_tenant=tuple(_line("--other-tenant-header", text, key_header) for text in other_tenant_header),
        slow=line("--slow-header", slow_header),
        fail=line("--fail-header", fail_header),
        large=line("--large-header", large_header),
        count_address=address(count_url),
        count_pointer=count_pointer,
        openapi=address(openapi),
        other_address=address(other_url),
        also_address=address(also_url),
        lease=lease,
        crash_command=_command("--crash-command", crash_command),
        store_down_command=_command("--store-down-command", store_down_command),
        store_up_command=_command("--store-up-command", store_up_command),
        command_limit=command_limit,
        carrier=_carrier(url, key_header, key_field, marker_header, sent if is_json else b""),
        same_caller=tuple(_line("--same-caller-header", text, key_header) for text in same_caller_header),
        unothers=unothers,
        key_format=_key_format(key_format),
        key_optional=key_optional,
        patience=patience,
        timeout=timeout,
    )
    known = None if baseline is None else _baseline(baseline)
    typer.echo(f"{len(clauses)} clauses, about {planned(clauses, target)} requests to {target.address}", err=True)
    report = check(target, profile=profile, clauses=clauses, time_limit=time_limit, progress=_progress)
    _clear()
    if known is not None:
        report = known.applied(report)
    wanted = (
        ("--write-baseline", write_baseline, written),
        ("--junit", junit, reports.to_junit),
        ("--sarif", sarif, reports.to_sarif),
        ("--html", html, reports.to_html),
    )
    for option, path, write in wanted:
        if path is not None:
            _write(option, path, write(report))
    if scripts is not None:
        _write_scripts(report, scripts)
    _print(report, as_json=as_json)
    for name in () if known is None else known.gone(report):
        typer.echo(f"{name} is in the baseline and passes now: write the baseline again", err=True)
    raise typer.Exit(_exit_code(report))


def _exit_code(report: Report) -> int:
    if not report.stopped:
        return 1 if report.failed else 0
    typer.echo(f"the run stopped early: {report.stopped}", err=True)
    return _INTERRUPTED if report.stopped.startswith("interrupted") else 2


def _list(clauses: tuple[Clause, ...]) -> None:
    for clause in clauses:
        needs = f"  (needs {', '.join(clause.needs)})" if clause.needs else ""
        typer.echo(f"{clause.id:28} {clause.severity.name.lower():8} {clause.title}{needs}")


def _baseline(path: Path) -> Baseline:
    try:
        return Baseline.parse(_content("--baseline", f"@{path}").decode("utf-8", "replace"))
    except BadBaselineError as error:
        raise typer.BadParameter(f"{path}: {error}", param_hint="--baseline") from None


def _readable(option: str, path: Path) -> str:
    _content(option, f"@{path}")
    return str(path)


def _command(option: str, text: str | None) -> tuple[str, ...]:
    """The words of a command, which is run without a shell, so that nothing in them is expanded."""
    if text is None:
        return ()
    try:
        words = tuple(shlex.split(text))
    except ValueError as error:
        raise typer.BadParameter(f"it cannot be split into words ({error})", param_hint=option) from None
    if not words:
        raise typer.BadParameter("it is empty", param_hint=option)
    return words


def _key_format(text: str) -> KeyFormat:
    try:
        return KeyFormat.parse(text)
    except BadKeyFormatError as error:
        raise typer.BadParameter(str(error), param_hint="--key-format") from None


def _carrier(url: str, header: str, member: str | None, marker: str, body: bytes) -> Carrier:
    if not _TOKEN.fullmatch(header):
        raise typer.BadParameter(f"{header!r} is no name of a header", param_hint="--key-header")
    name, _, value = marker.partition(":")
    if not _TOKEN.fullmatch(name.strip()):
        raise typer.BadParameter(
            f"{marker!r} is no header: write 'Name' or 'Name: value'", param_hint="--marker-header"
        )
    if member is not None and header != KEY:
        raise typer.BadParameter("the key is in a header or in the body, not in both", param_hint="--key-field")
    if member is not None and not isinstance(json.loads(body or b"null"), dict):
        raise typer.BadParameter("it needs a --body that is a JSON object", param_hint="--key-field")
    in_url = None if IN_URL not in url else Place.QUERY if IN_URL in url.partition("?")[2] else Place.PATH
    if in_url is not None and (member is not None or header != KEY):
        raise typer.BadParameter(f"the key is in the URL ({IN_URL}) already", param_hint="--key-field, --key-header")
    return Carrier(header, member, name.strip(), value.strip() or "true", in_url)


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


def _write_scripts(report: Report, folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise typer.BadParameter(f"{folder} cannot be made ({error.strerror})", param_hint="--scripts") from None
    for finding in (*report.failed, *report.known_findings, *report.advice):
        if isinstance(finding.verdict, Failed):
            lines = ["#!/usr/bin/env bash", f"# {finding.headline}", *script(report.target, finding.verdict.exchange)]
            _write("--scripts", folder / f"{finding.clause.id}.sh", "".join(f"{line}\n" for line in lines))


def _line(option: str, text: str, key_header: str) -> Header:
    name, colon, value = text.partition(":")
    if not colon or not name.strip() or not (text.isascii() and text.isprintable()):
        raise typer.BadParameter(f"{text!r} is no header: write 'Name: value'", param_hint=option)
    if name.strip().lower() == key_header.lower():
        raise typer.BadParameter("keys are made by the check itself: leave it out", param_hint=option)
    return name.strip(), value.strip()


def _with_media_type(lines: list[Header], body: str) -> tuple[Header, ...]:
    """The headers, with `application/json` for a body that has no media type; raises if that body is not JSON."""
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
    """The clause on a terminal; in the log of a pipeline a line for every tenth one."""
    if _is_terminal(sys.stderr):
        sys.stderr.write(f"\r\x1b[K{number}/{of} {clause.id}")
    elif number % 10 == 1:
        sys.stderr.write(f"{number}/{of} {clause.id}\n")
    sys.stderr.flush()


def _clear() -> None:
    if _is_terminal(sys.stderr):
        sys.stderr.write("\r\x1b[K")
        sys.stderr.flush()


def _print(report: Report, *, as_json: bool) -> None:
    if as_json:
        typer.echo(reports.to_json(report))
    elif _is_terminal(sys.stdout):
        _richly(report)
    else:
        typer.echo(reports.plain(report))


def _richly(report: Report) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console(highlight=False)
    for danger in reports.dangers(report):
        console.print(Text(f"{danger}\n", style="red" if report.failed else "yellow"), soft_wrap=True)
    for line in reports.further(report):
        console.print(Text(f"Also wrong: {line}", style="red"), soft_wrap=True)
    for area, lines in reports.rows(report):
        table = Table(
            "result", "clause", "", "", title=area.value, title_justify="left", title_style="bold", expand=True
        )
        for word, name, title, note in lines:
            table.add_row(Text(word, style=_STYLES[word]), Text(name), Text(title), Text(note, style="dim"))
        console.print(table)
    for line in reports.missing(report):
        console.print(Text(line, style="dim"), soft_wrap=True)
    console.print(Text(reports.run_line(report), style="dim"), soft_wrap=True)
    console.print(
        Text(reports.verdict_line(report), style="bold red" if report.failed else "bold green"), soft_wrap=True
    )
