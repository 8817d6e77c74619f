"""Settlement: stores the decision about an ended handler, and derives the response from the record.

                            decision
                               │
          commit the rows ─────┴───── roll them back, or there were none
                 │                              │
             together                         apart
    settlement is the last statement      rollback, then the settlement in a
    of the handler's transaction, COMMIT  separate transaction
                 │                              │
    ┌────────────┼──────────────┐         ┌─────┴───────┐
    acknowledged refused        no reply  acknowledged  refused, or the store is down
    ▼            ▼              ▼         ▼             ▼
    handler's    rolled back;   lost      handler's     the record's response; an outage is
    response     the record's             response      retried in the background
                 response

* **The handler's own bytes are sent only if the record has the handler's outcome** (the flow returns None). In every
  other case the client gets the record's response. If the store cannot be read, it gets "unavailable" where nothing was
  executed or everything was rolled back, and "outcome unknown" otherwise.
* **lost**: a COMMIT without a reply proves nothing. Only the record shows the outcome, and only after that transaction
  has certainly ended: LOCAL takes the key's lock again, any other settlement writes to the record's row, and both wait
  for the first transaction.
* **refused**: another owner has the record. Our result is stored as evidence, so an executed call is not forgotten. If
  the record is still ours and only rejects this settlement, a weaker one is written: not executed -> handed back ->
  unknown.
* **The store is down**: the settlement is retried in the background for the policy's `deadline`, even after the lease:
  until another owner has the record, the first one is the best source of its outcome.

LOCAL in one commit (`run.one_commit` is set) has written nothing before its COMMIT: there is no claim to withdraw, and
without the commit nothing happened. Everywhere else the record was claimed first, and a settlement proves its lease.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Final, TypeVar

from oncekey.canonical.digests import downstream_key
from oncekey.core.endings import Business, Decision
from oncekey.core.errors import CommitAmbiguousError, RecordUnreadableError, StoreError, TransactionControlError
from oncekey.core.keys import key_digest
from oncekey.core.lazy import Lazy
from oncekey.core.model import (
    UNAVAILABLE,
    Code,
    Completed,
    Deferred,
    Discarded,
    Doubtful,
    Effects,
    HandedBack,
    Outcome,
    Refuse,
    Retryable,
    Settled,
    State,
)
from oncekey.core.onecommit import Stored
from oncekey.core.rulings import answer_from
from oncekey.engine import local, request
from oncekey.engine.actions import Commit, Drop, Interrupted, Keep, Later, Life, Rollback, Sleep, Tx
from oncekey.engine.deciding import answer_to, in_doubt, log_unknown, refused

if TYPE_CHECKING:
    from collections.abc import Callable

    from oncekey.core import resolution
    from oncekey.core.answers import Answer
    from oncekey.core.flow import Body, Flow
    from oncekey.core.model import Lease, Parcel, Settlement
    from oncekey.engine import reconcile
    from oncekey.engine.local import LockHeld
    from oncekey.engine.run import Run
else:
    reconcile = Lazy("oncekey.engine.reconcile")
    resolution = Lazy("oncekey.core.resolution")

T = TypeVar("T")
_FINAL: Final = (Completed, Deferred)
log = logging.getLogger("oncekey")

TRIES: Final = 4
PAUSE: Final = 0.05
"""Seconds between two attempts: a server takes a moment to notice that a connection, and so its lock, is gone."""
CALL_PATIENCE: Final = 2.0
COMMIT_FAILED: Final = "commit_failed"
NOT_ENTERED: Final = "not_entered"
ROLLED_BACK: Final = "rolled_back_by_handler"
NO_ROWS: Final = "oncekey: a success is not stored, because its rows were rolled back (digest %s): %s"


def settle(run: Run, decision: Decision) -> Life[Answer | None]:
    """Store the decision. After an interruption, read whether the COMMIT happened; write anything else again."""
    if run.pulse is not None:
        run.pulse.stop()
    tx, settlement = run.tx, decision.settlement
    together = tx is not None and decision.business is Business.COMMIT
    try:
        if together:
            answer = yield from _together(run, tx, settlement)
        else:
            if tx is not None:
                yield Rollback(tx)
            answer = yield from _apart(run, settlement)
    except Interrupted:
        if tx is not None:
            yield Rollback(tx)
        answer = yield from (_lost_commit(run) if together else _apart(run, settlement))
    except Exception:
        # An unexpected error, in a listener of the application or in oncekey. A transaction that stayed open would hold
        # the key's lock, or the only writer of a database.
        if tx is not None:
            yield Rollback(tx)
        raise
    if run.front is not None:
        yield from run.front.settled(run, settlement if answer is None else None)
    if run.parcels.used:
        run.site.wake()
    if answer is None and run.one_commit is None:
        yield from _remember(run, settlement)
    if run.notifier is not None:
        run.notifier.over()
    return answer


def _together(run: Run, tx: Tx, settlement: Settlement) -> Life[Answer | None]:
    """Commit the handler's rows and the settlement together; if the settlement is refused, both are rolled back."""
    one_commit = run.one_commit
    try:
        ended: Keep | Drop = yield (
            Commit(tx, _claimed_last(run, settlement))
            if one_commit is None
            else _one_commit(run, tx, one_commit, settlement)
        )
    except CommitAmbiguousError as error:
        _failed(run, error)
        yield Rollback(tx)
        return (yield from _lost_commit(run))
    except (TransactionControlError, StoreError) as error:
        # An error from the server, even in reply to COMMIT, means a roll-back.
        if not (isinstance(error, StoreError) and error.outage):
            yield Rollback(tx)
            return (yield from _without_rows(run, settlement, error))
        _failed(run, error)
        yield Rollback(tx)
        log.error("oncekey: a business transaction could not be committed: %s", error)
        answer = yield from (
            _settle_claimed_alone(run, Retryable(COMMIT_FAILED)) if one_commit is None else _answer_of_record(run)
        )
        return answer or refused(run, UNAVAILABLE)
    if type(ended) is Keep:
        _note_stored(run, ended.value, settlement)
        return None
    if one_commit is None:
        return _response_of_record(run, ended.value)
    log.warning("oncekey: another owner stored a response first (digest %s)", _digest(run))
    return (yield from _answer_of_record(run)) or refused(run, local.BUSY)


def _one_commit(run: Run, tx: Tx, one_commit: LockHeld, settlement: Settlement) -> Commit:
    """The finished record and COMMIT: in one message if the driver supports it and there are no parcels to write."""
    assert isinstance(settlement, _FINAL)
    locks, parcels = run.store.locks, run.parcels.emitted
    assert locks is not None
    fold = None if parcels else locks.completing_at_commit(run.claim, one_commit.target, settlement, one_commit.begun)
    return Commit(tx, _finished_last(run, one_commit, settlement, parcels), fold)


def _finished_last(
    run: Run, one_commit: LockHeld, settlement: Completed | Deferred, parcels: tuple[Parcel, ...]
) -> Body[Keep | Drop]:
    locks = run.store.locks
    assert locks is not None
    stored = yield from local.store_finished(
        locks, run.store.parcels, run.claim, one_commit, settlement, parcels=parcels
    )
    return Drop() if stored is None else Keep(stored)


def _claimed_last(run: Run, settlement: Settlement) -> Body[Keep | Drop]:
    assert run.lease is not None
    settled = yield from request.settling(run.store, run.lease, settlement, run.parcels.emitted)
    return Keep(settled) if settled.ours else Drop(settled)


def _without_rows(run: Run, settlement: Settlement, error: Exception) -> Life[Answer | None]:
    """The rows were rolled back before their commit: a final failure is stored without them, a success is not."""
    if isinstance(settlement, Completed) and settlement.outcome is Outcome.FAILURE:
        return (yield from _apart(run, settlement))
    log.error(NO_ROWS, _digest(run), error)
    answer = yield from (
        _settle_claimed_alone(run, Retryable(ROLLED_BACK)) if run.one_commit is None else _answer_of_record(run)
    )
    return answer or refused(run, Refuse(Code.EXECUTION_FAILED))


def _apart(run: Run, settlement: Settlement) -> Life[Answer | None]:
    """Settle without rows. In one commit, only a final response is stored: a failure, or one after `op.rollback`."""
    if run.one_commit is None:
        return (yield from _settle_claimed_alone(run, settlement))
    if isinstance(settlement, Completed):
        return (yield from _store_answer_alone(run, settlement))
    if run.notifier is not None:
        run.notifier.settled(Discarded())
    return None if isinstance(settlement, Discarded) else (yield from _answer_of_record(run))


def _settle_claimed_alone(run: Run, settlement: Settlement) -> Life[Answer | None]:
    """Settle in a separate transaction; if the store cannot be reached, retry in the background."""
    lease = run.lease
    assert lease is not None
    try:
        settled = yield from request.settle(run.store, lease, settlement)
    except RecordUnreadableError as error:
        return _unread(run, error)
    except StoreError as error:
        _failed(run, error)
        # Even after the lease: until another owner has the record, this one is the best source of the outcome.
        yield Later(lambda: _settle_or_keep_evidence(run, lease, settlement), run.policy.deadline.total_seconds())
        return refused(run, UNAVAILABLE) if _did_nothing(run, settlement) else in_doubt(run)
    if settled.ours:
        _note_stored(run, settled, settlement)
        return None
    if _is_untouched(settled, lease):
        match settlement:
            case Retryable(last_error):
                # A step was stored and the reply was lost, so the record has to be resumed.
                return (yield from _settle_claimed_alone(run, HandedBack(last_error)))
            case Discarded():
                return (yield from _settle_claimed_alone(run, HandedBack(NOT_ENTERED, counted=False)))
            case HandedBack(last_error):
                # The time in which its open call is repeatable has just ended, so the call must not be made again.
                return (yield from _settle_claimed_alone(run, Doubtful(last_error))) or in_doubt(run)
            case _:
                pass
    yield from _keep_refused_answer(run, lease, settlement)
    if settled.snapshot.record is None and not (run.enrolment.transactional or _did_nothing(run, settlement)):
        return in_doubt(run)  # the record is gone, but outside effects may remain
    return _response_of_record(run, settled)


def _keep_refused_answer(run: Run, lease: Lease, settlement: Settlement) -> Flow[None]:
    """Store an INLINE handler's refused response as evidence; LOCAL is rolled back, and PHASED has stored its steps."""
    if lease.effects is Effects.INLINE:
        yield from reconcile.keep_refused_answer(run.store, lease, settlement, run.policy)


def _did_nothing(run: Run, settlement: Settlement) -> bool:
    """Whether the operation executed nothing. A phased one may have stored steps whose replies were lost."""
    return isinstance(settlement, Discarded) or (isinstance(settlement, Retryable) and run.phased_run is None)


def _settle_or_keep_evidence(run: Run, lease: Lease, settlement: Settlement) -> Flow[None]:
    """Settle; if that is refused, store the outcome as evidence and log an alarm."""
    if not (yield from request.settle(run.store, lease, settlement)).ours:
        yield from _keep_refused_answer(run, lease, settlement)
    elif run.notifier is not None:
        run.notifier.settled(settlement)


def _store_answer_alone(run: Run, settlement: Completed) -> Life[Answer | None]:
    """Store a final response after the roll-back; if that fails, nothing happened and the client may retry."""
    locks = run.store.locks
    assert locks is not None
    try:
        answer = yield from _unless_busy(
            lambda: local.store_record_only(locks, run.lock, run.claim, run.policy, settlement)
        )
    except RecordUnreadableError as error:
        return _unread(run, error)
    except StoreError as error:
        _failed(run, error)
        return refused(run, UNAVAILABLE)
    if not isinstance(answer, Stored):
        return answer_to(run, answer)
    _note_stored(run, answer, settlement)
    return None


def _lost_commit(run: Run) -> Life[Answer | None]:
    """The record's response after a COMMIT without a reply, read when that transaction has certainly ended."""
    lease, locks = run.lease, run.store.locks
    assert lease is not None
    try:
        if run.one_commit is not None:
            assert locks is not None
            found = yield from _unless_busy(lambda: local.lost_commit(locks, run.lock, run.claim, run.policy))
            return answer_to(run, found)
        settled = yield from request.settle_lost_commit(run.store, lease)
    except RecordUnreadableError as error:
        return _unread(run, error)
    except StoreError as error:
        _failed(run, error)
        if run.one_commit is None:
            store, patience = run.store, run.policy.deadline.total_seconds()
            yield Later(lambda: request.settle_lost_commit(store, lease), patience)
        return in_doubt(run)
    return refused(run, UNAVAILABLE) if settled.ours else _response_of_record(run, settled)


def _answer_of_record(run: Run) -> Life[Answer | None]:
    """The record's response, which takes precedence over any other."""
    try:
        answer = yield from local.answer_of_record(run.store, run.claim, run.policy)
    except RecordUnreadableError as error:
        return _unread(run, error)
    except StoreError as error:
        _failed(run, error)
        return refused(run, UNAVAILABLE)
    return None if answer is None else answer_to(run, answer)


def _unless_busy(flow: Callable[[], Flow[T]]) -> Life[T]:
    """Retry a flow for a moment while the lock is taken: a lost connection of ours may still hold it."""
    for _ in range(TRIES - 1):
        answer = yield from flow()
        if answer is not local.BUSY:
            return answer
        yield Sleep(PAUSE)
    return (yield from flow())


def _note_stored(run: Run, written: Stored | Settled, settlement: Settlement) -> None:
    """Note that the record has the handler's outcome."""
    if run.notifier is not None:
        run.notifier.settled(settlement)
    if isinstance(written, Settled):
        record = written.snapshot.record
        run.expires_at = None if record is None else record.expires_at
        if record is not None and record.state is State.COMPLETED:
            run.site.settled_keys.add(run.claim.id)
        return
    run.expires_at = written.expires_at
    run.site.settled_keys.add(run.claim.id)


def _failed(run: Run, error: StoreError) -> None:
    if run.notifier is not None:
        run.notifier.failed("settle", error)


def _is_untouched(settled: Settled, lease: Lease) -> bool:
    """Whether the record is still ours although it refused the settlement."""
    record = settled.snapshot.record
    mine = (State.IN_PROGRESS, lease.incarnation, lease.fence)
    return record is not None and (record.state, record.incarnation, record.fence) == mine


def _response_of_record(run: Run, settled: Settled) -> Answer:
    assert run.lease is not None
    log.warning("oncekey: a settlement was refused: the key has another owner (digest %s)", _digest(run))
    return answer_to(run, answer_from(settled.snapshot, run.lease))


def _unread(run: Run, error: RecordUnreadableError) -> Answer:
    """The refusal for a record that cannot be read: its current owner is unknown."""
    log.error("oncekey: %s", error)
    return refused(run, Refuse(Code.RECORD_UNREADABLE))


def _remember(run: Run, settlement: Settlement) -> Life[None]:
    """Log an unknown outcome, and store the call of an INLINE record, so that a webhook about it finds the record.

    The response does not wait for that: an unknown record is found without it, and at worst an alarm is missed.
    """
    claim, lease = run.claim, run.lease
    if isinstance(settlement, Doubtful):
        log_unknown(claim, settlement.last_error)
    if claim.effects is not Effects.INLINE or not isinstance(settlement, Completed | Retryable):
        return
    phase = run.site.inline_calls().get(claim.operation)
    port = None if phase is None else run.store.reconcile
    if port is None or phase is None or lease is None:
        return
    name = downstream_key(run.seed, phase)
    call = resolution.AnnouncedCall(claim.id, lease.incarnation, claim.operation, phase, name, None, 0)
    yield Later(lambda: port.add_call(call), CALL_PATIENCE)


def _digest(run: Run) -> str:
    return key_digest(run.claim.id.key)
