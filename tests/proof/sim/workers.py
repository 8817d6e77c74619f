"""The workers: sweeper, resolver, reaper, operator and relay. What each may do is asked of TRANSITIONS itself."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar

from oncekey.canonical.digests import downstream_key
from oncekey.core.errors import StoreError
from oncekey.core.flow import Mode, Statement, Transaction
from oncekey.core.guards import Facts
from oncekey.core.memo import encode, recovery_point
from oncekey.core.model import Effects, EntryKind, Lease, MemoEntry, State, StoredResponse
from oncekey.core.rulings import LEASE_RAN_OUT
from oncekey.core.transitions import Actor, Transition, Trigger, find_transition
from oncekey.stores.rows import memo_text, owner_proof, record_of, response_params, version_proof
from oncekey_demo.history import Effect
from proof.sim.scenarios import (
    CALL_TIMEOUT,
    CLOCK_TOLERANCE,
    DOUBT_WAIT,
    PARCEL_LEASE,
    POLICY,
    REAP_GRACE,
    SWEEP_GRACE,
    TTL,
)
from proof.sim.shop import CHARGE, Reaction
from proof.sim.steps import Mailbox, Point, Receive, talk

if TYPE_CHECKING:
    from oncekey.core.flow import Body, Flow, Rows, Value
    from oncekey.core.model import Instant, Record, RecordId
    from proof.sim.scheduler import Clock, Host
    from proof.sim.shop import Outcome
    from proof.sim.steps import Process
    from proof.sim.world import World


@dataclass(slots=True)
class Watch:
    """Compares the store's clock with a worker's own (A3), and remembers when it was last wrong."""

    clock: Clock
    wrong: bool = False
    wrong_at: Instant | None = None

    def look(self, store: Instant) -> bool:
        """Whether they agree, by the instant that came with a snapshot.

        It is that instant which decides what is due, so it is that one which must be right: a worker that
        compared the clocks first and then stood still would go on with another.
        """
        before, self.wrong = self.wrong, abs(store - self.clock.boot) > CLOCK_TOLERANCE
        if before or self.wrong:
            # Also at the first look that finds it right again: nobody knows how long ago that was.
            self.wrong_at = self.clock.boot
        return not self.wrong

    def settled(self, store: Instant) -> bool:
        """They have agreed for so long that what was stamped wrongly has had its full time all the same."""
        agree = self.look(store)
        return agree and (self.wrong_at is None or self.clock.boot >= self.wrong_at + TTL)


@dataclass(slots=True)
class Worker:
    """Looks at every record in its rounds."""

    world: World
    host: Host
    first_seen: dict[str, Instant] = field(default_factory=dict)

    name: ClassVar[str] = "worker"
    diligence: ClassVar[float] = 1.0
    """How often it comes when it is called."""

    def round(self) -> Process[None]:
        """One look at everything; an outage is no reason to stop."""
        yield Point("looks around")
        for record_id in self.world.keys:
            try:
                yield from self.tend(record_id)
            except StoreError:
                continue

    def trusts(self, now: Instant) -> bool:
        """Whether it dares to go by the store's clock."""
        return self.world.watch.look(now)

    def tend(self, record_id: RecordId) -> Process[None]:
        """Look at one record and do what is due."""
        snapshot = yield from talk(self.world.store_of(self.host).find(record_id))
        if not self.trusts(snapshot.now):
            self.world.scheduler.note(self.host.name, "does not trust the clock")
        elif snapshot.record is not None:
            yield from self.act(snapshot.record, snapshot.now)

    def act(self, record: Record, now: Instant) -> Process[None]:
        """What is due, if anything."""
        raise NotImplementedError

    def say(self, name: str, seen: Record, params: dict[str, Value] | None = None) -> Process[Rows]:
        """One statement that proves the version that was seen."""
        world, now = self.world, self.world.now_of(self.host)
        said: dict[str, Value] = {**(params or {}), **version_proof(seen), "now": now}
        statement = Statement(name, world.parts.commands[name], said)

        def body() -> Body[Rows]:
            return (yield statement)

        return (yield from talk(_flow(Transaction(name, Mode.SINGLE, body))))


class Sweeper(Worker):
    """A lease that ran out means what the record's own effects say."""

    name = "sweeper"

    def act(self, record: Record, now: Instant) -> Process[None]:
        """Rows 14 and 15."""
        yield from self.swept(record, now - SWEEP_GRACE)

    def swept(self, record: Record, now: Instant) -> Process[None]:
        """Move a stale record where TRANSITIONS says."""
        row = find_transition(Trigger.SWEEP, Actor.SWEEPER, Facts(record, now))
        if isinstance(row, Transition) and row.to is not None:
            yield from self.say("sweep", record, {"to": row.to.value, "last_error": LEASE_RAN_OUT})


class Resolver(Worker):
    """Settles what nobody knows, by what the provider has in its books."""

    name = "resolver"

    def act(self, record: Record, now: Instant) -> Process[None]:
        """Rows 19 to 23."""
        if record.state is not State.UNKNOWN:
            return
        clock = self.world.clock
        # Waiting is measured by the resolver's own clock: the store's may be put right in the meantime.
        since = self.first_seen.setdefault(f"{record.incarnation}/{record.fence}", clock.boot)
        waited = self.waited(since, clock.boot)
        yield Point("asks the provider")
        key = downstream_key(record.seed, "charge")
        charge = self.world.provider.charge_of(str(record.incarnation), key)
        open_call = record.effects is not Effects.PHASED or record.intent is not None
        if charge is not None and open_call:
            yield from self.executed(record, now, charge)
            return
        row = find_transition(Trigger.NOT_EXECUTED, Actor.RESOLVER, Facts(record, now, waited=waited))
        if isinstance(row, Transition) and row.to is not None:
            yield from self.say("resolve_not_executed", record, {"to": row.to.value})
            if row.to is State.PENDING:
                self.world.database.parcels[str(record.incarnation)] = 0
        elif record.reconcile_tries == 0:
            yield from self.say("still_unknown", record, {"wait": DOUBT_WAIT})

    def waited(self, since: Instant, now: Instant) -> bool:
        """Whether "the provider knows nothing of it" is a fact by now (U1)."""
        return now - since >= DOUBT_WAIT

    def executed(self, record: Record, now: Instant, charge: str) -> Process[None]:
        """The provider's word is the answer, or the result that a phased handler goes on with."""
        row = find_transition(Trigger.EXECUTED, Actor.RESOLVER, Facts(record, now, result_given=True))
        if not isinstance(row, Transition):
            return
        if row.to is State.COMPLETED:
            said = _answer(record, 201, charge)
            yield from self.say("resolve_executed", record, {"outcome": "success", **response_params(said)})
            return
        memo = (*record.memo, MemoEntry(CHARGE, EntryKind.CALL, encode(charge, POLICY.max_result_bytes)))
        given: dict[str, Value] = {"memo": memo_text(memo), "recovery_point": recovery_point(memo)}
        yield from self.say("resolve_result", record, given)


class Reaper(Worker):
    """Deletes what has expired, or marks it first."""

    name = "reaper"

    def trusts(self, now: Instant) -> bool:
        """Deleting cannot be undone, so it waits longer than the others after a clock was wrong."""
        return self.world.watch.settled(now)

    def act(self, record: Record, now: Instant) -> Process[None]:
        """Rows 18, 29 and 30."""
        facts = Facts(record, now - REAP_GRACE, soft=self.world.soft)
        row = find_transition(Trigger.EXPIRE, Actor.REAPER, facts)
        if isinstance(row, Transition) and row.to is not None:
            yield from self.say("expire", record, {"to": row.to.value})
        elif isinstance(find_transition(Trigger.PURGE, Actor.REAPER, facts), Transition):
            yield from self.say("purge", record)


class Operator(Sweeper):
    """Releases by hand what looks stuck, and may do no more than the sweeper and the resolver (A1)."""

    name = "operator"
    diligence = 0.3

    def act(self, record: Record, now: Instant) -> Process[None]:
        """Rows 14, 15 and 21; never on a live lease."""
        yield from self.swept(record, now)


class Relay(Worker):
    """Makes the call of a request that deferred it, once it has the parcel."""

    name = "relay"

    def trusts(self, now: Instant) -> bool:
        """A parcel's lease is taken and compared by whoever has it; there is nothing to be early with."""
        return True

    def act(self, record: Record, now: Instant) -> Process[None]:
        """Rows 24 to 27 and 7."""
        parcels, life = self.world.database.parcels, str(record.incarnation)
        if record.effects is not Effects.OUTBOX or life not in parcels or parcels[life] > self.world.clock.boot:
            return
        parcels[life] = self.world.clock.boot + PARCEL_LEASE
        remembers = self.world.scenario.provider_remembers
        facts = Facts(
            record, now, parcel_claimed=True, parcel_sent=record.intent is not None, parcel_repeatable=remembers
        )
        row = find_transition(Trigger.WORKER_CLAIM, Actor.WORKER, facts)
        if not isinstance(row, Transition):
            return
        if row.to is State.UNKNOWN:
            yield from self.say("park", record, {"last_error": "call_uncertain"})
            return
        owner = f"{self.host.name} {self.world.rng.uuid()}"
        rows = yield from self.say("take_up", record, {"owner": owner, "intent": _intent(record, now)})
        if rows:
            yield from self._deliver(record_of(rows[0]))

    def _deliver(self, record: Record) -> Process[None]:
        yield Point("sends", critical=True, slack=self.world.scenario.send_slack)
        reply_to = Mailbox()
        effect = Effect(
            f"{CHARGE} of {self.host.name}",
            record.id.scope,
            record.id.key,
            record.fingerprint,
            0,
            incarnation=str(record.incarnation),
            kind=CHARGE,
        )
        self.world.provider.send(effect, downstream_key(record.seed, CHARGE), reply_to)
        outcome: Outcome | None = yield Receive(reply_to, CALL_TIMEOUT)
        yield Point("has its reply" if outcome else "has no reply", critical=True)
        match None if outcome is None else outcome.reaction:
            case None:
                yield from self.own("park", record, {"last_error": "call_uncertain"})
            case Reaction.REFUSED:
                yield from self.own("postpone", record, {})
                self.world.database.parcels[str(record.incarnation)] = 0
            case Reaction.DECLINED:
                said = _answer(record, 402, "declined by the provider")
                yield from self.own("deliver", record, {"outcome": "failure", **response_params(said)})
            case _:
                assert outcome is not None
                said = _answer(record, 201, outcome.charge)
                yield from self.own("deliver", record, {"outcome": "success", **response_params(said)})

    def own(self, name: str, record: Record, params: dict[str, Value]) -> Process[Rows]:
        """One statement that proves the ownership of whoever took the record up."""
        said: dict[str, Value] = {**params, **owner_proof(Lease.of(record)), "now": self.world.now_of(self.host)}
        statement = Statement(name, self.world.parts.commands[name], said)

        def body() -> Body[Rows]:
            return (yield statement)

        return (yield from talk(_flow(Transaction(name, Mode.SINGLE, body))))


def _intent(record: Record, now: Instant) -> str:
    sends = 1 if record.intent is None else record.intent.sends + 1
    first = now if record.intent is None else record.intent.first_sent_at
    return json.dumps(
        {
            "phase": CHARGE,
            "downstream_key": downstream_key(record.seed, CHARGE),
            "digest": "",
            "sends": sends,
            "first_sent_at": first,
            "send_by": now + CALL_TIMEOUT,
            "repeatable_until": None,
        }
    )


def _answer(record: Record, status: int, what: str) -> StoredResponse:
    """As a handler would have answered: the life that it is from stands in front."""
    return StoredResponse(status, (), f"{record.incarnation} {what}".encode())


def _flow(transaction: Transaction[Rows]) -> Flow[Rows]:
    rows: Rows = yield transaction
    return rows
