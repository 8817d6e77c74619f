"""The breaker: while the store is down, requests are told so at once instead of queueing for time-outs (R111)."""

from __future__ import annotations

import time
from collections.abc import Callable

FAILURES = 5
"""How many outages in a row open it."""

PAUSE = 1.0
"""How many seconds it stays open before one request may try."""


class Breaker:
    """Closed, open, or half open: then one request in each pause is the probe."""

    __slots__ = ("_clock", "_failures", "_tries_at")

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._failures = 0
        self._tries_at = 0.0

    @property
    def closed(self) -> bool:
        """Whether the store was reached when it was last asked."""
        return self._failures < FAILURES

    def allows(self) -> bool:
        """Whether the store may be asked; an open breaker lets one through per pause."""
        if self._failures < FAILURES:
            return True
        if self._clock() < self._tries_at:
            return False
        self._tries_at = self._clock() + PAUSE
        return True

    def failed(self) -> None:
        """The store could not be reached."""
        self._failures += 1
        if self._failures >= FAILURES:
            self._tries_at = self._clock() + PAUSE

    def worked(self) -> None:
        """The store answered."""
        self._failures = 0
