"""The lifecycle, a server and workers with one rule broken: each differs from the real one in one function."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Final, TypeAlias
from uuid import uuid5

from oncekey.canonical.digests import Seeds
from oncekey.core.errors import CommitAmbiguousError, StoreError
from oncekey.core.model import UNAVAILABLE, Completed, Discarded, Lease, Replay, State
from oncekey.core.onecommit import Stored
from oncekey.engine import admit, request, serve, settle
from oncekey.engine.actions import Beat, Call, Commit, Life
from oncekey.engine.deciding import refused
from proof.lives import CallReport
from proof.sim.runtime import Serving
from proof.sim.scenarios import POLICY
from proof.sim.steps import Reply
from proof.sim.workers import Operator, Reaper, Resolver

if TYPE_CHECKING:
    from uuid import UUID

    from oncekey.core.answers import Answer
    from oncekey.core.flow import Body, Flow
    from oncekey.core.model import (
        Bypass,
        Claim,
        Deferred,
        Instant,
        Parcel,
        Record,
        RecordId,
        Settled,
        Settlement,
        Verdict,
    )
    from oncekey.core.policy import Policy
    from oncekey.engine.actions import Tx
    from oncekey.engine.local import LockHeld
    from oncekey.engine.run import Run
    from oncekey.ports.store import Locks, Outbox, Records
    from proof.lives import Said
    from proof.sim.runtime import Pulse
    from proof.sim.steps import Process


Begin: TypeAlias = "Callable[[Records, Claim, Policy], Flow[Verdict]]"

BEGIN: Final = request.begin
SERVE: Final = serve.serve
TOGETHER: Final = settle._together
GIVE_BACK: Final = admit._give_back


def releases_in_finally(run: Run) -> Life[Answer | Bypass | None]:
    """Whatever happened, the claim is taken back at the end unless there was an answer of the handler's."""
    told = yield from SERVE(run)
    if told is not None:
        claim = run.claim
        anything = Lease(claim.id, claim.incarnation, 1, 1, claim.effects, 0, 0, 0)
        try:
            yield from run.store.settle(anything, Discarded())
        except StoreError:
            return told
    return told


class AnswersBeforeItSettles(Serving):
    """The answer goes out, and then the settlement begins: what the handler said is what the client hears."""

    def handler(self, run: Run) -> Life[Said]:
        """Answer as soon as there is an answer."""
        said = yield from super().handler(run)
        if said.status is not None:
            own = CallReport(said.status, said.body, said.headers, own=True)
            yield Call(self._answered, (self.answer(own, run),))
        return said

    def _answered(self, answer: object) -> Process[None]:
        yield Reply(self.caller, answer)


class BeatsForEver(Serving):
    """A heartbeat that knows no deadline."""

    def beat(self, action: Beat) -> Pulse:
        """As the real one, twice as far as anybody looks."""
        return super().beat(Beat(action.renew, action.every, action.until * 1_000_000))


def takes_lost_commit_for_failure(run: Run) -> Life[Answer]:
    """An error at COMMIT means that it failed: say so without looking."""
    yield from ()
    return refused(run, UNAVAILABLE)


def answers_from_memory(run: Run, settled: Settled) -> None:
    """What the handler said is the answer, even if the settlement was refused."""
    return


def commits_twice(run: Run, tx: Tx, settlement: Settlement) -> Life[Answer | None]:
    """The business commits first, the record afterwards: two transactions where one was promised."""
    if not isinstance(settlement, Completed):
        return (yield from TOGETHER(run, tx, settlement))
    try:
        yield Commit(tx)
    except StoreError:
        return refused(run, UNAVAILABLE)
    if run.one_commit is not None:
        return (yield from settle._store_answer_alone(run, settlement))
    return (yield from settle._settle_claimed_alone(run, settlement))


def proves_everything(error: BaseException, policy: Policy) -> bool:
    """No reply is taken for "nothing happened": any exception releases the claim."""
    return True


def notices_no_conflict(
    locks: Locks,
    outbox: Outbox | None,
    claim: Claim,
    lock_held: LockHeld,
    settlement: Completed | Deferred,
    *,
    parcels: tuple[Parcel, ...] = (),
) -> Body[Stored | None]:
    """The record is inserted ON CONFLICT DO NOTHING, and whether a row was inserted is not asked."""
    sealed = yield from locks.completing(claim, lock_held.target, settlement, lock_held.begun)
    if parcels and outbox is not None:
        yield from outbox.putting(parcels)
    return sealed or Stored(expires_at=lock_held.proceed.lease.expires_at)


def waits_with_its_connection(run: Run, *, wait: bool = True) -> Life[None]:
    """A request that waits keeps its transaction, and whatever else it has."""
    if run.lease is None and run.record is None:
        yield from ()
        return
    yield from GIVE_BACK(run)


class NeverWaits(Resolver):
    """Believes "not executed" at once (F34)."""

    def waited(self, since: Instant, now: Instant) -> bool:
        """It says so, and does not."""
        return True


class ReleasesLive(Operator):
    """Releases what looks stuck, though its owner is alive (F39)."""

    def swept(self, record: Record, now: Instant) -> Process[None]:
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

    def trusts(self, now: Instant) -> bool:
        """Always."""
        return True


def claims_anew(records: Records, claim: Claim, policy: Policy) -> Flow[Verdict]:
    """A claim whose reply was lost is made again as somebody else's."""
    while True:
        flow = BEGIN(records, claim, policy)
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
    flow = BEGIN(records, claim, policy)
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


def cached() -> Begin:
    """A replay cache in front of the store that knows no expiry, no fingerprint and no incarnation (F40)."""
    answers: dict[str, Replay] = {}

    def begin_cached(records: Records, claim: Claim, policy: Policy) -> Flow[Verdict]:
        known = answers.get(claim.id.key)
        if known is not None:
            return known
        verdict = yield from BEGIN(records, claim, policy)
        if isinstance(verdict, Replay):
            answers[claim.id.key] = verdict
        return verdict

    return begin_cached


def seed_from_life(record_id: RecordId, fingerprint: str, incarnation: UUID) -> bytes:
    """Downstream keys that change with the incarnation (F38)."""
    return Seeds(POLICY.secret).of(record_id, fingerprint + str(incarnation))


def seed_from_key(record_id: RecordId, fingerprint: str, incarnation: UUID) -> bytes:
    """Downstream keys that do not change with the body (F38)."""
    return Seeds(POLICY.secret).of(record_id, "")
