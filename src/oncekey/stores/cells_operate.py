"""The operators' part of a store of cells: reads of pages, and the moves that an operator makes.

A move is decided on the record as it was read, and written by a swap of that version; if another writer was faster,
nothing is written and the operator reads again. There are no parcels. Lists read each index from its oldest cell on and
stop after `MOST` cells: unfinished and unknown records are seldom that many, and only some finished ones are shown.
There is no audit, so the log has a line about who moved what and why.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final

from oncekey.cells import Asking, Cell, Diagnostics, Index, Look
from oncekey.stores.cells_upkeep import FIRST, gathered, nothing, pages
from oncekey.stores.moves import found
from oncekey.stores.operate import STANDING

if TYPE_CHECKING:
    from oncekey.core.flow import Body, Flow, Rows
    from oncekey.core.model import Duration, Instant, RecordId
    from oncekey.core.transitions import AuditEntry, Note

log = logging.getLogger("oncekey.audit")

MOST: Final = 10_000
"""How many cells of an index one read takes at most."""
FEW: Final = 1000
"""How many finished cells a frequent count reads at most."""
_WAITING: Final = (Index.UNFINISHED, Index.UNKNOWN)
_OPEN: Final = (Index.UNFINISHED, Index.UNKNOWN, Index.EXPIRING)
_DONE: Final = (Index.EXPIRING, Index.KEPT)
_RECORDS: Final = (Index.UNFINISHED, Index.UNKNOWN, Index.EXPIRING, Index.KEPT)
_UNFINISHED: Final = frozenset({"in_progress", "failed_retryable", "unknown"})

DIAGNOSTICS: Final[Mapping[str, tuple[str, ...]]] = MappingProxyType(
    {"diagnostic_clock": ("now",), "diagnostic_cells": ("reported",)}
)


class LoggedMoves:
    """Replaces the audit in a store without one: writes an operator's moves to the log."""

    def noting(self, notes: Sequence[Note]) -> Body[None]:
        """Log each line."""
        yield from ()
        for note in notes:
            log.warning(
                "%s %s: %s of %s (digest %s), %s to %s, because %s",
                note.actor.value,
                note.who,
                note.trigger.value,
                note.operation,
                note.key_digest,
                None if note.source is None else note.source.value,
                None if note.to is None else note.to.value,
                note.why,
            )

    def history(self, record_id: RecordId, limit: int = 0) -> Flow[tuple[AuditEntry, ...]]:  # noqa: ARG002
        """No lines, because none are stored."""
        yield from ()
        return ()

    def deletions(self, scope: str, limit: int) -> Flow[tuple[AuditEntry, ...]]:  # noqa: ARG002
        """No lines, because none are stored."""
        yield from ()
        return ()

    def forget(self, age: Duration, limit: int) -> Flow[int]:  # noqa: ARG002
        """Nothing is kept."""
        yield from ()
        return 0


def _every(
    indexes: tuple[Index, ...], now: Instant | None, wanted: Callable[[Cell, Instant], bool]
) -> Asking[tuple[list[Cell], Instant]]:
    cells: list[Cell] = []
    at = 0
    for index in indexes:
        some, at = yield from gathered(index, FIRST, MOST, now, wanted)
        cells += some
    return cells, at


def _list_records(
    *,
    now: Instant | None,
    within: str | None,
    state: str | None,
    operation: str | None,
    effects: str | None,
    age: int,
    stale: bool,
    limit: int,
    before_at: int,
    before_scope: str,
    before_key: str,
) -> Asking[Rows]:
    asked = {"state": state, "operation": operation, "effects": effects}

    def wanted(cell: Cell, clock: Instant) -> bool:
        fits = _is_within(cell, within) and all(value is None or cell[name] == value for name, value in asked.items())
        over = cell["state"] == "in_progress" and cell["lease_until"] <= clock
        before = _made(cell) < (before_at, before_scope, before_key)
        return fits and before and cell["created_at"] <= clock - age and (over or not stale)

    cells, at = yield from _every(_RECORDS, now, wanted)
    return pages(sorted(cells, key=_made, reverse=True)[:limit], at)


def _made(cell: Cell) -> tuple[int, str, str]:
    return cell["created_at"], cell["scope"], cell["key"]


def _is_within(cell: Cell, scope: str | None) -> bool:
    return scope is None or cell["scope"].startswith(scope)


def _find_key(
    *,
    now: Instant | None,
    first: str,
    last: str,  # noqa: ARG001
    scope: str | None,
    within: str | None,
    limit: int,
) -> Asking[Rows]:
    """With its scope a key is one read; without it, all pages are read."""
    if scope is None:
        cells, at = yield from _every(_RECORDS, now, lambda cell, _: cell["key"] == first and _is_within(cell, within))
        return pages(sorted(cells, key=lambda cell: (cell["key"], cell["scope"]))[:limit], at)
    cell, clock = yield Look(scope, first)
    return pages([] if cell is None else [cell], clock if now is None else now)


def _beginning(indexes: tuple[Index, ...], *, unfinished: bool) -> Callable[..., Asking[Rows]]:
    def ask(*, now: Instant | None, first: str, last: str, within: str | None, limit: int) -> Asking[Rows]:
        def wanted(cell: Cell, _: Instant) -> bool:
            there = _is_within(cell, within) and first <= cell["key"] < last
            return there and (cell["state"] in _UNFINISHED) is unfinished

        cells, at = yield from _every(indexes, now, wanted)
        return pages(sorted(cells, key=lambda cell: (cell["key"], cell["scope"]))[:limit], at)

    return ask


def _hold_record(*, now: Instant | None, scope: str, key: str) -> Asking[Rows]:
    cell, clock = yield Look(scope, key)
    return [] if cell is None else [found(dict(cell), clock if now is None else now)]


def _stats(*, now: Instant | None) -> Asking[Rows]:
    cells, at = yield from _every(_RECORDS, now, lambda _cell, _clock: True)
    groups: dict[tuple[str, str, str], list[Cell]] = defaultdict(list)
    for cell in cells:
        groups[cell["state"], cell["effects"], cell["operation"]].append(cell)
    return [
        {
            "state": state,
            "effects": effects,
            "operation": operation,
            "records": len(some),
            "stale": sum(_is_stale(cell, at) for cell in some),
            "resumable": sum(_is_begun(cell) for cell in some),
            "expired": sum(_is_over(cell, at) for cell in some),
            "oldest": min(cell["created_at"] for cell in some),
            "newest": max(cell["created_at"] for cell in some),
        }
        for (state, effects, operation), some in sorted(groups.items())
    ]


def _is_stale(cell: Cell, at: Instant) -> bool:
    return bool(cell["state"] == "in_progress" and cell["lease_until"] <= at)


def _is_begun(cell: Cell) -> bool:
    begun = cell["memo"] is not None or cell["intent"] is not None
    return bool(cell["state"] == "failed_retryable" and begun)


def _is_over(cell: Cell, at: Instant) -> bool:
    return bool(cell["state"] in {"completed", "failed_retryable", "expired"} and cell["expires_at"] <= at)


def _waits(cells: Sequence[Cell], at: Instant) -> dict[str, list[int]]:
    """Kind -> the instants since which cells wait for a worker or an operator."""
    return {
        "unknown": [cell["created_at"] for cell in cells if cell["state"] == "unknown"],
        "stale": [cell["lease_until"] for cell in cells if _is_stale(cell, at)],
        "resumable": [cell["last_run_at"] for cell in cells if _is_begun(cell)],
        "expired": [cell["expires_at"] for cell in cells if cell["state"] != "expired" and _is_over(cell, at)],
        "parcels_due": [],
        "dead_letters": [],
    }


def _unresolved(*, now: Instant | None) -> Asking[Rows]:
    cells, at = yield from _every(_RECORDS, now, lambda _cell, _clock: True)
    return [
        {"now": at, "what": what, "records": len(since), "oldest": min(since, default=None)}
        for what, since in _waits(cells, at).items()
    ]


def _standing(*, now: Instant | None) -> Asking[Rows]:
    """Gauges read this often, so only a few pages of finished cells are counted."""
    cells, at = yield from _every(_WAITING, now, lambda _cell, _clock: True)
    for index in _DONE:
        some, at = yield from gathered(index, FIRST, FEW, now, lambda _cell, _clock: True)
        cells += some
    row: dict[str, Any] = {"now": at}
    for state in STANDING:
        row[state] = sum(cell["state"] == state for cell in cells)
    row["finished"] = sum(cell["state"] in {"completed", "expired"} for cell in cells)
    for what, since in _waits(cells, at).items():
        row |= {what: len(since), f"{what}_oldest": min(since, default=None)}
    return [row]


def _clock(*, now: Instant | None) -> Asking[Rows]:
    _, clock = yield Look("", "")
    return [{"now": clock if now is None else now}]


def _cell_diagnostics(*, now: Instant | None) -> Asking[Rows]:  # noqa: ARG001  (every statement gets the time)
    rows: Sequence[Mapping[str, Any]] = yield Diagnostics()
    return [{"reported": one} for one in rows]


OPERATOR_STATEMENTS: Final[Mapping[str, Callable[..., Asking[Rows]]]] = {
    "list_records": _list_records,
    "find_key": _find_key,
    "find_open_keys": _beginning(_OPEN, unfinished=True),
    "find_done_keys": _beginning(_DONE, unfinished=False),
    "last_results": nothing,
    "parcels_of": nothing,
    "hold_record": _hold_record,
    "hold_parcels_of": nothing,
    "letters_of": nothing,
    "drop_deferred": nothing,
    "bring_back": nothing,
    "drop_dead_letter": nothing,
    "stats": _stats,
    "standing": _standing,
    "unresolved": _unresolved,
    "outbox_census": nothing,
    "letter_census": nothing,
    "diagnostic_clock": _clock,
    "diagnostic_cells": _cell_diagnostics,
}
"""The statements for operators in a store of cells, except the moves."""
