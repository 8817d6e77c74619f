"""Memory: the moves of `oncekey.stores.moves` over a dictionary, for tests and for a single process.

It has no outbox, so the sweeper and the reaper never meet a pending record here.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, TypeAlias

from oncekey.stores.audit import AuditStore
from oncekey.stores.keystore import KeyStore
from oncekey.stores.moves import MOVES, claimed, found, is_resumable, recalled
from oncekey.stores.rows import COLUMNS
from oncekey.stores.upkeep import UpkeepStore

if TYPE_CHECKING:
    from oncekey.core.model import Instant
    from oncekey.flow import Command, Rows
    from oncekey.stores.moves import Line, RowMove


_EXPIRING = ("completed", "failed_retryable", "pending")
_UNANSWERED: Line = dict.fromkeys(name for name in COLUMNS if name.startswith("response_"))


def stale(table: Table, *, now: Instant, limit: int, **after: Any) -> Rows:
    running = [line for line in table.values() if line["state"] == "in_progress" and line["lease_until"] is not None]
    lines = [line for line in running if line["lease_until"] <= now]
    return _page(lines, "created_at", now, limit, after)


def runs(table: Table, *, now: Instant, limit: int) -> Rows:  # noqa: ARG001  (every statement gets the time)
    lines = sorted((line for line in table.values() if line["finished_at"]), key=_by("expires_at"), reverse=True)
    took = [{"operation": line["operation"], "took": line["finished_at"] - line["last_run_at"]} for line in lines]
    return [run for run in took if run["took"] > 0][:limit]


def expiring(table: Table, *, now: Instant, age: int, limit: int, **after: Any) -> Rows:
    lines = [line for line in table.values() if line["state"] in _EXPIRING and line["expires_at"] <= now - age]
    return _page(lines, "expires_at", now, limit, after)


def kept_expired(table: Table, *, now: Instant, age: int, limit: int, **after: Any) -> Rows:
    lines = [line for line in table.values() if line["state"] == "expired" and line["expires_at"] <= now - age]
    return _page(lines, "expires_at", now, limit, after)


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
        line
        for line in table.values()
        if line["scope"] == scope
        and line["state"] != "expired"
        and (line["state"] in {"pending", "in_progress", "unknown"} or line["expires_at"] > now)
    ]
    return [{"live": min(len(live), limit)}]


def audit_commands() -> Mapping[str, Command]:
    """The statements of an audit that starts empty: its lines are no records, so they are kept beside the table."""
    lines: list[Line] = []

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

    return {"note": note, "history": history, "forget_notes": forget_notes}


def roll_commands() -> Mapping[str, Command]:
    """The statements of a list of workers that starts empty: it is kept beside the table, like the audit."""
    roll: dict[str, Line] = {}

    def beat(_: Table, *, now: Instant, name: str, **columns: Any) -> Rows:
        started_at = roll.get(name, {"started_at": now})["started_at"]
        roll[name] = {"name": name, "started_at": started_at, "seen_at": now, **columns}
        return [roll[name]]

    def leave(_: Table, *, now: Instant, name: str) -> Rows:  # noqa: ARG001  (every statement gets the time)
        return [gone] if (gone := roll.pop(name, None)) is not None else []

    def workers(_: Table, *, now: Instant) -> Rows:
        there = sorted(roll.values(), key=lambda line: (line["started_at"], line["name"]))
        return [{**line, "now": now} for line in there] or [{"name": None, "now": now}]

    def forget_workers(_: Table, *, now: Instant, age: int) -> Rows:
        return [roll.pop(line["name"]) for line in list(roll.values()) if line["seen_at"] + line["every"] <= now - age]

    return {"beat": beat, "leave": leave, "workers": workers, "forget_workers": forget_workers}


def _page(lines: list[Line], at: str, now: Instant, limit: int, after: Line) -> Rows:
    since = (after["after_at"], after["after_scope"], after["after_key"])
    place = _by(at)
    page = sorted((line for line in lines if place(line) > since), key=place)[:limit]
    return [{**line, **_UNANSWERED, "now": now} for line in page] or [{**dict.fromkeys(COLUMNS), "now": now}]


def _by(at: str) -> Any:
    return lambda line: (line[at], line["scope"], line["key"])


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
    """Move due records, longest ago first; returns the rows as they were before."""
    since, place = (after["after_at"], after["after_scope"], after["after_key"]), _by("expires_at")
    due = [
        line
        for line in sorted(table.values(), key=place)
        if line["state"] in states
        and line["expires_at"] <= min(until, now - age)
        and (trusted_for is None or line["ttl"] <= trusted_for)
        and place(line) > since
    ]
    gone: list[Line] = []
    for line in due:
        if len(gone) == limit:
            break
        seen = {"seen_incarnation": line["incarnation"], "seen_version": line["version"]}
        moved = MOVES[move].apply(line, now, seen)
        if moved is None:
            continue
        gone.append({**line, "now": now})
        if moved.line is None:
            del table[line["scope"], line["key"]]
        else:
            line.update(moved.line)
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


Table: TypeAlias = "dict[tuple[str, str], Line]"


def find(table: Table, *, scope: str, key: str, now: Instant) -> Rows:
    """One row with the clock; its record's columns are empty if there is none."""
    return [found(table.get((scope, key)), now)]


def recall(table: Table, *, scope: str, key: str, now: Instant) -> Rows:
    """A completed record with the clock, or no row."""
    return recalled(table.get((scope, key)), now)


def recall_all(table: Table, *, asked: str, now: Instant) -> Rows:
    """The same for many keys."""
    return [row for one in json.loads(asked) for row in recall(table, **one, now=now)]


def claim(table: Table, *, now: Instant, **given: Any) -> Rows:
    """Insert unless there is a row; returns the row that is there."""
    where = (given["scope"], given["key"])
    table[where] = claimed(table.get(where), now, given)
    return [{**table[where], "now": now}]


def over_table(move: RowMove) -> Command:
    """A move as a statement: it changes the row of a table, and returns it as it is then, or as it was if removed."""

    def run(table: Table, *, now: Instant, **given: Any) -> Rows:
        where = (given["scope"], given["key"])
        line = table.get(where)
        moved = move.apply(line, now, given)
        if line is None or moved is None:
            return []
        if moved.line is None:
            del table[where]
        else:
            line.update(moved.line)
        return [{**line, "now": now}]

    return run


def resumable(table: Table, *, now: Instant, after_created: int, after_scope: str, after_key: str, limit: int) -> Rows:
    """Records that the completer may go on with, oldest first."""
    after = (after_created, after_scope, after_key)
    lines = [line for line in table.values() if _place(line) > after and is_resumable(line, now)]
    return [{**line, "now": now} for line in sorted(lines, key=_place)[:limit]]


def _place(line: Line) -> tuple[int, str, str]:
    return (line["created_at"], line["scope"], line["key"])


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
"""The command of memory for each name; the simulator runs the same, and breaks one at a time."""


class MemoryStore(KeyStore):
    """Records in a dictionary that the driver has."""

    def __init__(self, *, clock: Callable[[], Instant] | None = None) -> None:
        super().__init__({**COMMANDS, **audit_commands(), **roll_commands()}, clock=clock)
        self.audit = AuditStore(self._statements)
        self.upkeep = UpkeepStore(self._statements, self.audit)
