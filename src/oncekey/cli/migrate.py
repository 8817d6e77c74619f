"""`oncekey migrate status|up|sql`: creates and updates the tables of the store."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Annotated

import typer

from oncekey import wire
from oncekey.cli.printing import as_list, table
from oncekey.core.errors import ConfigurationError
from oncekey.core.migrations import MigrationPhase, MigrationState
from oncekey.core.sqltext import Dialect
from oncekey.engine import migrate
from oncekey.flow import adrive

if TYPE_CHECKING:
    from oncekey.core.migrations import MigrationStatus
    from oncekey.engine.shell import AsyncEngine

_SAMPLES = {Dialect.SQLITE: "sqlite:///any.db", Dialect.POSTGRES: "postgresql://any"}

StoreUrl = Annotated[
    str, typer.Option("--store", envvar="ONCEKEY_STORE", help=f"The store's URL: {wire.FORMS}.", metavar="URL")
]


def register(app: typer.Typer) -> None:
    """Add the group `migrate`."""
    group = typer.Typer(help="Create and update oncekey's own tables.", no_args_is_help=True)
    group.command("status")(status)
    group.command("up")(up)
    group.command("sql")(sql)
    app.add_typer(group, name="migrate")


def status(
    store: StoreUrl, *, as_json: Annotated[bool, typer.Option("--json", help="For programs to read.")] = False
) -> None:
    """List the migrations that the store has and lacks. Exit code 1 if any is pending or not as it should be.

    JSON: {"now", "items": [{"number", "phase", "name", "status"}], "next"}.
    """
    entries = asyncio.run(_status(store))
    lines = [_line(entry) for entry in entries]
    if as_json:
        as_list(lines)
    else:
        rows = [(f"{line['number']:04}", line["phase"], line["name"], line["status"]) for line in lines]
        table(("migration", "phase", "name", "status"), rows, empty="there are none")
    if any(entry.state in {MigrationState.PENDING, MigrationState.CHANGED} for entry in entries):
        raise typer.Exit(1)


def up(
    store: StoreUrl,
    *,
    phase: Annotated[
        MigrationPhase | None,
        typer.Option(help="`pre`: stop before the first migration that older code could not live with."),
    ] = None,
) -> None:
    """Run the migrations that the store lacks, each in a transaction of its own."""
    if phase is MigrationPhase.POST:
        raise ConfigurationError("`post` migrations build on `pre` ones: say --phase pre, or nothing for all")
    asyncio.run(_up(store, phase))


def sql(
    store: Annotated[str | None, typer.Option("--store", help="The store's URL; it is not connected to.")] = None,
    dialect: Annotated[Dialect | None, typer.Option(help="The database, where there is no URL yet.")] = None,
) -> None:
    """Print all migrations as SQL, to be run by other means. The command connects to nothing."""
    if (store is None) == (dialect is None):
        raise ConfigurationError("say --store URL or --dialect, one of the two")
    url = store if store is not None else _SAMPLES[Dialect(dialect or "")]
    typer.echo(wire.migrations_for(url).script(), nl=False)


async def _status(url: str) -> tuple[MigrationStatus, ...]:
    async with _engine(url) as engine:
        return await adrive(migrate.status(engine.store.schema), engine.driver.run)


async def _up(url: str, phase: MigrationPhase | None) -> None:
    async with _engine(url) as engine:
        schema = engine.store.schema
        pending = await adrive(migrate.plan(schema, only=phase), engine.driver.run)
        for migration in pending:
            ran = await adrive(schema.migrate(migration), engine.driver.run)
            typer.echo(f"{'applied' if ran else 'was there'} {migration.label}.sql")
        if not pending:
            typer.echo("nothing to do")


@asynccontextmanager
async def _engine(url: str) -> AsyncIterator[AsyncEngine]:
    """The engine of a store, under asyncio, because every database has a driver for that."""
    engine = wire.aconnect(url)
    if not engine.store.schema.migrations:
        wire.migrations_for(url)  # it raises the error that this store has no tables
    try:
        yield engine
    finally:
        await engine.close()


def _line(entry: MigrationStatus) -> dict[str, str | int]:
    one = entry.migration
    return {"number": one.number, "phase": one.phase.value, "name": one.name, "status": entry.state.value}
