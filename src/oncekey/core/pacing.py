"""Backoff: how long to wait before the next attempt.

Waits have full jitter. Seconds are floats here: these are waits of a worker, not instants of a store.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import isfinite
from typing import Final

from oncekey.core.errors import ConfigurationError

_MOST_DOUBLINGS: Final = 60


@dataclass(frozen=True, slots=True)
class Backoff:
    """The bounds of waits: `floor` <= wait <= `cap`, or the time that the server requests, up to `longest`."""

    base: float = 0.5
    cap: float = 8.0
    floor: float = 0.05
    longest: float = 60.0

    def __post_init__(self) -> None:
        ordered = 0 < self.floor <= self.base <= self.cap and self.cap <= self.longest and isfinite(self.longest)
        if not ordered:
            raise ConfigurationError("a backoff needs 0 < floor <= base <= cap <= longest, all of them finite")

    def wait(self, failures: int, chance: float, *, asked: float | None = None) -> float:
        """Seconds to wait after so many failures; `chance` is a random number from 0 to 1.

        The next attempt does not begin before the time that the server requested. The jitter is added to that time, so
        that not all clients return at once.
        """
        luck = min(max(chance, 0.0), 1.0)
        doublings = min(max(failures, 0), _MOST_DOUBLINGS)
        envelope: float = min(self.cap, self.base * 2**doublings)
        if asked is None:
            return max(self.floor, luck * envelope)
        return max(self.floor, min(max(asked, 0.0), self.longest) + luck * self.base)
