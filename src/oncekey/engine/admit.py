"""The way in: the right to execute, or what is said instead of executing."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import TYPE_CHECKING, Final, assert_never
from uuid import uuid4

from oncekey.core.choices import InProgress, StoreErrorPolicy
from oncekey.core.errors import CommitAmbiguousError, RecordUnreadableError, StoreBusyError, StoreError
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
from oncekey.core.rulings import rule_finished
from oncekey.core.settle import NOT_CALLED
from oncekey.engine import local, request
from oncekey.engine.answering import replayed
from oncekey.engine.effects import TAKE_BACK, Aside, Begin, Interrupted, Later, Recall, Rollback, Sleep, Step
from oncekey.engine.settle import settle
from oncekey.engine.telling import tell_replay

if TYPE_CHECKING:
    from oncekey.core.answers import Answer
    from oncekey.core.model import Claim, Glimpse, Settlement, Verdict
    from oncekey.core.onecommit import Locked
    from oncekey.core.policy import Policy
    from oncekey.engine.claiming import Question
    from oncekey.engine.effects import Life
    from oncekey.engine.fronts import Beside
    from oncekey.engine.run import Asker, Run, Site
    from oncekey.flow import Flow
    from oncekey.ports import Locks, Store

log = logging.getLogger("oncekey")

FIRST_POLL: Final = 0.02
LONGEST_POLL: Final = 0.5
"""Seconds between two looks of a request that waits for another one."""
NOT_USED: Final = "claim_not_used"


def admit(run: Run) -> Life[Verdict]:
    """The verdict on a claim. On `Proceed` the run knows its lease, and LOCAL in one commit its transaction."""
    front = run.front
    verdict = yield from (_guarded(run) if front is None else _behind(run, front))
    if type(verdict) is Replay:
        run.site.hints.add(run.claim.id)  # whoever retried once may do so again
    if type(verdict) is Proceed:
        run.proceeds(verdict)
        if not run.spent:
            if front is not None:
                yield from _held(run, front)
            return verdict
        # It may hold no connection while it waits, and what its dependencies were lent is gone.
        yield from settle(run, NOT_CALLED)
        return local.BUSY
    if not (run.borrowed and isinstance(verdict, Bypass)):
        yield from _give_back(run)
    return verdict


def recall(site: Site, asked: Question, policy: Policy, asker: Asker) -> Life[Answer | None]:
    """The stored answer of a key that was answered here before: one look, and nothing else. None: ask in full.

    It answers only what `admit` would answer in the same words, and never refuses. Where there is any doubt, an outage
    included, the whole question is asked from the beginning, and says what that means.
    """
    fronts = None if policy.replay_cache is None else site.fronts
    answers = None if fronts is None else fronts.answers(policy)
    began = 0.0 if site.tell is None else site.clock()
    said = None if answers is None else (yield from answers.find(asked, policy))
    if said is None:
        if asked.id not in site.hints.known or not site.breaker.closed:
            return None
        sent = 0.0 if fronts is None else fronts.moment()
        try:
            glimpse: Glimpse | None = yield Recall(asked.id)
        except StoreError:
            return None
        site.breaker.worked()
        if glimpse is not None:
            said = rule_finished(glimpse.finished, glimpse.now, asked.fingerprint, policy)
        if fronts is not None and type(said) is Replay:
            yield from fronts.heard(said, policy, sent)
    if type(said) is not Replay:
        return None
    if site.tell is not None:
        tell_replay(site.tell, said, site.clock() - began)
    return replayed(said, policy, asker)


def _behind(run: Run, front: Beside) -> Life[Verdict]:
    """Ask what stands in front of the store, and the store if that says nothing; then let the front know."""
    try:
        known = yield from front.find(run)
    except (Interrupted, Exception):
        yield from _give_back(run)
        raise
    if known is not None:
        return known
    run.asked_at = front.moment()
    verdict = yield from _guarded(run)
    yield from front.heard(run, verdict)
    return verdict


def _held(run: Run, front: Beside) -> Life[None]:
    """Tell the duplicates of an operation that it is under way."""
    try:
        yield from front.hold(run)
    except (Interrupted, Exception):
        yield from settle(run, NOT_CALLED)
        raise


def _guarded(run: Run) -> Life[Verdict]:
    """Ask the store, and turn whatever keeps it from answering into a verdict: nothing was executed yet."""
    breaker = run.site.breaker
    try:
        if run.limits is not None:
            turned_away: Refuse | None = yield from run.limits
            if turned_away is not None:
                return turned_away
        if breaker.failures and not breaker.allows():
            return _outage(run.policy)
        verdict = yield from _ask(run)
        if type(verdict) is Refuse and run.policy.on_in_progress is InProgress.WAIT:
            verdict = yield from _patiently(run, verdict)
    except RecordUnreadableError as error:
        # The store is there, and so is a record: also a route that fails open must not run now.
        breaker.worked()
        log.error("oncekey: %s", error)
        return Refuse(Code.RECORD_UNREADABLE)
    except StoreBusyError as error:
        # The store is there, and its handlers have their hands full: no reason to turn the others away.
        log.warning("oncekey: a request was turned away: %s", error)
        return _outage(run.policy)
    except StoreError as error:
        breaker.failed()
        if run.teller is not None:
            run.teller.failed("claim", error)
        if isinstance(error, CommitAmbiguousError):
            yield _undo(run)
        log.error("oncekey: the store could not be asked: %s", type(error).__name__)
        return _outage(run.policy)
    except (Interrupted, Exception):
        if run.claiming:
            yield _undo(run)
        yield from _give_back(run)
        raise
    if breaker.failures:
        breaker.worked()
    return verdict


def _patiently(run: Run, verdict: Verdict) -> Life[Verdict]:
    """In wait mode, look again until the first request is done or the patience is over; nobody holds anything."""
    clock, pause = run.site.clock, FIRST_POLL
    ends = clock() + run.policy.wait_max.total_seconds()
    while isinstance(verdict, Refuse) and verdict.code is Code.IN_PROGRESS and clock() < ends:
        yield from _give_back(run)
        yield Sleep(pause)
        pause = min(pause * 1.5, LONGEST_POLL)
        verdict = yield from _ask(run)
    return verdict


def _ask(run: Run) -> Life[Verdict]:
    """One question: a completer's, a claim, or the lock on the transaction that the handler will write in."""
    locks = run.store.locks
    if locks is not None and run.enrolment.transactional and not run.resumed:
        return (yield from _locked(run, locks))
    run.claiming = True
    if run.resumed:
        return (yield from request.resume(run.store, run.claim, run.policy))
    return (yield from _claimed(run))


def _claimed(run: Run) -> Life[Verdict]:
    """Claim. Where the store has one writer, who is at work, a stored answer is looked for first."""
    store, claim, policy = run.store, run.claim, run.policy
    one_writer = store.locks is None or store.locks.one_writer
    if one_writer and run.site.crowded(False):  # noqa: FBT003
        said = yield from local.after(store, claim, policy)
        if said is not None:
            return said
    try:
        return (yield from request.begin(store, claim, policy))
    except StoreBusyError:
        said = (yield from local.after(store, claim, policy)) if one_writer else None
        if said is None:
            raise
        return said


def _locked(run: Run, locks: Locks) -> Life[Verdict]:
    """LOCAL in one commit: the business transaction comes first, and the lock is taken on that very one.

    A stored answer needs neither. So it is looked for first where it is likely (a hint), where the handlers hold all
    connections (aside, one request after the other, unless a place comes free at once), and where no connection can be
    had at all.
    """
    store, claim, policy = run.store, run.claim, run.policy
    news = yield from _news(run, locks)
    if news is not None:
        return news
    look: Locked
    if run.tx is None:
        try:
            run.tx, look = yield Begin(locks.locking(run.lock, claim), blocking=run.enrolment.blocking)
        except StoreError:
            news = yield from local.glance(store, locks, run.lock, claim, policy)
            if news is None:
                raise
            return news
    else:
        look = yield Step(run.tx, locks.locking(run.lock, claim))
    entry = local.enter(look, claim, policy)
    match entry:
        case local.Go():
            if run.spent:  # it only looked: the handler's own rows would be in another transaction
                yield from _give_back(run)
                return local.BUSY
            run.go = entry
            return entry.proceed
        case local.ClaimFirst():
            run.claiming = True
            if locks.one_writer:  # a claim is a write of its own, and would wait for this very transaction
                tx, run.tx, run.spent = run.tx, None, run.borrowed
                yield Rollback(tx)
            return (yield from request.begin(store, claim, policy))
        case Replay() | Refuse():
            return entry
        case _:
            assert_never(entry)


def _news(run: Run, locks: Locks) -> Life[Replay | Refuse | None]:
    """What is known without a business transaction of one's own. None: it is worth a try."""
    store, claim, policy, site = run.store, run.claim, run.policy, run.site
    if run.spent:
        return (yield from local.glance(store, locks, run.lock, claim, policy))
    # Who was lent a transaction meets the record there: a second connection might not be had before the first is back.
    if run.tx is None and claim.id in site.hints.known:
        said = yield from local.stored(store, claim, policy)
        if said is None:
            said = yield from local.after(store, claim, policy)
        if said is not None:
            return said
    if run.tx is None and site.crowded(run.enrolment.blocking):
        if locks.one_writer and (yield from locks.holder(run.lock)) is Holder.NOBODY:
            return None  # whoever queues up to write looks by itself if that takes long
        try:
            look = local.glance(store, locks, run.lock, claim, policy)
            found: Replay | Refuse | None = yield Aside(look, blocking=run.enrolment.blocking)
        except StoreBusyError:
            return None  # where that is crowded, too, waiting for the place is all there is
        return found
    return None


def _give_back(run: Run) -> Life[None]:
    """Hold nothing: no transaction of ours, and nothing that a dependency was lent."""
    tx, run.tx, run.go = run.tx, None, None
    if tx is not None:
        run.spent = run.spent or run.borrowed
        yield Rollback(tx)
    if run.lends:
        yield TAKE_BACK


def _outage(policy: Policy) -> Verdict:
    if policy.on_store_error is StoreErrorPolicy.FAIL_OPEN:
        log.error("oncekey: executed without protection, because this route fails open")
        return Bypass()
    return UNAVAILABLE


def _undo(run: Run) -> Later:
    """A claim that may have been made although nobody will use it would look like a crash."""
    store, claim = run.store, run.claim
    return Later(lambda: _taken_back(store, claim), claim.lease / SECOND)


def _taken_back(store: Store, claim: Claim) -> Flow[None]:
    """Claim once more and give back what is ours then.

    Reading alone could miss a claim that is still being committed; a second one waits for it, or is made and known.
    It has an incarnation of its own, because two lives of a key never share one.
    """
    record = (yield from store.claim(replace(claim, incarnation=uuid4()))).record
    if record is None or record.state is not State.IN_PROGRESS or record.owner != claim.owner:
        return
    # A record that was taken over was there before us, and stays.
    unused: Settlement = Discarded() if record.attempts == 1 else Retryable(NOT_USED)
    if record.memo or record.intent is not None:
        unused = HandedBack(NOT_USED, counted=False)
    yield from store.settle(Lease.of(record), unused)
