"""Weather: how much goes wrong in a run. Each run has its own, so that rare faults also come alone and often."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from oncekey.testing.sim.dice import Dice


@dataclass(frozen=True, slots=True)
class Weather:
    """How likely each fault is, at each chance it gets."""

    crash: float = 0.0
    """A host vanishes at one of its steps."""
    pause: float = 0.0
    """A host stands still at one of its steps, often longer than its lease: a zombie."""
    unavailable: float = 0.0
    """The store cannot be reached: nothing of the statement happened."""
    lost_reply: float = 0.0
    """The statement's reply is lost; it may have been executed, or be executed later."""
    lost_commit: float = 0.0
    """The reply to the business transaction's COMMIT is lost."""
    hang: float = 0.0
    """A handler never comes back, while its heartbeat goes on."""
    cancelled: float = 0.0
    """A request is interrupted at one of its steps: its client has gone, or its server stops."""
    released: float = 0.0
    """A settled request is settled again as a release."""
    provider: float = 0.0
    """A call to the provider goes wrong: refused, declined, or without a reply."""
    jumps: float = 0.0
    """The store's clock is set forwards or backwards, by minutes."""


FAIR: Final = Weather()


def forecast(dice: Dice) -> Weather:
    """Draw a run's weather: each fault is off in some runs, rare in some and heavy in others."""
    return Weather(
        crash=dice.pick((0.0, 0.1, 0.4)),
        pause=dice.pick((0.0, 0.4, 0.8)),
        unavailable=dice.pick((0.0, 0.0, 0.02, 0.15)),
        lost_reply=dice.pick((0.0, 0.05, 0.25)),
        lost_commit=dice.pick((0.0, 0.2, 0.6)),
        hang=dice.pick((0.0, 0.0, 0.1)),
        cancelled=dice.pick((0.0, 0.2, 0.5)),
        released=dice.pick((0.0, 0.0, 0.4)),
        provider=dice.pick((0.0, 0.3, 0.7)),
        jumps=dice.pick((0.0, 1.0)),
    )
