"""`oncekey worker` runs an application's background tasks."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
from inspect import cleandoc
from typing import TYPE_CHECKING, Annotated, Final

import typer

from oncekey.cli import applications, printing
from oncekey.core.errors import ConfigurationError
from oncekey.observe.measuring import MetricsPage
from oncekey.ops.tasks import TASKS
from oncekey.wire import called
from oncekey.workers.calling import ABANDONED
from oncekey.workers.health import Metrics
from oncekey.workers.health import health as serve_health
from oncekey.workers.relay import CONCURRENCY
from oncekey.workers.service import GRACE, Service, Task
from oncekey.workers.tasks import Wanted, chosen, presence_of, tasks_for

if TYPE_CHECKING:
    from collections.abc import Callable

    from oncekey.once import Once

SIGNALS = (signal.SIGTERM, signal.SIGINT)
NOTHING_TO_DO = "nothing to do: the application has no topics, phases or resolvers for these tasks"


HELP: Final = cleandoc(
    f"""Run the background tasks until SIGTERM or SIGINT, each on its own schedule.

    {"; ".join(f"{task.name} {task.does}" for task in TASKS)}. Run as many workers as you like: each is registered in
    the store while it runs, and `oncekey doctor` checks it there.

    Exit code: 0 stopped, or with --once nothing failed; 1 with --once a task failed (see the log); 2 a usage error, or
    no store.
    """
)


def register(app: typer.Typer) -> None:
    """Add the command `worker`."""
    app.command("worker", help=HELP)(worker)


def worker(
    app: Annotated[str, typer.Option("--app", metavar="MODULE:NAME", help="The application's Once object.")],
    *,
    topics: Annotated[
        str | None, typer.Option("--topics", metavar="A,B", help="Only these topics. [default: all]")
    ] = None,
    concurrency: Annotated[
        int, typer.Option("--concurrency", min=1, help="Simultaneous calls and messages.")
    ] = CONCURRENCY,
    grace: Annotated[float, typer.Option("--grace", min=0, help="Seconds for open calls to finish at a stop.")] = GRACE,
    only: Annotated[str | None, typer.Option("--only", metavar="A,B", help="Only these tasks.")] = None,
    without: Annotated[str | None, typer.Option("--without", metavar="A,B", help="All tasks but these.")] = None,
    health: Annotated[
        str | None,
        typer.Option("--health", metavar="HOST:PORT", help=("Serve /healthz, /readyz and /metrics on this port.")),
    ] = None,
    once: Annotated[bool, typer.Option("--once", help="Run until nothing is due, and exit.")] = False,
) -> None:
    """Run the tasks of an application."""
    found = applications.joined(applications.load(app))
    wanted = chosen(only, without)
    applications.log_plainly()
    names = None if topics is None else tuple(name.strip() for name in topics.split(",") if name.strip())

    def tasks() -> list[Task]:
        return tasks_for(found, Wanted(wanted, names, concurrency))

    well = asyncio.run(_serve(found, tasks, grace, health, app, only_once=once))
    if ABANDONED:
        # A function that swallows every exception would keep the interpreter from exiting.
        sys.stdout.flush()
        logging.shutdown()
        os._exit(0 if well else 1)
    if not well:
        raise typer.Exit(1)


async def _serve(
    once: Once, make_tasks: Callable[[], list[Task]], grace: float, address: str | None, app: str, *, only_once: bool
) -> bool:
    """Run the tasks until a signal, or with --once until nothing is due; False if a task failed."""
    await once.start()
    try:
        tasks = make_tasks()
        if not tasks:
            raise ConfigurationError(NOTHING_TO_DO)
        presence = None if only_once else presence_of(once, tasks)
        service = Service(tasks, presence=presence, grace=grace, notify=once.notify)
        typer.echo(f"oncekey worker{'' if presence is None else f' {presence.who}'}: {app} on {_place(once)}")
        for task in tasks:
            typer.echo(f"  {task.name:10}  {_schedule(task, only_once=only_once)}".rstrip())
        if only_once:
            did = await service.once()
            failed = f", {did.failed} failed: see the log" if did.failed else ""
            typer.echo(f"{did.done} done{failed}")
            return did.failed == 0
        loop = asyncio.get_running_loop()
        for number in SIGNALS:
            loop.add_signal_handler(number, service.stop)
        async with serve_health(service, address, _metrics(once)) as port:
            if port is not None:
                typer.echo(f"health on port {port}")
            await service.run()
        return True
    finally:
        await once.stop()


def _metrics(once: Once) -> Metrics | None:
    """The metrics page of the first observer that has one."""
    observers: tuple[object, ...] = once.observers
    shown = next((one for one in observers if isinstance(one, MetricsPage)), None)
    if shown is None:
        return None

    async def page() -> tuple[str, bytes]:
        return shown.content_type, await shown.page(once)

    return page


def _place(once: Once) -> str:
    """The store's URL, without its password."""
    return printing.address(called(once.store))


def _schedule(task: Task, *, only_once: bool) -> str:
    """How often a task runs."""
    pace = task.pace
    often = f"every {pace.longest:g} s" if pace.fixed else f"every {pace.shortest:g} to {pace.longest:g} s"
    return "; ".join(part for part in ("" if only_once else often, task.about) if part)
