"""Time as a parameter: a clock that nobody can set, and the store's clock, which somebody does set."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from oncekey.core.model import Duration, Instant

EPOCH: Instant = 1_700_000_000_000_000


@dataclass(slots=True)
class Clock:
    """`boot` only ever goes forward and is what timers run on; `store` is what records are stamped with."""

    boot: Instant = EPOCH
    offset: Duration = 0

    @property
    def store(self) -> Instant:
        """The store's clock now."""
        return self.boot + self.offset

    @property
    def elapsed(self) -> Duration:
        """Since the run began."""
        return self.boot - EPOCH
