"""The two kinds of handlers: one business transaction (LOCAL, claim-first), and a call to the outside (INLINE)."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from oncekey.core.errors import CommitAmbiguousError, StoreError
from oncekey.core.model import Code, Completed, Effects, Refuse, Replay, Retryable
from oncekey.core.rulings import answer_from
from oncekey.core.seed import downstream_key
from oncekey.core.settle import Business, decide
from oncekey.testing.history import Effect, Kind
from oncekey.testing.sim.plan import Course, answered, raised
from oncekey.testing.sim.provider import Reaction
from oncekey.testing.sim.serving import Answer, replay, stored
from oncekey.testing.sim.steps import Commit, Insert, Mailbox, Point, Receive, Rollback, Wait, talk, within
from oncekey.testing.sim.timing import CALL_TIMEOUT, POLICY

if TYPE_CHECKING:
    from oncekey.core.model import Lease, Record, Settlement, Snapshot
    from oncekey.core.settle import Ending
    from oncekey.testing.sim.provider import Outcome
    from oncekey.testing.sim.serving import Serving
    from oncekey.testing.sim.steps import OpenTransaction, Process

STORE_FAILED = "store_failed"


class _Run:
    """What both kinds share: a lease, and an answer that is the record's when our settlement was not written."""

    undone: Kind
    """What a client may be told when the settlement was not ours."""

    def __init__(self, serving: Serving, lease: Lease, record: Record) -> None:
        self.serving = serving
        self.world = serving.world
        self.host = serving.host
        self.plan = serving.plan
        self.lease = lease
        self.record = record

    def effect(self) -> Effect:
        """What is done for this request, if it is done."""
        asked = self.serving.asked
        return Effect(
            id=f"row of {asked.operation}",
            scope=asked.id.scope,
            key=asked.id.key,
            fingerprint=asked.fingerprint,
            at=0,
            operation=asked.operation,
            incarnation=str(self.lease.incarnation),
        )

    def says(self, snapshot: Snapshot) -> Answer:
        """What the record says now (P3, L2)."""
        verdict = answer_from(snapshot, self.lease)
        match verdict:
            case Replay(record):
                return replay(record)
            case Refuse(code):
                return Answer(self.undone, code=code)
            case _:
                raise AssertionError(verdict)

    def settled(self, settlement: Settlement) -> Process[Answer]:
        """Settle in a transaction of its own, and answer."""
        settled = yield from self.serving.settle(self.lease, settlement)
        if settled is None:
            return Answer(self.undone, code=Code.STORE_UNAVAILABLE)
        if not settled.ours:
            return self.says(settled.snapshot)
        return self.told(settlement)

    def told(self, settlement: Settlement) -> Answer:
        """The answer to a request whose settlement is in the record."""
        match settlement:
            case Completed(response):
                return stored(response, self.lease.incarnation, replayed=False)
            case Retryable():
                return Answer(Kind.FAIL, code=Code.EXECUTION_FAILED)
            case _:
                return Answer(Kind.INFO, code=Code.OUTCOME_UNKNOWN)


class LocalRun(_Run):
    """Business rows and settlement commit together, or neither does."""

    undone = Kind.FAIL

    def run(self) -> Process[Answer]:
        """The handler and its settlement."""
        tx = self.world.database.begin(self.host.name)
        try:
            ending = yield from self.handle(tx)
            decision = decide(Effects.LOCAL, POLICY, ending)
            if decision.business is Business.ROLLBACK:
                return (yield from self.undo(tx, decision.settlement))
            settling = self.serving.store.settling(self.lease, decision.settlement)
            settled = yield from within(tx, settling)
        except StoreError:
            return (yield from self.undo(tx, Retryable(STORE_FAILED)))
        if not settled.ours:
            yield Rollback(tx)
            return self.says(settled.snapshot)
        return (yield from self.commit(tx, decision.settlement))

    def handle(self, tx: OpenTransaction) -> Process[Ending]:
        """The user's code: it writes one row through the transaction it was handed."""
        yield Wait(self.plan.work)
        if self.host.lost and self.plan.heeds_loss:
            return raised()
        match self.plan.course:
            case Course.DECLINES:
                return answered(402, b"declined for " + self.host.name.encode())
            case Course.RAISES:
                yield Insert(tx, self.effect())
                return raised()
            case _:
                yield Insert(tx, self.effect())
                return answered(201, b"made by " + self.host.name.encode())

    def commit(self, tx: OpenTransaction, settlement: Settlement) -> Process[Answer]:
        """The commit, and what is said when its reply does not come (P7)."""
        try:
            yield Commit(tx)
        except CommitAmbiguousError:
            return (yield from self.lost_commit())
        except StoreError:
            return (yield from self.settled(Retryable(STORE_FAILED)))
        return self.told(settlement)

    def lost_commit(self) -> Process[Answer]:
        """Nobody knows yet: ask the record, which waits for the commit to end."""
        parts = self.serving.parts
        try:
            settled = yield from talk(parts.settle_lost_commit(self.serving.store, self.lease))
        except StoreError:
            return Answer(Kind.INFO, code=Code.OUTCOME_UNKNOWN)
        if settled.ours:
            return Answer(Kind.FAIL, code=Code.EXECUTION_FAILED)
        # A record that was swept meanwhile does not wait for the commit: "come back later" promises nothing.
        answer = self.says(settled.snapshot)
        return answer if answer.kind is Kind.OK else replace(answer, kind=Kind.INFO)

    def undo(self, tx: OpenTransaction, settlement: Settlement) -> Process[Answer]:
        """Roll back, then say so in the record."""
        yield Rollback(tx)
        return (yield from self.settled(settlement))


class InlineRun(_Run):
    """One call to a provider, and a settlement afterwards."""

    undone = Kind.INFO

    def run(self) -> Process[Answer]:
        """The handler and its settlement."""
        ending = yield from self.handle()
        return (yield from self.settled(decide(Effects.INLINE, POLICY, ending).settlement))

    def handle(self) -> Process[Ending]:
        """The user's code: it starts its call only while its lease is surely its own (U1)."""
        yield Wait(self.plan.work)
        if self.plan.course is Course.DECLINES:
            return answered(402, b"declined for " + self.host.name.encode())
        if self.host.lost or self.world.clock.boot >= self.host.trusted_until:
            return raised(not_executed=True)
        yield Point("sends", critical=True, slack=self.world.scenario.send_slack)
        reply_to = Mailbox()
        self.world.provider.send(self.effect(), downstream_key(self.record.seed, "charge"), reply_to)
        outcome: Outcome | None = yield Receive(reply_to, CALL_TIMEOUT)
        yield Point("has its reply" if outcome else "has no reply", critical=True)
        if self.plan.course is Course.RAISES or outcome is None:
            return raised()
        match outcome.reaction:
            case Reaction.REFUSED:
                return raised(not_executed=True)
            case Reaction.DECLINED:
                return answered(402, b"declined by the provider")
            case _:
                return answered(201, outcome.charge.encode())
