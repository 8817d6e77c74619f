"""`stores.md`: every store from its row of the table, and its features from the protocols that it satisfies."""

from __future__ import annotations

from dataclasses import fields
from typing import Final

from oncekey.cli.stores import Abilities, Listed, effects_of, listed, parts_of
from oncekey.wire import STORES, Declared

from .markdown import code, table, title
from .markdown import page as put_together

MEANS: Final = {
    "outbox": "`op.emit`, `op.defer` and topics",
    "audit": "`oncekey keys history`, and entries for every move that no request made",
    "workers": "sweeper, reaper and the list of workers",
    "operators": "`oncekey keys`, `unknown`, `stats` and `doctor`",
    "console": "`oncekey console` and `oncekey stats --watch`",
    "resolvers": "`once.resolver` and `once.webhook`",
}


def page() -> str:
    """The whole page."""
    rows = [(row, listed(row)) for row in STORES]
    parts = [name for name in MEANS if any(name in parts_of(_able(one)) for _, one in rows)]
    return put_together(
        title("Stores"),
        "The URL that you pass to `Once` selects the store. `oncekey stores` prints the same tables for the drivers "
        "that are installed.",
        table(
            ("Store", "URL", "Driver for asyncio", "Driver for threads", "Extra"),
            [
                (one.title, code(*one.urls), ", ".join(one.asynchronous), ", ".join(one.blocking), _extras(row))
                for row, one in rows
            ],
        ),
        table(
            ("Store", "Effects", *parts),
            [(one.title, ", ".join(effects_of(_able(one))), *_ticks(one, parts)) for _, one in rows],
        ),
        table(("Feature", "Required for"), [(name, MEANS[name]) for name in parts]),
        "On a store that shares no transaction with the application, a PHASED handler has `op.call` and `op.value`, "
        "but no `op.phase`. If an application uses a feature that its store lacks, it does not start, and the error "
        "names the feature.",
        "## For low stakes only",
        *(_low_stakes(one) for _, one in rows if one.low_stakes is not None),
        "## All schemes",
        table(("Store", "Schemes"), [(one.title, code(*one.schemes)) for _, one in rows]),
    )


def _ticks(one: Listed, parts: list[str]) -> list[str]:
    return ["yes" if name in parts_of(_able(one)) else "" for name in parts]


def _low_stakes(one: Listed) -> str:
    return f"{one.low_stakes}. Operations on {one.title} need `low_stakes=True`."


def _able(one: Listed) -> Abilities:
    assert one.can is not None, f"the page needs every driver: {', '.join(one.install)}"
    assert len(fields(one.can)) == 9, "a new feature has to be shown here"  # noqa: PLR2004
    return one.can


def _extras(row: Declared) -> str:
    named = dict.fromkeys(way.extra for way in (*row.asynchronous, *row.blocking) if way.extra)
    return code(*(f"oncekey[{name}]" for name in named)) or "none"
