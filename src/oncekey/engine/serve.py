"""The lifecycle of one protected operation, from its claim to its response: one flow for all frameworks and proofs.

    admit    the right to execute, or a response instead: limits, the breaker, then the lock (LOCAL in one commit)
             or the claim; in wait mode repeatedly, holding nothing in between
    Invoke   the adapter runs the handler, a function or an upstream; once its end is complete, the adapter resumes
             the flow with the decision of `engine.deciding`; any task or thread may resume it
    settle   the decision is stored: in one commit with the handler's rows, or without them; after a COMMIT without
             a reply, the flow reads the record
    respond  None: the record has the handler's outcome, so the handler's own bytes are sent. An `Answer` replaces them.

Three rules hold everywhere below. The response is sent after the settlement, never before. Every open transaction has
one owner that ends it: a runtime that fails in `Begin` leaves nothing open, and a flow that got a transaction commits
it or rolls it back. And an `Interrupted` is thrown at most once: before the handler, the flow cleans up and re-raises
it; from the settlement on, it continues to its response, because the outcome of what was executed has to be stored.

A flow that stopped at `Invoke` owns its claim and its transaction. So every path out of an adapter resumes it, with
`NOT_CALLED` if the handler was never called; `end_after_bug` is for errors inside oncekey itself.
"""

from __future__ import annotations

import secrets
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from oncekey.core.endings import NOT_CALLED, Business, Decision
from oncekey.core.errors import ConfigurationError, StoreError
from oncekey.core.model import UNAVAILABLE, Bypass, Claim, Effects, Lease, Proceed, RecordId
from oncekey.core.policy import micros
from oncekey.engine import request
from oncekey.engine.actions import INVOKE, Beat, Begin, Commit, Drop, Flush, Interrupted, Keep, Life, Rollback, Tx
from oncekey.engine.admit import admit
from oncekey.engine.deciding import answer_to, refused
from oncekey.engine.request import NO_OUTBOX
from oncekey.engine.run import Parcels, Run, Site
from oncekey.engine.settle import settle

if TYPE_CHECKING:
    from oncekey.core.answers import Answer
    from oncekey.core.flow import Body


def serve(run: Run) -> Life[Answer | Bypass | None]:
    """Serve one operation. `Bypass`: the route fails open, and its handler runs without protection."""
    verdict = yield from admit(run)
    if run.notifier is not None:
        run.notifier.admitted(verdict)
    if type(verdict) is not Proceed:
        return verdict if isinstance(verdict, Bypass) else answer_to(run, verdict)
    if run.one_commit is None:
        try:
            yield from _prepare(run)
        except StoreError as error:
            if run.notifier is not None:
                run.notifier.failed("begin", error)
            yield from settle(run, NOT_CALLED)
            return refused(run, UNAVAILABLE)
        except (Interrupted, Exception):
            yield from settle(run, NOT_CALLED)
            raise
    decision: Decision = yield INVOKE
    if run.notifier is not None:
        run.notifier.ended()
    return (yield from settle(run, decision))


def _prepare(run: Run) -> Life[None]:
    """Start the heartbeat of a claimed record, and open the transaction of a LOCAL handler that has none yet."""
    lease, policy, store = run.lease, run.policy, run.store
    assert lease is not None
    span = micros(policy.lease)
    run.pulse = yield Beat(
        lambda: request.renew(store, lease, span), policy.heartbeat.total_seconds(), policy.deadline.total_seconds()
    )
    if run.enrolment.transactional and run.tx is None:
        run.tx, _ = yield Begin(blocking=run.enrolment.blocking)


def end_after_bug(run: Run, life: Life[Any], *, entered: bool) -> Life[None]:
    """End a flow after an error inside oncekey; `entered` is whether the handler was called.

    If it was not, the claim is withdrawn. If it was, its outcome is not decided: the lease expires, and the sweeper
    finds the record. Only the heartbeat and the transaction are ended here.
    """
    life.close()
    if not entered and run.lease is not None:
        yield from settle(run, NOT_CALLED)
        return
    if run.pulse is not None:
        run.pulse.stop()
    if run.tx is not None:
        yield Rollback(run.tx)


class NoConnectionError(Exception):
    """The handler was not called, because its transaction could not be opened; `why` is the store's own error."""

    def __init__(self, why: StoreError) -> None:
        super().__init__(type(why).__name__)
        self.why = why


class Unkeyed:
    """A LOCAL handler that runs without a record: only its rows and its parcels are committed."""

    __slots__ = ("claim", "parcels", "site", "tx")

    def __init__(self, site: Site, claim: Claim | None, tx: Tx = None) -> None:
        self.site = site
        self.claim = claim
        """The claim that the request would have made, if its route fails open."""
        self.tx: Tx = tx
        # Parcels without a record get a separate incarnation.
        record_id, seed = (RecordId("", ""), secrets.token_bytes(32)) if claim is None else (claim.id, claim.seed)
        self.parcels = Parcels(Lease(record_id, uuid4(), 1, 1, Effects.LOCAL, 0, 0, 0), seed)


def serve_unkeyed(run: Unkeyed) -> Life[None]:
    """Serve a handler without a record; its adapter resumes the flow with the decision about the rows."""
    if run.tx is None:
        run.tx, _ = yield Begin()
    tx = run.tx
    rows: Business = yield INVOKE
    try:
        if rows is Business.COMMIT:
            yield Flush(tx)
            yield Commit(tx, _put(run))
        else:
            yield Rollback(tx)
    except (Exception, Interrupted):
        yield Rollback(tx)
        raise
    if run.parcels.used:
        run.site.wake()


def _put(run: Unkeyed) -> Body[Keep | Drop]:
    if run.parcels.emitted:
        writer = run.site.store.parcels
        if writer is None:
            raise ConfigurationError(NO_OUTBOX)
        yield from writer.putting(run.parcels.emitted)
    return Keep()
