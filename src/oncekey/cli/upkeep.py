"""`oncekey sweep` and `oncekey reap` run the sweeper or the reaper: one round, or rounds until SIGTERM."""

from __future__ import annotations

import asyncio
import signal
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from oncekey.cli import applications, options, printing
from oncekey.core.errors import ConfigurationError
from oncekey.core.policy import Policy
from oncekey.engine.operate import NOT_HERE
from oncekey.workers.service import Service, Task
from oncekey.workers.tasks import reaper_of, sweeper_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from oncekey.engine.shell import AsyncEngine
    from oncekey.observe.events import Notify
    from oncekey.workers.upkeep import Reaper, Sweeper


T = TypeVar("T", bound=Task)


def register(app: typer.Typer) -> None:
    """Add the commands `sweep` and `reap`."""
    app.command("sweep")(sweep)
    app.command("reap")(reap)


App = Annotated[
    str | None,
    typer.Option("--app", metavar="MODULE:NAME", help="The application's Once object, for its policy."),
]


def sweep(
    store: options.StoreUrl, *, once: options.OnlyOnce = False, app: App = None, as_json: options.AsJson = False
) -> None:
    """Release keys whose owner has died: move them to the state that their effects require. Runs no handler.

    LOCAL and resumable PHASED become retryable; everything that may have been executed becomes unknown. A live lease is
    never touched. The sweeper moves nothing while the clocks disagree. Every move is logged and audited. `oncekey
    worker` does the same continuously.

    JSON, with --once: {"moved", "by": [{"operation", "to", "keys"}]}.
    """
    policy, notify = _policy(app)

    def task(engine: AsyncEngine) -> Sweeper | None:
        return sweeper_of(engine, policy, notify=notify)

    def shape(sweeper: Sweeper, moved: int) -> dict[str, Any]:
        lines = [
            {"operation": operation, "to": to.value, "keys": count}
            for (operation, to), count in sorted(sweeper.counts.items())
        ]
        return {"moved": moved, "by": lines}

    _run(store, task, shape, only_once=once, json_wanted=as_json)


def reap(
    store: options.StoreUrl, *, once: options.OnlyOnce = False, app: App = None, as_json: options.AsJson = False
) -> None:
    """Remove expired keys, 5 minutes after they have expired.

    Responses and failures are deleted, or marked if the policy keeps them; unfinished work becomes unknown; a deferred
    call that no worker ever took is completed with a timeout response. Keys in progress, unknown outcomes and dead
    letters stay. Audit entries are deleted after their own retention time. Pass --app to use the application's settings
    instead of the defaults. `oncekey worker` does the same continuously.

    JSON, with --once: {"moved", "by": {"purged", "marked", "parked", "abandoned", "notes", "workers"}}.
    """
    policy, notify = _policy(app)

    def task(engine: AsyncEngine) -> Reaper | None:
        return reaper_of(engine, policy, notify=notify)

    def shape(reaper: Reaper, moved: int) -> dict[str, Any]:
        names = ("purged", "marked", "parked", "abandoned", "notes", "workers")
        return {"moved": moved, "by": {name: reaper.counts[name] for name in names}}

    _run(store, task, shape, only_once=once, json_wanted=as_json)


def _policy(app: str | None) -> tuple[Policy, Notify | None]:
    """The application's settings, and the function that sends events to its observers."""
    if app is None:
        return Policy(), applications.notify()
    found = applications.joined(applications.load(app))
    return found.policy, found.notify


def _run(
    store: str,
    make: Callable[[AsyncEngine], T | None],
    shape: Callable[[T, int], dict[str, Any]],
    *,
    only_once: bool,
    json_wanted: bool,
) -> None:
    applications.log_plainly()

    async def doing(engine: AsyncEngine) -> dict[str, Any] | None:
        task = make(engine)
        if task is None:
            raise ConfigurationError(NOT_HERE)
        if only_once:
            return shape(task, await task.run_once())
        service = Service([task])
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, service.stop)
        await service.run()
        return None

    done = options.work(store, doing)
    if done is None:
        return
    if json_wanted:
        printing.as_json(done)
        return
    typer.echo(f"{done['moved']} moved")
    lines = done["by"] if isinstance(done["by"], list) else [done["by"]]
    for line in lines:
        typer.echo("  " + ", ".join(f"{name} {value}" for name, value in line.items()))
