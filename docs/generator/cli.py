"""`cli.md`: what `--help` says of every command, and what it does not say."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

import typer
from typer.testing import CliRunner

from oncekey.cli.app import make_app

from .markdown import page as put_together
from .markdown import title

ALSO: Final[Mapping[str, str]] = {
    "oncekey": (
        "It comes with the extra `cli`: `pip install 'oncekey[cli]'`. A mistake is one line on standard error. The "
        "exit code is 0 when all is well."
    ),
    "oncekey check": (
        "It comes with the package `oncekey-check`, whose program `oncekey-check URL` takes the same options. "
        "[Check an API](../howto/check-an-api.md) shows how to use it, [Conformance clauses](conformance.md) lists "
        "what it tries. The report is on standard output, what it is doing on standard error."
    ),
    "oncekey client": (
        "It comes with the package `oncekey-client`, whose program `oncekey-client` (extra `cli`) has the same "
        "commands. "
        "A journal is written by programs; see [Send requests that happen once](../howto/client.md). The command "
        "`resume` needs httpx."
    ),
    "oncekey demo": (
        "It makes the tables that it needs, starts a provider as a process of its own, and prints requests to try. "
        "The files of the default store and of the provider's ledger are made in the working folder. It is for "
        "trying things out: its two tokens are public. It comes with the package `oncekey-demo`, whose program "
        "`oncekey-demo` takes the same options. `--traffic 30` sends it real "
        "requests for 30 seconds, at most 8 new keys per second, with faults of the provider and retries. "
        "Afterwards the console shows every outcome, unknown ones and dead letters included: with `--traffic`, "
        "workers try a message twice, and ask the provider about an unknown outcome after half an hour. The seed "
        "is printed; `--seed` sends the same requests again, which a store that has them replays."
    ),
    "oncekey provider": (
        "The payment provider of the demo, which recognises keys and fails by name: a request brings "
        "`X-Demo-Fault: drop-after`, or `POST /faults` sets it for all. `GET /charges` is its ledger. It comes with "
        "the package `oncekey-demo`."
    ),
    "oncekey worker": "[Workers](../howto/workers.md) shows how to use it.",
    "oncekey torture": (
        "It is part of the package `oncekey-demo`. [Torture test](../howto/unit-tests.md#torture-test) explains its "
        "faults and its checks."
    ),
    "oncekey reconcile": "[Find out what became of it](../howto/unknown.md) shows resolvers and webhooks.",
    "oncekey unknown": "[Unknown outcomes](../howto/unknown.md) explains how to settle them.",
    "oncekey migrate": (
        "Applications do not start on a store that lacks a `pre` migration; see "
        "[PostgreSQL in production](../howto/postgresql.md)."
    ),
}
"""What the help does not say."""


def page() -> str:
    """The page."""
    parts = []
    for command in commands():
        parts += [f"## {command}", f"```text\n{help_of(command)}\n```"]
        if command in ALSO:
            parts.append(ALSO[command])
    return put_together(title("Command line"), *parts)


def commands() -> list[str]:
    """Every command and group by what one types for it."""
    return list(_walk("oncekey", typer.main.get_command(make_app())))


def help_of(command: str) -> str:
    """The help, as it is on a terminal of 80 columns."""
    _, *words = command.split()
    shown = CliRunner().invoke(make_app(), [*words, "--help"], prog_name="oncekey", env={"COLUMNS": "80"})
    return "\n".join(line.rstrip() for line in shown.output.strip().splitlines())


def _walk(path: str, command: Any) -> Iterator[str]:  # noqa: ANN401  (typer keeps its commands' class to itself)
    yield path
    if hasattr(command, "list_commands"):
        context = typer.Context(command)
        for name in command.list_commands(context):
            yield from _walk(f"{path} {name}", command.get_command(context, name))
