"""The audit: lines that are written with the moves that they describe, and outlive the records (ADR 0014)."""

from __future__ import annotations

from typing import TYPE_CHECKING
from uuid import UUID

from oncekey.core.flow import Flow, Row, Value
from oncekey.core.keys import key_digest
from oncekey.core.model import Duration, RecordId, State
from oncekey.core.transitions import Actor, AuditEntry, Note, Trigger
from oncekey.stores.keystore import NoteWriter
from oncekey.stores.statements import PART_STATEMENTS, execute

if TYPE_CHECKING:
    from oncekey.stores.statements import Statements

STATEMENTS = PART_STATEMENTS["audit"]

MOST = 1000
"""How many lines of a key's history one read returns."""


class AuditStore(NoteWriter):
    """The audit, in any store that has the named statements."""

    def __init__(self, statements: Statements) -> None:
        statements.require(STATEMENTS)
        super().__init__(statements)

    def history(self, record_id: RecordId, limit: int = MOST) -> Flow[tuple[AuditEntry, ...]]:
        params: dict[str, Value] = {
            "scope": record_id.scope,
            "key_digest": key_digest(record_id.key),
            "after": 0,
            "limit": limit,
        }
        return tuple(entry_of(row) for row in (yield from self._statements.read("history", params)))

    def deletions(self, scope: str, limit: int) -> Flow[tuple[AuditEntry, ...]]:
        rows = yield from self._statements.read("deletions", {"scope": scope, "limit": limit})
        return tuple(entry_of(row) for row in rows)

    def forget(self, age: Duration, limit: int) -> Flow[int]:
        return len((yield from execute(self._statements.alone("forget_notes", {"age": age, "limit": limit}))))


def entry_of(row: Row) -> AuditEntry:
    """Decode one line."""
    note = Note(
        scope=row["scope"],
        key_digest=row["key_digest"],
        incarnation=UUID(str(row["incarnation"])),
        operation=row["operation"],
        fence=row["fence"],
        source=_state(row["source"]),
        to=_state(row["target"]),
        trigger=Trigger(row["trigger"]),
        actor=Actor(row["actor"]),
        who=row["who"],
        why=row["why"],
    )
    return AuditEntry(int(row["at"]), note)


def _state(name: str | None) -> State | None:
    return None if name is None else State(name)
