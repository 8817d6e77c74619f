"""How long to wait before the next try, and how large the next batch is.

Waits have full jitter. Seconds are floats here: these are waits of a worker, no instants of a store. Batches grow while
they end in good time, and shrink as soon as one does not: the outbox's worker and the reaper go by the same rule. It
knows no clock: the worker measures, and asks.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import isfinite
from typing import Final

from oncekey.core.errors import ConfigurationError

_MOST_DOUBLINGS: Final = 60


@dataclass(frozen=True, slots=True)
class Backoff:
    """The envelope of waits: `floor` <= wait <= `cap`, or what the server asks for, up to `longest`."""

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

        The client does not ask again before the time that the server named. The jitter is added to that time, so that
        not all clients come back at once.
        """
        luck = min(max(chance, 0.0), 1.0)
        doublings = min(max(failures, 0), _MOST_DOUBLINGS)
        envelope: float = min(self.cap, self.base * 2**doublings)
        if asked is None:
            return max(self.floor, luck * envelope)
        return max(self.floor, min(max(asked, 0.0), self.longest) + luck * self.base)


@dataclass(frozen=True, slots=True)
class Worked:
    """How a batch went."""

    asked: int
    got: int
    took: float
    """From its claim until the last of it was done, in the unit of `Bounds.target`."""
    weight: int = 0
    """How many bytes it brought into memory."""

    @property
    def full(self) -> bool:
        """Whether the batch was as large as the worker asked for, so that a larger one would have brought more."""
        return self.got >= self.asked


@dataclass(frozen=True, slots=True)
class Bounds:
    """The smallest and largest size of a batch, and the time in which a batch should end."""

    least: int
    most: int
    target: float
    heaviest: int | None = None
    """How many bytes a batch may bring into memory; its least size may exceed that."""

    def after(self, size: int, worked: Worked) -> int:
        """The size of the next batch.

        It is what would have ended just in time at the speed of the last one, at most twice and at least half of the
        size before. A batch that ended in time never makes it smaller, and one that was not full never larger: it
        says nothing about more.
        """
        fits = 2 * size if worked.took <= 0 else int(min(2 * size, worked.got * self.target / worked.took))
        if worked.took > self.target:
            wanted = max(size // 2, min(size, fits))
        elif worked.full:
            wanted = max(size, fits)
        else:
            wanted = size
        return self._within(size, wanted, worked)

    def _within(self, size: int, wanted: int, worked: Worked) -> int:
        most = self.most
        if self.heaviest is not None and worked.weight:
            most = min(most, self.heaviest * worked.got // worked.weight)
        # A size that fell below the least, because batches failed, also grows back step by step.
        return max(min(self.least, 2 * size), min(most, wanted))
