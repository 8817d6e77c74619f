"""The header `Idempotency-First-Sent`: when a client first sent a request, and whether that is too long ago."""

from __future__ import annotations

from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Final

from oncekey.core.errors import MalformedError
from oncekey.core.model import SECOND, Duration, Instant

FIRST_SENT: Final = "Idempotency-First-Sent"
_UNREADABLE: Final = f"{FIRST_SENT} holds neither an HTTP date nor an RFC 3339 timestamp, so its age is not known."
_LONGEST: Final = 64


def first_sent(lines: list[bytes]) -> Instant | None:
    """The instant that the header names; None if there is no such header."""
    if not lines:
        return None
    if len(lines) > 1 or len(lines[0]) > _LONGEST or not lines[0].isascii():
        raise MalformedError(_UNREADABLE)
    value = lines[0].decode("ascii").strip()
    try:
        # RFC 3339 begins with a digit, an HTTP date with the day of the week.
        at = datetime.fromisoformat(value) if value[:1].isdigit() else parsedate_to_datetime(value)
    except (ValueError, TypeError):
        raise MalformedError(_UNREADABLE) from None
    if at.tzinfo is None:
        # An RFC 3339 timestamp has an offset; an HTTP date is always GMT, whose "-0000" Python reads as no zone.
        if value[:1].isdigit():
            raise MalformedError(_UNREADABLE)
        at = at.replace(tzinfo=UTC)
    return round(at.timestamp() * SECOND)


def is_too_old(lines: list[bytes], oldest: Duration, now: Instant) -> bool:
    """Whether the request was first sent longer than `oldest` ago; False without the header."""
    at = first_sent(lines)
    return at is not None and now - at > oldest
