"""Whole lives, cut off at every effect: `serve` with a handler's effects in it, killed or interrupted, then retried.

The proof beside this one (`proof`) kills a whole application at every statement, with workers, zombies and lost replies
around it. This one has no framework: it drives the lifecycle itself, so it also reaches what has no statement (a
heartbeat that is started, a call that is about to be made, a commit that was decided and not begun).
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Final

from oncekey.boottime import boottime
from oncekey.core.model import MINUTE, Code, Effects, State
from oncekey.core.policy import Policy
from oncekey.core.seed import downstream_key, seed_of
from oncekey.engine import steps
from oncekey.engine.breaker import Breaker
from oncekey.engine.effects import Call, Life
from oncekey.engine.enrolment import Enrolment
from oncekey.engine.run import Run, Site
from oncekey.testing.claims import a_claim
from oncekey.testing.lives import Heard, Said, life

if TYPE_CHECKING:
    from collections.abc import Callable

    from oncekey.flow import Rows
    from oncekey.ports import Store
    from oncekey.testing.clock import ManualClock

POLICY: Final = Policy()
LATER: Final = 10 * MINUTE
"""Longer than every lease."""
ROWS: Final = {
    Effects.LOCAL: {"order": 1},
    Effects.OUTBOX: {"transfer": 1},
    Effects.INLINE: {},
    Effects.PHASED: {"payment": 1, "settlement": 1},
}
"""What a success has written, by the kind of effects."""
DONE: Final = {Effects.LOCAL: 201, Effects.OUTBOX: 202, Effects.INLINE: 201, Effects.PHASED: 201}
"""What a client hears at last; of an OUTBOX request its worker is still to come."""


@dataclass(slots=True)
class Teller:
    """Everything outside of the store: the handlers, what they write with, and a provider with a ledger."""

    insert: Callable[..., Any]
    """Writes a row through a connection: a function, or one that is awaited."""
    emits: bool = True
    """Whether a LOCAL handler hands something to the outbox; then its record does not travel with the COMMIT."""
    charges: list[str] = field(default_factory=list)

    def handler(self, run: Run) -> Life[Said]:
        """The handler of the run's kind of effects."""
        key, effects = run.claim.id.key, run.enrolment.effects
        match effects:
            case Effects.LOCAL:
                yield Call(self.insert, (run.tx.connection, "order", key, 1, None))
                if self.emits:
                    run.parcels.emit("receipt", {}, None)
            case Effects.OUTBOX:
                yield Call(self.insert, (run.tx.connection, "transfer", key, 1, None))
                run.parcels.defer("transfer", {})
            case Effects.INLINE:
                yield Call(self.charge, (downstream_key(run.seed, "charge"),))
            case Effects.PHASED:
                yield from self._phased(run, key)
        return Said(202 if effects is Effects.OUTBOX else 201, b'"made"')

    def charge(self, key: str) -> str:
        """A call that arrives."""
        self.charges.append(key)
        return f"ch_{len(self.charges)}"

    def _phased(self, run: Run, key: str) -> Life[None]:
        course, store, parcels = run.course, run.store, run.parcels
        assert course is not None
        yield from steps.phase(store, course, parcels, "one", lambda tx: self.insert(tx, "payment", key, 1, None))
        yield from steps.call(store, course, "charge", self.charge, repeatable=True, given=None)
        yield from steps.phase(store, course, parcels, "two", lambda tx: self.insert(tx, "settlement", key, 1, None))


class Unasked:
    """A request that has no key line to echo and no page to show its state on."""

    echo: bytes | None = None
    status_url: str | None = None


def request(store: Store, teller: Teller, effects: Effects, key: str) -> Life[Heard]:
    """One request, from its claim to what its client hears."""
    claim = a_claim(key, effects=effects, recovery=POLICY.recovery_for(effects))
    claim = replace(claim, seed=seed_of(claim.id, claim.fingerprint, None))
    site = Site(store, Breaker(), boottime, boottime)
    return life(Run(site, claim, Enrolment("crash", effects, POLICY, None), Unasked()), teller.handler)


def wrong(effects: Effects, heard: Heard | None, left: dict[str, Rows], teller: Teller) -> list[str]:
    """What is not as it must be once there is an answer. INLINE may end in a doubt, and never in a second call."""
    found = Counter(str(row["kind"]) for row in left["effects"])
    calls, distinct = len(teller.charges), len(set(teller.charges))
    unknown = heard is not None and heard.code is Code.OUTCOME_UNKNOWN
    said = "nothing" if heard is None else f"{heard.status} {heard.code or ''}".strip()
    told: list[str] = []
    if effects is Effects.INLINE:
        if calls > 1:
            told.append(f"never a second call, and there were {calls}")
        if not unknown and (heard is None or heard.status != DONE[effects] or calls != 1):
            told.append(f"one call and its answer, or a doubt: {calls} calls, and {said} was heard")
        return told
    if heard is None or heard.status != DONE[effects] or unknown:
        told.append(f"an answer at last, and {said} was heard")
    if dict(found) != ROWS[effects]:
        told.append(f"each row exactly once, and there are {dict(found)}")
    if effects is Effects.PHASED and distinct != 1:
        told.append(f"one charge for the provider, and there are {distinct}")
    parcels = Counter(str(row["kind"]) for row in left["committed"])
    wanted = {Effects.LOCAL: {"emit": 1} if teller.emits else {}, Effects.OUTBOX: {"defer": 1}}.get(effects, {})
    if dict(parcels) != wanted:
        told.append(f"each parcel exactly once, and there are {dict(parcels)}")
    return told


def owned(left: dict[str, Rows]) -> bool:
    """Whether somebody still owns the record."""
    return any(row["state"] == State.IN_PROGRESS for row in left["records"])


def pass_time(clock: ManualClock) -> None:
    """Leases run out because the clock is moved, and nobody waits."""
    clock.advance(LATER)
