"""`oncekey sweep` and `oncekey reap`: one round of the upkeep, or rounds until told to stop."""

from __future__ import annotations

import asyncio
import signal
from typing import TYPE_CHECKING, Annotated, Any

import typer

from oncekey.cli import desk, observing
from oncekey.cli.printing import as_json as as_json_document
from oncekey.core.errors import ConfigurationError
from oncekey.core.policy import Policy
from oncekey.engine.operate import NOT_HERE

if TYPE_CHECKING:
    from collections.abc import Callable

    from oncekey.engine.shell import AsyncEngine
    from oncekey.observe.events import Tell
    from oncekey.workers.service import Task

Once = Annotated[bool, typer.Option("--once", help="Do what is due now, and exit; without it, go on until SIGTERM.")]
App = Annotated[
    str | None,
    typer.Option("--app", metavar="MODULE:NAME", help="Where the application's Once object is, for its policy."),
]


def register(app: typer.Typer) -> None:
    """Add the commands `sweep` and `reap`."""
    app.command("sweep")(sweep)
    app.command("reap")(reap)


def sweep(store: desk.StoreUrl, *, once: Once = False, app: App = None, as_json: desk.AsJson = False) -> None:
    """Move keys whose owner did not come back where their own effects say. Runs no handler.

    LOCAL and resumable PHASED become retryable, everything that may have happened becomes unknown. A live lease is
    never touched; it stands still if the clocks disagree. Every move is logged and audited. `oncekey worker` does the
    same all the time.

    JSON, with --once: {"moved", "by": [{"operation", "to", "keys"}]}.
    """
    from oncekey.workers.sweeper import Sweeper

    policy, tell = _policy(app)

    def task(engine: AsyncEngine) -> Sweeper:
        if engine.store.upkeep is None:
            raise ConfigurationError(NOT_HERE)
        return Sweeper(engine.store.upkeep, engine.driver.run, policy, tell=tell)

    def shape(sweeper: Any, moved: int) -> dict[str, Any]:
        lines = [
            {"operation": operation, "to": to.value, "keys": count}
            for (operation, to), count in sorted(sweeper.counts.items())
        ]
        return {"moved": moved, "by": lines}

    _run(store, task, shape, only_once=once, json_wanted=as_json)


def reap(store: desk.StoreUrl, *, once: Once = False, app: App = None, as_json: desk.AsJson = False) -> None:
    """End keys whose time is over, 5 minutes after it.

    Answers and failures are deleted, or marked where the policy keeps them; work that was begun and never gone on with
    becomes unknown; a deferred call that no worker ever took is answered with a time-out. What is in progress, unknown
    or a dead letter stays. Lines of the audit go after their own time. Say --app, so that the application's own
    settings are used: without it the defaults are. `oncekey worker` does the same all the time.

    JSON, with --once: {"moved", "by": {"purged", "marked", "parked", "abandoned", "notes", "workers"}}.
    """
    from oncekey.workers.reaper import Reaper

    policy, tell = _policy(app)

    def task(engine: AsyncEngine) -> Reaper:
        if engine.store.upkeep is None:
            raise ConfigurationError(NOT_HERE)
        return Reaper(engine.store.upkeep, engine.store.audit, engine.driver.run, policy, tell=tell)

    def shape(reaper: Any, moved: int) -> dict[str, Any]:
        names = ("purged", "marked", "parked", "abandoned", "notes", "workers")
        return {"moved": moved, "by": {name: reaper.counts[name] for name in names}}

    _run(store, task, shape, only_once=once, json_wanted=as_json)


def _policy(app: str | None) -> tuple[Policy, Tell | None]:
    """The application's settings, and what tells its observers."""
    if app is None:
        return Policy(), observing.tell()
    from oncekey.cli.worker import load

    found = observing.joined(load(app))
    return found.policy, found.tell


def _run(
    store: str,
    make: Callable[[AsyncEngine], Task],
    shape: Callable[[Any, int], dict[str, Any]],
    *,
    only_once: bool,
    json_wanted: bool,
) -> None:
    from oncekey.workers.service import Service

    observing.log_plainly()

    async def doing(engine: AsyncEngine) -> dict[str, Any] | None:
        task = make(engine)
        if only_once:
            return shape(task, await task.run_once())
        service = Service([task])
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, service.stop)
        await service.run()
        return None

    done = desk.work(store, doing)
    if done is None:
        return
    if json_wanted:
        as_json_document(done)
        return
    typer.echo(f"{done['moved']} moved")
    lines = done["by"] if isinstance(done["by"], list) else [done["by"]]
    for line in lines:
        typer.echo("  " + ", ".join(f"{name} {value}" for name, value in line.items()))
