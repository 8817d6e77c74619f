"""LOCAL in one commit, as values: what a request found under its lock, and where its finished record is written."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from types import MappingProxyType
from typing import TYPE_CHECKING, Final

from oncekey.core.guards import Facts
from oncekey.core.model import Effects
from oncekey.core.transitions import TRANSITIONS, Actor, Row, Table, Trigger, find_row

if TYPE_CHECKING:
    from oncekey.core.model import Claim, Instant, Record, Snapshot


@dataclass(frozen=True, slots=True)
class Locked:
    """What the first statement of the transaction found; a record counts with or without the lock (L1)."""

    got: bool
    snapshot: Snapshot
    """The record, and the store's clock; a driver that finds a new key in the message of its BEGIN reads no clock."""
    begun: int
    """The identity of this transaction: after a commit by the handler the session has another one (L5)."""
    other: bool = False
    """Another request under the same key holds the lock, and the record was read after that was seen."""


class Holder(StrEnum):
    """Which request holds the lock of a key, as far as the marks show."""

    NOBODY = "nobody"
    OTHER = "other"
    SOMEBODY = "somebody"
    """The same request, or a holder without a mark: of an older version, or one that is just ending."""


class WriteKind(StrEnum):
    """Which row the finished record is written to."""

    NEW = "new"
    RETRYABLE = "retryable"
    REPLACE_EXPIRED = "anew"


@dataclass(frozen=True, slots=True)
class WriteTarget:
    """Where the finished record is written: a new row, or the row of `seen`, whose version the write proves (L3)."""

    kind: WriteKind
    seen: Record | None = None


@dataclass(frozen=True, slots=True)
class Stored:
    """The finished record is written."""

    expires_at: Instant | None
    """Whole seconds, as the client sees it. None: the reply to the write was lost."""
    in_one_commit: bool
    """False if the handler ended its own transaction: its rows are in, and the record follows them (F16)."""


KINDS: Final[Mapping[int, WriteKind]] = MappingProxyType(
    {2: WriteKind.NEW, 3: WriteKind.NEW, 17: WriteKind.RETRYABLE, 31: WriteKind.REPLACE_EXPIRED}
)
"""Rows of TRANSITIONS that a request finishes in one write -> which row of the table is written."""

_ENDS_WITH: Final[Mapping[Effects, Trigger]] = {Effects.LOCAL: Trigger.COMMIT, Effects.OUTBOX: Trigger.DEFER}


def write_target_for(snapshot: Snapshot, claim: Claim, table: Table = TRANSITIONS) -> WriteTarget | None:
    """Where the claim's finished record can be written under the lock; None: the request has to claim first (L3)."""
    facts = Facts(snapshot.record, snapshot.now, effects=claim.effects, locked=True)
    row = find_row(_ENDS_WITH[claim.effects], Actor.REQUESTER, facts, table)
    return WriteTarget(KINDS[row.number], snapshot.record) if isinstance(row, Row) else None
