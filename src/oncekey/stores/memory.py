"""The memory store: the moves of `oncekey.stores.moves` over a dictionary, for tests and for a single process.

It has no outbox, so the sweeper and the reaper never find a pending record here.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, TypeAlias

from oncekey.stores.audit import AuditStore
from oncekey.stores.keystore import KeyStore
from oncekey.stores.moves import MOVES, Cell, CellMove, claimed, found, is_resumable, recalled
from oncekey.stores.rows import COLUMNS
from oncekey.stores.upkeep import UpkeepStore

if TYPE_CHECKING:
    from oncekey.core.flow import Command, Rows
    from oncekey.core.model import Instant


_EXPIRING = ("completed", "failed_retryable", "pending")
_UNANSWERED: Cell = dict.fromkeys(name for name in COLUMNS if name.startswith("response_"))


def stale(table: Table, *, now: Instant, limit: int, **after: Any) -> Rows:
    running = [cell for cell in table.values() if cell["state"] == "in_progress" and cell["lease_until"] is not None]
    cells = [cell for cell in running if cell["lease_until"] <= now]
    return _page(cells, "created_at", now, limit, after)


def runs(table: Table, *, now: Instant, limit: int) -> Rows:  # noqa: ARG001  (every statement gets the time)
    cells = sorted((cell for cell in table.values() if cell["finished_at"]), key=_by("expires_at"), reverse=True)
    took = [{"operation": cell["operation"], "took": cell["finished_at"] - cell["last_run_at"]} for cell in cells]
    return [run for run in took if run["took"] > 0][:limit]


def expiring(table: Table, *, now: Instant, age: int, limit: int, **after: Any) -> Rows:
    cells = [cell for cell in table.values() if cell["state"] in _EXPIRING and cell["expires_at"] <= now - age]
    return _page(cells, "expires_at", now, limit, after)


def kept_expired(table: Table, *, now: Instant, age: int, limit: int, **after: Any) -> Rows:
    cells = [cell for cell in table.values() if cell["state"] == "expired" and cell["expires_at"] <= now - age]
    return _page(cells, "expires_at", now, limit, after)


def purge_expired(table: Table, *, soft: bool, **due: Any) -> Rows:
    states = ("failed_retryable",) if soft else ("completed", "failed_retryable")
    return _ended(table, "purge", states, **due)


def purge_kept(table: Table, *, soft: bool, **due: Any) -> Rows:  # noqa: ARG001  (all of them get it)
    return _ended(table, "purge", ("expired",), **due)


def mark_expired(table: Table, *, soft: bool, **due: Any) -> Rows:  # noqa: ARG001
    return _ended(table, "mark", ("completed",), **due)


def drop_unclaimed(table: Table, *, now: Instant, **proof: Any) -> Rows:  # noqa: ARG001  (there are no parcels)
    return []


def live_keys(table: Table, *, now: Instant, scope: str, limit: int) -> Rows:
    live = [
        cell
        for cell in table.values()
        if cell["scope"] == scope
        and cell["state"] != "expired"
        and (cell["state"] in {"pending", "in_progress", "unknown"} or cell["expires_at"] > now)
    ]
    return [{"live": min(len(live), limit)}]


def audit_commands() -> Mapping[str, Command]:
    """The statements of an audit that starts empty: its lines are not records, so they are not in the table."""
    lines: list[dict[str, Any]] = []

    def note(_: Table, *, now: Instant, notes: str) -> Rows:
        for line in json.loads(notes):
            lines.append({**line, "id": lines[-1]["id"] + 1 if lines else 1, "at": now})
        return []

    def history(_: Table, *, now: Instant, scope: str, key_digest: str, after: int, limit: int) -> Rows:  # noqa: ARG001
        own = [line for line in lines if (line["scope"], line["key_digest"]) == (scope, key_digest)]
        return [line for line in own if line["id"] > after][:limit]

    def forget_notes(_: Table, *, now: Instant, age: int, limit: int) -> Rows:
        old = [line for line in lines[:limit] if line["at"] <= now - age]
        lines[:] = [line for line in lines if line not in old]
        return old

    def deletions(_: Table, *, now: Instant, scope: str, limit: int) -> Rows:  # noqa: ARG001
        return [line for line in reversed(lines) if (line["scope"], line["key_digest"]) == (scope, "")][:limit]

    return {"note": note, "history": history, "deletions": deletions, "forget_notes": forget_notes}


def roll_commands() -> Mapping[str, Command]:
    """The statements of a list of workers that starts empty: it is not in the table, like the audit."""
    roll: dict[str, Cell] = {}

    def beat(_: Table, *, now: Instant, name: str, **columns: Any) -> Rows:
        started_at = roll.get(name, {"started_at": now})["started_at"]
        roll[name] = {"name": name, "started_at": started_at, "seen_at": now, **columns}
        return [roll[name]]

    def leave(_: Table, *, now: Instant, name: str) -> Rows:  # noqa: ARG001  (every statement gets the time)
        return [gone] if (gone := roll.pop(name, None)) is not None else []

    def workers(_: Table, *, now: Instant) -> Rows:
        there = sorted(roll.values(), key=lambda cell: (cell["started_at"], cell["name"]))
        return [{**cell, "now": now} for cell in there] or [{"name": None, "now": now}]

    def forget_workers(_: Table, *, now: Instant, age: int) -> Rows:
        return [roll.pop(cell["name"]) for cell in list(roll.values()) if cell["seen_at"] + cell["every"] <= now - age]

    return {"beat": beat, "leave": leave, "workers": workers, "forget_workers": forget_workers}


def _page(cells: list[Cell], at: str, now: Instant, limit: int, after: Cell) -> Rows:
    since = (after["after_at"], after["after_scope"], after["after_key"])
    place = _by(at)
    page = sorted((cell for cell in cells if place(cell) > since), key=place)[:limit]
    return [{**cell, **_UNANSWERED, "now": now} for cell in page] or [{**dict.fromkeys(COLUMNS), "now": now}]


def _by(at: str) -> Any:
    return lambda cell: (cell[at], cell["scope"], cell["key"])


def _ended(
    table: Table,
    move: str,
    states: tuple[str, ...],
    *,
    now: Instant,
    age: int,
    until: Instant,
    limit: int,
    trusted_for: int | None,
    **after: Any,
) -> Rows:
    """Move due records, the oldest expiry first; returns the rows as they were before."""
    since, place = (after["after_at"], after["after_scope"], after["after_key"]), _by("expires_at")
    due = [
        cell
        for cell in sorted(table.values(), key=place)
        if cell["state"] in states
        and cell["expires_at"] <= min(until, now - age)
        and (trusted_for is None or cell["ttl"] <= trusted_for)
        and place(cell) > since
    ]
    gone: list[Cell] = []
    for cell in due:
        if len(gone) == limit:
            break
        seen = {"seen_incarnation": cell["incarnation"], "seen_version": cell["version"]}
        moved = MOVES[move].apply(cell, now, seen)
        if moved is None:
            continue
        gone.append({**cell, "now": now})
        if moved.cell is None:
            del table[cell["scope"], cell["key"]]
        else:
            cell.update(moved.cell)
    return gone


UPKEEP: Mapping[str, Command] = MappingProxyType(
    {
        "stale": stale,
        "runs": runs,
        "expiring": expiring,
        "kept_expired": kept_expired,
        "purge_expired": purge_expired,
        "purge_kept": purge_kept,
        "mark_expired": mark_expired,
        "drop_unclaimed": drop_unclaimed,
        "live_keys": live_keys,
    }
)


Table: TypeAlias = "dict[tuple[str, str], Cell]"


def find(table: Table, *, scope: str, key: str, now: Instant) -> Rows:
    """One row with the clock; its record's columns are empty if there is none."""
    return [found(table.get((scope, key)), now)]


def recall(table: Table, *, scope: str, key: str, now: Instant) -> Rows:
    """A completed record with the clock, or no row."""
    return recalled(table.get((scope, key)), now)


def recall_all(table: Table, *, asked: str, now: Instant) -> Rows:
    """`recall` for many keys."""
    return [row for one in json.loads(asked) for row in recall(table, **one, now=now)]


def claim(table: Table, *, now: Instant, **given: Any) -> Rows:
    """Insert the claim unless there is a row; returns the row of the key."""
    where = (given["scope"], given["key"])
    table[where] = claimed(table.get(where), now, given)
    return [{**table[where], "now": now}]


def over_table(move: CellMove) -> Command:
    """A move as a statement: it changes the row of a table and returns the new row, or the old one if removed."""

    def run(table: Table, *, now: Instant, **given: Any) -> Rows:
        where = (given["scope"], given["key"])
        cell = table.get(where)
        moved = move.apply(cell, now, given)
        if cell is None or moved is None:
            return []
        if moved.cell is None:
            del table[where]
        else:
            cell.update(moved.cell)
        return [{**cell, "now": now}]

    return run


def resumable(table: Table, *, now: Instant, after_created: int, after_scope: str, after_key: str, limit: int) -> Rows:
    """Records that the completer may resume, the oldest first."""
    after = (after_created, after_scope, after_key)
    cells = [cell for cell in table.values() if _place(cell) > after and is_resumable(cell, now)]
    return [{**cell, "now": now} for cell in sorted(cells, key=_place)[:limit]]


def _place(cell: Cell) -> tuple[int, str, str]:
    return (cell["created_at"], cell["scope"], cell["key"])


COMMANDS: Mapping[str, Command] = MappingProxyType(
    {
        "find": find,
        "recall": recall,
        "recall_all": recall_all,
        "claim": claim,
        **{name: over_table(move) for name, move in MOVES.items()},
        "resumable": resumable,
        **UPKEEP,
    }
)
"""The memory store's command for each name; the simulator runs the same commands, and breaks one at a time."""


class MemoryStore(KeyStore):
    """Records in the driver's dictionary."""

    of_one_process = True

    def __init__(self, *, clock: Callable[[], Instant] | None = None) -> None:
        super().__init__({**COMMANDS, **audit_commands(), **roll_commands()}, clock=clock)
        self.audit = AuditStore(self._statements)
        self.upkeep = UpkeepStore(self._statements, self.audit)
