"""Evidence from an owner whose write is refused: what it executed is not the record's answer, and is not lost (U2).

It is evidence like a webhook's: it settles the record if that is unknown or becomes so, and never overwrites. It is
best effort: if the store is down it is lost, and the alarm in the log remains.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Final

from oncekey.canonical.digests import downstream_key
from oncekey.core.errors import ResultNotStorableError, StoreError
from oncekey.core.keys import key_digest
from oncekey.core.memo import FINISHED, decode, is_rejection
from oncekey.core.model import Completed, Effects, Outcome
from oncekey.core.resolution import CallReport, Executed, Rejected
from oncekey.engine.reconcile import EvidenceTarget, compared
from oncekey.resolvers import to_text
from oncekey.topics import Reply

if TYPE_CHECKING:
    from oncekey.core.model import Lease, MemoEntry, Settlement
    from oncekey.core.policy import Policy
    from oncekey.flow import Flow
    from oncekey.ports import Store

log = logging.getLogger("oncekey")

SOURCE: Final = "owner"
ALARM: Final = "oncekey: %s was executed by an owner that had lost its key; its result was not stored (digest %s)"


def keep_refused_result(store: Store, lease: Lease, seed: bytes, entry: MemoEntry, policy: Policy) -> Flow[None]:
    """Keep the result of an announced call whose record refused it."""
    log.error(ALARM, entry.name, key_digest(lease.id.key))
    value = decode(entry.result)
    resolution = Rejected(value) if is_rejection(entry) else Executed(value)
    target = EvidenceTarget(lease.id, lease.incarnation, entry.name, downstream_key(seed, entry.name))
    yield from _kept(store, lease, target, resolution, policy)


def keep_refused_answer(store: Store, lease: Lease, settlement: Settlement, policy: Policy) -> Flow[None]:
    """Keep the answer of an INLINE handler whose record refused it; other effects need no such evidence.

    The refusal rolled back what LOCAL did, and PHASED has stored each step.
    """
    if lease.effects is not Effects.INLINE or not isinstance(settlement, Completed):
        return
    if settlement.outcome is not Outcome.SUCCESS:
        return
    log.error(ALARM, "the request", key_digest(lease.id.key))
    # INLINE announced no call, so the evidence is filed under the incarnation, which is no provider's key.
    target = EvidenceTarget(lease.id, lease.incarnation, FINISHED, str(lease.incarnation))
    yield from _kept(store, lease, target, Executed(_reply(settlement, policy)), policy)


def _reply(settlement: Completed, policy: Policy) -> Reply:
    """The answer as evidence, without a body that is larger than a call's result may be."""
    response = settlement.response
    body = response.body if response.body is not None and len(response.body) <= policy.max_result_bytes else None
    headers = tuple((name.decode("latin-1"), value.decode("latin-1")) for name, value in response.headers)
    return Reply(response.status, body, headers)


def _kept(
    store: Store, lease: Lease, target: EvidenceTarget, resolution: Executed | Rejected, policy: Policy
) -> Flow[None]:
    port = store.reconcile
    if port is None:
        return
    try:
        # The same step of the same owner is the same event, however often its result is refused.
        event = f"{lease.incarnation}/{lease.fence}/{target.phase}"
        report = CallReport(SOURCE, event, to_text(resolution, policy), downstream_key=target.downstream_key)
        evidence, _ = yield from port.add(report)
        if evidence.verdict is None and (verdict := (yield from compared(store, target, resolution))) is not None:
            yield from port.store_verdict(evidence, verdict)
    except (StoreError, ResultNotStorableError) as error:
        digest = key_digest(lease.id.key)
        log.error("oncekey: the evidence of it could not be kept (%s, digest %s)", type(error).__name__, digest)
