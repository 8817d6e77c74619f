"""What memory's statements have in common: the row that a proof is about, and the version that every write moves."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, TypeAlias

if TYPE_CHECKING:
    from oncekey.core.model import Instant
    from oncekey.flow import Rows

Line: TypeAlias = dict[str, Any]
Table: TypeAlias = dict[tuple[str, str], Line]


def owned(table: Table, proof: Line) -> Line | None:
    """The row, if this owner still has it (O)."""
    line = table.get((proof["scope"], proof["key"]))
    if line and line["incarnation"] == proof["incarnation"] and line["fence"] == proof["fence"]:
        return line
    return None


def seen(table: Table, proof: Line) -> Line | None:
    """The row, if nobody has written since it was read (V)."""
    line = table.get((proof["scope"], proof["key"]))
    if line and (line["incarnation"], line["version"]) == (proof["seen_incarnation"], proof["seen_version"]):
        return line
    return None


def repeatable_now(line: Line, now: Instant) -> bool:
    """Whether the open call may be made once more, now (H3)."""
    until = json.loads(line["intent"])["repeatable_until"]
    return until is not None and until > now


def written(line: Line, now: Instant) -> Rows:
    """The row after a write, as a statement returns it."""
    line["version"] += 1
    return [{**line, "now": now}]
