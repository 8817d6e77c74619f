"""In which way requests were sent: what a script needs to know to send them in the same way again."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Way(StrEnum):
    """How a request reached the server."""

    PLAIN = "plain"
    """On a connection of its own."""
    TOGETHER = "together"
    """At the same moment as others."""
    PIPELINED = "pipelined"
    """In one go with others on one connection."""
    SLOWLY = "slowly"
    """The body in pieces."""
    CUT = "cut"
    """The client hung up."""
    OVERLAPPING = "overlapping"
    """The second one while the first one ran."""
    INTERRUPTED = "interrupted"
    """A command was run while the request ran."""


@dataclass(frozen=True, slots=True)
class Manner:
    """A way, and its details. `many` consecutive exchanges belong together."""

    way: Way = Way.PLAIN
    many: int = 1
    seconds: float = 0.0
    """The distance between two requests, or how long the client stayed."""
    sent: int = 0
    """The bytes that were sent before the client hung up."""
    listened: bool = False
    """Whether the client waited for the beginning of the answer before it hung up."""
    after: tuple[str, ...] = ()
    """The options whose commands were run before the request, or while it ran."""


PLAIN = Manner()
