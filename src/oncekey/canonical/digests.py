"""Hashes of length-prefixed parts, with and without a secret, and the downstream keys of external calls.

A function that is called for every request writes its frame inline, as `b"%d:%b" % (len(part), part)` for each part,
and uses a keyed hash that was prepared when the policy was created: the same bytes at a fraction of the cost.

Downstream keys are derived and never random (D1). The seed comes from (scope, key, fingerprint) and is stored at the
claim. So the same request has the same downstream keys over attempts, take-overs, expiry and even the loss of its
record, while another body under a reused key has others; and a rotated secret cannot change the keys of a record that
already has its seed.
"""

from __future__ import annotations

import hmac
from hashlib import sha256
from typing import TYPE_CHECKING, Final
from uuid import UUID

from oncekey.core.errors import ConfigurationError

if TYPE_CHECKING:
    from oncekey.core.model import RecordId


_BLOCK: Final = 64
_INNER: Final = bytes(byte ^ 0x36 for byte in range(256))
_OUTER: Final = bytes(byte ^ 0x5C for byte in range(256))


def frame(*parts: bytes) -> bytes:
    """Join `parts` so that different sequences never have the same bytes.

    Each part is written as its length in decimal, a colon, and the part itself: `frame(b"ab", b"")` is
    `b"2:ab0:"`. No byte of a part can be mistaken for a boundary.
    """
    return b"".join([piece for part in parts for piece in (b"%d:" % len(part), part)])


def raw(text: str) -> bytes:
    """The bytes of any `str`, also of one with lone surrogates; different texts have different bytes."""
    return text.encode("utf-8", "surrogatepass")


class Hmac:
    """HMAC-SHA-256 (RFC 2104) under one key, which is processed once and not for every message."""

    __slots__ = ("_inner", "_outer")

    def __init__(self, key: bytes) -> None:
        block = (sha256(key).digest() if len(key) > _BLOCK else key).ljust(_BLOCK, b"\0")
        self._inner = sha256(block.translate(_INNER))
        self._outer = sha256(block.translate(_OUTER))

    def digest(self, message: bytes) -> bytes:
        """The 32 bytes of the HMAC, which cannot be computed without the key."""
        inside, outside = self._inner.copy(), self._outer.copy()
        inside.update(message)
        outside.update(inside.digest())
        return outside.digest()


PUBLIC_KEY: Final = b"oncekey seed 1"
"""The key of the hash if no secret is set. It separates this use of the hash and hides nothing: an attacker who has
scope, key and fingerprint can then compute the downstream keys."""

_DOWNSTREAM: Final = b"oncekey downstream key 1"


class Seeds:
    """Computes the seeds of requests under one secret, or without one."""

    __slots__ = ("_keyed",)

    def __init__(self, secret: bytes | None) -> None:
        if secret is not None and not secret:
            raise ConfigurationError("The secret is empty; give at least 16 random bytes, or None for no secret.")
        self._keyed = Hmac(PUBLIC_KEY if secret is None else secret)

    def of(self, id: RecordId, fingerprint: str) -> bytes:  # noqa: A002  (the field's name)
        """The 32 bytes from which all downstream keys of this request are derived."""
        scope = id.scope.encode("utf-8", "surrogatepass")
        key = id.key.encode("utf-8", "surrogatepass")
        encoded = fingerprint.encode("utf-8", "surrogatepass")
        framed = b"%d:%b%d:%b%d:%b" % (len(scope), scope, len(key), key, len(encoded), encoded)
        return self._keyed.digest(framed)


def downstream_key(seed: bytes, phase: str) -> str:
    """The idempotency key that `phase` sends to the provider, the same on every attempt.

    It has the bits of a random UUID (version 4), because some providers reject every other version.
    """
    return str(UUID(bytes=hmac.digest(seed, frame(_DOWNSTREAM, raw(phase)), "sha256")[:16], version=4))
