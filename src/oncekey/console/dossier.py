"""Gathers everything about one record for its page: what its state means, what to do, and what happened to it."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final

from oncekey.console.orders import FOR_LETTERS, SLUGS, Words, refusal_of, runbook_of, words_of
from oncekey.core.enclosing import shown_text
from oncekey.core.envelopes import described, key_of_answer, key_of_text
from oncekey.core.memo import decode
from oncekey.core.model import Effects, Instant, MemoEntry, Outcome, Record, RecordId, State, StoredResponse
from oncekey.core.operate import PROVIDER_LAG, Forbidden, Move, Order, Possibility, believed_from, possible, refusals
from oncekey.core.results import shape_of
from oncekey.core.rulings import Situation, situate
from oncekey.core.transitions import Actor, AuditEntry, Trigger
from oncekey.engine.operate import operations_of, survey_of
from oncekey.engine.request import look
from oncekey.ops.explain_retry import (
    WHY,
    downstream_keys,
    expires,
    meaning,
    prospect,
    resent_after,
    returns,
    why,
)

if TYPE_CHECKING:
    from uuid import UUID

    from oncekey.core.flow import Flow
    from oncekey.core.operate import ParcelLocation
    from oncekey.core.resolution import AnnouncedCall, Evidence
    from oncekey.core.transitions import Note
    from oncekey.ops.stats import ParcelView
    from oncekey.ports.store import Store

TRIGGERS: Final[Mapping[Trigger, str]] = MappingProxyType(
    {
        Trigger.TAKE_OVER: "taken over",
        Trigger.SWEEP: "released: its lease ended without a response",
        Trigger.DOUBT: "outcome became unknown",
        Trigger.EXPIRE: "expired",
        Trigger.EXECUTED: "resolved: executed",
        Trigger.DECLINED: "resolved: declined",
        Trigger.NOT_EXECUTED: "resolved: not executed",
        Trigger.STILL_UNKNOWN: "checked with the provider: still unknown",
        Trigger.DLQ_RETRY: "dead letter retried",
        Trigger.DEAD_LETTER: "call became a dead letter",
        Trigger.TRY_AGAIN: "returned to the outbox",
        Trigger.ABANDON: "ended: no worker claimed its call",
        Trigger.PURGE: "deleted",
        Trigger.SUPERSEDE: "executed again after it expired",
        Trigger.BUST: "stored response removed",
        Trigger.EXTEND: "expiry postponed",
        Trigger.REPLACE: "result entered by hand replaced",
        Trigger.DISCARD: "dead letter discarded",
        Trigger.DISCLOSE: "contents shown",
        Trigger.LOG_OUT: "logged out of the console",
        Trigger.SETTLE: "response stored",
        Trigger.HAND_BACK: "interrupted: a retry or a worker resumes it",
    }
)
"""Triggers in a few words; the others are shown by name."""

_WAIT: Final[Mapping[Situation, str]] = MappingProxyType(
    {
        Situation.STALE: "Nothing if a worker is alive: it releases the key soon after the lease ends.",
        Situation.PENDING: "Nothing: a worker makes the call. If it stays pending, check that a worker is alive.",
        Situation.LIVE: "Wait until its lease ends: its owner may be running.",
        Situation.COMPLETED: "Nothing: the request has its response.",
        Situation.EXPIRED: "Nothing: the key has expired.",
    }
)

NOT_NOW: Final = "it does not apply to a record in this state"


@dataclass(frozen=True, slots=True)
class Event:
    """One line of the timeline."""

    at: Instant
    what: str
    detail: str = ""
    who: str = ""
    fence: int | None = None
    source: State | None = None
    to: State | None = None
    operator: bool = False
    other_life: bool = False
    times: int = 1
    """How often it happened, one after the other; `at` is the first time."""
    last: Instant | None = None


@dataclass(frozen=True, slots=True)
class Choice:
    """An order that the operator may give now."""

    order: Order
    words: Words
    letter: UUID | None = None


@dataclass(frozen=True, slots=True)
class Refusal:
    """An order that would be refused now, and why."""

    label: str
    why: str
    runbook: str


@dataclass(frozen=True, slots=True)
class Dossier:
    """A record with its steps, calls, parcels, evidence and audit."""

    record: Record
    now: Instant
    busy: bool
    parcels: tuple[ParcelView, ...]
    calls: tuple[AnnouncedCall, ...]
    evidence: tuple[Evidence, ...]
    lines: tuple[AuditEntry, ...]
    last: MemoEntry | None = None
    """What the same call returned when a request last made it, under any key."""
    inline: tuple[str, ...] = ()
    """The calls of an INLINE handler, as workers name them."""
    possible: tuple[Possibility, ...] = ()
    refusals: Mapping[Order, Forbidden] = field(default_factory=dict)

    @property
    def means(self) -> str:
        """Its state in a sentence."""
        return meaning(self.record, self.now)

    @property
    def why(self) -> str | None:
        """Why it is not completed."""
        return why(self.record, self.lines)

    @property
    def retry(self) -> str:
        """What a client's retry gets."""
        return prospect(self.record, self.now)

    @property
    def todo(self) -> str:
        """What the operator should do, in a sentence or two."""
        record, situation = self.record, situate(self.record, self.now)
        if situation is Situation.RETRYABLE:
            who = "a client's retry, or a worker," if record.request else "a client's retry"
            return f"Nothing: {who} executes the rest."
        if situation is Situation.COMPLETED and record.outcome is Outcome.FAILURE:
            if record.effects is Effects.OUTBOX:
                return "Nothing. To try again, the client sends a new key."
            return "Nothing, unless you have fixed the cause of the failure."
        if situation is not Situation.UNKNOWN:
            return _WAIT.get(situation, "")
        if record.intent is None and record.effects is not Effects.INLINE:
            return "No call is open. Fix the cause, then resume the request."
        asked, tries = "", record.reconcile_tries
        if tries or record.reconcile_after is None:
            often = "once" if tries == 1 else f"{tries} times"
            later = "will not check again" if record.reconcile_after is None else "will check again"
            asked = f" A resolver has checked {often} and {later}."
        return f"Look up the call at the provider, then choose what you found.{asked}"

    @property
    def expires(self) -> bool:
        """Whether the record expires."""
        return expires(self.record)

    @property
    def references(self) -> dict[str, str]:
        """The downstream keys of the calls that may have been made."""
        return downstream_keys(self.record, self.inline)

    @property
    def unnamed(self) -> bool:
        """Whether an INLINE handler may have made a call, and no worker has named its calls."""
        record = self.record
        return record.state is State.UNKNOWN and record.effects is Effects.INLINE and not self.references

    @property
    def believed(self) -> Instant | None:
        """From when on "not executed" is accepted without closing the reference; None if the record is not unknown."""
        return believed_from(self.record, PROVIDER_LAG) if self.record.state is State.UNKNOWN else None

    @property
    def choices(self) -> tuple[Choice, ...]:
        """The orders that an operator may give now; of two with the same effect, the plainer one."""
        plainer = {one.row for one in self.possible if one.order in {Order.RELEASE, Order.RETRY}}
        return tuple(
            Choice(one.order, self.words(one.order), one.letter if one.order in FOR_LETTERS else None)
            for one in self.possible
            if not (one.order is Order.NOT_EXECUTED and one.row in plainer)
        )

    @property
    def refused(self) -> tuple[Refusal, ...]:
        """The orders for such a record that would be refused now."""
        return tuple(
            Refusal(self.words(order).label, self.objection(order), runbook_of(order, self.record))
            for order in self.refusals
        )

    def objection(self, order: Order) -> str:
        """Why an order would be refused now; empty if it would not."""
        if any(one.order is order for one in self.possible):
            return ""
        if order not in self.refusals:
            return NOT_NOW
        return refusal_of(order, self.refusals[order])

    def words(self, order: Order) -> Words:
        """What an order does to this record."""
        to = next((one.to for one in self.possible if one.order is order), None)
        return words_of(order, self.record, to)

    @property
    def resent_after(self) -> Instant | None:
        """When the open call was declared not executed, if it was sent before that, too."""
        return resent_after(self.record, self.calls, self.lines)

    @property
    def queued_again(self) -> Instant | None:
        """When the deferred call last returned to the outbox, which begins the count of its attempts anew."""
        return max(returns(self.record, self.lines, Trigger.NOT_EXECUTED, Trigger.DLQ_RETRY), default=None)

    @property
    def outline(self) -> str:
        """The shape of the last result of the open call, with placeholders for its values."""
        if self.last is None or key_of_text(self.last.result) is not None:
            return ""
        return _outlined(shape_of(decode(self.last.result)))

    @property
    def timeline(self) -> list[Event]:
        """Everything that is known to have happened, in order; repeated checks with the provider are one event."""
        events: list[Event] = []
        for event in sorted(self._events(), key=lambda one: one.at):
            last = events[-1] if events else None
            same = last is not None and (last.what, last.other_life) == (event.what, event.other_life)
            if last is None or not same or event.what != TRIGGERS[Trigger.STILL_UNKNOWN]:
                events.append(event)
            else:
                events[-1] = replace(event, at=last.at, times=last.times + 1, last=event.at)
        return events

    def _events(self) -> Iterator[Event]:
        record = self.record
        yield Event(record.created_at, "request received", to=State.IN_PROGRESS)
        if record.attempts > 1 or record.last_run_at > record.created_at:
            yield Event(
                record.last_run_at,
                "handler started",
                f"attempt {record.attempts}",
                record.owner or "",
                fence=record.fence,
            )
        for call in self.calls:
            named = f", at the provider {call.provider_id}" if call.provider_id else ""
            yield Event(call.at, f"call {call.phase} announced", f"downstream key {call.downstream_key}{named}")
        if record.intent is not None and self.resent_after is not None:
            sent = f"downstream key {record.intent.downstream_key}"
            yield Event(record.intent.first_sent_at, f"call {record.intent.phase} announced again", sent)
        for one in self.evidence:
            verdict = f": {one.verdict}" if one.verdict else ", not evaluated yet"
            yield Event(one.at, f"report from {one.report.source}", f"event {one.report.event_id}{verdict}")
        for parcel in self.parcels:
            yield Event(parcel.created_at, f"{parcel.topic} written to the outbox", parcel.kind.value)
            if parcel.died_at is not None:
                yield Event(parcel.died_at, f"{parcel.topic} became a dead letter", parcel.last_error or "")
        for entry in self.lines:
            yield _line(entry, record)
        if record.finished_at is not None:
            status = "" if record.response is None else f"status {record.response.status}"
            yield Event(record.finished_at, "response stored", status, to=State.COMPLETED)


def _line(entry: AuditEntry, record: Record) -> Event:
    note = entry.note
    by = note.who if note.actor is Actor.OPERATOR else f"{note.actor} {note.who}"
    return Event(
        at=entry.at,
        what=TRIGGERS.get(note.trigger, note.trigger.value.replace("_", " ")),
        detail=reason(note),
        who=by,
        fence=note.fence,
        source=note.source,
        to=note.to,
        operator=note.actor is Actor.OPERATOR,
        other_life=note.incarnation != record.incarnation,
    )


def reason(note: Note) -> str:
    """The reason of an audit line; an error code as text, unless an operator wrote it."""
    return note.why if note.actor is Actor.OPERATOR else WHY.get(note.why, note.why)


def gather(store: Store, record_id: RecordId, lock: int | None) -> Flow[Dossier | None]:
    """Everything about one key; None if it has no record."""
    sight = yield from look(store, record_id, lock)
    record, now = sight.snapshot.record, sight.snapshot.now
    if record is None or store.audit is None:
        return None
    survey, operations = survey_of(store), operations_of(store)
    calls = yield from survey.calls(record.incarnation)
    inline: tuple[str, ...] = ()
    if record.effects is Effects.INLINE and store.upkeep is not None:
        inline = (yield from store.upkeep.workers()).inline_calls(record.operation)
    names = {call.downstream_key for call in calls} | set(downstream_keys(record, inline).values())
    ids = {call.provider_id for call in calls if call.provider_id is not None}
    by_hand = record.memo[-1].name if record.memo and record.memo[-1].by_hand else None
    phase = by_hand if record.intent is None else record.intent.phase
    last = None
    if phase is not None and record.effects is Effects.PHASED:
        last = yield from operations.last_result(record.operation, phase)
    parcels = yield from operations.parcels(record.incarnation)
    meant = {one.order for one in _offered(record, now)} | set(refusals(record, now))
    refused = {order: why for order, why in refusals(record, now, parcels).items() if order in meant}
    return Dossier(
        record=record,
        now=now,
        busy=sight.busy,
        parcels=(yield from survey.parcels(record.incarnation)),
        calls=calls,
        evidence=(yield from survey.reports_about(tuple(sorted(names)), tuple(sorted(ids)))),
        lines=(yield from store.audit.history(record_id)),
        last=last,
        inline=inline,
        possible=_offered(record, now, parcels),
        refusals=refused,
    )


def _offered(record: Record, now: Instant, parcels: tuple[ParcelLocation, ...] = ()) -> tuple[Possibility, ...]:
    """The possible orders that the console has a form for."""
    return tuple(one for one in possible(record, now, parcels) if one.advisable and one.order in SLUGS)


@dataclass(frozen=True, slots=True)
class Line:
    """A line of the audit, or several of the same record that report the same check with the provider."""

    entry: AuditEntry
    """The newest one."""
    times: int
    first: Instant


def folded(entries: Iterable[AuditEntry]) -> list[Line]:
    """Lines of the audit, the newest first, with the repeated checks of each record with the provider as one line."""
    lines: dict[object, Line] = {}
    for entry in entries:
        note = entry.note
        repeats = note.trigger is Trigger.STILL_UNKNOWN
        place = (note.scope, note.key_digest, note.incarnation) if repeats else object()
        known = lines.get(place)
        lines[place] = (
            Line(entry, 1, entry.at) if known is None else replace(known, times=known.times + 1, first=entry.at)
        )
    return list(lines.values())


def after(move: Move) -> Record:
    """The record as it will be after a move, in the fields that decide about a retry."""
    record = move.seen
    assert move.row.to is not None
    if move.answer is not None:
        return replace(
            record, state=State.COMPLETED, outcome=move.answer.outcome, response=move.answer.response, intent=None
        )
    moved = replace(record, state=move.row.to, outcome=None, response=None, owner=None, lease_until=None)
    if move.memo:
        return replace(moved, memo=move.memo, recovery_point=move.memo[-1].name, intent=None)
    settled = move.row.to is State.FAILED_RETRYABLE and record.state is State.UNKNOWN
    return replace(moved, intent=None) if settled or move.forget else moved


def body_of(response: StoredResponse) -> str:
    """A stored body as text; Base64 if it is not text."""
    key_id = key_of_answer(response)
    if key_id is not None:
        return described(key_id)
    if response.body is None:
        return ""
    try:
        return indented(response.body.decode("utf-8"))
    except UnicodeDecodeError:
        return base64.b64encode(response.body).decode("ascii")


def indented(text: str) -> str:
    """JSON with its lines broken; anything else as it is, except what is sealed."""
    try:
        return json.dumps(json.loads(text), indent=2, ensure_ascii=False)
    except ValueError:
        return shown_text(text)


def token_of(record_id: RecordId) -> str:
    """The part of a URL that names a record."""
    content = json.dumps([record_id.scope, record_id.key], ensure_ascii=False).encode("utf-8", "surrogatepass")
    return base64.urlsafe_b64encode(content).decode().rstrip("=")


def record_id_of(token: str) -> RecordId | None:
    """The record of a URL; None if the token is invalid."""
    try:
        content: Any = json.loads(base64.urlsafe_b64decode(token + "=" * (-len(token) % 4)))
        scope, key = content
    except (ValueError, TypeError):
        return None
    return RecordId(scope, key) if is_text(scope) and is_text(key) else None


def is_text(word: object) -> bool:
    """Whether a word can be the scope or the key of a record, so that a store can look it up."""
    if not isinstance(word, str) or "\0" in word:
        return False
    try:
        word.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True


def _outlined(shape: Any) -> str:  # noqa: ANN401  (a shape is nested lists and mappings of names)
    if isinstance(shape, dict):
        return "{" + ", ".join(f"{json.dumps(name)}: {_outlined(one)}" for name, one in shape.items()) + "}"
    return f"[{', '.join(map(_outlined, shape))}]" if isinstance(shape, list) else f"<{shape}>"
