"""Waits between tries."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from core.properties import stable
from oncekey.core.errors import ConfigurationError
from oncekey.core.pacing import Backoff

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
def test_wait_is_bounded_for_any_jitter_and_retry_after(failures, chance, asked):
    backoff = Backoff()
    assert backoff.floor <= backoff.wait(failures, chance, asked=asked) <= backoff.longest + backoff.base


@stable
@given(FAILURES, CHANCE, st.floats(0, 60))
def test_wait_is_at_least_the_retry_after_of_the_server(failures, chance, asked):
    # R222
    assert Backoff().wait(failures, chance, asked=asked) >= asked


def test_full_jitter_reaches_both_ends_and_doubles_up_to_the_cap():
    backoff = Backoff(base=1.0, cap=8.0, floor=0.1, longest=60.0)
    assert [backoff.wait(n, 1.0) for n in range(6)] == [1.0, 2.0, 4.0, 8.0, 8.0, 8.0]
    assert [backoff.wait(n, 0.0) for n in range(3)] == [0.1] * 3


@pytest.mark.parametrize(
    "wrong",
    [{"floor": 0.0}, {"base": 0.01}, {"cap": 0.1}, {"longest": 1.0}, {"longest": float("inf")}],
)
def test_invalid_backoff_envelope_is_rejected(wrong):
    with pytest.raises(ConfigurationError, match="floor <= base <= cap <= longest"):
        Backoff(**wrong)
