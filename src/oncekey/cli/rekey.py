"""`oncekey rekey` encrypts stored content with the current key."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from oncekey.cli import options, printing
from oncekey.core.errors import ConfigurationError
from oncekey.core.flow import adrive
from oncekey.sealing import KEYS_VARIABLE, Seal, from_environment
from oncekey.stores.rekey import PAGE, WALKS, Walked

if TYPE_CHECKING:
    from oncekey.engine.shell import AsyncEngine

NO_KEYS = f"no encryption key was given: set {KEYS_VARIABLE} to NAME:BASE64 of 32 bytes, the current key first"
_LEFT = 1


def register(app: typer.Typer) -> None:
    """Add the command `rekey`."""
    app.command("rekey")(rekey)


def rekey(
    store: options.StoreUrl,
    *,
    batch: Annotated[int, typer.Option(min=1, max=10_000, help="The number of records to read at a time.")] = PAGE,
    as_json: options.AsJson = False,
) -> None:
    """Encrypt all stored content with the current key, while the application runs; it can be interrupted and restarted.

    The keys are in ONCEKEY_SEAL_KEYS, the current one first: k2:BASE64,k1:BASE64. Give every process the new key first,
    and remove the old one when `oncekey doctor` no longer reports it. Plain content is encrypted too. Records of
    requests in progress are skipped: run the command again later.

    JSON: {"looked", "resealed", "owned", "closed", "moved"}. Exit code: 0 nothing was skipped, 1 some was, 2 a usage
    error or no store.
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
        typer.echo(f"{done.looked} read, {done.resealed} encrypted with {seal.current}.")
        for count, why in (
            (done.owned, "are in use by a request or a worker: run it again later"),
            (done.moved, "changed meanwhile: run it again"),
            (done.closed, "could not be decrypted: their key is not in " + KEYS_VARIABLE),
        ):
            if count:
                typer.echo(f"{count} skipped, which {why}.")
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
                typer.echo(f"{done.looked} read, {done.resealed} encrypted", err=True)
    return done
