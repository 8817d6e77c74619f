"""`oncekey stores` lists the stores and their capabilities; `oncekey migrate status|up|sql` creates their tables."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from oncekey import wire
from oncekey.cli import options, printing
from oncekey.core.errors import ConfigurationError
from oncekey.core.flow import adrive
from oncekey.core.migrations import MigrationPhase, MigrationState, MigrationStatus
from oncekey.core.sqltext import Dialect
from oncekey.engine import migrating

if TYPE_CHECKING:
    from oncekey.engine.shell import AsyncEngine
    from oncekey.ports.store import Store


@dataclass(frozen=True, slots=True)
class Abilities:
    """A store's capabilities, from the protocols that it and its drivers implement."""

    effects: tuple[str, ...]
    """The effects that handlers may have."""
    phase: bool
    """Whether PHASED handlers have `phase` as well as `call` and `value`: it needs the application's transactions."""
    outbox: bool
    audit: bool
    upkeep: bool
    """Whether sweepers and reapers support it."""
    operate: bool
    """Whether operators can inspect and change records: with the commands, and with `survey` in the console."""
    survey: bool
    reconcile: bool
    tables: bool
    """Whether it has tables to migrate."""


def abilities(store: Store, *drivers: object) -> Abilities:
    """The capabilities of a store with these drivers, which are classes or instances."""
    sharing = wire.shares(*drivers)
    outbox = sharing and store.parcels is not None
    effects = {"LOCAL": sharing, "PHASED": True, "OUTBOX": outbox, "INLINE": True}
    return Abilities(
        effects=tuple(name for name, has in effects.items() if has),
        phase=sharing,
        outbox=outbox,
        audit=store.audit is not None,
        upkeep=store.upkeep is not None,
        operate=store.operate is not None,
        survey=store.survey is not None,
        reconcile=store.reconcile is not None,
        tables=bool(store.schema.migrations),
    )


@dataclass(frozen=True, slots=True)
class Listed:
    """A store in the command's list."""

    store: str
    title: str
    urls: tuple[str, ...]
    schemes: tuple[str, ...]
    asynchronous: tuple[str, ...]
    """The installed asyncio drivers."""
    blocking: tuple[str, ...]
    """The installed blocking drivers."""
    install: tuple[str, ...]
    """The commands that install the missing drivers."""
    can: Abilities | None
    """The store's capabilities; None if none of its drivers is installed, so they are unknown."""
    low_stakes: str | None


def listed(row: wire.Declared) -> Listed:
    """One store, from its row and from the protocols that it and its drivers implement."""
    ways = (*row.asynchronous, *row.blocking)
    there = [way for way in ways if way.missing is None]
    missing = dict.fromkeys(f"pip install 'oncekey[{way.extra}]'" for way in ways if way not in there)
    return Listed(
        store=row.kind.value,
        title=row.title,
        urls=row.forms,
        schemes=tuple(row.schemes),
        asynchronous=tuple(_name(way) for way in row.asynchronous if way in there),
        blocking=tuple(_name(way) for way in row.blocking if way in there),
        install=tuple(missing),
        can=abilities(row.store(), *(way.load() for way in there)) if there else None,
        low_stakes=row.low_stakes,
    )


def _name(way: wire.DriverChoice) -> str:
    return way.package or (way.needs[0] if way.needs else "standard library")


def register(app: typer.Typer) -> None:
    """Add the command `stores` and the group `migrate`."""
    app.command("stores")(stores)
    group = typer.Typer(help="Create and update oncekey's own tables.", no_args_is_help=True)
    group.command("status")(status)
    group.command("up")(up)
    group.command("sql")(sql)
    app.add_typer(group, name="migrate")


def stores(*, as_json: options.AsJson = False) -> None:
    """List the stores: the form of their URLs, the installed drivers, and the capabilities of each.

    The command makes no connection. It derives the capabilities of a store from the protocols that the store and its
    installed drivers implement.

    JSON: {"items": [{"store", "title", "urls", "schemes", "asynchronous": [drivers], "blocking": [drivers], "install":
    [commands], "can": {"effects", "phase", "outbox", "audit", "upkeep", "operate", "survey", "reconcile", "tables"} or
    null, "low_stakes"}], "next": null}.
    """
    rows = [listed(row) for row in wire.STORES]
    if as_json:
        printing.as_json({"items": [asdict(row) for row in rows], "next": None})
        return
    head = ("store", "url", "asyncio", "threads", "effects", "also")
    printing.table(head, [_line(row) for row in rows], empty="none", first=("store", "effects", "url"))
    for row in rows:
        for command in row.install:
            typer.echo(f"{row.title}: {command}")
        if row.low_stakes is not None:
            typer.echo(f"{row.title}: for low stakes only: {row.low_stakes}")


def _line(row: Listed) -> tuple[str, ...]:
    able = row.can
    return (
        row.title,
        row.urls[0],
        ", ".join(row.asynchronous) or "missing",
        ", ".join(row.blocking) or "missing",
        "?" if able is None else " ".join(effects_of(able)),
        "?" if able is None else " ".join(parts_of(able)) or "-",
    )


def effects_of(able: Abilities) -> list[str]:
    """The effects, with the restrictions of PHASED."""
    return [f"{one} (call, value)" if one == "PHASED" and not able.phase else one for one in able.effects]


def parts_of(able: Abilities) -> list[str]:
    """The other capabilities: audit, upkeep, and so on."""
    parts: dict[str, Any] = {
        "outbox": able.outbox,
        "audit": able.audit,
        "workers": able.upkeep,
        "operators": able.operate,
        "console": able.survey,
        "resolvers": able.reconcile,
    }
    return [name for name, has in parts.items() if has]


_SAMPLES = {Dialect.SQLITE: "sqlite:///any.db", Dialect.POSTGRES: "postgresql://any"}


def status(
    store: options.OptionalStoreUrl = None, *, app: options.StoreOfApp = None, as_json: options.AsJson = False
) -> None:
    """List the migrations of the store. Exit code 1 if any is pending or has changed.

    JSON: {"now", "items": [{"number", "phase", "name", "status"}], "next"}.
    """
    entries = asyncio.run(_status(options.store_named(store, app)))
    lines = [_migration_line(entry) for entry in entries]
    if as_json:
        printing.as_list(lines)
    else:
        rows = [(f"{line['number']:04}", line["phase"], line["name"], line["status"]) for line in lines]
        printing.table(("migration", "phase", "name", "status"), rows, empty="no migrations")
    if any(entry.state in {MigrationState.PENDING, MigrationState.CHANGED} for entry in entries):
        raise typer.Exit(1)


def up(
    store: options.OptionalStoreUrl = None,
    *,
    app: options.StoreOfApp = None,
    phase: Annotated[
        MigrationPhase | None,
        typer.Option(help="`pre`: run only migrations that older code can work with."),
    ] = None,
) -> None:
    """Run the pending migrations, each in its own transaction; all in one, if the store is new."""
    if phase is MigrationPhase.POST:
        raise ConfigurationError("`post` migrations build on `pre` ones: pass --phase pre, or omit it to run all")
    asyncio.run(_up(options.store_named(store, app), phase))


def sql(
    store: options.OptionalStoreUrl = None,
    dialect: Annotated[Dialect | None, typer.Option(help="The database, instead of a URL.")] = None,
    app: options.StoreOfApp = None,
) -> None:
    """Print all migrations as SQL, to run them with other tools. The command makes no connection."""
    url = options.store_named(store, app) if dialect is None else _SAMPLES[dialect]
    typer.echo(wire.migrations_for(url).script(), nl=False)


async def _status(url: str) -> tuple[MigrationStatus, ...]:
    async with _engine(url) as engine:
        return await adrive(migrating.status(engine.store.schema), engine.driver.run)


async def _up(url: str, phase: MigrationPhase | None) -> None:
    async with _engine(url) as engine:
        schema = engine.store.schema
        plan = await adrive(migrating.plan(schema, only=phase), engine.driver.run)
        for together in plan:
            ran = await adrive(schema.migrate(*together), engine.driver.run)
            for migration in together:
                typer.echo(f"{'applied' if migration in ran else 'existed:'} {migration.label}.sql")
        if not plan:
            typer.echo("nothing to do")


@asynccontextmanager
async def _engine(url: str) -> AsyncIterator[AsyncEngine]:
    """The engine of a store with its asyncio driver, because every database has one."""
    engine = wire.aconnect(url)
    if not engine.store.schema.migrations:
        wire.migrations_for(url)  # raises: this store has no tables
    try:
        yield engine
    finally:
        await engine.close()


def _migration_line(entry: MigrationStatus) -> dict[str, str | int]:
    one = entry.migration
    return {"number": one.number, "phase": one.phase.value, "name": one.name, "status": entry.state.value}
