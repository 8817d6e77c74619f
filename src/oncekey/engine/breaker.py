"""The circuit breaker: while a store is out, most requests are refused without asking it."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

FAILURES = 5
"""How many outages in a row open the breaker."""

PAUSE = 1.0
"""How many seconds the breaker stays open before one request may try."""


class Breaker:
    """Closed, open, or half open: then one request in each pause is the probe."""

    __slots__ = ("_clock", "_tries_at", "failures")

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self.failures = 0
        """How many outages in a row there were; nearly always 0."""
        self._tries_at = 0.0

    @property
    def closed(self) -> bool:
        """Whether fewer than `FAILURES` outages came in a row."""
        return self.failures < FAILURES

    def allows(self) -> bool:
        """Whether a request may ask the store; an open breaker lets one through per pause."""
        if self.failures < FAILURES:
            return True
        if self._clock() < self._tries_at:
            return False
        self._tries_at = self._clock() + PAUSE
        return True

    def failed(self) -> None:
        """Note that the store could not be reached."""
        self.failures += 1
        if self.failures >= FAILURES:
            self._tries_at = self._clock() + PAUSE

    def worked(self) -> None:
        """Note that the store answered."""
        self.failures = 0
