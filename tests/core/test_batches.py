"""The sizes of batches: they grow while batches end in time, and stay in their bounds."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from oncekey.core.batches import Bounds, Worked

BOUNDS = Bounds(least=10, most=1000, target=6.0)


@pytest.mark.parametrize(
    ("size", "worked", "wanted"),
    [
        (10, Worked(10, 10, 0.0), 20),  # no time at all: twice as many
        (10, Worked(10, 10, 0.01), 20),  # ever so quick, and never more than twice
        (20, Worked(20, 20, 4.0), 30),  # what would have ended just in time
        (30, Worked(30, 30, 6.0), 30),  # just in time: it stays
        (40, Worked(40, 40, 8.0), 30),  # too long: what would have ended in time
        (40, Worked(40, 40, 60.0), 20),  # far too long: half, and not less
        (12, Worked(12, 12, 60.0), 10),  # never less than what can be begun at once
        (800, Worked(800, 800, 0.1), 1000),
        (500, Worked(500, 3, 0.1), 500),  # not full: nobody knows whether more would be as quick
        (500, Worked(500, 3, 30.0), 250),  # one of three calls hung
        (500, Worked(250, 250, 0.1), 1000),  # half was asked for, because half was still in hand
    ],
)
def test_next_batch_size_for_each_result(size, worked, wanted):
    assert BOUNDS.after(size, worked) == wanted


def test_heavy_batches_stay_small():
    bounds = Bounds(least=10, most=1000, target=6.0, heaviest=1_000_000)
    assert bounds.after(100, Worked(100, 100, 0.1, weight=100)) == 200
    assert bounds.after(100, Worked(100, 100, 0.1, weight=1_000_000)) == 100
    assert bounds.after(100, Worked(100, 100, 0.1, weight=4_000_000)) == 25
    assert bounds.after(100, Worked(100, 100, 0.1, weight=400_000_000)) == 10  # what can be begun at once is


def test_size_below_the_minimum_grows_step_by_step():
    assert [BOUNDS.after(size, Worked(size, size, 60.0)) for size in (1, 4, 9, 10)] == [2, 8, 10, 10]


@given(
    size=st.integers(10, 1000),
    asked=st.integers(1, 1000),
    share=st.floats(0, 1),
    took=st.floats(0, 1e6),
    weight=st.integers(0, 10**9),
)
def test_size_stays_within_bounds_and_at_most_doubles(size, asked, share, took, weight):
    bounds = Bounds(10, 1000, 6.0, heaviest=10**6)
    got = int(asked * share)
    after = bounds.after(size, Worked(asked, got, took, weight))
    assert 10 <= after <= 1000
    assert after <= 2 * size
    if took > 6.0:
        assert after <= size
    elif weight * size <= 10**6 * got:
        assert after >= size
