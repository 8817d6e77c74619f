"""Waits between tries."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st

from core.properties import stable
from oncekey.core.errors import ConfigurationError
from oncekey.core.pacing import Backoff, parse_retry_after

NOW = datetime(2026, 11, 15, 12, 0, 0, tzinfo=UTC).timestamp()
CHANCE = st.floats(0, 1)
FAILURES = st.integers(0, 10_000)


@stable
@given(FAILURES, CHANCE)
def test_a_wait_is_within_the_envelope(failures, chance):
    # R223
    backoff = Backoff(base=0.5, cap=8.0, floor=0.05)
    assert 0.05 <= backoff.wait(failures, chance) <= min(8.0, 0.5 * 2 ** min(failures, 60))


@stable
@given(FAILURES, st.floats(allow_nan=False), st.one_of(st.none(), st.floats(allow_nan=False)))
def test_no_chance_and_no_server_makes_a_wait_absurd(failures, chance, asked):
    backoff = Backoff()
    assert backoff.floor <= backoff.wait(failures, chance, asked=asked) <= backoff.longest + backoff.base


@stable
@given(FAILURES, CHANCE, st.floats(0, 60))
def test_a_server_that_named_a_time_is_not_asked_sooner(failures, chance, asked):
    # R222
    assert Backoff().wait(failures, chance, asked=asked) >= asked


def test_full_jitter_reaches_both_ends_and_doubles_up_to_the_cap():
    backoff = Backoff(base=1.0, cap=8.0, floor=0.1, longest=60.0)
    assert [backoff.wait(n, 1.0) for n in range(6)] == [1.0, 2.0, 4.0, 8.0, 8.0, 8.0]
    assert [backoff.wait(n, 0.0) for n in range(3)] == [0.1] * 3


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
def test_nothing_that_a_server_says_is_an_error(value, now):
    found = parse_retry_after(value, now)
    assert found is None or found >= 0


@pytest.mark.parametrize(
    "wrong",
    [{"floor": 0.0}, {"base": 0.01}, {"cap": 0.1}, {"longest": 1.0}, {"longest": float("inf")}],
)
def test_an_envelope_that_is_none_is_refused(wrong):
    with pytest.raises(ConfigurationError, match="floor <= base <= cap <= longest"):
        Backoff(**wrong)
