"""The simulated shop: a handler for each kind of effects, as flows, and the provider that it calls.

A handler's body begins with the life of the key that it ran in, so that the reader of an answer knows whose it is. The
provider has a ledger of its own, which is the truth about what was done.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from types import MappingProxyType
from typing import TYPE_CHECKING, Final, TypeAlias

from oncekey.canonical.digests import downstream_key
from oncekey.core.errors import NotExecutedError, RejectedError
from oncekey.core.model import Effects
from oncekey.engine import steps as taken
from oncekey.engine.actions import Call, Life
from oncekey_demo.history import Effect
from proof.lives import NotEntered, Said
from proof.sim.scenarios import CALL_TIMEOUT, PROVIDER_LAG, HandlerCourse
from proof.sim.steps import Insert, Mailbox, Point, Receive, Wait

if TYPE_CHECKING:
    from oncekey.core.model import Duration
    from oncekey.engine.run import Run
    from proof.sim.runtime import Asked
    from proof.sim.scenarios import Plan, Rng
    from proof.sim.scheduler import Scheduler
    from proof.sim.steps import OpenTransaction, Process
    from proof.sim.world import World


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

    def __init__(self, scheduler: Scheduler, rng: Rng, *, remembers: bool) -> None:
        self.ledger: list[Effect] = []
        self._scheduler = scheduler
        self._rng = rng
        self._remembers = remembers
        self._by_key: dict[str, str] = {}

    def send(self, charge: Effect, downstream_key: str, reply_to: Mailbox) -> None:
        """A call leaves for the provider; from here on nothing can stop it."""
        bad = self._rng.chance(self._scheduler.rates.provider)
        reaction = self._rng.pick(_BAD) if bad else Reaction.CHARGED
        late = 0 if reaction is Reaction.REFUSED else self._rng.between(1, PROVIDER_LAG)
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


CHARGE: Final = "charge"
PROMISES: Final[Mapping[Effects, tuple[str, ...]]] = {
    Effects.LOCAL: ("order",),
    Effects.OUTBOX: ("transfer", CHARGE),
    Effects.PHASED: ("payment", CHARGE, "settlement"),
    Effects.INLINE: (CHARGE,),
}
"""What a success means, by the kind of effects."""


class FailedError(Exception):
    """The application's own fault."""


@dataclass(slots=True)
class Counter:
    """Where one request is served: what it asked for, and how its handler goes."""

    world: World
    asked: Asked
    plan: Plan

    def local(self, run: Run) -> Life[Said]:
        """One row through the transaction that it was handed."""
        yield from self._enter(run)
        if self.plan.course is HandlerCourse.DECLINES:
            return self._said(run, 402)
        yield Call(self._insert, (run, run.tx.connection, "order"))
        if self.plan.course is HandlerCourse.RAISES:
            raise FailedError
        return self._said(run, 201)

    def outbox(self, run: Run) -> Life[Said]:
        """A row, and a call that a worker makes later."""
        yield from self._enter(run)
        if self.plan.course is HandlerCourse.DECLINES:
            return self._said(run, 402)
        yield Call(self._insert, (run, run.tx.connection, "transfer"))
        run.parcels.defer("transfer", {"by": self.asked.operation})
        if self.plan.course is HandlerCourse.RAISES:
            raise FailedError
        return Said(202)

    def inline(self, run: Run) -> Life[Said]:
        """One call to a provider, started only while the lease is surely its own (U1)."""
        yield from self._enter(run)
        if self.plan.course is HandlerCourse.DECLINES:
            return self._said(run, 402)
        try:
            charge: str = yield Call(self._charge, (run, downstream_key(run.seed, CHARGE)))
        except RejectedError:
            return self._said(run, 402)
        if self.plan.course is HandlerCourse.RAISES:
            raise FailedError
        return self._said(run, 201, charge)

    def phased(self, run: Run) -> Life[Said]:
        """A phase, a call and a phase, each remembered: whoever resumes it goes on behind what is done."""
        phased_run, store = run.phased_run, run.store
        assert phased_run is not None
        yield from self._enter(run)
        repeatable = self.world.scenario.provider_remembers

        def create(tx: OpenTransaction) -> Process[str]:
            return (yield from self._insert(run, tx, "payment"))

        def settle(tx: OpenTransaction) -> Process[str]:
            return (yield from self._insert(run, tx, "settlement"))

        def charge(key: str) -> Process[str]:
            return (yield from self._charge(run, key))

        yield from taken.phase(store, phased_run, run.parcels, "created", create)
        if self.plan.course is HandlerCourse.RAISES and not self.world.rng.chance(0.5):
            raise FailedError
        try:
            made = yield from taken.call(store, phased_run, CHARGE, charge, repeatable=repeatable, parameters=None)
        except RejectedError:
            return self._said(run, 402)
        yield from taken.phase(store, phased_run, run.parcels, "settled", settle)
        return self._said(run, 201, str(made))

    def _enter(self, run: Run) -> Life[None]:
        if not self.plan.entered:
            raise NotEntered(Said(401, b"nobody knows you"))
        self.world.entered(self.asked, run)
        yield Call(self._work)
        if run.lost() and self.plan.heeds_loss:
            raise FailedError

    def _work(self) -> Process[None]:
        yield Wait(self.plan.work)

    def _insert(self, run: Run, tx: OpenTransaction, kind: str) -> Process[str]:
        effect = self._effect(run, kind)
        yield Insert(tx, effect)
        return effect.id

    def _charge(self, run: Run, key: str) -> Process[str]:
        """A call that leaves for the provider, if its owner may still make it, and what comes back."""
        pulse = run.pulse
        if run.lost() or (pulse is not None and self.world.clock.boot >= pulse.trusted_until):  # type: ignore[attr-defined]
            raise NotExecutedError("the lease is not surely ours any more")
        yield Point("sends", critical=True, slack=self.world.scenario.send_slack)
        reply_to = Mailbox()
        self.world.provider.send(self._effect(run, CHARGE), key, reply_to)
        outcome: Outcome | None = yield Receive(reply_to, CALL_TIMEOUT)
        yield Point("has its reply" if outcome else "has no reply", critical=True)
        if outcome is None:
            raise TimeoutError
        match outcome.reaction:
            case Reaction.REFUSED:
                raise NotExecutedError("the provider could not be reached")
            case Reaction.DECLINED:
                raise RejectedError({"reason": "declined by the provider"})
            case _:
                return outcome.charge

    def _effect(self, run: Run, kind: str) -> Effect:
        assert run.lease is not None
        asked = self.asked
        return Effect(
            id=f"{kind} of {asked.operation}",
            scope=asked.id.scope,
            key=asked.id.key,
            fingerprint=asked.fingerprint,
            at=0,
            operation=asked.operation,
            incarnation=str(run.lease.incarnation),
            kind=kind,
        )

    def _said(self, run: Run, status: int, what: str = "") -> Said:
        assert run.lease is not None
        return Said(status, f"{run.lease.incarnation} {what or self.asked.operation}".encode())


Handling: TypeAlias = "Callable[[Counter, Run], Life[Said]]"

HANDLERS: Mapping[Effects, Handling] = MappingProxyType(
    {
        Effects.LOCAL: Counter.local,
        Effects.OUTBOX: Counter.outbox,
        Effects.INLINE: Counter.inline,
        Effects.PHASED: Counter.phased,
    }
)
"""Effects -> the handler of such a route."""
