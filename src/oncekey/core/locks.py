"""The numbers of the locks that a LOCAL request takes: one for its key, and a mark that says which request has it (L1).

PostgreSQL's advisory locks are numbers that all sessions of a database share. A keyed hash makes the numbers of oncekey
hard to aim at and unlikely to be the application's own; a collision of keys is a false "in progress", never a double
run. The mark is evidence and excludes no other request: it counts only on the connection that holds the key's lock.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from hashlib import blake2b
from typing import TYPE_CHECKING, Final

from oncekey.canonical.digests import frame, raw

if TYPE_CHECKING:
    from oncekey.core.model import RecordId

_PUBLIC_KEY: Final = b"oncekey lock 1"
_FAMILY: Final = frame(b"oncekey family")
_MARK: Final = frame(b"oncekey mark")


@dataclass(frozen=True, slots=True)
class Lock:
    """What one request locks. `family` is of its key like `number`, but of other bits; `mark` is of the request."""

    number: int
    family: int
    mark: int


class Locks:
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
        name, mark = self._name(record_id), fingerprint.encode("utf-8", "surrogatepass")
        number, family, marked = self._eight.copy(), self._four.copy(), self._four.copy()
        number.update(name)
        family.update(b"%b%d:%b" % (_FAMILY, len(name), name))
        marked.update(b"%b%d:%b%d:%b" % (_MARK, len(name), name, len(mark), mark))
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
    return (Locks(schema, secret) if secret else _public(schema)).number(record_id)


def lock_of(schema: str, record_id: RecordId, fingerprint: str, secret: bytes | None) -> Lock:
    """The locks of a request: those of its key, and the mark that tells it from another request under that key."""
    return (Locks(schema, secret) if secret else _public(schema)).of(record_id, fingerprint)


@lru_cache(maxsize=16)
def _public(schema: str) -> Locks:
    """The locks without a secret, cached by schema; those with a secret are kept by their policy."""
    return Locks(schema, None)
