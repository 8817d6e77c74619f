"""`oncekey torture`: injects faults into servers and workers on this machine, and checks all records afterwards."""

from __future__ import annotations

import asyncio
import json
import secrets
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from oncekey_demo.torture.plan import Plan
    from oncekey_demo.torture.running import Outcome, RunProgress, Watch

VIOLATED = 1


def register(app: typer.Typer) -> None:
    """Add the command `torture`."""
    app.command("torture")(torture)


def torture(  # noqa: PLR0917  (typer reads the parameters)
    store: Annotated[
        str,
        typer.Option(
            help="An empty store for this run: sqlite:///torture.db, or a server: postgresql://…@127.0.0.1/scratch.",
            metavar="URL",
        ),
    ],
    seconds: Annotated[float, typer.Option(help="Seconds with faults; recovery and checks take more.")] = 30.0,
    seed: Annotated[int | None, typer.Option(help="Decides requests and faults. [default: random]")] = None,
    servers: Annotated[int, typer.Option(help="Server processes.")] = 2,
    workers: Annotated[int, typer.Option(help="Worker processes.")] = 2,
    clients: Annotated[int, typer.Option(help="Clients, each with one key at a time.")] = 8,
    allow_existing: Annotated[
        bool, typer.Option("--allow-existing", help="Use a store with other records; they are not changed.")
    ] = False,
    keep: Annotated[bool, typer.Option("--keep", help="Leave records and tables in the store afterwards.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    shop: Annotated[str | None, typer.Option("--shop", hidden=True, metavar="MODULE")] = None,
) -> None:
    """Run servers, workers and a provider under faults, and check that every request was executed once.

    Processes are killed and stopped, and their replies are lost. Everything runs on this machine and ends with the
    command. Exit code 1: a guarantee was violated.
    """
    from oncekey_demo.torture.plan import SHOP, Plan
    from oncekey_demo.torture.running import torture as run

    plan = Plan(
        store=store,
        seconds=seconds,
        seed=secrets.randbelow(1_000_000) if seed is None else seed,
        servers=servers,
        workers=workers,
        clients=clients,
        allow_existing=allow_existing,
        keep=keep,
        shop=shop or SHOP,
    )
    with _watching(plan, quiet=as_json) as watch:
        outcome = asyncio.run(_until_terminated(run(plan, watch)))
    if as_json:
        typer.echo(json.dumps(outcome.document(), indent=2))
    else:
        _show(outcome)
    if not outcome.clean:
        raise typer.Exit(VIOLATED)


async def _until_terminated(work: Any) -> Any:
    """Cancel the run on SIGTERM, too, so that it ends every process that it started."""
    task = asyncio.ensure_future(work)
    with suppress(NotImplementedError):
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    return await task


@contextmanager
def _watching(plan: Plan, *, quiet: bool) -> Iterator[Watch]:
    """Show the progress: a bar on a terminal, otherwise a line per stage; nothing with --json."""
    if quiet or not sys.stderr.isatty():
        yield _lines(plan, quiet=quiet)
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (
        TextColumn("[bold]{task.description}"),
        BarColumn(),
        TextColumn("{task.fields[keys]} keys, {task.fields[requests]} requests, {task.fields[faults]} faults"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("starting", total=1.0, keys=0, requests=0, faults=0)

        def show(look: RunProgress) -> None:
            bar.update(
                task,
                description=look.stage.value,
                completed=look.share,
                keys=look.keys,
                requests=look.requests,
                faults=look.faults,
            )

        yield show


def _lines(plan: Plan, *, quiet: bool) -> Watch:
    announced: set[str] = set()

    def show(look: RunProgress) -> None:
        if not quiet and look.stage.value not in announced:
            announced.add(look.stage.value)
            print(f"seed {plan.seed}: {look.stage.value} ({look.keys} keys, {look.faults} faults)", file=sys.stderr)

    return show


def _show(outcome: Outcome) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console(highlight=False)
    table = Table(title=f"oncekey torture: {outcome.plan.shown}, seed {outcome.plan.seed}", show_header=False)
    table.add_column(style="bold")
    table.add_column(justify="right")
    rows: list[tuple[str, object]] = [
        ("keys", outcome.keys),
        ("requests", outcome.requests),
        *((f"  response {name}", count) for name, count in outcome.answers.items()),
        ("crashes (kill -9)", outcome.crashes),
        ("pauses past the lease", outcome.pauses),
        ("ambiguous commits", outcome.ambiguous_commits),
        *((f"  {name}", count) for name, count in outcome.faults.items()),
        ("resumed by another process", outcome.resumed),
        ("messages delivered again", outcome.delivered_again),
        *((f"  records {name}", count) for name, count in outcome.states.items()),
        ("charges in the ledger", outcome.charges),
        ("unknown", outcome.unknown),
        ("seconds", f"{outcome.seconds:.0f}"),
    ]
    for name, value in rows:
        table.add_row(name, str(value))
    table.add_section()
    for name, count in (("duplicates", outcome.duplicates), ("lost", outcome.lost)):
        style = "bold red" if count else "bold green"
        table.add_row(Text(name, style=style), Text(str(count), style=style))
    table.add_row("violations", str(len(outcome.findings)))
    table.add_row("seed", str(outcome.plan.seed))
    console.print(table)
    for finding in outcome.findings:
        console.print(Text(f"{finding.rule}: key {finding.key}: {finding.sentence}", style="red"), soft_wrap=True)
    for key, story in outcome.stories.items():
        console.print(Text(f"\nHistory of {key}:", style="bold"))
        for line in story:
            console.print(Text(f"  {line}"), soft_wrap=True)
    console.print(Text(f"\nRepeat: {outcome.plan.command}"), soft_wrap=True)
