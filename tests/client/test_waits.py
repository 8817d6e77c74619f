"""`Retry-After`: seconds or a date, and whatever else a server sends."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st

from core.properties import stable
from oncekey_client.waits import parse_retry_after

NOW = datetime(2026, 11, 15, 12, 0, 0, tzinfo=UTC).timestamp()


@pytest.mark.parametrize(
    ("value", "seconds"),
    [
        ("0", 0.0),
        ("7", 7.0),
        (" 120 ", 120.0),
        ("9" * 5000, 1e12),
        ("Sun, 15 Nov 2026 12:00:30 GMT", 30.0),
        ("Sunday, 15-Nov-26 12:00:30 GMT", 30.0),
        ("Sun Nov 15 12:00:30 2026", 30.0),
        ("Sun, 15 Nov 2026 11:00:00 GMT", 0.0),
        ("-5", None),
        ("1.5", None),
        ("soon", None),
        ("", None),
        ("Sun, 99 Nov 2026 12:00:30 GMT", None),
        ("١٢", None),
    ],
)
def test_seconds_and_dates_are_read_and_nothing_else(value, seconds):
    # R222
    assert parse_retry_after(value, NOW) == seconds


@stable
@given(st.one_of(st.text(), st.from_regex(r"[A-Za-z]{3,9},? [0-9A-Za-z :-]{8,40}")), st.floats(0, 1e11))
def test_retry_after_parser_never_raises(value, now):
    found = parse_retry_after(value, now)
    assert found is None or found >= 0
