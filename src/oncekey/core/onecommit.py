"""LOCAL in one commit, as values: what the lock and the look found, and what the finished record is written on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from types import MappingProxyType
from typing import TYPE_CHECKING, Final

from oncekey.core.guards import Facts
from oncekey.core.model import Effects
from oncekey.core.transitions import TRANSITIONS, Actor, Row, Table, Trigger, judge

if TYPE_CHECKING:
    from oncekey.core.model import Claim, Instant, Record, Snapshot


@dataclass(frozen=True, slots=True)
class Locked:
    """What the first statement of the transaction found: a record that is read counts with or without the lock (L1)."""

    got: bool
    snapshot: Snapshot
    """The record, and the store's clock; a driver that finds a new key in the message of its BEGIN reads no clock."""
    begun: int
    """What this transaction is known by, and no other: a handler that commits by itself cannot keep it (L5)."""
    other: bool = False
    """The lock was seen in the hands of another request under the same key, and the record was read after that."""


class Holder(StrEnum):
    """Who holds the lock of a key, as far as the marks tell."""

    NOBODY = "nobody"
    OTHER = "other"
    SOMEBODY = "somebody"
    """The same request, or a holder without a mark: a version before marks, or one that is just ending."""


class Kind(StrEnum):
    """What the finished record is written on."""

    NEW = "new"
    RETRYABLE = "retryable"
    ANEW = "anew"


@dataclass(frozen=True, slots=True)
class Ground:
    """A place for the finished record: none was there, or `seen`, whose version is proven in the write (L3)."""

    kind: Kind
    seen: Record | None = None


@dataclass(frozen=True, slots=True)
class Sealed:
    """The finished record is written."""

    expires_at: Instant | None
    """To the second, which is what a client is told. None: nobody heard of it."""
    in_one_commit: bool
    """False if the handler ended its own transaction: its rows are in, and the record follows them (F16)."""


KINDS: Final[Mapping[int, Kind]] = MappingProxyType({2: Kind.NEW, 3: Kind.NEW, 17: Kind.RETRYABLE, 31: Kind.ANEW})
"""Rows of TRANSITIONS that a requester finishes in one write -> what they are written on."""

_ENDS_WITH: Final[Mapping[Effects, Trigger]] = {Effects.LOCAL: Trigger.COMMIT, Effects.OUTBOX: Trigger.DEFER}


def ground_for(snapshot: Snapshot, claim: Claim, table: Table = TRANSITIONS) -> Ground | None:
    """What the claim's finished record can be written on under the lock; None: it has to claim first (L3)."""
    facts = Facts(snapshot.record, snapshot.now, effects=claim.effects, locked=True)
    row = judge(_ENDS_WITH[claim.effects], Actor.REQUESTER, facts, table)
    return Ground(KINDS[row.number], snapshot.record) if isinstance(row, Row) else None
