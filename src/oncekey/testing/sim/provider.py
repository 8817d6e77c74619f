"""The outside: a provider with a ledger of its own, which is the truth about what was done."""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum
from typing import TYPE_CHECKING, Final

from oncekey.testing.sim.steps import Point, Wait
from oncekey.testing.sim.timing import PROVIDER_LAG

if TYPE_CHECKING:
    from oncekey.core.model import Duration
    from oncekey.testing.history import Effect
    from oncekey.testing.sim.dice import Dice
    from oncekey.testing.sim.scheduler import Scheduler
    from oncekey.testing.sim.steps import Mailbox, Process


class Reaction(StrEnum):
    """What becomes of a call."""

    CHARGED = "charged"
    CHARGED_SILENTLY = "charged, reply lost"
    LOST = "lost on the way"
    DECLINED = "declined"
    REFUSED = "connection refused"


_BAD: Final = (Reaction.CHARGED_SILENTLY, Reaction.LOST, Reaction.DECLINED, Reaction.REFUSED)


@dataclass(frozen=True, slots=True)
class Outcome:
    """What the caller hears."""

    reaction: Reaction
    charge: str = ""


class Provider:
    """Takes charges. One that `remembers` gives the same charge for the same key; others charge each time."""

    def __init__(self, scheduler: Scheduler, dice: Dice, *, remembers: bool) -> None:
        self.ledger: list[Effect] = []
        self._scheduler = scheduler
        self._dice = dice
        self._remembers = remembers
        self._by_key: dict[str, str] = {}

    def send(self, charge: Effect, downstream_key: str, reply_to: Mailbox) -> None:
        """A call leaves for the provider; from here on nothing can stop it."""
        bad = self._dice.chance(self._scheduler.weather.provider)
        reaction = self._dice.pick(_BAD) if bad else Reaction.CHARGED
        late = 0 if reaction is Reaction.REFUSED else self._dice.between(1, PROVIDER_LAG)
        call = self._arrive(charge, downstream_key, reply_to, reaction, late)
        self._scheduler.spawn(f"{charge.operation}'s call", call)

    def charge_of(self, incarnation: str, downstream_key: str) -> str | None:
        """What the provider has in its books: by key if it remembers keys, else by our reference."""
        if self._remembers:
            return self._by_key.get(downstream_key)
        return next((one.id for one in self.ledger if one.incarnation == incarnation), None)

    def _arrive(self, charge: Effect, key: str, reply_to: Mailbox, reaction: Reaction, late: Duration) -> Process[None]:
        yield Wait(late)
        yield Point(f"the provider: {reaction}")
        match reaction:
            case Reaction.CHARGED:
                reply_to.put(Outcome(reaction, self._charge(charge, key)))
            case Reaction.CHARGED_SILENTLY:
                self._charge(charge, key)
            case Reaction.DECLINED | Reaction.REFUSED:
                reply_to.put(Outcome(reaction))
            case Reaction.LOST:
                return

    def _charge(self, charge: Effect, key: str) -> str:
        if self._remembers and key in self._by_key:
            return self._by_key[key]
        done = replace(charge, id=f"charge-{len(self.ledger) + 1}", at=self._scheduler.turn)
        self._by_key[key] = done.id
        self.ledger.append(done)
        return done.id
