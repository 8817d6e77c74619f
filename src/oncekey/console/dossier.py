"""Gathers all that is known of one record for its page: what its state means, what to do, and what happened to it."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final

from oncekey.core.enclosing import shown_text
from oncekey.core.envelopes import key_of_answer, key_of_text, said_of
from oncekey.core.memo import decode
from oncekey.core.model import Effects, Instant, MemoEntry, Record, RecordId, State, StoredResponse
from oncekey.core.operate import PROVIDER_LAG, Move, Order, Possibility, believed_from, possible
from oncekey.core.results import shape_of
from oncekey.core.rulings import Situation, situate
from oncekey.core.transitions import Actor, AuditEntry, Trigger
from oncekey.engine.operate import operations_of, survey_of
from oncekey.engine.request import look
from oncekey.ops.explain_retry import downstream_keys, meaning, prospect, purpose, why

if TYPE_CHECKING:
    from oncekey.core.flow import Flow
    from oncekey.core.resolution import AnnouncedCall, Evidence
    from oncekey.ops.stats import ParcelView
    from oncekey.ports.store import Store

TRIGGERS: Final[Mapping[Trigger, str]] = MappingProxyType(
    {
        Trigger.TAKE_OVER: "taken over",
        Trigger.SWEEP: "released: its owner did not come back",
        Trigger.DOUBT: "put in doubt",
        Trigger.EXPIRE: "its time was over",
        Trigger.EXECUTED: "settled: it was executed",
        Trigger.NOT_EXECUTED: "settled: it was not executed",
        Trigger.STILL_UNKNOWN: "asked about, still unknown",
        Trigger.DLQ_RETRY: "sent back to the outbox",
        Trigger.DEAD_LETTER: "its parcel became a dead letter",
        Trigger.TRY_AGAIN: "to be tried again",
        Trigger.ABANDON: "ended: no worker ever took its parcel",
        Trigger.PURGE: "deleted",
        Trigger.SUPERSEDE: "begun anew after it expired",
        Trigger.BUST: "its answer was taken away",
        Trigger.EXTEND: "kept for longer",
        Trigger.REPLACE: "a result given by hand was replaced",
        Trigger.DISCARD: "given up",
        Trigger.DISCLOSE: "its contents were shown",
        Trigger.LOG_OUT: "logged out of the console",
        Trigger.SETTLE: "settled",
        Trigger.HAND_BACK: "handed back",
    }
)
"""Moves in a few words; the others keep their names from the table."""

_WAIT: Final[Mapping[Situation, str]] = MappingProxyType(
    {
        Situation.STALE: "A worker releases it soon after its lease ended. If no worker lives, release it yourself.",
        Situation.PENDING: "Nothing: a worker makes the call. If it stays like this, see whether a worker lives.",
        Situation.LIVE: "Nothing: wait for it. It is not to be touched while its owner is alive.",
        Situation.COMPLETED: "Nothing.",
        Situation.EXPIRED: "Nothing.",
    }
)


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

    @property
    def means(self) -> str:
        """Its state in a sentence."""
        return meaning(self.record, self.now)

    @property
    def why(self) -> str | None:
        """Why it is not done."""
        return why(self.record)

    @property
    def retry(self) -> str:
        """How a client's retry is answered."""
        return prospect(self.record, self.now)

    @property
    def todo(self) -> str:
        """What the operator should do, in a sentence or two."""
        record, situation = self.record, situate(self.record, self.now)
        if situation is Situation.RETRYABLE:
            who = "a client's retry or a worker's completer" if record.request else "a client's retry"
            return f"Nothing: {who} does the rest."
        if situation is not Situation.UNKNOWN:
            return _WAIT.get(situation, "")
        if record.intent is None and record.effects is not Effects.INLINE:
            return "No call is open. Mend what is wrong, then let it go on."
        asked, tries = "", record.reconcile_tries
        if tries or record.reconcile_after is None:
            often = "once" if tries == 1 else f"{tries} times"
            later = "asks no more" if record.reconcile_after is None else "will ask again"
            asked = f" A resolver has asked {often}, and {later}."
        return f"Look at the provider, then say what you found.{asked}"

    @property
    def references(self) -> dict[str, str]:
        """The downstream keys of the calls that may have been made."""
        return downstream_keys(self.record, self.inline)

    @property
    def believed(self) -> Instant | None:
        """From when on "it did not happen" is believed; None if the record is not unknown."""
        return believed_from(self.record, PROVIDER_LAG) if self.record.state is State.UNKNOWN else None

    @property
    def choices(self) -> tuple[Possibility, ...]:
        """The orders that an operator may give now; of two that do the same the plainer one."""
        released = {one.row for one in self.possible if one.order is Order.RELEASE}
        return tuple(one for one in self.possible if not (one.order is Order.NOT_EXECUTED and one.row in released))

    def purpose(self, order: Order) -> str:
        """What an operator who gives this order has found out."""
        return purpose(order, self.record)

    @property
    def outline(self) -> str:
        """What the open call's result looked like the last time, with gaps for its values."""
        if self.last is None or key_of_text(self.last.result) is not None:
            return ""
        return _outlined(shape_of(decode(self.last.result)))

    @property
    def timeline(self) -> list[Event]:
        """Everything that is known to have happened, in order."""
        return sorted(self._events(), key=lambda event: event.at)

    def _events(self) -> Iterator[Event]:
        record = self.record
        yield Event(record.created_at, "claimed", "this life of the key began", to=State.IN_PROGRESS)
        if record.attempts > 1 or record.last_run_at > record.created_at:
            yield Event(
                record.last_run_at, "run begun", f"attempt {record.attempts}", record.owner or "", fence=record.fence
            )
        for call in self.calls:
            named = f", there {call.provider_id}" if call.provider_id else ""
            yield Event(call.at, f"call {call.phase} announced", f"as {call.downstream_key}{named}")
        for one in self.evidence:
            verdict = f": {one.verdict}" if one.verdict else ", not judged yet"
            yield Event(one.at, f"report from {one.report.source}", f"event {one.report.event_id}{verdict}")
        for parcel in self.parcels:
            yield Event(parcel.created_at, f"parcel {parcel.topic} written", parcel.kind.value)
            if parcel.died_at is not None:
                yield Event(parcel.died_at, f"parcel {parcel.topic} is a dead letter", parcel.last_error or "")
        for entry in self.lines:
            yield _line(entry, record)
        if record.finished_at is not None:
            status = "" if record.response is None else f"with {record.response.status}"
            yield Event(record.finished_at, "answered", status, to=State.COMPLETED)


def _line(entry: AuditEntry, record: Record) -> Event:
    note = entry.note
    by = note.who if note.actor is Actor.OPERATOR else f"{note.actor} {note.who}"
    return Event(
        at=entry.at,
        what=TRIGGERS.get(note.trigger, note.trigger.value.replace("_", " ")),
        detail=note.why,
        who=by,
        fence=note.fence,
        source=note.source,
        to=note.to,
        operator=note.actor is Actor.OPERATOR,
        other_life=note.incarnation != record.incarnation,
    )


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
        possible=possible(record, now, (yield from operations.parcels(record.incarnation))),
    )


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
    """A stored body as text for people; what is no text as Base64."""
    key_id = key_of_answer(response)
    if key_id is not None:
        return said_of(key_id)
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
    """The part of an address that names a record."""
    content = json.dumps([record_id.scope, record_id.key], ensure_ascii=False).encode("utf-8", "surrogatepass")
    return base64.urlsafe_b64encode(content).decode().rstrip("=")


def record_id_of(token: str) -> RecordId | None:
    """The record of an address; None if it is none of ours."""
    try:
        content: Any = json.loads(base64.urlsafe_b64decode(token + "=" * (-len(token) % 4)))
        scope, key = content
    except (ValueError, TypeError):
        return None
    return RecordId(scope, key) if is_text(scope) and is_text(key) else None


def is_text(word: object) -> bool:
    """Whether a word can be the scope or the key of a record, so that a store can be asked for it."""
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
