"""How things are at a glance: the pace of requests, as far as a bounded look can tell it."""

from __future__ import annotations

from oncekey.core.model import MINUTE, SECOND, Outcome, State
from oncekey.ops.stats import End, pace

NOW = 10_000 * MINUTE


def end(ago, state=State.COMPLETED, outcome=Outcome.SUCCESS, took=0):
    return End(state, outcome, "create_order", NOW - ago, took)


def test_ends_are_counted_by_how_they_were_and_when():
    ends = [
        end(0, took=300_000),
        end(30 * SECOND, took=100_000),
        end(4 * MINUTE, outcome=Outcome.FAILURE, took=200_000),
        end(9 * MINUTE, State.FAILED_RETRYABLE, None),
        end(2 * MINUTE, State.UNKNOWN, None),
        end(11 * MINUTE, took=99 * SECOND),  # before the window
    ]

    lately = pace(ends, NOW, limit=100, window=10 * MINUTE, parts=10)

    assert lately.ended == {"succeeded": 2, "failed for good": 1, "to be retried": 1, "unknown": 1}
    assert lately.bars["succeeded"] == (0, 0, 0, 0, 0, 0, 0, 0, 1, 1)
    assert lately.all_bars == (1, 0, 0, 0, 0, 1, 0, 1, 1, 1)
    assert lately.took == {50: 200_000, 95: 300_000, 99: 300_000}
    assert lately.rate("succeeded") == 2 / 600


def test_where_more_ended_than_were_looked_at_the_window_ends_with_them():
    lately = pace([end(second * SECOND) for second in range(60)], NOW, limit=60, window=10 * MINUTE, parts=10)

    assert lately.window == 59 * SECOND
    assert lately.rate("succeeded") == 1.0


def test_nothing_is_no_pace():
    lately = pace([], NOW, limit=1, window=MINUTE, parts=4)

    assert lately.all_bars == (0, 0, 0, 0)
    assert lately.took == {}
    assert lately.rate("unknown") == 0


def test_all_at_one_moment_is_no_division_by_nothing():
    assert pace([end(0)], NOW, limit=1, window=MINUTE, parts=4).window == 1
