"""What a seed decides: how much goes wrong in a run, what its handlers do, and where the chances lie.

The times of a simulated world are short against each other's, as real ones are, and virtual: free. The same seed throws
the same dice on every machine. Each run has fault rates of its own, so that rare faults also come alone and often.
Every promise must hold in each scenario; some faults are likelier in one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from enum import StrEnum
from random import Random
from types import MappingProxyType
from typing import Final, TypeVar
from uuid import UUID

from oncekey.core.model import MINUTE, SECOND, Duration, Effects
from oncekey.core.policy import Policy, micros
from oncekey_demo.checker import Rule

POLICY: Final = Policy(
    lease=timedelta(seconds=60),
    deadline=timedelta(minutes=4),
    call_timeout=timedelta(seconds=20),
    ttl=timedelta(minutes=20),
    allow_short_ttl=True,
    secret=b"the simulator's secret",
)
LEASE: Final = micros(POLICY.lease)
DEADLINE: Final = micros(POLICY.deadline)
CALL_TIMEOUT: Final = micros(POLICY.call_timeout)
TTL: Final = micros(POLICY.ttl)

PARCEL_LEASE: Final = MINUTE
"""How long a worker has a parcel; the call that it makes is over by then, or in doubt."""
SWEEP_GRACE: Final = 5 * SECOND
REAP_GRACE: Final = 5 * MINUTE
CLOCK_TOLERANCE: Final = MINUTE
"""How far the store's clock may be off before workers stop (A3); less than what U1 waits, or it is worth nothing."""

PROVIDER_LAG: Final = 10 * SECOND
"""How long a call that was sent can take to be visible at the provider."""
SEND_SLACK: Final = 4 * MINUTE
"""How long an owner may stand still between its last look at its lease and the send: no fence covers it (U1)."""
DOUBT_WAIT: Final = max(LEASE, 5 * MINUTE) + PROVIDER_LAG + CLOCK_TOLERANCE
"""How long a resolver watches an unknown record before "not executed" is believed (U1)."""

SMALL_JUMP: Final = CLOCK_TOLERANCE
BIG_JUMP: Final = 15 * MINUTE
SKEW: Final = 60 * MINUTE
"""How wrong the wall clock of a host may be: nothing may depend on it."""

_RESOLVED: Final = DEADLINE + LEASE + DOUBT_WAIT
_REAPED: Final = _RESOLVED + TTL + REAP_GRACE + MINUTE
BEATS: Final[tuple[Duration, ...]] = (
    SECOND,
    LEASE,
    LEASE + SEND_SLACK // 2,
    DEADLINE + LEASE,
    _RESOLVED,
    TTL,
    _REAPED,
    _REAPED + MINUTE,
)
"""When things are about to change: clients come, workers look and zombies wake around these instants."""
CHAOS: Final = BEATS[-1] + 3 * MINUTE
"""How long faults last."""


T = TypeVar("T")


class Rng:
    """All that a run leaves to chance is thrown here."""

    def __init__(self, seed: int) -> None:
        self._random = Random(seed)

    def chance(self, likelihood: float) -> bool:
        """True as often as said."""
        return likelihood > 0 and self._random.random() < likelihood

    def between(self, low: int, high: int) -> int:
        """A whole number, both ends included."""
        return low + int(self._random.random() * (high - low + 1))

    def pick(self, of: Sequence[T]) -> T:
        """One of them."""
        return of[int(self._random.random() * len(of))]

    def uuid(self) -> UUID:
        """A random UUID that is the same in every replay."""
        return UUID(int=self._random.getrandbits(128), version=4)


@dataclass(frozen=True, slots=True)
class FaultRates:
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


NO_FAULTS: Final = FaultRates()


def draw_rates(rng: Rng) -> FaultRates:
    """Draw how likely each fault is in a run: each fault is off in some runs, rare in some and heavy in others."""
    return FaultRates(
        crash=rng.pick((0.0, 0.1, 0.4)),
        pause=rng.pick((0.0, 0.4, 0.8)),
        unavailable=rng.pick((0.0, 0.0, 0.02, 0.15)),
        lost_reply=rng.pick((0.0, 0.05, 0.25)),
        lost_commit=rng.pick((0.0, 0.2, 0.6)),
        hang=rng.pick((0.0, 0.0, 0.1)),
        cancelled=rng.pick((0.0, 0.2, 0.5)),
        released=rng.pick((0.0, 0.0, 0.4)),
        provider=rng.pick((0.0, 0.3, 0.7)),
        jumps=rng.pick((0.0, 1.0)),
    )


HANG: Final = 10_000 * MINUTE


class HandlerCourse(StrEnum):
    """How a handler goes."""

    SUCCEEDS = "succeeds"
    DECLINES = "declines"
    RAISES = "raises"
    NOT_ENTERED = "not entered"


@dataclass(frozen=True, slots=True)
class Plan:
    """How a handler goes, how long it works before it acts, and whether it heeds the loss of its lease."""

    course: HandlerCourse = HandlerCourse.SUCCEEDS
    work: Duration = SECOND
    heeds_loss: bool = True

    @property
    def entered(self) -> bool:
        """Whether the handler is called at all."""
        return self.course is not HandlerCourse.NOT_ENTERED

    @property
    def hangs(self) -> bool:
        """Whether it never comes back."""
        return self.work >= HANG


_COURSES: Final = (
    *(HandlerCourse.SUCCEEDS,) * 6,
    HandlerCourse.DECLINES,
    HandlerCourse.RAISES,
    HandlerCourse.NOT_ENTERED,
)
_WORKS: Final = (SECOND // 100, SECOND // 10, SECOND, 5 * SECOND, 30 * SECOND, 90 * SECOND)


def draw_plan(rng: Rng, rates: FaultRates) -> Plan:
    """A handler's course; some hang for ever."""
    work = HANG if rng.chance(rates.hang) else rng.pick(_WORKS)
    return Plan(rng.pick(_COURSES), work, heeds_loss=rng.chance(0.5))


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
    rates: FaultRates | None = None
    """What goes wrong; without it, each seed draws its own."""
    rules: frozenset[Rule] = frozenset(Rule)


EVERYDAY: Final = Scenario()

OUTSIDE: Final = Scenario(effects=(Effects.INLINE,), quiet=(4, 5, 6, 7), wakes=(1, 2, 3))
"""Calls to a provider, and everybody busy around the end of the lease."""

REUSED: Final = Scenario(quiet=(3, 4, 5, 6), wakes=(7,))
"""A key is reaped and used again, and the zombies of its first life wake up in its second."""

UNHEARD: Final = Scenario(quiet=(3, 4, 5, 6), wakes=(7,), rates=FaultRates(pause=0.8, lost_reply=0.4, lost_commit=0.2))
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
