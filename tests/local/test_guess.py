"""The second at which a record expires, as it is guessed."""

from __future__ import annotations

from oncekey.core.model import HOUR, SECOND
from oncekey.stores.locks import Guess

DAY = 24 * HOUR


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def test_nothing_is_guessed_before_something_was_told() -> None:
    assert Guess(Clock()).second(DAY) is None


def test_the_clock_goes_on_and_the_highest_estimate_is_kept() -> None:
    clock = Clock()
    guess = Guess(clock)
    guess.learn(5_000_400_000)  # the server's clock said 5000.4 some time ago
    clock.now += 1
    assert guess.second(DAY) == (5_001_400_000 + DAY) // SECOND
    guess.learn(5_001_700_000)  # told sooner
    clock.now += 1
    assert guess.second(0) == 5002
    guess.learn(5_002_100_000)  # told later: the other one was better
    clock.now += 0.5
    assert guess.second(0) == 5003


def test_a_clock_that_was_set_is_believed() -> None:
    clock = Clock()
    guess = Guess(clock)
    guess.learn(9_000 * SECOND)
    for instant in (5_000 * SECOND, 7_000 * SECOND):
        guess.learn(instant)
        assert guess.second(DAY) == (instant + DAY) // SECOND
