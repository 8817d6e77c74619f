"""How places are written."""

from __future__ import annotations

import pytest

from proof.crash.crasher import Point, When


def test_crash_point_round_trips_as_text() -> None:
    point = Point.parse("after:commit-take_up:2")

    assert point == Point(When.AFTER, "commit-take_up", 2)
    assert Point.parse(str(point)) == point
    assert Point.parse("before:claim") == Point(When.BEFORE, "claim", 1)


@pytest.mark.parametrize("text", ["", "after", "after:", "during:claim:1", "after:claim:x"])
def test_invalid_crash_point_is_rejected(text: str) -> None:
    with pytest.raises(ValueError, match="is no point"):
        Point.parse(text)
