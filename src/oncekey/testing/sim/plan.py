"""What a handler is going to do, drawn when its request arrives."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Final

from oncekey.core.model import MINUTE, SECOND

if TYPE_CHECKING:
    from oncekey.core.model import Duration
    from oncekey.testing.sim.dice import Dice
    from oncekey.testing.sim.weather import Weather

HANG: Final = 10_000 * MINUTE


class Course(StrEnum):
    """How a handler goes."""

    SUCCEEDS = "succeeds"
    DECLINES = "declines"
    RAISES = "raises"
    NOT_ENTERED = "not entered"


@dataclass(frozen=True, slots=True)
class Plan:
    """How a handler goes, how long it works before it acts, and whether it heeds the loss of its lease."""

    course: Course = Course.SUCCEEDS
    work: Duration = SECOND
    heeds_loss: bool = True

    @property
    def entered(self) -> bool:
        """Whether the handler is called at all."""
        return self.course is not Course.NOT_ENTERED

    @property
    def hangs(self) -> bool:
        """Whether it never comes back."""
        return self.work >= HANG


_COURSES: Final = (*(Course.SUCCEEDS,) * 6, Course.DECLINES, Course.RAISES, Course.NOT_ENTERED)
_WORKS: Final = (SECOND // 100, SECOND // 10, SECOND, 5 * SECOND, 30 * SECOND, 90 * SECOND)


def draw_plan(dice: Dice, weather: Weather) -> Plan:
    """A handler's course; some hang for ever."""
    work = HANG if dice.chance(weather.hang) else dice.pick(_WORKS)
    return Plan(dice.pick(_COURSES), work, heeds_loss=dice.chance(0.5))
