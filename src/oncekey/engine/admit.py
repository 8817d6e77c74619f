"""Admission: decides whether a request may run its handler, and otherwise which response it gets.

A request passes these checks in order. Each check runs only if the one before gave no verdict:

    front ──▶ limits ──▶ breaker ──▶ store ─┬─▶ Proceed   the handler runs
    known     too many   store is           ├─▶ Replay    the stored response
    response  requests   down               ├─▶ Refuse    in progress, key reused, unknown, ...
                                            └─▶ Bypass    the store failed, and the route fails open

There are three ways to query the store:

* LOCAL and OUTBOX on the application's own database (`_locked`): the request begins the business transaction first,
  takes the key's lock in it, and reads the record after that (L1). Nothing is written before the one commit, so a
  crash leaves nothing behind. See `engine.local`.
* Every other request (`_claimed`): one INSERT creates the record IN_PROGRESS with a lease, or finds the existing
  record; `core.rulings` then decides whether to replay it, take it over, supersede it or park it. A write whose reply
  was lost is not repeated blindly: the request reads the record, which names its owner (`engine.request`).
* The completer (`request.resume`) only takes over: it never claims, supersedes or waits.

In wait mode, a request that finds its key in progress polls until `wait_max` has passed. It holds neither a transaction
nor a connection meanwhile. If the request is interrupted, or a reply is lost for good, while its claim may have been
stored, the claim is withdrawn in the background (`_undo`), so that it does not look like a crash.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import TYPE_CHECKING, Final, assert_never
from uuid import uuid4

from oncekey.core.endings import NOT_CALLED
from oncekey.core.errors import CommitAmbiguousError, RecordUnreadableError, StoreBusyError, StoreError
from oncekey.core.lazy import Lazy
from oncekey.core.model import (
    SECOND,
    UNAVAILABLE,
    Bypass,
    Code,
    Discarded,
    HandedBack,
    Lease,
    Proceed,
    Refuse,
    Replay,
    Retryable,
    State,
)
from oncekey.core.onecommit import Holder
from oncekey.core.policy import InProgress, Policy, StoreErrorPolicy
from oncekey.core.rulings import rule_finished
from oncekey.engine import local, request
from oncekey.engine.actions import (
    RELEASE_CONNECTIONS,
    Aside,
    Begin,
    Execute,
    Interrupted,
    Later,
    Recall,
    Rollback,
    Sleep,
)
from oncekey.engine.deciding import log_unknown, replayed
from oncekey.engine.settle import settle

if TYPE_CHECKING:
    from oncekey.core.answers import Answer
    from oncekey.core.flow import Flow
    from oncekey.core.model import Claim, Glimpse, Settlement, Verdict
    from oncekey.core.onecommit import Locked
    from oncekey.engine import notifying
    from oncekey.engine.actions import Life
    from oncekey.engine.claiming import ClaimInput
    from oncekey.engine.fronts import RouteFronts
    from oncekey.engine.run import Run, Site
    from oncekey.ports.store import Asker, Locks, Store
else:
    notifying = Lazy("oncekey.engine.notifying")


log = logging.getLogger("oncekey")

FIRST_POLL: Final = 0.02
LONGEST_POLL: Final = 0.5
"""The longest pause, in seconds, between two polls of a request that waits for another one."""
NOT_USED: Final = "claim_not_used"


def admit(run: Run) -> Life[Verdict]:
    """The verdict on a claim. On `Proceed` the run has its lease and, for LOCAL in one commit, its transaction."""
    front = run.front
    verdict = yield from (_ask_store(run) if front is None else _ask_front_first(run, front))
    if type(verdict) is Replay:
        run.site.settled_keys.add(run.claim.id)  # a client that retried once may do so again
    if type(verdict) is Proceed:
        run.proceeds(verdict)
        if not run.early_tx_rolled_back:
            if front is not None:
                yield from _note_in_front(run, front)
            return verdict
        # A waiting request must hold no connection, so the transaction that its dependencies used was rolled back.
        yield from settle(run, NOT_CALLED)
        return local.BUSY
    if type(verdict) is Refuse and verdict.met is not None and verdict.record is not None:
        log_unknown(run.claim, verdict.record.last_error or "")  # this request found that the owner is gone
    if not (run.has_early_tx and isinstance(verdict, Bypass)):
        # A stored response is valid with or without the lock, so it is sent before the lock is released.
        yield from _give_back(run, wait=run.has_early_tx or type(verdict) is not Replay)
    return verdict


def recall(site: Site, claim_input: ClaimInput, policy: Policy, asker: Asker) -> Life[Answer | None]:
    """The stored response for a key that this process has settled, by one short read. None: call `admit`.

    It returns only a response that `admit` would return, too, and never refuses. If in doubt, and during an outage, it
    returns None, and the caller starts from the beginning.
    """
    fronts = None if policy.replay_cache is None else site.fronts()
    answers = None if fronts is None else fronts.answers(policy)
    began = 0.0 if site.notify is None else site.clock()
    found_answer = None if answers is None else (yield from answers.find(claim_input, policy))
    if found_answer is None:
        if claim_input.id not in site.settled_keys.known or not site.breaker.closed:
            return None
        sent = 0.0 if fronts is None else fronts.moment()
        try:
            glimpse: Glimpse | None = yield Recall(claim_input.id)
        except StoreError:
            return None
        site.breaker.worked()
        if glimpse is not None:
            found_answer = rule_finished(glimpse.finished, glimpse.now, claim_input.fingerprint, policy)
        if fronts is not None and type(found_answer) is Replay:
            yield from fronts.note_verdict(found_answer, policy, sent)
    if type(found_answer) is not Replay:
        return None
    if site.notify is not None:
        notifying.notify_replay(site.notify, found_answer, site.clock() - began)
    return replayed(found_answer, policy, asker)


def _ask_front_first(run: Run, front: RouteFronts) -> Life[Verdict]:
    """Read the front, then the store if the front has no verdict; pass the store's verdict to the front."""
    try:
        known = yield from front.find(run)
    except (Interrupted, Exception):
        yield from _give_back(run)
        raise
    if known is not None:
        return known
    run.asked_at = front.moment()
    verdict = yield from _ask_store(run)
    yield from front.note_verdict(run, verdict)
    return verdict


def _note_in_front(run: Run, front: RouteFronts) -> Life[None]:
    """Note in the front that the operation is in progress, for its duplicates."""
    try:
        yield from front.hold(run)
    except (Interrupted, Exception):
        yield from settle(run, NOT_CALLED)
        raise


def _ask_store(run: Run) -> Life[Verdict]:
    """Query the store, and turn every store failure into a verdict: nothing was executed yet."""
    breaker = run.site.breaker
    try:
        if run.limits is not None:
            turned_away: Refuse | None = yield from run.limits
            if turned_away is not None:
                return turned_away
        if breaker.failures and not breaker.allows():
            return _outage(run.policy)
        verdict = yield from _ask_once(run)
        if type(verdict) is Refuse and run.policy.on_in_progress is InProgress.WAIT:
            verdict = yield from _wait_for_first(run, verdict)
    except RecordUnreadableError as error:
        # The store is up and has a record: even a route that fails open must not run now.
        breaker.worked()
        log.error("oncekey: %s", error)
        return Refuse(Code.RECORD_UNREADABLE)
    except StoreBusyError as error:
        # The store is up, but all its connections are in use: the breaker must not turn other requests away.
        log.warning("oncekey: a request was turned away: %s", error)
        return _outage(run.policy)
    except StoreError as error:
        breaker.failed()
        if run.notifier is not None:
            run.notifier.failed("claim", error)
        if isinstance(error, CommitAmbiguousError):
            yield _undo(run)
        log.error("oncekey: the store is unavailable: %s", error.reason)
        return _outage(run.policy)
    except (Interrupted, Exception):
        if run.claiming:
            yield _undo(run)
        yield from _give_back(run)
        raise
    if breaker.failures:
        breaker.worked()
    return verdict


def _wait_for_first(run: Run, verdict: Verdict) -> Life[Verdict]:
    """In wait mode, poll until the first request is done or `wait_max` has passed, holding nothing meanwhile."""
    clock, pause = run.site.clock, FIRST_POLL
    ends = clock() + run.policy.wait_max.total_seconds()
    while isinstance(verdict, Refuse) and verdict.code is Code.IN_PROGRESS and clock() < ends:
        yield from _give_back(run)
        yield Sleep(pause)
        pause = min(pause * 1.5, LONGEST_POLL)
        verdict = yield from _ask_once(run)
    return verdict


def _ask_once(run: Run) -> Life[Verdict]:
    """One attempt at the store: a completer's take-over, a claim, or the lock in the business transaction."""
    locks = run.store.locks
    if locks is not None and run.enrolment.transactional and not run.resumed:
        return (yield from _locked(run, locks))
    run.claiming = True
    if run.resumed:
        return (yield from request.resume(run.store, run.claim, run.policy))
    return (yield from _claimed(run))


def _claimed(run: Run) -> Life[Verdict]:
    """Claim. If the store has a single writer and it is in use, look for a stored response first."""
    store, claim, policy = run.store, run.claim, run.policy
    one_writer = store.locks is None or store.locks.one_writer
    if one_writer and run.site.is_full(False):  # noqa: FBT003
        found_answer = yield from local.answer_of_record(store, claim, policy)
        if found_answer is not None:
            return found_answer
    try:
        return (yield from request.begin(store, claim, policy))
    except StoreBusyError:
        found_answer = (yield from local.answer_of_record(store, claim, policy)) if one_writer else None
        if found_answer is None:
            raise
        return found_answer


def _locked(run: Run, locks: Locks) -> Life[Verdict]:
    """LOCAL in one commit: begin the business transaction first, and take the lock in it.

    A stored response needs neither. So the request looks for one first if it is likely (`settled_keys`); if handlers
    hold all connections (one such request at a time, unless a connection becomes free at once); and if no connection is
    available at all.
    """
    store, claim, policy = run.store, run.claim, run.policy
    found_answer = yield from _answer_without_transaction(run, locks)
    if found_answer is not None:
        return found_answer
    look: Locked
    if run.tx is None:
        try:
            run.tx, look = yield Begin(locks.locking(run.lock, claim), blocking=run.enrolment.blocking)
        except StoreError:
            found_answer = yield from local.peek(store, locks, run.lock, claim, policy)
            if found_answer is None:
                raise
            return found_answer
    else:
        look = yield Execute(run.tx, locks.locking(run.lock, claim))
    entry = local.enter(look, claim, policy)
    match entry:
        case local.LockHeld():
            if run.early_tx_rolled_back:  # it could only read: the handler's rows would be in another transaction
                yield from _give_back(run)
                return local.BUSY
            run.one_commit = entry
            return entry.proceed
        case local.ClaimFirst():
            run.claiming = True
            if locks.one_writer:  # a claim is a separate write, and would wait for this transaction
                tx, run.tx, run.early_tx_rolled_back = run.tx, None, run.has_early_tx
                yield Rollback(tx)
            return (yield from request.begin(store, claim, policy))
        case Replay() | Refuse():
            return entry
        case _:
            assert_never(entry)


def _answer_without_transaction(run: Run, locks: Locks) -> Life[Replay | Refuse | None]:
    """The verdict that needs no business transaction; None: begin one."""
    store, claim, policy, site = run.store, run.claim, run.policy, run.site
    if run.early_tx_rolled_back:
        return (yield from local.peek(store, locks, run.lock, claim, policy))
    # A request whose dependency opened a transaction reads the record there: a second connection may not be free.
    if run.tx is None and claim.id in site.settled_keys.known:
        found_answer = yield from local.stored(store, claim, policy)
        if found_answer is None:
            found_answer = yield from local.answer_of_record(store, claim, policy)
        if found_answer is not None:
            return found_answer
    if run.tx is None and site.is_full(run.enrolment.blocking):
        if locks.one_writer and (yield from locks.holder(run.lock)) is Holder.NOBODY:
            return None  # a request that waits long for the writer looks for a stored response itself
        try:
            look = local.peek(store, locks, run.lock, claim, policy)
            found: Replay | Refuse | None = yield Aside(look, blocking=run.enrolment.blocking)
        except StoreBusyError:
            return None  # no connection is free for the read either: the request can only queue
        return found
    return None


def _give_back(run: Run, *, wait: bool = True) -> Life[None]:
    """Roll back our transaction, and end the sessions that the request's dependencies used."""
    tx, run.tx, run.one_commit = run.tx, None, None
    if tx is not None:
        run.early_tx_rolled_back = run.early_tx_rolled_back or run.has_early_tx
        yield Rollback(tx, wait=wait)
    if run.dependencies_hold_connections:
        yield RELEASE_CONNECTIONS


def _outage(policy: Policy) -> Verdict:
    if policy.on_store_error is StoreErrorPolicy.FAIL_OPEN:
        log.error("oncekey: executed without protection, because this route fails open")
        return Bypass()
    return UNAVAILABLE


def _undo(run: Run) -> Later:
    """Withdraw the claim in the background: if it was stored and stayed, it would look like a crash."""
    store, claim = run.store, run.claim
    return Later(lambda: _taken_back(store, claim), claim.lease / SECOND)


def _taken_back(store: Store, claim: Claim) -> Flow[None]:
    """Claim once more, and discard the record if it is then ours.

    Reading alone could miss a claim that is still being committed; a second claim waits for it, or succeeds itself. It
    uses a new incarnation, because no incarnation is used twice.
    """
    record = (yield from store.claim(replace(claim, incarnation=uuid4()))).record
    if record is None or record.state is not State.IN_PROGRESS or record.owner != claim.owner:
        return
    # A record that we took over existed before our claim, and stays.
    unused: Settlement = Discarded() if record.attempts == 1 else Retryable(NOT_USED)
    if record.memo or record.intent is not None:
        unused = HandedBack(NOT_USED, counted=False)
    yield from store.settle(Lease.of(record), unused)
