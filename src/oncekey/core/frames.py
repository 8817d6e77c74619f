"""Length-prefixed joining, the one way parts become bytes before they are hashed, and hashes with a key.

A function that is called for every request writes its frame out, as `b"%d:%b" % (len(part), part)` for each part, and
takes a keyed hash whose key was mixed in when the policy was built: both give the same bytes at a fraction of the cost.
"""

from __future__ import annotations

from hashlib import sha256
from typing import Final

_BLOCK: Final = 64
_INNER: Final = bytes(byte ^ 0x36 for byte in range(256))
_OUTER: Final = bytes(byte ^ 0x5C for byte in range(256))


def frame(*parts: bytes) -> bytes:
    """Join `parts` so that no two different sequences give the same bytes.

    Each part is written as its length in decimal, a colon, and the part itself: `frame(b"ab", b"")` is
    `b"2:ab0:"`. No byte of a part can be taken for a border.
    """
    return b"".join([piece for part in parts for piece in (b"%d:" % len(part), part)])


def raw(text: str) -> bytes:
    """The bytes of any `str`, also of one with lone surrogates; different texts give different bytes."""
    return text.encode("utf-8", "surrogatepass")


class Hmac:
    """HMAC-SHA-256 (RFC 2104) under one key, which is mixed in once and not for every message."""

    __slots__ = ("_inner", "_outer")

    def __init__(self, key: bytes) -> None:
        block = (sha256(key).digest() if len(key) > _BLOCK else key).ljust(_BLOCK, b"\0")
        self._inner = sha256(block.translate(_INNER))
        self._outer = sha256(block.translate(_OUTER))

    def digest(self, message: bytes) -> bytes:
        """The 32 bytes, which cannot be computed without the key."""
        inside, outside = self._inner.copy(), self._outer.copy()
        inside.update(message)
        outside.update(inside.digest())
        return outside.digest()
