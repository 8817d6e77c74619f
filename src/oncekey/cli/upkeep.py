"""`oncekey sweep`, `reap` and `rekey`: run the upkeep by hand, one round of it, or rounds until SIGTERM."""

from __future__ import annotations

import asyncio
import signal
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from oncekey.cli import observing, options
from oncekey.cli.printing import as_json as as_json_document
from oncekey.core.errors import ConfigurationError
from oncekey.core.policy import Policy
from oncekey.engine.operate import NOT_HERE
from oncekey.engine.rekey import PAGE, WALKS, Walked
from oncekey.flow import adrive
from oncekey.sealing import KEYS_VARIABLE, from_environment

if TYPE_CHECKING:
    from collections.abc import Callable

    from oncekey.engine.shell import AsyncEngine
    from oncekey.observe.events import Notify
    from oncekey.sealing import Seal
    from oncekey.workers.service import Task


Once = Annotated[bool, typer.Option("--once", help="Do what is due now, and exit; without it, go on until SIGTERM.")]
App = Annotated[
    str | None,
    typer.Option("--app", metavar="MODULE:NAME", help="Where the application's Once object is, for its policy."),
]


def register(app: typer.Typer) -> None:
    """Add the commands `sweep`, `reap` and `rekey`."""
    app.command("sweep")(sweep)
    app.command("reap")(reap)
    app.command("rekey")(rekey)


def sweep(store: options.StoreUrl, *, once: Once = False, app: App = None, as_json: options.AsJson = False) -> None:
    """Move keys whose owner did not come back to the state that their effects say. Runs no handler.

    LOCAL and resumable PHASED become retryable, everything that may have happened becomes unknown. A live lease is
    never touched. The sweeper moves nothing while the clocks disagree. Every move is logged and audited. `oncekey
    worker` does the same all the time.

    JSON, with --once: {"moved", "by": [{"operation", "to", "keys"}]}.
    """
    from oncekey.workers.sweeper import Sweeper

    policy, notify = _policy(app)

    def task(engine: AsyncEngine) -> Sweeper:
        if engine.store.upkeep is None:
            raise ConfigurationError(NOT_HERE)
        return Sweeper(engine.store.upkeep, engine.driver.run, policy, notify=notify)

    def shape(sweeper: Any, moved: int) -> dict[str, Any]:
        lines = [
            {"operation": operation, "to": to.value, "keys": count}
            for (operation, to), count in sorted(sweeper.counts.items())
        ]
        return {"moved": moved, "by": lines}

    _run(store, task, shape, only_once=once, json_wanted=as_json)


def reap(store: options.StoreUrl, *, once: Once = False, app: App = None, as_json: options.AsJson = False) -> None:
    """Remove expired keys, 5 minutes after they have expired.

    Answers and failures are deleted, or marked if the policy keeps them; work that was begun and never finished becomes
    unknown; a deferred call that no worker ever took is answered with a time-out. What is in progress, unknown or a
    dead letter stays. Lines of the audit are deleted after their own time. Say --app, so that the application's own
    settings are used: without it the defaults are. `oncekey worker` does the same all the time.

    JSON, with --once: {"moved", "by": {"purged", "marked", "parked", "abandoned", "notes", "workers"}}.
    """
    from oncekey.workers.reaper import Reaper

    policy, notify = _policy(app)

    def task(engine: AsyncEngine) -> Reaper:
        if engine.store.upkeep is None:
            raise ConfigurationError(NOT_HERE)
        return Reaper(engine.store.upkeep, engine.store.audit, engine.driver.run, policy, notify=notify)

    def shape(reaper: Any, moved: int) -> dict[str, Any]:
        names = ("purged", "marked", "parked", "abandoned", "notes", "workers")
        return {"moved": moved, "by": {name: reaper.counts[name] for name in names}}

    _run(store, task, shape, only_once=once, json_wanted=as_json)


def _policy(app: str | None) -> tuple[Policy, Notify | None]:
    """The application's settings, and the function that sends events to its observers."""
    if app is None:
        return Policy(), observing.notify()
    from oncekey.cli.worker import load

    found = observing.joined(load(app))
    return found.policy, found.notify


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

    done = options.work(store, doing)
    if done is None:
        return
    if json_wanted:
        as_json_document(done)
        return
    typer.echo(f"{done['moved']} moved")
    lines = done["by"] if isinstance(done["by"], list) else [done["by"]]
    for line in lines:
        typer.echo("  " + ", ".join(f"{name} {value}" for name, value in line.items()))


NO_KEYS = f"there is no key to seal with: {KEYS_VARIABLE} has them, NAME:BASE64 of 32 bytes, the current one first"
_LEFT = 1


def rekey(
    store: options.StoreUrl,
    *,
    batch: Annotated[int, typer.Option(min=1, max=10_000, help="How many records are read at once.")] = PAGE,
    as_json: options.AsJson = False,
) -> None:
    """Seal all stored content under the current key, while the application runs; it may be interrupted and begun again.

    The keys are in ONCEKEY_SEAL_KEYS, the current one first: k2:BASE64,k1:BASE64. Give every process the new key before
    that, and take the old one away when `oncekey doctor` names it no longer. Content that was never sealed is sealed.
    Records of requests in progress are left: run the command again when they have ended.

    JSON: {"looked", "resealed", "owned", "closed", "moved"}. Exit code: 0 nothing was left, 1 some was, 2 a mistake
    or no store.
    """
    seal = from_environment()
    if seal is None:
        raise ConfigurationError(NO_KEYS)

    async def doing(engine: AsyncEngine) -> Walked:
        return await _walk(engine, seal, batch, quiet=as_json)

    done = options.work(store, doing)
    left = done.owned + done.closed + done.moved
    if as_json:
        as_json_document(asdict(done))
    else:
        typer.echo(f"{done.looked} looked at, {done.resealed} sealed under {seal.current}.")
        for count, why in (
            (done.owned, "a request or a worker is at work on: run it again when they have ended"),
            (done.moved, "changed just then: run it again"),
            (done.closed, "did not open: their key is not among those in " + KEYS_VARIABLE),
        ):
            if count:
                typer.echo(f"{count} left, which {why}.")
    raise typer.Exit(_LEFT if left else 0)


async def _walk(engine: AsyncEngine, seal: Seal, batch: int, *, quiet: bool) -> Walked:
    done = Walked()
    for walk in WALKS:
        after: Any = None
        while True:
            stop = await adrive(walk(engine.store, seal, after, batch), engine.driver.run)
            done += stop.walked
            after = stop.after
            if after is None:
                break
            if not quiet:
                typer.echo(f"{done.looked} looked at, {done.resealed} sealed", err=True)
    return done
