"""Header fields: which fields of a response may be stored, and how instants and URLs are written."""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta
from functools import lru_cache
from typing import Final
from urllib.parse import quote

from oncekey.core.model import Headers

KEY_HEADER: Final = "Idempotency-Key"

# The body is unusable without the first two, and a client that lost its response needs the third.
ALWAYS_KEPT: Final = frozenset({b"content-type", b"content-encoding", b"location"})

NEVER_KEPT: Final = frozenset(
    {
        # of one connection only (RFC 9110, 7.6.1)
        b"connection",
        b"keep-alive",
        b"proxy-connection",
        b"te",
        b"trailer",
        b"transfer-encoding",
        b"upgrade",
        # created anew for every response
        b"content-length",
        b"date",
        b"idempotency-key",
        # of one caller only
        b"authentication-info",
        b"authorization",
        b"proxy-authenticate",
        b"proxy-authentication-info",
        b"proxy-authorization",
        b"set-cookie",
        b"set-cookie2",
        b"www-authenticate",
    }
)

_TOKEN: Final = re.compile(r"[!#$%&'*+\-.^_`|~0-9A-Za-z]+")
PRINTABLE: Final = re.compile(rb"[\x20-\x7e]+")
"""Values that may be echoed: they have no characters that could end the field and begin another one."""
_TRACE_PARENT: Final = re.compile(
    r"(?!ff)[0-9a-f]{2}-(?!0{32})([0-9a-f]{32})-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}(?:-.*)?"
)
TRACE_PARENT: Final = b"traceparent"
_URI_MARKS: Final = ":/?#[]@!$&'()*+,;=%-._~"
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_DAYS: Final = ("Mon", "Tue", "Wed", "Thu", "Fri", "Sat", "Sun")
_MONTHS: Final = ("Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec")


def is_field_name(name: str) -> bool:
    """Whether `name` is a valid field name."""
    return _TOKEN.fullmatch(name) is not None


@lru_cache(maxsize=256)
def field_name(name: str) -> bytes:
    """A checked field name as it is sent."""
    return name.lower().encode("ascii")


def trace_id_of(traceparent: bytes | str | None) -> str:
    """The trace id in a `traceparent` (W3C Trace Context); empty if there is none, or it cannot be parsed."""
    if traceparent is None:
        return ""
    value = traceparent.decode("latin-1") if isinstance(traceparent, bytes) else traceparent
    found = _TRACE_PARENT.fullmatch(value.strip())
    return "" if found is None else found[1]


def target(url: str) -> bytes:
    """A URL reference for a header field; characters that are not allowed there are percent-encoded."""
    return quote(url, safe=_URI_MARKS).encode("ascii")


@lru_cache(maxsize=1024)
def http_date(second: int) -> bytes:
    """An IMF-fixdate of a whole second; a caller that promises to keep something rounds down, never up."""
    moment = _EPOCH + timedelta(seconds=second)
    day, month = _DAYS[moment.weekday()], _MONTHS[moment.month - 1]
    return f"{day}, {moment.day:02} {month} {moment.year:04} {moment:%H:%M:%S} GMT".encode("ascii")


def first(headers: Headers, name: bytes) -> bytes | None:
    """The first value of a field."""
    return next((value for field, value in headers if field.lower() == name), None)
