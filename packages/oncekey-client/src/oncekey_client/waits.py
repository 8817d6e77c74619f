"""How long the client waits before the next attempt: full jitter, and never less than `Retry-After`.

The library's workers use the same envelope: `tests/client/test_agreement.py` compares the two.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from datetime import UTC
from email.utils import parsedate_to_datetime
from math import isfinite
from typing import Final

from oncekey_client.exchange import ClientConfigurationError

_SECONDS: Final = re.compile(r"[0-9]+", re.ASCII)
_DATE: Final = re.compile(r"[A-Za-z]{3,9},? [0-9A-Za-z :-]{8,40}", re.ASCII)
_MOST_DIGITS: Final = 12
_MOST_DOUBLINGS: Final = 60


@dataclass(frozen=True, slots=True)
class Backoff:
    """The envelope of waits: `floor` <= wait <= `cap`, or the server's delay, up to `longest`."""

    base: float = 0.5
    cap: float = 8.0
    floor: float = 0.05
    longest: float = 60.0

    def __post_init__(self) -> None:
        ordered = 0 < self.floor <= self.base <= self.cap and self.cap <= self.longest and isfinite(self.longest)
        if not ordered:
            raise ClientConfigurationError("a backoff needs 0 < floor <= base <= cap <= longest, all of them finite")

    def wait(self, failures: int, chance: float, *, asked: float | None = None) -> float:
        """Seconds to wait after that many failures; `chance` is a random number from 0 to 1.

        The client does not retry before the time that the server requested. The jitter is added to that time, so that
        not all clients retry at once.
        """
        luck = min(max(chance, 0.0), 1.0)
        doublings = min(max(failures, 0), _MOST_DOUBLINGS)
        envelope: float = min(self.cap, self.base * 2**doublings)
        if asked is None:
            return max(self.floor, luck * envelope)
        return max(self.floor, min(max(asked, 0.0), self.longest) + luck * self.base)


def parse_retry_after(value: str, now: float) -> float | None:
    """The delay of a `Retry-After` header in seconds; None if it cannot be parsed.

    `now` is the time of day in seconds since the epoch, for headers with a date; a date in the past is 0.
    """
    text = value.strip(" \t")
    if _SECONDS.fullmatch(text):
        # More digits than any wait has; the caller clamps the value.
        return float(text) if len(text) <= _MOST_DIGITS else 10.0**_MOST_DIGITS
    if not _DATE.fullmatch(text):
        return None
    try:
        moment = parsedate_to_datetime(text)
    except (ValueError, TypeError, IndexError, OverflowError):
        return None
    if moment.tzinfo is None:
        moment = moment.replace(tzinfo=UTC)
    try:
        return max(0.0, moment.timestamp() - now)
    except (ValueError, OverflowError):
        return None
