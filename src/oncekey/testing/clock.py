"""A clock that tests move by hand, so that they never sleep."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from oncekey.core.model import Duration, Instant

START: Instant = 1_800_000_000_000_000


class ManualClock:
    """An instant that only `advance` moves; give it to a store as its `clock`."""

    def __init__(self, start: Instant = START) -> None:
        self.now = start

    def __call__(self) -> Instant:
        """The instant."""
        return self.now

    def advance(self, span: Duration) -> Instant:
        """Move the clock forward; returns the new instant."""
        self.now += span
        return self.now
