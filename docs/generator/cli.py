"""`cli.md`: the `--help` of every command, and notes that the help does not contain."""

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
        "Install it with the extra `cli`: `pip install 'oncekey[cli]'`. An error is one line on standard error. The "
        "exit code is 0 on success."
    ),
    "oncekey check": (
        "It is part of the package `oncekey-check`, whose program `oncekey-check URL` takes the same options. "
        "[Check an API](../howto/check-an-api.md) shows how to use it, [Conformance clauses](conformance.md) lists its "
        "clauses. It writes the report to standard output and its progress to standard error."
    ),
    "oncekey client": (
        "It is part of the package `oncekey-client`, whose program `oncekey-client` (extra `cli`) has the same "
        "commands. "
        "Programs write the journal; see [Client](../howto/client.md). The command "
        "`resume` needs httpx."
    ),
    "oncekey demo": (
        "It creates its tables, starts a provider as a separate process, and prints requests to try. The default store "
        "and the provider's ledger are files in the working directory. Do not use it in production: its two tokens are "
        "public. It is part of the package `oncekey-demo`, whose program `oncekey-demo` takes the same options. "
        "`--traffic 30` sends requests for 30 seconds, at most 8 new keys per second, with faults of the provider and "
        "retries. Afterwards the console shows every outcome, including unknown outcomes and dead letters: with "
        "`--traffic`, workers attempt a message twice, and check an unknown outcome with the provider after half an "
        "hour. The demo prints the seed; `--seed` sends the same requests again, and a store that has them replays "
        "them."
    ),
    "oncekey provider": (
        "The payment provider of the demo. It recognises keys, and fails on request: send `X-Demo-Fault: drop-after` "
        "with a request, or `POST /faults` for all requests. `GET /charges` returns its ledger. It is part of the "
        "package `oncekey-demo`."
    ),
    "oncekey worker": "[Workers](../howto/workers.md) explains how to run it.",
    "oncekey torture": (
        "It is part of the package `oncekey-demo`. [Torture test](../howto/unit-tests.md#torture-test) explains its "
        "faults and its checks."
    ),
    "oncekey reconcile": "[Unknown outcomes](../howto/unknown.md) explains resolvers and webhooks.",
    "oncekey unknown": "[Unknown outcomes](../howto/unknown.md) explains how to settle them.",
    "oncekey migrate": (
        "Applications do not start if a `pre` migration is missing; see [PostgreSQL](../howto/postgresql.md)."
    ),
}
"""Notes that the help does not contain."""


def page() -> str:
    """The page."""
    parts = []
    for command in commands():
        parts += [f"## {command}", f"```text\n{help_of(command)}\n```"]
        if command in ALSO:
            parts.append(ALSO[command])
    return put_together(title("Command line"), *parts)


def commands() -> list[str]:
    """Every command and group, as typed on the command line."""
    return list(_walk("oncekey", typer.main.get_command(make_app())))


def help_of(command: str) -> str:
    """The help on a terminal with 80 columns."""
    _, *words = command.split()
    shown = CliRunner().invoke(make_app(), [*words, "--help"], prog_name="oncekey", env={"COLUMNS": "80"})
    return "\n".join(line.rstrip() for line in shown.output.strip().splitlines())


def _walk(path: str, command: Any) -> Iterator[str]:  # noqa: ANN401  (typer does not export the class of its commands)
    yield path
    if hasattr(command, "list_commands"):
        context = typer.Context(command)
        for name in command.list_commands(context):
            yield from _walk(f"{path} {name}", command.get_command(context, name))
