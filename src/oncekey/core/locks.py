"""The numbers of the locks that a LOCAL request takes: one for its key, and a mark that says which request has it (L1).

PostgreSQL's advisory locks are numbers, shared by everybody in the database. A keyed hash makes ours hard to aim
at and unlikely to meet the application's own; a collision of keys is a false "in progress" and never a double run.
The mark is evidence and excludes no other request: it is read only of the connection that holds the key's lock.
"""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import blake2b
from typing import TYPE_CHECKING, Final

from oncekey.core.frames import frame, raw

if TYPE_CHECKING:
    from oncekey.core.model import RecordId

_PUBLIC_KEY: Final = b"oncekey lock 1"
_FAMILY: Final = b"oncekey family"
_MARK: Final = b"oncekey mark"


@dataclass(frozen=True, slots=True)
class Lock:
    """What one request locks. `family` is of its key like `number`, but of other bits; `mark` is of the request."""

    number: int
    family: int
    mark: int


def lock_number(schema: str, record_id: RecordId, secret: bytes | None) -> int:
    """A signed 64-bit number for (schema, scope, key)."""
    return _number(_key(schema, record_id), secret, size=8)


def lock_of(schema: str, record_id: RecordId, fingerprint: str, secret: bytes | None) -> Lock:
    """The locks of a request: what its key has, and what tells it from another request under that key."""
    key = _key(schema, record_id)
    return Lock(
        number=_number(key, secret, size=8),
        family=_number(frame(_FAMILY, key), secret, size=4),
        mark=_number(frame(_MARK, key, raw(fingerprint)), secret, size=4),
    )


def _key(schema: str, record_id: RecordId) -> bytes:
    return frame(raw(schema), raw(record_id.scope), raw(record_id.key))


def _number(parts: bytes, secret: bytes | None, *, size: int) -> int:
    key = blake2b(secret, digest_size=32).digest() if secret else _PUBLIC_KEY
    return int.from_bytes(blake2b(parts, digest_size=size, key=key).digest(), "big", signed=True)
