"""Scenarios: where a world's chances lie. Every promise must hold in each; some faults are likelier in one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Final

from oncekey.core.model import Effects
from oncekey.testing.checker import Rule
from oncekey.testing.sim.timing import BEATS, SEND_SLACK
from oncekey.testing.sim.weather import Weather

if TYPE_CHECKING:
    from oncekey.core.model import Duration


@dataclass(frozen=True, slots=True)
class Scenario:
    """What kind of world it is, and which rules can be asked about it."""

    effects: tuple[Effects, ...] = tuple(Effects)
    locks: tuple[float, ...] = (1.0, 0.0, 0.5)
    """How many hosts know the store's locks, so that LOCAL is one commit; the others claim first."""
    quiet: tuple[int, ...] = ()
    """The beats at which no client comes."""
    wakes: tuple[int, ...] = tuple(range(len(BEATS)))
    """The beats at which zombies wake."""
    send_slack: Duration = SEND_SLACK
    provider_remembers: bool = False
    loses_records: bool = False
    """Records vanish, as in a restore from an old backup."""
    weather: Weather | None = None
    """What goes wrong; without it, each seed draws its own."""
    rules: frozenset[Rule] = frozenset(Rule)


EVERYDAY: Final = Scenario()

OUTSIDE: Final = Scenario(effects=(Effects.INLINE,), quiet=(4, 5, 6, 7), wakes=(1, 2, 3))
"""Calls to a provider, and everybody busy around the end of the lease."""

REUSED: Final = Scenario(quiet=(3, 4, 5, 6), wakes=(7,))
"""A key is reaped and used again, and the zombies of its first life wake up in its second."""

UNHEARD: Final = Scenario(quiet=(3, 4, 5, 6), wakes=(7,), weather=Weather(pause=0.8, lost_reply=0.4, lost_commit=0.2))
"""Replies are lost all the time, and whoever waits for one sleeps through the life of its own record."""

CLAIMED: Final = Scenario(effects=(Effects.LOCAL,), locks=(0.0,))
"""LOCAL where nobody knows a lock: a claim comes first, and can be lost to somebody else."""

MIXED: Final = Scenario(effects=(Effects.LOCAL, Effects.OUTBOX), locks=(0.5,))
"""Some hosts run LOCAL in one commit and some claim first, all at once."""

RESTORED: Final = Scenario(
    effects=(Effects.INLINE,),
    provider_remembers=True,
    loses_records=True,
    # The others need the records that were lost.
    rules=frozenset({Rule.ONE_EFFECT, Rule.NO_LOST_ACK, Rule.NO_PHANTOM}),
)
"""Records are lost, and a provider that remembers keys is what is left (F38)."""

SCENARIOS: Mapping[str, Scenario] = MappingProxyType(
    {
        "everyday": EVERYDAY,
        "outside": OUTSIDE,
        "reused": REUSED,
        "unheard": UNHEARD,
        "claimed": CLAIMED,
        "mixed": MIXED,
        "restored": RESTORED,
    }
)
"""All of them by name."""
