"""`oncekey rekey` seals stored content under the current key."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from oncekey.cli import options, printing
from oncekey.core.errors import ConfigurationError
from oncekey.core.flow import adrive
from oncekey.engine.rekey import PAGE, WALKS, Walked
from oncekey.sealing import KEYS_VARIABLE, Seal, from_environment

if TYPE_CHECKING:
    from oncekey.engine.shell import AsyncEngine

NO_KEYS = f"there is no key to seal with: {KEYS_VARIABLE} has them, NAME:BASE64 of 32 bytes, the current one first"
_LEFT = 1


def register(app: typer.Typer) -> None:
    """Add the command `rekey`."""
    app.command("rekey")(rekey)


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
