"""The number of the lock that a LOCAL request takes for its key (L1).

PostgreSQL's advisory locks are numbers, shared by everybody in the database. A keyed hash makes ours hard to aim
at and unlikely to meet the application's own; a collision is a false "in progress" and never a double run.
"""

from __future__ import annotations

from hashlib import blake2b
from typing import TYPE_CHECKING, Final

from oncekey.core.frames import frame, raw

if TYPE_CHECKING:
    from oncekey.core.model import RecordId

_PUBLIC_KEY: Final = b"oncekey lock 1"


def lock_number(schema: str, record_id: RecordId, secret: bytes | None) -> int:
    """A signed 64-bit number for (schema, scope, key)."""
    key = blake2b(secret, digest_size=32).digest() if secret else _PUBLIC_KEY
    parts = frame(raw(schema), raw(record_id.scope), raw(record_id.key))
    return int.from_bytes(blake2b(parts, digest_size=8, key=key).digest(), "big", signed=True)
