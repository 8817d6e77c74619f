"""`oncekey-check URL` tests an API's idempotency keys.

If the library is also installed, the same command is `oncekey check`.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TextIO

from oncekey_check import Address, CheckReport, Clause, Failed, Target, check, chosen, options, planned, reports
from oncekey_check.carrier import IN_URL, KEY, BadKeyFormatError, Carrier, Header, KeyFormat, Place
from oncekey_check.errors import CheckError
from oncekey_check.running import BadBaselineError, Baseline, written
from oncekey_check.scripts import script

if TYPE_CHECKING:
    from argparse import Namespace


_INTERRUPTED: Final = 130
_TOKEN: Final = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
_COLOURS: Final = {
    "FAILED": "1;31",
    "advice": "33",
    "passed": "32",
    "allowed": "2;32",
    "skipped": "2",
    "undecided": "36",
    "known": "35",
}


def main() -> None:
    """Run the program `oncekey-check`."""
    raise SystemExit(run(sys.argv[1:], "oncekey-check", "oncekey-check"))


def register(app: Any) -> None:
    """Add the command `check` to the typer program `oncekey`; the options are parsed here."""
    import typer

    def check(context: Any) -> None:
        raise SystemExit(run(context.args, context.command_path, "oncekey"))

    check.__annotations__["context"] = typer.Context  # typer is not imported by this module
    passed_on = {"ignore_unknown_options": True, "allow_extra_args": True, "allow_interspersed_args": False}
    app.command("check", add_help_option=False, context_settings=passed_on)(check)


def run(words: list[str], prog: str, program: str) -> int:
    """Run the command with these arguments, and return its exit code; an error of the tester is one line."""
    given = options.parsed(words, prog)
    try:
        return check_url(given)
    except options.BadOptionError as error:
        options.parser(prog).error(str(error))
    except CheckError as error:
        print(f"{program}: {error}", file=sys.stderr)
        return 2


def check_url(given: Namespace) -> int:
    """Check the API of the options; returns the exit code."""
    clauses = chosen(given.only, given.skip)
    if given.show_list:
        _list(clauses)
        return 0
    if given.url is None:
        raise options.BadOptionError("the operation's URL is missing", option="URL")
    if (given.store_down_command is None) != (given.store_up_command is None):
        raise options.BadOptionError("the store must be stopped and started: pass both commands", option="--store-…")
    if given.lease is not None and given.timeout <= 2 * given.lease:
        raise options.BadOptionError(
            "a request that is slower than its lease needs a --timeout of more than two leases", option="--lease"
        )
    trusted = None if given.cacert is None else _readable("--cacert", given.cacert)

    def address(text: str | None) -> Address | None:
        return None if text is None else Address.parse(text, trusted)

    def optional(option: str, text: str | None) -> bytes | None:
        return None if text is None else _content(option, text)

    def line(option: str, text: str | None) -> Header | None:
        return None if text is None else _line(option, text, given.key_header)

    headers = _with_media_type([_line("--header", text, given.key_header) for text in given.header], given.body)
    sent = _content("--body", given.body)
    is_json = _is_json(sent) and "json" in dict(_lowered(headers)).get("content-type", "")
    target = Target(
        address=Address.parse(given.url, trusted),
        method=given.method.upper(),
        body=sent,
        headers=headers,
        is_json=is_json,
        other_body=optional("--other-body", given.other_body),
        invalid_body=optional("--invalid-body", given.invalid_body),
        declined_body=optional("--declined-body", given.declined_body),
        other_tenant=tuple(
            _line("--other-tenant-header", text, given.key_header) for text in given.other_tenant_header
        ),
        slow=line("--slow-header", given.slow_header),
        fail=line("--fail-header", given.fail_header),
        large=line("--large-header", given.large_header),
        count_address=address(given.count_url),
        count_pointer=given.count_pointer,
        openapi=address(given.openapi),
        other_address=address(given.other_url),
        also_address=address(given.also_url),
        lease=given.lease,
        crash_command=_command("--crash-command", given.crash_command),
        store_down_command=_command("--store-down-command", given.store_down_command),
        store_up_command=_command("--store-up-command", given.store_up_command),
        command_limit=given.command_limit,
        carrier=_carrier(given.url, given.key_header, given.key_field, given.marker_header, sent if is_json else b""),
        same_caller=tuple(_line("--same-caller-header", text, given.key_header) for text in given.same_caller_header),
        unothers=given.unothers,
        key_format=_key_format(given.key_format),
        key_optional=given.key_optional,
        patience=given.patience,
        timeout=given.timeout,
    )
    known = None if given.baseline is None else _baseline(given.baseline)
    print(f"{len(clauses)} clauses, about {planned(clauses, target)} requests to {target.address}", file=sys.stderr)
    report = check(target, profile=given.profile, clauses=clauses, time_limit=given.time_limit, progress=_progress)
    _clear()
    if known is not None:
        report = known.applied(report)
    wanted = (
        ("--write-baseline", given.write_baseline, written),
        ("--junit", given.junit, reports.to_junit),
        ("--sarif", given.sarif, reports.to_sarif),
        ("--html", given.html, reports.to_html),
    )
    for option, path, write in wanted:
        if path is not None:
            _write(option, path, write(report))
    if given.scripts is not None:
        _write_scripts(report, given.scripts)
    _print(report, as_json=given.as_json)
    for name in () if known is None else known.gone(report):
        print(f"{name} is in the baseline but passes now: update it with --write-baseline", file=sys.stderr)
    return _exit_code(report)


def _exit_code(report: CheckReport) -> int:
    if not report.stopped:
        return 1 if report.failed else 0
    print(f"the run stopped early: {report.stopped}", file=sys.stderr)
    return _INTERRUPTED if report.stopped.startswith("interrupted") else 2


def _list(clauses: tuple[Clause, ...]) -> None:
    lines = []
    for clause in clauses:
        needs = f"  (needs {', '.join(clause.needs)})" if clause.needs else ""
        lines.append(f"{clause.id:28} {clause.severity.name.lower():8} {clause.title}{needs}")
    _write_out("\n".join(lines))


def _baseline(path: Path) -> Baseline:
    try:
        return Baseline.parse(_content("--baseline", f"@{path}").decode("utf-8", "replace"))
    except BadBaselineError as error:
        raise options.BadOptionError(f"{path}: {error}", option="--baseline") from None


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
        raise options.BadOptionError(f"it cannot be split into words ({error})", option=option) from None
    if not words:
        raise options.BadOptionError("it is empty", option=option)
    return words


def _key_format(text: str) -> KeyFormat:
    try:
        return KeyFormat.parse(text)
    except BadKeyFormatError as error:
        raise options.BadOptionError(str(error), option="--key-format") from None


def _carrier(url: str, header: str, member: str | None, marker: str, body: bytes) -> Carrier:
    if not _TOKEN.fullmatch(header):
        raise options.BadOptionError(f"{header!r} is not a header name", option="--key-header")
    name, _, value = marker.partition(":")
    if not _TOKEN.fullmatch(name.strip()):
        raise options.BadOptionError(
            f"{marker!r} is not a header: write 'Name' or 'Name: value'", option="--marker-header"
        )
    if member is not None and header != KEY:
        raise options.BadOptionError(
            "the key is either in a header or in the body: pass one of the two options", option="--key-field"
        )
    if member is not None and not isinstance(json.loads(body or b"null"), dict):
        raise options.BadOptionError("it needs a --body that is a JSON object", option="--key-field")
    in_url = None if IN_URL not in url else Place.QUERY if IN_URL in url.partition("?")[2] else Place.PATH
    if in_url is not None and (member is not None or header != KEY):
        raise options.BadOptionError(f"the key is already in the URL ({IN_URL})", option="--key-field, --key-header")
    return Carrier(header, member, name.strip(), value.strip() or "true", in_url)


def _content(option: str, text: str) -> bytes:
    if not text.startswith("@"):
        return text.encode()
    try:
        return Path(text[1:]).read_bytes()
    except OSError as error:
        raise options.BadOptionError(f"{text[1:]} cannot be read ({error.strerror})", option=option) from None


def _write(option: str, path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise options.BadOptionError(f"{path} cannot be written ({error.strerror})", option=option) from None


def _write_scripts(report: CheckReport, folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise options.BadOptionError(f"{folder} cannot be created ({error.strerror})", option="--scripts") from None
    for finding in (*report.failed, *report.known_findings, *report.advice):
        if isinstance(finding.verdict, Failed):
            lines = ["#!/usr/bin/env bash", f"# {finding.headline}", *script(report.target, finding.verdict.exchange)]
            _write("--scripts", folder / f"{finding.clause.id}.sh", "".join(f"{line}\n" for line in lines))


def _line(option: str, text: str, key_header: str) -> Header:
    name, colon, value = text.partition(":")
    if not colon or not name.strip() or not (text.isascii() and text.isprintable()):
        raise options.BadOptionError(f"{text!r} is not a header: write 'Name: value'", option=option)
    if name.strip().lower() == key_header.lower():
        raise options.BadOptionError("the check creates its own keys: remove it", option=option)
    return name.strip(), value.strip()


def _with_media_type(lines: list[Header], body: str) -> tuple[Header, ...]:
    """The headers, with `application/json` for a body without a media type; raises if that body is not JSON."""
    if any(name.lower() == "content-type" for name, _ in lines):
        return tuple(lines)
    if not _is_json(_content("--body", body)):
        raise options.BadOptionError(
            "the body is not JSON: correct it, or set its media type with --header 'Content-Type: …'", option="--body"
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
    """Show the current clause on a terminal; print every tenth one to the log of a pipeline."""
    if _is_terminal(sys.stderr):
        sys.stderr.write(f"\r\x1b[K{number}/{of} {clause.id}")
    elif number % 10 == 1:
        sys.stderr.write(f"{number}/{of} {clause.id}\n")
    sys.stderr.flush()


def _clear() -> None:
    if _is_terminal(sys.stderr):
        sys.stderr.write("\r\x1b[K")
        sys.stderr.flush()


def _print(report: CheckReport, *, as_json: bool) -> None:
    if as_json:
        _write_out(reports.to_json(report))
    elif _is_terminal(sys.stdout):
        _write_out(_coloured(report))
    else:
        _write_out(reports.plain(report))


def _write_out(text: str) -> None:
    """Print a text. A reader such as `head` may close the pipe: the exit code remains that of the run."""
    try:
        print(text, flush=True)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or Python would report it when it exits


def _coloured(report: CheckReport) -> str:
    """The report for a terminal: results in colour, and the verdict last."""
    colour = "31" if report.failed else "33"
    lines = [f"{_painted(danger, colour)}\n" for danger in reports.dangers(report)]
    if others := reports.further(report):
        lines += [_painted("Also wrong", "31"), *(_painted(f"  {line}", "31") for line in others)]
    for area, table in reports.rows(report):
        lines += ["", _painted(area.value, "1")]
        for word, name, title, note in table:
            more = f" {_painted(f'({note})', '2')}" if note else ""
            lines.append(f"  {_painted(f'{word:9}', _COLOURS[word])} {name:26} {title}{more}")
    lines += ["", *(_painted(line, "2") for line in (*reports.missing(report), reports.run_line(report)))]
    return "\n".join([*lines, _painted(reports.verdict_line(report), "1;31" if report.failed else "1;32")])


def _painted(text: str, colour: str) -> str:
    plain = "NO_COLOR" in os.environ or os.environ.get("TERM") == "dumb"
    return text if plain else f"\x1b[{colour}m{text}\x1b[0m"
