"""The straight path: a LOCAL request with a new key, in one generator.

    BEGIN + lock + look ────▶ handler ────▶ record + COMMIT
            │                    │                 │
            │ anything but       │ anything but    │ anything but a
            │ a new key          │ a success       │ confirmed commit
            ▼                    ▼                 ▼
    `admit`, with what      `settle`          `settle`, with what the
    was opened                                COMMIT returned or raised

Nearly every request of a LOCAL route takes this path, and the generators of the flow would cost it more time than its
messages do. It sends the same statements as the flow, and it decides nothing: `local.enter` rules that the key is new,
and `decided` that the answer is a success. In every other case the flow continues from the same point, and repeats
neither the BEGIN nor the handler nor the COMMIT.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Final

from oncekey.core.endings import Business, Decision
from oncekey.core.errors import StoreError
from oncekey.core.model import Completed, Effects, Outcome
from oncekey.engine import local
from oncekey.engine.actions import INVOKE, Begin, Drop, Interrupted, Keep, Life
from oncekey.engine.settle import note_stored, one_commit_of, settle

if TYPE_CHECKING:
    from oncekey.core.answers import Answer
    from oncekey.core.onecommit import Locked
    from oncekey.engine.run import Run

WITHOUT: Final = "ONCEKEY_TESTS_WITHOUT_STRAIGHT_PATH"
TAKEN: Final = WITHOUT not in os.environ
"""False only in tests, which run both ways. It is not a setting, because the two ways differ only in their cost."""


def is_straight(run: Run) -> bool:
    """Whether a request may begin its transaction at once: nothing else is asked first, and no answer is likely."""
    enrolment, site = run.enrolment, run.site
    return (
        TAKEN
        and enrolment.effects is Effects.LOCAL
        and run.store.locks is not None
        and run.tx is None
        and run.limits is None
        and run.front is None
        and not run.resumed
        and not run.dependencies_hold_connections
        and not site.breaker.failures
        and run.claim.id not in site.settled_keys.known
        and not site.is_full(enrolment.blocking)
    )


def straight(run: Run) -> Life[Answer | None]:
    """Serve a request whose key is new. If `run.opened` is set, it was not: then `admit` continues from there."""
    locks, claim = run.store.locks, run.claim
    assert locks is not None
    look: Locked
    try:
        run.tx, look = yield Begin(locks.locking(run.lock, claim), blocking=run.enrolment.blocking)
    except StoreError as error:
        run.opened = error
        return None
    # A record may be unreadable. The flow has a rule for that, so it is not read here.
    entry = local.enter(look, claim, run.policy) if look.snapshot.record is None else None
    if type(entry) is not local.LockHeld or entry.target is not local.NEW:
        run.opened = look
        return None
    run.one_commit = entry
    run.proceeds(entry.proceed)
    if run.site.breaker.failures:
        run.site.breaker.worked()
    if run.notifier is not None:
        run.notifier.admitted(entry.proceed)
    decision: Decision = yield INVOKE
    if run.notifier is not None:
        run.notifier.ended()
    settlement = decision.settlement
    if (
        decision.business is not Business.COMMIT
        or type(settlement) is not Completed
        or settlement.outcome is not Outcome.SUCCESS
        or run.parcels.used
    ):
        return (yield from settle(run, decision))
    sent: Keep | Drop | BaseException
    try:
        sent = yield one_commit_of(run, run.tx, entry, settlement)
    except (Exception, Interrupted) as error:  # noqa: BLE001  (`settle` has a rule for each, or raises it again)
        sent = error
    if not isinstance(sent, Keep):
        return (yield from settle(run, decision, sent))
    note_stored(run, sent.value, settlement)
    return None
