"""Keys for outside calls, derived from the request and never random (D1).

The seed comes from (scope, key, fingerprint) and is stored at the claim. So the same request gives the same
downstream keys over attempts, take-overs, expiry and even the loss of its record, while another body under a
reused key gets others; and a rotated secret cannot change the keys of a record that already has its seed.
"""

from __future__ import annotations

import hmac
from typing import TYPE_CHECKING, Final
from uuid import UUID

from oncekey.core.errors import ConfigurationError
from oncekey.core.frames import Hmac, frame, raw

if TYPE_CHECKING:
    from oncekey.core.model import RecordId

PUBLIC_KEY: Final = b"oncekey seed 1"
"""The key of the hash when no secret is set. It separates this use of the hash and hides nothing: an attacker that
knows scope, key and fingerprint can then compute the downstream keys."""

_DOWNSTREAM: Final = b"oncekey downstream key 1"


class Seeds:
    """Gives the seeds of all requests under one secret, or of all without one."""

    __slots__ = ("_keyed",)

    def __init__(self, secret: bytes | None) -> None:
        if secret is not None and not secret:
            raise ConfigurationError("The secret is empty; give at least 16 random bytes, or None for no secret.")
        self._keyed = Hmac(PUBLIC_KEY if secret is None else secret)

    def of(self, id: RecordId, fingerprint: str) -> bytes:  # noqa: A002  (the field's name)
        """The 32 bytes that all downstream keys of this request come from."""
        scope = id.scope.encode("utf-8", "surrogatepass")
        key = id.key.encode("utf-8", "surrogatepass")
        mark = fingerprint.encode("utf-8", "surrogatepass")
        framed = b"%d:%b%d:%b%d:%b" % (len(scope), scope, len(key), key, len(mark), mark)
        return self._keyed.digest(framed)


def seed_of(id: RecordId, fingerprint: str, secret: bytes | None) -> bytes:  # noqa: A002  (the field's name)
    """The 32 bytes that all downstream keys of this request come from."""
    return Seeds(secret).of(id, fingerprint)


def downstream_key(seed: bytes, phase: str) -> str:
    """The idempotency key that `phase` sends to the outside, the same on every attempt.

    It has the bits of a random UUID (version 4), because some providers refuse every other version.
    """
    return str(UUID(bytes=hmac.digest(seed, frame(_DOWNSTREAM, raw(phase)), "sha256")[:16], version=4))
