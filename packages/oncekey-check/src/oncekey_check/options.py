"""The options of `oncekey-check`. A TOML file can set them too, so that a pipeline needs one short command."""

from __future__ import annotations

import argparse
import os
import re
import tomllib
from collections.abc import Callable, Iterator, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final

from oncekey_check import CheckProfile
from oncekey_check.carrier import KEY, MARKER

DESCRIPTION: Final = """\
Test an API's idempotency keys. Only use it on an API that you are allowed to test.

It sends a few hundred real requests, each of which may have a real effect: use a
test environment. In a body, {{uuid}}, {{key}} and "{{n}}" become different values for
each key, for fields that must be unique; in the URL, {{key}} becomes the key.

Exit code 0: no clause of the profile failed; 1: at least one failed; 2: the API could
not be checked, or not completely; 130: interrupted. Reports are always written, with
the results so far.

oncekey-check http://127.0.0.1:8000/orders --body @order.json -H 'Authorization: Bearer demo-alpha'
"""
_VARIABLE: Final = re.compile(r"\$\{([A-Za-z_][A-Za-z0-9_]*)\}")
_OWN: Final = frozenset({"config", "help", "version"})


class BadOptionError(Exception):
    """An invalid value; the program exits with code 2."""

    def __init__(self, message: str, option: str = "") -> None:
        super().__init__(f"{option}: {message}" if option else message)


class _Help(argparse.RawDescriptionHelpFormatter):
    """Shows an option's value once after its names, in every version of Python."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=30)

    def _format_action_invocation(self, action: argparse.Action) -> str:
        if not action.option_strings:
            return super()._format_action_invocation(action)
        value = f" {action.metavar}" if action.metavar and action.nargs != 0 else ""
        return ", ".join(action.option_strings) + value


def _seconds(least: float, most: float | None = None) -> Callable[[str], float]:
    def seconds(text: str) -> float:
        value = float(text)
        if value < least or (most is not None and value > most):
            bounds = f"{least:g} or more" if most is None else f"from {least:g} to {most:g}"
            raise argparse.ArgumentTypeError(f"{text} is not {bounds}")
        return value

    return seconds


def _profile(text: str) -> CheckProfile:
    if text not in list(CheckProfile):
        raise argparse.ArgumentTypeError(f"{text!r} is not one of {', '.join(map(repr, map(str, CheckProfile)))}")
    return CheckProfile(text)


def _names(text: str) -> list[str]:
    """The names in a comma-separated text. An empty text is an unknown name, so that it does not select everything."""
    return [name for part in text.split(",") if (name := part.strip())] or [text]


def parser(prog: str) -> argparse.ArgumentParser:
    """All options."""
    made = argparse.ArgumentParser(
        prog=prog,
        usage="%(prog)s [OPTIONS] [URL]",
        description=DESCRIPTION,
        formatter_class=_Help,
        allow_abbrev=False,
    )
    add = made.add_argument
    add("url", nargs="?", metavar="URL", help="The operation's URL, such as https://api.example.com/orders.")
    add(
        "--body",
        metavar="TEXT|@FILE",
        default="{}",
        help="A body that the operation accepts; @FILE reads a file. [default: %(default)s]",
    )
    add("-H", "--header", action="append", metavar="HEADER", help="A header to send, 'Name: value'; repeatable.")
    add("--method", metavar="TEXT", default="POST", help="The operation's method. [default: %(default)s]")
    add(
        "--profile",
        type=_profile,
        metavar="|".join(CheckProfile),
        default=CheckProfile.IETF,
        help="The rules to judge by: the IETF draft, Stripe's behaviour, the same with 409 for another body, or the "
        "strictest choice for APIs that move money. [default: %(default)s]",
    )
    add(
        "--key-header",
        metavar="TEXT",
        default=KEY,
        help="The header in which this API expects the key. [default: %(default)s]",
    )
    add("--key-field", metavar="NAME", help="The member of the JSON body that contains the key, instead of a header.")
    add(
        "--marker-header",
        metavar="TEXT",
        default=MARKER,
        help="The header that marks a replay: 'Name', or 'Name: value' if it is not 'true'. [default: %(default)s]",
    )
    add(
        "--count-url",
        metavar="URL",
        help=("A URL that returns the number of effects as JSON, so that 'once' can be observed."),
    )
    add(
        "--count-pointer",
        metavar="TEXT",
        default="",
        help="The JSON pointer to the number or list in the response of --count-url, such as /total. Empty: the whole "
        "document.",
    )
    add(
        "--other-tenant-header",
        action="append",
        metavar="HEADER",
        help="The header that identifies the caller as another tenant; repeatable.",
    )
    add(
        "--same-caller-header",
        action="append",
        metavar="HEADER",
        help="Other credentials of the same caller, such as a renewed token; repeatable.",
    )
    add("--slow-header", metavar="HEADER", help="A header that makes the operation slow, so that requests overlap.")
    add("--fail-header", metavar="HEADER", help="A header that makes the operation fail with 5xx.")
    add("--large-header", metavar="HEADER", help="A header that makes the response larger than 64 KiB.")
    add(
        "--other-body",
        metavar="TEXT|@FILE",
        help="Another body that the operation accepts. [default: --body with a number or text changed]",
    )
    add("--invalid-body", metavar="TEXT|@FILE", help="A body that is refused. [default: --body, made invalid]")
    add(
        "--declined-body",
        metavar="TEXT|@FILE",
        help=("A body that is refused permanently with 4xx, such as a declined card."),
    )
    add("--other-url", metavar="URL", help="Another operation with keys that accepts the same body.")
    add("--also-url", metavar="URL", help="The same operation on a second instance of the API.")
    add("--openapi", metavar="URL", help="The OpenAPI description, if it is not at /openapi.json.")
    add(
        "--lease",
        type=_seconds(0.1, 300),
        metavar="SECONDS",
        help="The API's lease in seconds. The number in --slow-header is changed to make a request run longer.",
    )
    add(
        "--crash-command",
        metavar="COMMAND",
        help="A command that kills the server with SIGKILL and restarts it; run without a shell.",
    )
    add(
        "--store-down-command",
        metavar="COMMAND",
        help="A command that stops the store of the keys; run without a shell.",
    )
    add("--store-up-command", metavar="COMMAND", help="The command that starts the store again.")
    add(
        "--command-limit",
        type=_seconds(1, 600),
        metavar="SECONDS",
        default=60.0,
        help="Seconds that a command, and the restart of the server, may take. [default: %(default)s]",
    )
    add("--cacert", type=Path, metavar="FILE", help="Certificates to trust instead of the system's, as PEM.")
    add(
        "--key-format",
        metavar="TEXT",
        default="{{uuid}}",
        help="The format of the keys that the API accepts, with {{uuid}}, {{hex:N}} or {{digits:N}} in it. [default: "
        "%(default)s]",
    )
    add("--key-optional", action="store_true", help="Keys are optional by design.")
    add("--unsafe-methods", dest="unothers", action="store_true", help="Also send PUT and DELETE to the URL.")
    add(
        "--only",
        action="extend",
        type=_names,
        metavar="A,B",
        help="Only these clauses, with commas between them: ids, areas such as races, or patterns. Repeatable.",
    )
    add(
        "--skip",
        action="extend",
        type=_names,
        metavar="A,B",
        help="Skip these clauses, with commas between them. Repeatable.",
    )
    add(
        "--list",
        dest="show_list",
        action="store_true",
        help=("List the clauses and their requirements, and send nothing."),
    )
    add(
        "--patience",
        type=_seconds(0.1, 600),
        metavar="SECONDS",
        default=15.0,
        help="Seconds within which an abandoned request must end. [default: %(default)s]",
    )
    add(
        "--timeout",
        type=_seconds(0.1, 600),
        metavar="SECONDS",
        default=30.0,
        help="Seconds to wait for one response. [default: %(default)s]",
    )
    add(
        "--time-limit",
        type=_seconds(1),
        metavar="SECONDS",
        default=600.0,
        help="Seconds after which no further clause is started. [default: %(default)s]",
    )
    add("--json", dest="as_json", action="store_true", help="Print the report as JSON.")
    add("--junit", type=Path, metavar="FILE", help="Write the report as JUnit XML, for continuous integration.")
    add("--sarif", type=Path, metavar="FILE", help="Write the findings as SARIF, for a code host.")
    add("--html", type=Path, metavar="FILE", help="Write the report as one HTML page.")
    add(
        "--scripts",
        type=Path,
        metavar="FOLDER",
        help="Write a script that reproduces each finding to this folder.",
    )
    add("--baseline", type=Path, metavar="FILE", help="Known findings: the exit code is 1 only for new or worse ones.")
    add("--write-baseline", type=Path, metavar="FILE", help="Write the findings of this run as a baseline.")
    add(
        "--config",
        type=Path,
        metavar="FILE",
        help="A TOML file with any of these options, such as count-url = '…'. The command line overrides it.",
    )
    add("--version", action="version", version=f"oncekey-check {version('oncekey-check')}", help="Print the version.")
    return made


def parsed(words: list[str], prog: str) -> argparse.Namespace:
    """The options of the command line, and of the file that it names; exits with code 2 if one is wrong."""
    made = parser(prog)
    given = made.parse_args(words)
    if given.config is None:
        return _filled_in(made, given)
    try:
        more = list(_words(made, given, _read(given.config)))
    except BadOptionError as error:
        made.error(f"--config: {error}")
    return _filled_in(made, made.parse_args([*more, *words]))


def _filled_in(made: argparse.ArgumentParser, given: argparse.Namespace) -> argparse.Namespace:
    """The options with an empty list for those that may be repeated and were not given."""
    for action in made._actions:  # noqa: SLF001  (argparse has no other list of them)
        if _repeats(action) and getattr(given, action.dest) is None:
            setattr(given, action.dest, [])
    return given


def _repeats(action: argparse.Action) -> bool:
    return isinstance(action, argparse._AppendAction)  # noqa: SLF001  (the class of "append", and base of "extend")


def _read(path: Path) -> Mapping[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise BadOptionError(f"{path} cannot be read ({error.strerror})") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise BadOptionError(f"{path} is not TOML: {error}") from None


def _words(made: argparse.ArgumentParser, given: argparse.Namespace, file: Mapping[str, Any]) -> Iterator[str]:
    """The values of the file as command-line arguments; a list on the real command line replaces that of the file."""
    actions = {
        max(action.option_strings or [action.dest], key=len).lstrip("-"): action
        for action in made._actions  # noqa: SLF001  (as above)
        if action.dest not in _OWN
    }
    for option, value in file.items():
        action = actions.get(option)
        if action is None:
            raise BadOptionError(f"no option {option!r}; the options are {', '.join(sorted(actions))}")
        if isinstance(value, dict) or (isinstance(value, list) and not _repeats(action)):
            raise BadOptionError(f"{option} takes one value")
        if not action.option_strings:
            if given.url is None:
                yield _filled(value)
        elif action.nargs == 0:
            if value is True:
                yield f"--{option}"
        elif not (_repeats(action) and getattr(given, action.dest) is not None):
            for one in value if isinstance(value, list) else [value]:
                yield f"--{option}={_filled(one)}"


def _filled(value: object) -> str:
    """The value with `${NAME}` taken from the environment: credentials do not belong in a file."""

    def taken(met: re.Match[str]) -> str:
        if met[1] not in os.environ:
            raise BadOptionError(f"the environment variable {met[1]} is not set")
        return os.environ[met[1]]

    return _VARIABLE.sub(taken, str(value))
