"""Length-prefixed joining: the one way parts become bytes before they are hashed (R36)."""

from __future__ import annotations


def frame(*parts: bytes) -> bytes:
    """Join `parts` so that no two different sequences give the same bytes.

    Each part is written as its length in decimal, a colon, and the part itself: `frame(b"ab", b"")` is
    `b"2:ab0:"`. No byte of a part can be taken for a border.
    """
    return b"".join([piece for part in parts for piece in (b"%d:" % len(part), part)])


def raw(text: str) -> bytes:
    """The bytes of any `str`, also of one with lone surrogates; different texts give different bytes."""
    return text.encode("utf-8", "surrogatepass")
