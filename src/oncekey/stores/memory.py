"""Memory: the moves of `oncekey.stores.moves` over a dictionary, for tests and for a single process."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, TypeAlias

from oncekey.stores.audit import AuditStore
from oncekey.stores.keystore import KeyStore
from oncekey.stores.memory_upkeep import UPKEEP, audit_commands, roll_commands
from oncekey.stores.moves import MOVES, claimed, found, is_resumable, recalled
from oncekey.stores.upkeep import UpkeepStore

if TYPE_CHECKING:
    from oncekey.core.model import Instant
    from oncekey.flow import Command, Rows
    from oncekey.stores.moves import Line, RowMove

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
