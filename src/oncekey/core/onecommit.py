"""LOCAL in one commit, as values: the numbers of its locks, its first read, and where its record is written (L1).

PostgreSQL's advisory locks are numbers that all sessions of a database share. A keyed hash makes the numbers of oncekey
hard to aim at and unlikely to be the application's own; a collision of keys is a false "in progress", never a double
run.

In addition to the key's lock a request takes a second one, the *mark*, derived from key and fingerprint. It shows
another request whether the same request is running (409) or a different one (422). It is evidence and excludes nobody:
it counts only on the connection that holds the key's lock.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from functools import lru_cache
from hashlib import blake2b
from types import MappingProxyType
from typing import Final

from oncekey.canonical.digests import frame, raw
from oncekey.core.guards import Facts
from oncekey.core.model import Claim, Effects, Instant, Record, RecordId, Snapshot, value
from oncekey.core.transitions import TRANSITIONS, Actor, Table, Transition, Trigger, find_transition


@value
class Locked:
    """The result of the transaction's first statement; a record counts with or without the lock (L1)."""

    got: bool
    snapshot: Snapshot
    """The record, and the store's clock; a driver that finds a new key in the message of its BEGIN reads no clock."""
    begun: int
    """The identity of this transaction: a later one of the session has another, and nothing is stored in that (L5)."""
    other: bool = False
    """Another request under the same key holds the lock, and the record was read after that was known."""


class Holder(StrEnum):
    """Which request holds the lock of a key, as far as the marks show."""

    NOBODY = "nobody"
    OTHER = "other"
    UNKNOWN_HOLDER = "somebody"
    """The same request, or a holder without a mark: one of an older version, or one that is just ending."""


class WriteKind(StrEnum):
    """Which row the finished record is written to."""

    NEW = "new"
    RETRYABLE = "retryable"
    REPLACE_EXPIRED = "anew"


@value
class WriteTarget:
    """Where the finished record is written: a new row, or the row of `seen`, whose version the write proves (L3)."""

    kind: WriteKind
    seen: Record | None = None


@value
class Stored:
    """The finished record is written."""

    expires_at: Instant | None
    """Whole seconds, as the client sees it. None: the reply to the write was lost."""


KINDS: Final[Mapping[int, WriteKind]] = MappingProxyType(
    {2: WriteKind.NEW, 3: WriteKind.NEW, 17: WriteKind.RETRYABLE, 31: WriteKind.REPLACE_EXPIRED}
)
"""Rows of TRANSITIONS that a request finishes in one write -> which row of the table is written."""

_ENDS_WITH: Final[Mapping[Effects, Trigger]] = {Effects.LOCAL: Trigger.COMMIT, Effects.OUTBOX: Trigger.DEFER}


def write_target_for(snapshot: Snapshot, claim: Claim, table: Table = TRANSITIONS) -> WriteTarget | None:
    """Where the claim's finished record can be written under the lock; None: the request has to claim first (L3)."""
    facts = Facts(snapshot.record, snapshot.now, effects=claim.effects, locked=True)
    row = find_transition(_ENDS_WITH[claim.effects], Actor.REQUESTER, facts, table)
    return WriteTarget(KINDS[row.number], snapshot.record) if isinstance(row, Transition) else None


_PUBLIC_KEY: Final = b"oncekey lock 1"
_FAMILY: Final = frame(b"oncekey family")
_MARK: Final = frame(b"oncekey mark")


@value
class Lock:
    """What one request locks. `family` is of its key like `number`, but of other bits; `mark` is of the request."""

    number: int
    family: int
    mark: int


class LockNumbers:
    """Gives the locks of all requests in one schema under one secret, or under none."""

    __slots__ = ("_eight", "_four", "_schema")

    def __init__(self, schema: str, secret: bytes | None) -> None:
        name = raw(schema)
        self._schema = b"%d:%b" % (len(name), name)
        key = blake2b(secret, digest_size=32).digest() if secret else _PUBLIC_KEY
        self._four = blake2b(digest_size=4, key=key)
        self._eight = blake2b(digest_size=8, key=key)

    def number(self, record_id: RecordId) -> int:
        """A signed 64-bit number for (schema, scope, key)."""
        eight = self._eight.copy()
        eight.update(self._name(record_id))
        return int.from_bytes(eight.digest(), "big", signed=True)

    def of(self, record_id: RecordId, fingerprint: str) -> Lock:
        """The locks of a request: those of its key, and the mark that tells it from another request under that key."""
        name, encoded = self._name(record_id), fingerprint.encode("utf-8", "surrogatepass")
        number, family, marked = self._eight.copy(), self._four.copy(), self._four.copy()
        number.update(name)
        family.update(b"%b%d:%b" % (_FAMILY, len(name), name))
        marked.update(b"%b%d:%b%d:%b" % (_MARK, len(name), name, len(encoded), encoded))
        return Lock(
            int.from_bytes(number.digest(), "big", signed=True),
            int.from_bytes(family.digest(), "big", signed=True),
            int.from_bytes(marked.digest(), "big", signed=True),
        )

    def _name(self, record_id: RecordId) -> bytes:
        scope = record_id.scope.encode("utf-8", "surrogatepass")
        key = record_id.key.encode("utf-8", "surrogatepass")
        return b"%b%d:%b%d:%b" % (self._schema, len(scope), scope, len(key), key)


def lock_number(schema: str, record_id: RecordId, secret: bytes | None) -> int:
    """A signed 64-bit number for (schema, scope, key)."""
    return (LockNumbers(schema, secret) if secret else _public(schema)).number(record_id)


@lru_cache(maxsize=16)
def _public(schema: str) -> LockNumbers:
    """The locks without a secret, cached by schema; those with a secret are kept by their policy."""
    return LockNumbers(schema, None)
