"""The world of one key, small enough to visit every state of it.

A world is a value: the record, its parcel, the provider, everyone who is in the middle of something, and
the books that only the checker can see. Time is not a number. What a clock can make true (lease over, expired,
window over, waiting over) is a flag, and the passing of time is an event that raises it, whenever it may.

Two numbers of the real record are kept as what they mean. The version is "has anybody written since I looked"
(`fresh`), the fence is "was I the last to get it" (`held`): both only ever go up, so a look or a fence that was
overtaken once never fits again. That is what makes the number of worlds finite.

There is one exploration per kind of effects and kind of provider, each small enough to be complete. Crashes and lost
replies are not counted: any actor may die at any step, as often as it likes. What is bounded is how many are in the
middle of something at the same time, how often a handler is begun before it is parked, and how often the key is used
anew.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from types import MappingProxyType
from typing import NamedTuple, TypeAlias

from oncekey.core.model import Effects, Recovery, State

CHARGE = "charge"
"""The name of the one outside call."""

REST = "rest"
"""The name of the local phase after it."""

REFUSED_BY_PROVIDER = "rejected"
"""The provider's final no, as the value of a call."""


class Answer(NamedTuple):
    """What a completed record tells everybody."""

    ok: bool
    value: str
    by: str


class Rec(NamedTuple):
    """The record, without what is the same in every world."""

    incarnation: int
    body: str
    effects: Effects
    recovery: Recovery
    state: State
    attempts: int
    memo: tuple[tuple[str, str], ...] = ()
    sends: int = 0
    window_over: bool = False
    lease: bool | None = True
    """True is live, False is over, None is no lease."""
    deadline_over: bool = False
    expired: bool = False
    waited: bool = False
    answer: Answer | None = None
    by_hand: bool = False
    """An operator gave the last result."""

    def closed(self) -> Rec:
        """Without an open call."""
        return self._replace(sends=0, window_over=False)

    def learned(self, phase: str, value: str) -> Rec:
        """With the result of a phase stored."""
        return self._replace(memo=(*self.memo, (phase, value)), by_hand=False)

    def result(self, phase: str) -> str | None:
        """The stored result of a phase."""
        return next((value for name, value in self.memo if name == phase), None)


class Parcel(NamedTuple):
    """The parcel of a deferred record."""

    claimed: bool = False
    lease: bool | None = None
    parked: bool = False


class At(StrEnum):
    """Where somebody stands."""

    TAKING_OVER = "about to take over"
    SUPERSEDING = "about to start anew"
    DOUBTING = "about to doubt"
    OPEN = "in the transaction of one commit"
    CLAIMED = "lost the reply to a claim and looks again"
    START = "at the start of the handler"
    ANNOUNCED = "announced a call"
    UNSENT = "did not send"
    UNCERTAIN = "does not know what became of the call"
    GOT = "has the result"
    CHARGED = "stored the result"
    DONE = "has done everything"
    HUNG = "hangs, with a heartbeat"
    LOOKING = "lost the reply and looks again"


class Proc(NamedTuple):
    """Somebody in the middle of something. Between any two of its steps anything else may happen."""

    body: str
    at: At
    incarnation: int = 0
    worker: bool = False
    held: bool = False
    """The fence it got is the record's last (P1)."""
    last: bool = False
    """In truth nobody became the owner after it; the checker's own view, which no rule may consult."""
    parcel: bool = False
    """The parcel's claim is still its own."""
    fresh: bool = False
    """The version has not moved since it looked."""
    value: str = ""
    route: Effects = Effects.LOCAL
    then: str = ""
    """Where it goes on if a look shows that the write whose reply was lost has happened."""


class Charge(NamedTuple):
    """An effect in the provider's ledger, and whether its key would still be recognised."""

    key: str
    body: str
    remembered: bool


class CallUnderWay(NamedTuple):
    """A call under way that nobody waits for any more: it may still arrive, or be lost."""

    key: str
    body: str
    incarnation: int


class Query(NamedTuple):
    """A resolver that asked the provider, saw nothing, and has not written that down yet."""

    incarnation: int
    waited: bool


class Book(NamedTuple):
    """What really happened in one incarnation."""

    effects: int = 0
    rows: int = 0
    """How often the handler's own rows were committed beside the call."""
    answer: Answer | None = None
    promised: bool = False
    """The answer may have been given to somebody, and its time is not over."""


Books: TypeAlias = tuple[Book | None, ...]
"""One book for each incarnation so far; None where nobody can add to it any more."""


class World(NamedTuple):
    """Everything."""

    rec: Rec | None = None
    parcel: Parcel | None = None
    ledger: tuple[Charge, ...] = ()
    closed: tuple[str, ...] = ()
    flight: tuple[CallUnderWay, ...] = ()
    procs: tuple[Proc, ...] = ()
    query: Query | None = None
    books: Books = ()
    carried: int = 0
    """Effects of a record that was discarded: for the key they have happened all the same."""


class Move(NamedTuple):
    """One step: what is said about it in a trace, where it leads, and what kind of step it is."""

    label: str
    world: World
    fault: bool = False
    """It needs bad luck, so nobody may count on it."""
    client: bool = False
    """It needs a new request, so nobody may count on it either."""


class Breach(Exception):  # noqa: N818  (it is what the checker looks for, not a fault of the model)
    """A promise was broken, by a step that the trace shall end with."""

    step = ""


@dataclass(frozen=True, slots=True)
class Scenario:
    """Which worlds are visited: who is there, what can go wrong, and how much of it."""

    name: str
    effects: Effects
    recovery: Recovery
    dedup: bool = False
    """The provider recognises a key it has seen, for some time; so calls are declared repeatable."""
    forgets: bool = True
    """That time ends."""
    bodies: tuple[str, ...] = ("a", "b")
    routes: tuple[Effects, ...] = ()
    """What today's code declares, if it is not what made the record (a deploy)."""
    procs: int = 2
    """How many may be in the middle of something at once."""
    incarnations: int = 1
    """How often the key may be used anew, the first time included."""
    losses: bool = False
    """Replies of commits get lost."""
    max_attempts: int = 2
    one_commit: bool = False
    """Requests may also run in one commit, under the lock (L1)."""
    closes: bool = False
    """The resolver closes the reference at the provider instead of waiting."""
    residual: bool = False
    """A pause may fall between the last check and the send, which nothing can fence (U1)."""
    forgives: bool = False
    """Double effects are not counted, to see that such a pause breaks nothing else."""
    busts: bool = False
    """An operator takes answers back."""
    by_hand: bool = False
    """An operator gives the result of an open call, and gives it anew."""
    hangs: bool = False
    """Handlers hang, while their heartbeat goes on."""
    soft: bool = False
    """Expired records are kept for a while."""


_LOCAL, _PHASED, _OUTBOX, _INLINE = Effects.LOCAL, Effects.PHASED, Effects.OUTBOX, Effects.INLINE
_RETRY, _RESUME, _UNKNOWN = Recovery.RETRY, Recovery.RESUME, Recovery.UNKNOWN

_ALL = (
    Scenario(
        "local",
        _LOCAL,
        _RETRY,
        procs=3,
        incarnations=3,
        losses=True,
        one_commit=True,
        busts=True,
        hangs=True,
        soft=True,
    ),
    Scenario("local, in doubt by policy", _LOCAL, _UNKNOWN, procs=3, incarnations=2, losses=True),
    Scenario("inline", _INLINE, _UNKNOWN, procs=3, incarnations=3, losses=True, busts=True),
    Scenario("inline, closing", _INLINE, _UNKNOWN, procs=3, losses=True, closes=True),
    Scenario("inline, beyond the waiting rule", _INLINE, _UNKNOWN, procs=3, losses=True, residual=True, forgives=True),
    Scenario("inline, after a deploy", _INLINE, _UNKNOWN, procs=3, routes=(_INLINE, _LOCAL)),
    Scenario("phased", _PHASED, _RESUME, procs=4, max_attempts=3, losses=True),
    Scenario("phased, used anew", _PHASED, _RESUME, procs=3, incarnations=2, losses=True),
    Scenario("phased, closing", _PHASED, _RESUME, procs=3, closes=True),
    Scenario("phased, beyond the waiting rule", _PHASED, _RESUME, procs=3, residual=True, forgives=True),
    Scenario("phased, by hand", _PHASED, _RESUME, procs=3, by_hand=True),
    Scenario("phased, in doubt by policy", _PHASED, _UNKNOWN, procs=3, losses=True),
    Scenario("phased, repeatable", _PHASED, _RESUME, dedup=True, procs=3, max_attempts=3, losses=True),
    Scenario("phased, repeatable, used anew", _PHASED, _RESUME, dedup=True, incarnations=2),
    Scenario("outbox", _OUTBOX, _RETRY, procs=4, losses=True),
    Scenario("outbox, used anew", _OUTBOX, _RETRY, procs=3, incarnations=3, losses=True, soft=True),
    Scenario("outbox, beyond the waiting rule", _OUTBOX, _RETRY, procs=3, losses=True, residual=True, forgives=True),
    Scenario("outbox, in doubt by policy", _OUTBOX, _UNKNOWN, procs=4, losses=True),
    Scenario("outbox, repeatable", _OUTBOX, _RETRY, dedup=True, procs=3, losses=True),
    Scenario("outbox, repeatable, used anew", _OUTBOX, _RETRY, dedup=True, incarnations=2),
)

SCENARIOS: Mapping[str, Scenario] = MappingProxyType({scenario.name: scenario for scenario in _ALL})
"""All explorations by their names."""
