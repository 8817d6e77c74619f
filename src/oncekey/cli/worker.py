"""`oncekey worker` runs the tasks that do the work behind an application's requests.

`oncekey sweep`, `reap` and `rekey` run the upkeep by hand: one round of it, or rounds until SIGTERM.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from oncekey.cli import applications, options, printing
from oncekey.core.errors import ConfigurationError
from oncekey.core.policy import Policy
from oncekey.engine.operate import NOT_HERE
from oncekey.engine.upkeep import PAGE, WALKS, Walked
from oncekey.flow import adrive
from oncekey.observe.measuring import MetricsPage
from oncekey.sealing import KEYS_VARIABLE, Seal, from_environment
from oncekey.wire import called
from oncekey.workers.calling import ABANDONED
from oncekey.workers.health import health as serve_health
from oncekey.workers.relay import CONCURRENCY, Relay
from oncekey.workers.service import GRACE, Service, Task
from oncekey.workers.tasks import chosen, presence_of, tasks_for
from oncekey.workers.upkeep import Reaper, Sweeper

if TYPE_CHECKING:
    from collections.abc import Callable

    from oncekey.engine.shell import AsyncEngine
    from oncekey.observe.events import Notify
    from oncekey.once import Once
    from oncekey.workers.health import Metrics

_SIGNALS = (signal.SIGTERM, signal.SIGINT)
NOTHING_TO_DO = "there is nothing to do: the application has no topics, phases or resolvers for the wanted tasks"


def register(app: typer.Typer) -> None:
    """Add the commands `worker`, `sweep`, `reap` and `rekey`."""
    app.command("worker")(worker)
    app.command("sweep")(sweep)
    app.command("reap")(reap)
    app.command("rekey")(rekey)


def worker(
    app: Annotated[str, typer.Option("--app", metavar="MODULE:NAME", help="Where the application's Once object is.")],
    *,
    topics: Annotated[
        str | None, typer.Option("--topics", metavar="A,B", help="Work on these topics only; without it, on all.")
    ] = None,
    concurrency: Annotated[int, typer.Option("--concurrency", min=1, help="Parcels at a time.")] = CONCURRENCY,
    grace: Annotated[float, typer.Option("--grace", min=0, help="Seconds for open calls at a stop.")] = GRACE,
    only: Annotated[str | None, typer.Option("--only", metavar="A,B", help="Run these tasks only.")] = None,
    without: Annotated[str | None, typer.Option("--without", metavar="A,B", help="Leave these tasks out.")] = None,
    health: Annotated[
        str | None, typer.Option("--health", metavar="HOST:PORT", help="Serve /healthz, /readyz and /metrics there.")
    ] = None,
    once: Annotated[bool, typer.Option("--once", help="Work until nothing is due, and exit.")] = False,
) -> None:
    """Run the five background tasks until SIGTERM or SIGINT, each on its own schedule.

    relay makes the calls that requests deferred and delivers the messages that they emitted; completer goes on with
    phased requests whose client never came back; sweeper moves keys whose owner died; reconciler asks resolvers about
    unknown outcomes; reaper removes what has expired. Run as many workers as you like: each is registered in the store
    while it runs, where `oncekey doctor` sees it.

    Exit code: 0 stopped, or with --once nothing failed; 1 with --once something failed, and the log says what; 2 a
    mistake, or no store.
    """
    found = applications.joined(applications.load(app))
    wanted = chosen(only, without)
    applications.log_plainly()
    names = None if topics is None else tuple(name.strip() for name in topics.split(",") if name.strip())

    def tasks() -> list[Task]:
        return tasks_for(found, topics=names, concurrency=concurrency, wanted=wanted)

    well = asyncio.run(_serve(found, tasks, grace, health, app, only_once=once))
    if ABANDONED:
        # A function that swallows whatever is thrown at it would keep the interpreter from ending.
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
            typer.echo(f"  {task.name:10}  {_schedule(task, once, only_once=only_once)}".rstrip())
        if only_once:
            did = await service.once()
            failed = f", {did.failed} failed: the log says what" if did.failed else ""
            typer.echo(f"{did.done} done{failed}")
            return did.failed == 0
        loop = asyncio.get_running_loop()
        for number in _SIGNALS:
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
    """The store, without what may be a password in it."""
    return printing.address(called(once.store))


def _schedule(task: Task, once: Once, *, only_once: bool) -> str:
    """How often a task looks, and what for."""
    pace = task.pace
    often = f"every {pace.longest:g} s" if pace.fixed else f"every {pace.shortest:g} to {pace.longest:g} s"
    topics = f"topics {', '.join(task.topics)}" if isinstance(task, Relay) else ""
    asked = f"resolvers {', '.join(once.resolvers.names)}" if task.name == "reconciler" and once.resolvers.names else ""
    return "; ".join(part for part in ("" if only_once else often, topics, asked) if part)


App = Annotated[
    str | None,
    typer.Option("--app", metavar="MODULE:NAME", help="Where the application's Once object is, for its policy."),
]


def sweep(
    store: options.StoreUrl, *, once: options.OnlyOnce = False, app: App = None, as_json: options.AsJson = False
) -> None:
    """Move keys whose owner did not come back to the state that their effects say. Runs no handler.

    LOCAL and resumable PHASED become retryable, everything that may have happened becomes unknown. A live lease is
    never touched. The sweeper moves nothing while the clocks disagree. Every move is logged and audited. `oncekey
    worker` does the same all the time.

    JSON, with --once: {"moved", "by": [{"operation", "to", "keys"}]}.
    """
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


def reap(
    store: options.StoreUrl, *, once: options.OnlyOnce = False, app: App = None, as_json: options.AsJson = False
) -> None:
    """Remove expired keys, 5 minutes after they have expired.

    Answers and failures are deleted, or marked if the policy keeps them; work that was begun and never finished becomes
    unknown; a deferred call that no worker ever took is answered with a time-out. What is in progress, unknown or a
    dead letter stays. Lines of the audit are deleted after their own time. Say --app, so that the application's own
    settings are used: without it the defaults are. `oncekey worker` does the same all the time.

    JSON, with --once: {"moved", "by": {"purged", "marked", "parked", "abandoned", "notes", "workers"}}.
    """
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
        return Policy(), applications.notify()
    found = applications.joined(applications.load(app))
    return found.policy, found.notify


def _run(
    store: str,
    make: Callable[[AsyncEngine], Task],
    shape: Callable[[Any, int], dict[str, Any]],
    *,
    only_once: bool,
    json_wanted: bool,
) -> None:
    applications.log_plainly()

    async def doing(engine: AsyncEngine) -> dict[str, Any] | None:
        task = make(engine)
        if only_once:
            return shape(task, await task.run_once())
        service = Service([task])
        for number in _SIGNALS:
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
        printing.as_json(asdict(done))
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
