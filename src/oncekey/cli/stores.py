"""`oncekey stores`: lists every store with its URL, the drivers that are installed, and what it can do."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import typer

from oncekey.cli.options import AsJson
from oncekey.cli.printing import as_json as as_json_document
from oncekey.cli.printing import table
from oncekey.wire import STORES, abilities

if TYPE_CHECKING:
    from oncekey.wire import Abilities, Declared, DriverChoice


@dataclass(frozen=True, slots=True)
class Listed:
    """A store as the command lists it."""

    store: str
    title: str
    urls: tuple[str, ...]
    schemes: tuple[str, ...]
    asynchronous: tuple[str, ...]
    """The drivers for asyncio that can be used here."""
    blocking: tuple[str, ...]
    """The drivers for threads that can be used here."""
    install: tuple[str, ...]
    """The commands that install the missing drivers."""
    can: Abilities | None
    """What the store can do; None: none of its drivers is installed, so it cannot be found out."""
    low_stakes: str | None


def listed(row: Declared) -> Listed:
    """One store, from its row and from the protocols that it and its drivers satisfy."""
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


def _name(way: DriverChoice) -> str:
    return way.package or (way.needs[0] if way.needs else "standard library")


def register(app: typer.Typer) -> None:
    """Add the command `stores`."""
    app.command("stores")(stores)


def stores(*, as_json: AsJson = False) -> None:
    """List the stores: how their URLs begin, what is installed here, and what each can do.

    The command connects to nothing. It finds out what a store can do from the protocols that the store and its
    installed drivers satisfy.

    JSON: {"items": [{"store", "title", "urls", "schemes", "asynchronous": [drivers], "blocking": [drivers], "install":
    [commands], "can": {"effects", "phase", "outbox", "audit", "upkeep", "operate", "survey", "reconcile", "tables"} or
    null, "low_stakes"}], "next": null}.
    """
    rows = [listed(row) for row in STORES]
    if as_json:
        as_json_document({"items": [asdict(row) for row in rows], "next": None})
        return
    head = ("store", "url", "asyncio", "threads", "effects", "besides")
    table(head, [_line(row) for row in rows], empty="none", first=("store", "effects", "url"))
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
    """The effects, and what PHASED lacks where it lacks something."""
    return [f"{one} (call, value)" if one == "PHASED" and not able.phase else one for one in able.effects]


def parts_of(able: Abilities) -> list[str]:
    """What else the store can do: audit, upkeep, and so on."""
    parts: dict[str, Any] = {
        "outbox": able.outbox,
        "audit": able.audit,
        "workers": able.upkeep,
        "operators": able.operate,
        "console": able.survey,
        "resolvers": able.reconcile,
    }
    return [name for name, has in parts.items() if has]
