"""Settles unknown outcomes: resolvers, webhooks and operators make the same move, and the first one wins.

An owner whose write is refused adds evidence, too: it executed something that the record does not show. The evidence
settles the record if that is or becomes unknown, and never overwrites an outcome. It is best effort: if the store is
down, the evidence is lost and only the alarm in the log remains.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Final, assert_never

from oncekey.canonical.digests import downstream_key
from oncekey.core.errors import ConfigurationError, ResultNotStorableError, StoreError
from oncekey.core.keys import key_digest
from oncekey.core.memo import FINISHED, check_text, decode, is_rejection
from oncekey.core.model import Completed, Effects, Outcome, State
from oncekey.core.operate import Forbidden, Move, Moved, OperatorCommand, ParcelLocation, Search, audited_as, decide
from oncekey.core.resolution import (
    CallReport,
    EvidenceVerdict,
    Executed,
    NotExecuted,
    Rejected,
    Undecided,
    is_about,
    known_outcome,
)
from oncekey.core.resolvers import Resolvers, answered, command_of, from_text, question_of, to_text
from oncekey.core.topics import Reply
from oncekey.core.transitions import Mover, Note
from oncekey.engine.notifying import of_move
from oncekey.engine.operate import NOT_HERE, operations_of
from oncekey.observe.events import About, Contradicted, Notify

if TYPE_CHECKING:
    from uuid import UUID

    from oncekey.core.flow import Flow
    from oncekey.core.model import Lease, MemoEntry, Record, RecordId, Settlement, Snapshot
    from oncekey.core.policy import Policy
    from oncekey.core.resolution import Evidence, Resolution
    from oncekey.ports.store import Reconcile, Store


MOST_INLINE = 1000
"""How many unknown INLINE records a webhook is compared with: they announce no calls that could be looked up."""

_ANOTHER_LIFE = "the key has expired and was used again since then"
_ANOTHER_CALL = "a different call is open now"


class EvidenceEffect(StrEnum):
    """The effect of evidence on its record."""

    SETTLED = "settled"
    """It settled its record."""
    KEPT = "kept"
    """It is stored for later: its record is not known yet or still has an owner, or the evidence is undecided."""
    AGREES = "agrees"
    """The record has the same outcome."""
    CONTRADICTS = "contradicts"
    """The record has another outcome, and is not changed: an operator has to check."""
    UNCLEAR = "unclear"
    """It may concern several calls, or its provider id is known only from other sources: stored for an operator."""


@dataclass(frozen=True, slots=True)
class EvidenceTarget:
    """The record that evidence concerns, in one incarnation, and its call."""

    id: RecordId
    incarnation: UUID
    phase: str
    downstream_key: str


@dataclass(frozen=True, slots=True)
class Received:
    """The result of a message. `repeated`: it was received before; `conflict`: another message has its event id."""

    became: EvidenceEffect
    target: EvidenceTarget | None = None
    repeated: bool = False
    conflict: bool = False


@dataclass(frozen=True, slots=True)
class Unclear:
    """Evidence that cannot be attributed to one call."""


PolicyOf = Callable[[str], "Policy"]
"""The policy of an operation."""


def reconcile_of(store: Store) -> Reconcile:
    """The store's interface for calls and evidence; raises `ConfigurationError` if it has none."""
    if store.reconcile is None:
        raise ConfigurationError(NOT_HERE)
    return store.reconcile


def settle(
    store: Store,
    target: EvidenceTarget,
    resolution: Executed | Rejected | NotExecuted,
    mover: Mover,
    policy_of: PolicyOf,
    *,
    why: str,
    waited: bool = False,
    notify: Notify | None = None,
) -> Flow[Moved | Forbidden]:
    """Settle an unknown record: decided under a lock, checked by version, and audited in the same commit."""
    commands: list[OperatorCommand] = []

    def deciding(seen: Snapshot, parcels: tuple[ParcelLocation, ...]) -> Move | Forbidden:
        record = seen.record
        if record is None or record.incarnation != target.incarnation:
            return Forbidden(_ANOTHER_LIFE)
        if record.state is State.UNKNOWN and not is_about(record, target.downstream_key):
            return Forbidden(_ANOTHER_CALL)
        command = command_of(resolution, record, policy_of(record.operation), why)
        commands.append(replace(command, actor=mover.actor, waited=waited))
        return decide(commands[-1], seen, parcels)

    def noting(move: Move) -> Note:
        return Note.of(move.seen, move.row.to, audited_as(commands[-1].order, move.seen), mover, why)

    done = yield from operations_of(store).move(target.id, deciding, noting)
    if notify is not None and isinstance(done, Moved):
        for event in of_move(done, audited_as(commands[-1].order, done.move.seen), mover):
            notify(event)
    return done


def receive(
    store: Store,
    report: CallReport,
    mover: Mover,
    policy_of: PolicyOf,
    resolvers: Resolvers,
    *,
    notify: Notify | None = None,
) -> Flow[Received]:
    """Store evidence, then apply it if its record is unknown; for a live record it is only stored."""
    evidence, new = yield from reconcile_of(store).add(report)
    conflict = not new and _content(evidence.report) != _content(report)
    if conflict:
        # Another message has this event id. This one gets a separate id, so that a repetition of it is recognised, too.
        digest = hashlib.sha256(repr(_content(report)).encode()).hexdigest()
        evidence, new = yield from reconcile_of(store).add(replace(report, event_id=f"{report.event_id}#{digest}"))
    target = yield from target_of(store, report, resolvers.inline_calls, name=True)
    if evidence.verdict is not None:
        became = _effect_of(evidence.verdict)
    elif isinstance(target, EvidenceTarget):
        became = yield from apply(store, evidence, target, mover, policy_of, resolvers, notify=notify)
    else:
        became = EvidenceEffect.KEPT if target is None else EvidenceEffect.UNCLEAR
    about = target if isinstance(target, EvidenceTarget) else None
    return Received(became, about, repeated=not new, conflict=conflict)


def _content(report: CallReport) -> tuple[str | None, ...]:
    return report.downstream_key, report.provider_id, report.resolution


def apply(  # noqa: PLR0917  (what, about what, who, and by which rules)
    store: Store,
    evidence: Evidence,
    target: EvidenceTarget,
    mover: Mover,
    policy_of: PolicyOf,
    resolvers: Resolvers,
    *,
    notify: Notify | None = None,
) -> Flow[EvidenceEffect]:
    """Settle a record by evidence, or compare the two; a settled record is never changed."""
    resolution = from_text(evidence.report.resolution)
    if isinstance(resolution, Undecided):
        return EvidenceEffect.KEPT
    shaped = yield from _shaped(store, resolution, target, resolvers)
    if shaped is not None:
        why = f"{evidence.report.source} {evidence.report.event_id}"
        done = yield from settle(store, target, shaped, mover, policy_of, why=why, notify=notify)
        if isinstance(done, Moved):
            yield from reconcile_of(store).store_verdict(evidence, EvidenceVerdict.SETTLED)
            return EvidenceEffect.SETTLED
    verdict = yield from compared(store, target, resolution)
    if verdict is None:
        return EvidenceEffect.KEPT
    yield from reconcile_of(store).store_verdict(evidence, verdict)
    if notify is not None and verdict is EvidenceVerdict.CONTRADICTS:
        notify(Contradicted(About(target.phase, None, target.id, target.incarnation), evidence.report.source))
    return _effect_of(verdict)


def payload_of(store: Store, record: Record) -> Flow[Any]:
    """The payload of a deferred call whose parcel is a dead letter; otherwise None."""
    if record.effects is not Effects.OUTBOX or store.outbox is None:
        return None
    for parcel in (yield from operations_of(store).parcels(record.incarnation)):
        letter = (yield from store.outbox.find_dead_letter(parcel.id)) if parcel.dead else None
        if letter is not None:
            check_text(letter.parcel.payload)
            return json.loads(letter.parcel.payload)
    return None


def _shaped(
    store: Store, resolution: Executed | Rejected | NotExecuted, target: EvidenceTarget, resolvers: Resolvers
) -> Flow[Executed | Rejected | NotExecuted | None]:
    """The resolution, with the resolver's response. None: the record is not unknown; a later check may settle it."""
    seen = yield from store.find(target.id)
    record = seen.record
    if record is None or record.state is not State.UNKNOWN:
        return None
    resolver = resolvers.get(record.operation)
    if resolver is None or resolver.answer is None or isinstance(resolution, NotExecuted):
        return resolution
    question = question_of(record, resolver, (yield from payload_of(store, record)), seen.now)
    return answered(resolution, resolver, question)


def compared(store: Store, target: EvidenceTarget, resolution: Resolution) -> Flow[EvidenceVerdict | None]:
    """Whether a record agrees with evidence about its call; None: the record has no outcome yet."""
    record = (yield from store.find(target.id)).record
    if record is None or record.incarnation != target.incarnation:
        return None
    known, reported = known_outcome(record, target.phase), _outcome(resolution)
    if known is None or reported is None:
        # The record may run again, but the evidence reports an execution: only a person can find out which is wrong.
        retryable = record.state is State.FAILED_RETRYABLE and record.intent is None
        return EvidenceVerdict.CONTRADICTS if retryable and reported is Outcome.SUCCESS else None
    return EvidenceVerdict.AGREES if known is reported else EvidenceVerdict.CONTRADICTS


def _outcome(resolution: Resolution) -> Outcome | None:
    match resolution:
        case Executed():
            return Outcome.SUCCESS
        case Rejected() | NotExecuted():
            return Outcome.FAILURE
        case Undecided():
            return None
        case _:
            assert_never(resolution)


def _effect_of(verdict: EvidenceVerdict) -> EvidenceEffect:
    return {EvidenceVerdict.SETTLED: EvidenceEffect.AGREES}.get(verdict) or EvidenceEffect(verdict.value)


def target_of(
    store: Store, report: CallReport, inline: Mapping[str, str], *, name: bool = False
) -> Flow[EvidenceTarget | Unclear | None]:
    """The call that evidence names; None if it is not one of ours. `name`: also store the provider's id of the call.

    The downstream key decides. Without one, the provider's id counts only within its source: every account of a
    provider may number its charges from 1. Two candidates make the evidence unclear.
    """
    port = reconcile_of(store)
    key = report.downstream_key
    if key is None:
        assert report.provider_id is not None
        keys = yield from port.keys_named(report.source, report.provider_id)
        if len(keys) != 1:
            others = keys or (yield from port.calls_of(None, report.provider_id))
            return Unclear() if others else None
        (key,) = keys
    calls = yield from port.calls_of(key, None)
    if not calls:
        return (yield from _inline_target(store, key, inline))
    call = calls[0]  # the newest: the same request may have made the same call in an earlier incarnation
    if any(one.id != call.id for one in calls):
        return Unclear()
    if name and report.provider_id is not None and call.provider_id is None:
        yield from port.name(call, report.provider_id)
    return EvidenceTarget(call.id, call.incarnation, call.phase, call.downstream_key)


def _inline_target(store: Store, key: str, inline: Mapping[str, str]) -> Flow[EvidenceTarget | None]:
    """The unknown INLINE record whose downstream key matches: INLINE handlers announce no calls."""
    for operation, phase in inline.items():
        wanted = Search(state=State.UNKNOWN, operation=operation, effects=Effects.INLINE)
        page = yield from operations_of(store).search(wanted, MOST_INLINE)
        for record in page.records:
            if downstream_key(record.seed, phase) == key:
                return EvidenceTarget(record.id, record.incarnation, phase, key)
    return None


log = logging.getLogger("oncekey")

SOURCE: Final = "owner"
ALARM: Final = "oncekey: %s was executed by an owner that had lost its key; its result was not stored (digest %s)"


def keep_refused_result(store: Store, lease: Lease, seed: bytes, entry: MemoEntry, policy: Policy) -> Flow[None]:
    """Store the result of an announced call as evidence, because the record refused it."""
    log.error(ALARM, entry.name, key_digest(lease.id.key))
    value = decode(entry.result)
    resolution = Rejected(value) if is_rejection(entry) else Executed(value)
    target = EvidenceTarget(lease.id, lease.incarnation, entry.name, downstream_key(seed, entry.name))
    yield from _kept(store, lease, target, resolution, policy)


def keep_refused_answer(store: Store, lease: Lease, settlement: Settlement, policy: Policy) -> Flow[None]:
    """Store the success of an INLINE handler as evidence, because the record refused it."""
    if not isinstance(settlement, Completed) or settlement.outcome is not Outcome.SUCCESS:
        return
    log.error(ALARM, "the request", key_digest(lease.id.key))
    # INLINE announced no call, so the evidence is stored under the incarnation, which is not a provider's key.
    target = EvidenceTarget(lease.id, lease.incarnation, FINISHED, str(lease.incarnation))
    yield from _kept(store, lease, target, Executed(_reply(settlement, policy)), policy)


def _reply(settlement: Completed, policy: Policy) -> Reply:
    """The response as evidence, without its body if that is larger than a call's result may be."""
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
        log.error("oncekey: that evidence could not be stored (%s, digest %s)", type(error).__name__, digest)
