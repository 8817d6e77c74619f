"""The typer application. The module of a command is imported when the command runs, not for `--help`."""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from importlib import import_module
from importlib.util import find_spec
from types import MappingProxyType
from typing import Annotated, Any, Final

import typer
from typer.core import TyperGroup

COMMANDS: Final[Mapping[str, tuple[str, str]]] = MappingProxyType(
    {
        "audit": ("routes", "Find unprotected routes, for CI."),
        "check": ("oncekey-check", "Test an API's idempotency keys over HTTP."),
        "client": ("oncekey-client", "Inspect a client's journal, and finish interrupted requests."),
        "console": ("console", "Serve the operator console."),
        "demo": ("oncekey-demo", "Serve a small shop whose requests are safe to retry."),
        "dlq": ("dlq", "Inspect, retry and discard dead letters."),
        "doctor": ("doctor", "Check a store for problems."),
        "keys": ("keys", "Inspect keys, and resolve them by hand."),
        "migrate": ("stores", "Create and update oncekey's own tables."),
        "openapi": ("routes", "Print an OpenAPI document that includes idempotency keys."),
        "provider": ("oncekey-demo", "Serve a simulated payment provider with every failure mode."),
        "reap": ("upkeep", "Remove expired keys."),
        "reconcile": ("reconcile", "Resolve unknown outcomes; compare the provider's ledger."),
        "rekey": ("rekey", "Encrypt stored data with the current key."),
        "routes": ("routes", "List the state-changing routes, and how each is protected."),
        "stats": ("stats", "Count keys and pending work; --watch repeats it."),
        "stores": ("stores", "List the stores, installed drivers and capabilities."),
        "sweep": ("upkeep", "Release keys whose owner has died."),
        "torture": ("oncekey-demo", "Inject crashes and lost replies; check that nothing ran twice."),
        "unknown": ("reconcile", "List keys whose outcome is unknown."),
        "worker": ("worker", "Run the background tasks until SIGTERM."),
    }
)
"""Every command, with the module or distribution that registers it, and its line in `oncekey --help`."""

PROJECT: Final[dict[str, str]] = {}
"""The values of `--app` and `--store` in a Django project, whose `manage.py oncekey` sets them."""

MANAGE: Final = "manage.py oncekey"
_TYPED: Final = re.compile(
    rf"(?<!manage\.py )\boncekey ((?:{'|'.join(COMMANDS.keys() - {'stores'})})\b)"  # `stores` is mostly a verb
    r"(?: --app (?:MODULE:\w+|\.\.\.))?"
)

GROUP: Final = "oncekey.commands"
"""Entry point group of commands in other distributions: the command's name, and a module with `register(app)`."""


def as_typed(text: str) -> str:
    """A text for people, with the commands as they are typed here: in a Django project, those of `manage.py`."""
    return _TYPED.sub(rf"{MANAGE} \1", text) if PROJECT else text


class Commands(TyperGroup):
    """The commands by name: `--help` reads the table, and only the command that was typed is imported.

    The classes of click are `Any` here: some versions of typer bundle their own copy.
    """

    def list_commands(self, ctx: Any) -> list[str]:  # noqa: ARG002  (click's signature)
        """All names, sorted."""
        return list(COMMANDS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:  # noqa: ARG002  (click's signature)
        """The command with a name, from the module that registers it."""
        if cmd_name not in COMMANDS:
            return None
        module = _module_of(cmd_name)
        own = typer.Typer(rich_markup_mode=None)
        own.callback()(lambda: None)  # a group, however few commands the module has
        module.register(own)
        group: Any = typer.main.get_command(own)
        return _of_project(group.commands[cmd_name])

    def format_commands(self, ctx: Any, formatter: Any) -> None:  # noqa: ARG002  (click's signature)
        """Write the table of commands without importing any of them."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, _summary(name)) for name in COMMANDS])


def _summary(command: str) -> str:
    """The line of a command in `--help`; if its distribution is not installed, with the command that installs it."""
    place, summary = COMMANDS[command]
    missing = place.startswith("oncekey-") and find_spec(place.replace("-", "_")) is None
    return f"{summary} (pip install {place})" if missing else summary


def _of_project(command: Any) -> Any:
    """A command whose options have the project's values, if there is a project: no variable replaces them."""
    for option in command.params:
        if option.name in PROJECT:
            option.default, option.envvar = PROJECT[option.name], None
            option.required, option.show_default = False, "the project's"
    for below in getattr(command, "commands", {}).values():
        _of_project(below)
    return command


def _module_of(command: str) -> Any:
    """The module that registers a command; its distribution may not be installed."""
    place = COMMANDS[command][0]
    if not place.startswith("oncekey-"):
        return import_module(f"oncekey.cli.{place}")
    from importlib.metadata import entry_points

    for found in entry_points(group=GROUP, name=command):
        return found.load()
    sys.stderr.write(f"oncekey {command} is in another package: pip install {place}\n")
    raise SystemExit(2)


def make_app() -> typer.Typer:
    """All commands. Help is plain text: rich formatting would take three times as long."""
    app = typer.Typer(
        name="oncekey",
        cls=Commands,
        help="Make state-changing HTTP requests safe to retry.",
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
        rich_markup_mode=None,
    )
    app.callback()(_options)
    return app


def _options(
    context: typer.Context,
    *,
    log: Annotated[
        bool,
        typer.Option("--log", envvar="ONCEKEY_LOG", help="Log each event of the command to stderr, as a line of JSON."),
    ] = False,
    observe: Annotated[
        str | None,
        typer.Option(
            "--observe",
            envvar="ONCEKEY_OBSERVE",
            metavar="MODULE:NAME",
            help="Send the events of the command to the observers of this Once, or to this observer.",
        ),
    ] = None,
    show_version: Annotated[  # noqa: ARG001  (its callback prints it)
        bool,
        typer.Option(
            "--version", is_eager=True, callback=lambda asked: _version(asked=asked), help="Print the version."
        ),
    ] = False,
) -> None:
    """Make state-changing HTTP requests safe to retry."""
    if log or observe is not None:
        from oncekey.cli.applications import begin

        context.call_on_close(begin(log=log, observe=observe))


def _version(*, asked: bool) -> None:
    if asked:
        from importlib.metadata import version

        typer.echo(f"oncekey {version('oncekey')}")
        raise typer.Exit
