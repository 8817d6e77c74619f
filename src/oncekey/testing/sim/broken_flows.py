"""Servers and workers with one rule broken: each class or flow differs from the real one in one method."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING
from uuid import uuid5

from oncekey.core.errors import CommitAmbiguousError, StoreError
from oncekey.core.model import Code, Discarded, Lease, Replay, State
from oncekey.core.seed import seed_of
from oncekey.engine import request
from oncekey.testing.history import Kind
from oncekey.testing.sim.handlers import InlineRun, LocalRun
from oncekey.testing.sim.plan import raised
from oncekey.testing.sim.serving import Answer, Serving, heartbeat
from oncekey.testing.sim.steps import Commit, Reply, talk
from oncekey.testing.sim.timing import POLICY
from oncekey.testing.sim.workers import Operator, Reaper, Resolver

if TYPE_CHECKING:
    from uuid import UUID

    from oncekey.core.model import Claim, Instant, Record, RecordId, Settlement, Snapshot, Verdict
    from oncekey.core.policy import Policy
    from oncekey.core.settle import Ending
    from oncekey.flow import Flow
    from oncekey.ports import Records
    from oncekey.testing.sim.parts import Begin
    from oncekey.testing.sim.steps import OpenTransaction, Process


class ReleasesInFinally(Serving):
    """Whatever happened, the claim is taken back at the end unless there was an answer."""

    def answer(self) -> Process[Answer]:
        """As the real one, and then the release."""
        answer = yield from super().answer()
        if answer.kind is not Kind.OK:
            try:
                yield from talk(self.store.settle(self._anything(), Discarded()))
            except StoreError:
                return answer
        return answer

    def _anything(self) -> Lease:
        claim = self.claim
        return Lease(claim.id, claim.incarnation, 1, 1, claim.effects, 0, 0, 0)


class AcknowledgesBeforeCommit(LocalRun):
    """The answer goes out while the transaction is still open."""

    def commit(self, tx: OpenTransaction, settlement: Settlement) -> Process[Answer]:
        """Answer, then commit."""
        yield Reply(self.serving.caller, self.told(settlement))
        return (yield from super().commit(tx, settlement))


class TakesLostCommitForFailure(LocalRun):
    """An error at COMMIT means that it failed."""

    def lost_commit(self) -> Process[Answer]:
        """Say so without looking."""
        yield from ()
        return Answer(Kind.FAIL, code=Code.EXECUTION_FAILED)


class AnswersFromMemory(LocalRun):
    """What the handler said is the answer, even if the settlement was refused."""

    def says(self, snapshot: Snapshot) -> Answer:  # noqa: ARG002  (as the real one)
        """Never mind the record."""
        return Answer(Kind.OK, 201, b"made by " + self.host.name.encode(), incarnation=str(self.lease.incarnation))


class CommitsTwice(LocalRun):
    """The business commits first, the record afterwards."""

    def commit(self, tx: OpenTransaction, settlement: Settlement) -> Process[Answer]:
        """Two transactions where one was promised."""
        tx.rows.clear()
        self.world.database.locks.clear()
        try:
            yield Commit(tx)
        except StoreError:
            return Answer(Kind.INFO, code=Code.OUTCOME_UNKNOWN)
        return (yield from self.settled(settlement))


class CallsUncertainNotExecuted(InlineRun):
    """No reply is taken for "nothing happened": the exception releases the claim."""

    def handle(self) -> Process[Ending]:
        """As the real one, but never in doubt."""
        ending = yield from super().handle()
        return raised(not_executed=True) if ending.status is None else ending


class NeverWaits(Resolver):
    """Believes "not executed" at once (F34)."""

    def waited(self, since: Instant, now: Instant) -> bool:  # noqa: ARG002  (as the real one)
        """It says so, and does not."""
        return True


class ReleasesLive(Operator):
    """Releases what looks stuck, though its owner is alive (F39)."""

    def swept(self, record: Record, now: Instant) -> Process[None]:  # noqa: ARG002  (as the real one)
        """Without a look at the lease."""
        if record.state is State.IN_PROGRESS:
            yield from self.say("sweep", record, {"to": "failed_retryable", "last_error": "released"})


class ReapsAnything(Reaper):
    """Deletes by age alone (F3)."""

    def act(self, record: Record, now: Instant) -> Process[None]:
        """Without a look at the state."""
        if record.expires_at <= now:
            yield from self.say("purge", record)


class TrustsAnyClock(Reaper):
    """Believes the store's clock whatever it says (F41)."""

    def trusts(self, now: Instant) -> bool:  # noqa: ARG002  (as the real one)
        """Always."""
        return True


def beats_for_ever(serving: Serving, lease: Lease, deadline: Instant) -> Process[None]:
    """A heartbeat that knows no deadline."""
    return (yield from heartbeat(serving, lease, deadline * 2))


def claims_anew(records: Records, claim: Claim, policy: Policy) -> Flow[Verdict]:
    """A claim whose reply was lost is made again as somebody else's."""
    while True:
        flow = request.begin(records, claim, policy)
        try:
            transaction = next(flow)
            while True:
                try:
                    result = yield transaction
                except CommitAmbiguousError as error:
                    if transaction.name == "claim":
                        break
                    transaction = flow.throw(error)
                except StoreError as error:
                    transaction = flow.throw(error)
                else:
                    transaction = flow.send(result)
        except StopIteration as stop:
            return stop.value  # type: ignore[no-any-return]  # a generator's return value is untyped here
        claim = replace(claim, incarnation=uuid5(claim.incarnation, "again"), owner=claim.owner + "'")


def claims_as_before(records: Records, claim: Claim, policy: Policy) -> Flow[Verdict]:
    """A claim whose reply was lost is said again word for word, however long ago that was."""
    flow = request.begin(records, claim, policy)
    try:
        transaction = next(flow)
        while True:
            try:
                result = yield transaction
            except CommitAmbiguousError as error:
                if transaction.name != "claim":
                    transaction = flow.throw(error)
            except StoreError as error:
                transaction = flow.throw(error)
            else:
                transaction = flow.send(result)
    except StopIteration as stop:
        return stop.value  # type: ignore[no-any-return]  # a generator's return value is untyped here


def cached(begin: Begin) -> Begin:
    """A replay cache in front of the store that knows no expiry, no fingerprint and no incarnation (F40)."""
    answers: dict[str, Replay] = {}

    def begin_cached(records: Records, claim: Claim, policy: Policy) -> Flow[Verdict]:
        known = answers.get(claim.id.key)
        if known is not None:
            return known
        verdict = yield from begin(records, claim, policy)
        if isinstance(verdict, Replay):
            answers[claim.id.key] = verdict
        return verdict

    return begin_cached


def seed_from_life(record_id: RecordId, fingerprint: str, incarnation: UUID) -> bytes:
    """Downstream keys that change with the incarnation (F38)."""
    return seed_of(record_id, fingerprint + str(incarnation), POLICY.secret)


def seed_from_key(record_id: RecordId, fingerprint: str, incarnation: UUID) -> bytes:  # noqa: ARG001  (as the real)
    """Downstream keys that do not change with the body (F38)."""
    return seed_of(record_id, "", POLICY.secret)
