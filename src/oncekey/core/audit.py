"""What the audit keeps of a move: who moved which record from where to where, when, under which fence, and why.

The key itself is not kept. An operator who knows a key finds its lines by its digest, which does not reveal the key.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from oncekey.core.keys import key_digest

if TYPE_CHECKING:
    from uuid import UUID

    from oncekey.core.model import Instant, Record, State
    from oncekey.core.transitions import Actor, Trigger


@dataclass(frozen=True, slots=True)
class Mover:
    """Who makes a move: the part it plays, and the process or the person that plays it."""

    actor: Actor
    who: str


@dataclass(frozen=True, slots=True)
class Note:
    """One line of the audit as it is written; the store adds the instant."""

    scope: str
    key_digest: str
    incarnation: UUID
    operation: str
    fence: int
    source: State | None
    to: State | None
    trigger: Trigger
    actor: Actor
    who: str
    why: str

    @classmethod
    def of(cls, seen: Record, to: State | None, trigger: Trigger, mover: Mover, why: str) -> Note:
        """The line about a move of `seen`; its fence is the one it had."""
        return cls(
            scope=seen.id.scope,
            key_digest=key_digest(seen.id.key),
            incarnation=seen.incarnation,
            operation=seen.operation,
            fence=seen.fence,
            source=seen.state,
            to=to,
            trigger=trigger,
            actor=mover.actor,
            who=mover.who,
            why=why,
        )


@dataclass(frozen=True, slots=True)
class AuditEntry:
    """One line of the audit as it is read."""

    at: Instant
    note: Note
