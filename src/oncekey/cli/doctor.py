"""`oncekey doctor`: checks a store for problems."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from oncekey import wire
from oncekey.cli import options, printing
from oncekey.cli.applications import load
from oncekey.core.errors import StoreError
from oncekey.core.flow import adrive
from oncekey.core.migrations import MigrationPhase, MigrationState, MigrationStatus
from oncekey.core.model import SECOND, Duration, Instant, moment
from oncekey.core.policy import Policy, micros
from oncekey.databases.postgres import diagnostics as postgres
from oncekey.databases.redis import diagnostics as redis_server
from oncekey.engine import migrating, operate
from oncekey.ops import doctor as rules
from oncekey.ops.doctor import Finding, Level
from oncekey.sealing import from_environment
from oncekey.stores import rekey

if TYPE_CHECKING:
    from oncekey.core.enclosing import InUse
    from oncekey.core.upkeep import Run
    from oncekey.databases.postgres.address import Pooling
    from oncekey.engine.shell import AsyncEngine
    from oncekey.ops.stats import Roll, StoreStats

_RUNS: Final = 1000
_PATIENCE: Final = 2.0
"""Timeout in seconds for Redis."""
_SAMPLE: Final = 1000
"""How many stored values are checked for encryption if this command has no keys."""
_ALL: Final = 2**62
_OPENED: Final = 200
"""How many records the command decrypts to check its keys."""
_EXIT: Final = {Level.OK: 0, Level.NOTE: 0, Level.WARNING: 1, Level.ERROR: 2}
_LEASE: Final = f"{Policy().lease.total_seconds():.0f}s"
_STALE: Final = f"{rules.Limits().stale // SECOND}s"
_COLOURS: Final = {Level.OK: "green", Level.NOTE: "cyan", Level.WARNING: "yellow", Level.ERROR: "red"}


@dataclass(frozen=True, slots=True)
class _Checkup:
    """What was read from the store, and when."""

    entries: tuple[MigrationStatus, ...]
    stats: StoreStats | None
    diagnostics: Mapping[str, tuple[Mapping[str, Any], ...]]
    runs: tuple[Run, ...]
    roll: Roll | None
    sealed: tuple[InUse, ...]
    unopened: int
    before: Instant
    after: Instant
    pooling: Pooling | None


def register(app: typer.Typer) -> None:
    """Add the command `doctor`."""
    app.command("doctor")(doctor)


def doctor(
    store: options.OptionalStoreUrl = None,
    *,
    app: Annotated[
        str | None,
        typer.Option("--app", metavar="MODULE:NAME", help="The application's Once, for its store and lease."),
    ] = None,
    lease: Annotated[
        str | None,
        typer.Option(
            help=f"The policy's lease, to compare with the duration of operations. [default: of --app, or {_LEASE}]",
            metavar="SPAN",
        ),
    ] = None,
    workers: Annotated[int, typer.Option(min=0, help="The minimum number of live workers.")] = 1,
    silent_after: Annotated[
        str | None,
        typer.Option(
            help="When a worker without a heartbeat counts as dead. [default: 3 of its intervals]", metavar="SPAN"
        ),
    ] = None,
    unknown_after: Annotated[str, typer.Option(help="Warn about unknown keys that are older.", metavar="SPAN")] = "1h",
    stale_after: Annotated[
        str, typer.Option(help="Warn about keys whose lease ended longer ago.", metavar="SPAN")
    ] = _STALE,
    resumable_after: Annotated[
        str, typer.Option(help="Warn about unfinished work that has waited longer.", metavar="SPAN")
    ] = "1h",
    expired_after: Annotated[
        str, typer.Option(help="Warn about records that expired longer ago.", metavar="SPAN")
    ] = "1d",
    due_after: Annotated[
        str, typer.Option(help="Warn about calls and messages overdue for longer.", metavar="SPAN")
    ] = "5m",
    dead_after: Annotated[str, typer.Option(help="Warn about dead letters that are older.", metavar="SPAN")] = "0",
    replay_cache: options.ReplayCache = None,
    quiet: Annotated[bool, typer.Option("--quiet", help="Omit checks that found no problem.")] = False,
    as_json: options.AsJson = False,
) -> None:
    """Check a store: schema, indexes, clock, workers, pending work, dead rows, old transactions, settings.

    With --replay-cache it also checks the Redis in front of the store.

    Changes nothing. Each finding states an observation, its meaning and a remedy. Every unknown or stale key, every due
    delivery and every dead letter is at least a note; work that has waited longer than its option is a warning, and so
    is a store without a live worker. Exit code 0: no problems, perhaps notes; 1: warnings; 2: errors, or no store.

    JSON: {"now", "items": [{"level", "about", "seen", "means", "todo"}], "next", "level": "ok" | "note" | "warning" |
    "error"}.
    """
    limits = rules.Limits(
        unknown=options.span(unknown_after),
        stale=options.span(stale_after),
        resumable=options.span(resumable_after),
        expired=options.span(expired_after),
        due=options.span(due_after),
        dead=options.span(dead_after),
        silent=None if silent_after is None else options.span(silent_after),
        workers=workers,
    )
    url = options.store_named(store, app)
    findings = tuple(_findings(url, _lease_of(app) if lease is None else options.span(lease), limits))
    if replay_cache is not None:
        findings += (_front(replay_cache),)
    level = rules.worst(findings)
    shown = [one for one in findings if not quiet or one.level is not Level.OK]
    if as_json:
        now = time.time_ns() // 1000
        items = [asdict(one) for one in shown]
        printing.as_json({"now": moment(now), "items": items, "next": None, "level": level.value})
    else:
        _print(shown)
    raise typer.Exit(_EXIT[level])


def _lease_of(app: str | None) -> Duration:
    """The shortest lease of an application's routes and functions, or the default."""
    if app is None:
        return options.span(_LEASE)
    once = load(app)
    return min(micros(policy.lease) for policy in (once.policy, *map(once.policy_of, once.enrolled)))


def _findings(url: str, lease: Duration, limits: rules.Limits) -> Iterator[Finding]:
    try:
        checkup = options.work(url, _examine, checked=False)
    except StoreError as error:
        yield Finding(
            Level.ERROR,
            "store",
            str(error),
            "no key can be claimed, so every protected request is refused",
            "check that it runs, and that the URL and its user are right",
        )
        return
    diagnostics = checkup.diagnostics
    kind = wire.understand(url).kind
    tables = wire.declared(kind).tables
    if checkup.entries:
        yield from rules.schema(checkup.entries)
    if diagnostics.get("diagnostic_clock"):
        yield rules.clock(int(diagnostics["diagnostic_clock"][0]["now"]), checkup.before, checkup.after)
    if checkup.stats is None:
        return
    if tables is not None:
        yield from rules.indexes(tables().migrations, diagnostics.get("diagnostic_indexes", ()))
    if checkup.roll is not None:
        yield from rules.workers(checkup.roll, checkup.stats, limits)
    yield from rules.unresolved(checkup.stats, limits)
    seal = from_environment()
    names = None if seal is None else frozenset(seal.names)
    current = None if seal is None else seal.current
    yield from rules.seals(checkup.sealed, names, current, checkup.unopened)
    yield from rules.policies(checkup.runs, lease, diagnostics.get("diagnostic_ttl", ()))
    if diagnostics:
        yield from wire.diagnostics_of(kind).findings(diagnostics, checkup.stats.now, lease)
    if checkup.pooling is not None:
        yield postgres.pooler(**asdict(checkup.pooling))


def _front(place: str) -> Finding:
    """The finding about the replay cache in front of the store."""
    shown = options.shared_front(place).shown
    import redis

    try:
        with redis.Redis.from_url(place, socket_timeout=_PATIENCE, socket_connect_timeout=_PATIENCE) as client:
            memory: Any = client.info("memory")
    except (redis.RedisError, OSError):
        return redis_server.front(shown, None)
    return redis_server.front(shown, memory)


async def _examine(engine: AsyncEngine) -> _Checkup:
    """Read everything that the findings need. A wrong schema is a finding, not an error of the command."""
    store, run = engine.store, engine.driver.run
    entries = await adrive(migrating.status(store.schema), run)
    fits = all(entry.state is MigrationState.APPLIED or _may_wait(entry) for entry in entries)
    operations = operate.operations_of(store)
    before = time.time_ns() // 1000
    diagnostics = await adrive(operations.diagnostics(), run)
    after = time.time_ns() // 1000
    stats = await adrive(operations.stats(), run) if fits else None
    runs = await adrive(store.upkeep.runs(_RUNS), run) if fits and store.upkeep is not None else ()
    roll = await adrive(store.upkeep.workers(), run) if fits and store.upkeep is not None else None
    seal = from_environment()
    kept = await adrive(rekey.seals(store, _SAMPLE if seal is None else _ALL), run) if fits else ()
    unopened = 0 if seal is None or not fits else await adrive(rekey.unopened(store, seal, _OPENED), run)
    pooling = None
    if hasattr(engine.driver, "pooling"):
        with suppress(StoreError):  # this store may allow only one connection at a time
            pooling = await engine.driver.pooling()
    return _Checkup(entries, stats, diagnostics, runs, roll, kept, unopened, before, after, pooling)


def _may_wait(entry: MigrationStatus) -> bool:
    """Whether this version works without that migration."""
    return entry.state is MigrationState.PENDING and entry.migration.phase is MigrationPhase.POST


def _print(findings: list[Finding]) -> None:
    if not findings:
        typer.echo("no problems found")
    for one in findings:
        level = one.level.value.upper().ljust(7)
        if printing.colours():
            level = typer.style(level, fg=_COLOURS[one.level], bold=one.level is not Level.OK)
        typer.echo(f"{level}  {one.about.replace('_', ' ')}: {printing.plain(one.seen)}")
        if one.means:
            typer.echo(f"         {one.means}")
        if one.todo:
            typer.echo(f"         -> {one.todo}")
