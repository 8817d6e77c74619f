"""How `oncekey keys` and `oncekey unknown` show records: stable JSON for programs, and text for people."""

from __future__ import annotations

import json
import shlex
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from oncekey.cli.options import age, possibility, typed, words_of
from oncekey.cli.printing import broken, pairs, plain
from oncekey.core.enclosing import shown_text
from oncekey.core.envelopes import key_of_text
from oncekey.core.keys import key_digest
from oncekey.core.memo import decode
from oncekey.core.model import Duration, Effects, Instant, Intent, MemoEntry, Record, State, moment
from oncekey.core.operate import PROVIDER_LAG, RESULT, Order, Possibility, believed_from, possible
from oncekey.core.results import shape_of
from oncekey.core.rulings import Situation, situate
from oncekey.core.scope import shown_scope
from oncekey.frameworks.resources import describe, in_flight
from oncekey.ops.explain_retry import downstream_keys, expires, meaning, prospect, purpose, resent_after, why

if TYPE_CHECKING:
    from collections.abc import Iterator

    from oncekey.core.resolution import AnnouncedCall
    from oncekey.core.transitions import AuditEntry
    from oncekey.engine.request import KeyView

UNDER_WAY: Final = "In progress: a LOCAL request is running; its row appears when it is done."
_RUNNING: Final = "A retry receives the response for a request in progress. Nothing is executed."
_BY_ITSELF: Final = {
    Situation.STALE: "A worker releases it a minute after its lease ends. To release it now:",
    Situation.PENDING: "A worker makes the call. `oncekey doctor` shows whether one is alive.",
    Situation.LIVE: "Wait until its lease ends; if its owner died, a worker or a retry handles it then.",
    Situation.COMPLETED: "Nothing.",
    Situation.EXPIRED: "Nothing.",
}
_BRIEF: Final = (
    "operation", "effects", "attempts", "recovery_point", "created_at", "finished_at", "expires_at", "version",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class RecordView:
    """A key with its record, and what is known about its call."""

    sight: KeyView
    last: MemoEntry | None = None
    """The result of the same call the last time a request made it, under any key."""
    calls: tuple[str, ...] = ()
    """The names of the calls of an INLINE handler, which does not announce them."""
    audit: tuple[AuditEntry, ...] = ()
    announced: tuple[AnnouncedCall, ...] = ()
    """The announcements of the open call, in any incarnation."""


def line_of(record: Record, now: Instant) -> dict[str, Any]:
    """A record as an item of `keys list`."""
    return {
        "key": record.id.key,
        "scope": record.id.scope,
        "state": record.state.value,
        "outcome": record.outcome.value if record.outcome else None,
        "operation": record.operation,
        "effects": record.effects.value,
        "recovery_point": record.recovery_point,
        "attempts": record.attempts,
        "last_error": record.last_error,
        "status": None if record.response is None else record.response.status,
        "created_at": moment(record.created_at),
        "last_run_at": moment(record.last_run_at),
        "lease_until": moment(record.lease_until),
        "expires_at": moment(record.expires_at),
        "digest": key_digest(record.id.key),
        "stale": situate(record, now) is Situation.STALE,
    }


def shown(known: RecordView, key: str) -> dict[str, Any]:
    """A key with everything that an operator needs for a decision."""
    sight = known.sight
    record, now = sight.snapshot.record, sight.snapshot.now
    if record is None or (sight.busy and situate(record, now) is Situation.EXPIRED):
        return {**in_flight(key), "means": UNDER_WAY, "retry": _RUNNING, "possible": [], "now": moment(now)}
    shape = _result_shape(known)
    return {
        **describe(record),
        "means": meaning(record, now),
        "why": why(record, known.audit),
        "scope": record.id.scope,
        "effects": record.effects.value,
        "recovery": record.recovery.value,
        "incarnation": str(record.incarnation),
        "fence": record.fence,
        "version": record.version,
        "owner": record.owner,
        "lease_until": moment(record.lease_until),
        "deadline": moment(record.deadline),
        "reconcile_after": moment(record.reconcile_after),
        "reconcile_tries": record.reconcile_tries,
        "steps": [
            {"name": entry.name, "kind": entry.kind.value, "result": shown_text(entry.result), "by_hand": entry.by_hand}
            for entry in record.memo
        ],
        "open_call": _open_call_in_full(known, record),
        "downstream_keys": downstream_keys(record, known.calls),
        "result_shape": shape,
        "not_executed_is_believed_from": believed(record),
        "parcels": [
            {"id": str(one.id), "kind": one.kind.value, "dead": one.dead, "held_until": moment(one.held_until)}
            for one in sight.parcels
        ],
        "evidence": [
            {
                "at": moment(one.at),
                "source": one.report.source,
                "event_id": one.report.event_id,
                "said": shown_text(one.report.resolution),
            }
            for one in sight.evidence
        ],
        "retry": prospect(record, now),
        "possible": [
            {**possibility(one), "command": command_of(one, record, _result_option(shape))}
            for one in possible(record, now, sight.parcels)
        ],
        "now": moment(now),
    }


def record_lines(known: RecordView, shape: dict[str, Any], *, verbose: bool) -> Iterator[str]:
    """The lines of `keys show`: the meaning of the state; what to do, with commands to copy; the details."""
    yield shape["means"]
    if shape.get("why"):
        yield f"Why: {plain(shape['why'])}."
    yield shape["retry"]
    record, now = known.sight.snapshot.record, known.sight.snapshot.now
    if record is not None and "scope" in shape:
        yield from ("", "What to do")
        for line in _advice(known, record, now, shape):
            yield f"  {line}" if line else ""
        yield ""
        brief = [("key", record.id.key), ("caller", shown_scope(record.id.scope))]
        brief += [(name.replace("_", " "), shape[name]) for name in _BRIEF if _is_shown(name, shape, record)]
        yield from pairs(brief)
    if verbose:
        names = [name for name, value in shape.items() if value not in ([], {}) and _is_shown(name, shape, record)]
        yield from ("", *pairs([(name.replace("_", " "), _text(shape[name])) for name in names]))


def _is_shown(name: str, shape: dict[str, Any], record: Record | None) -> bool:
    """Whether a field has a value that applies to the record: not every record expires."""
    return shape[name] is not None and (name != "expires_at" or (record is not None and expires(record)))


def _advice(known: RecordView, record: Record, now: Instant, shape: dict[str, Any]) -> Iterator[str]:
    situation = situate(record, now)
    if situation is Situation.UNKNOWN:
        yield from _looking(record, shape)
    elif situation is Situation.RETRYABLE:
        who = "A client's retry, or a worker, completes it." if record.request else "A retry completes it."
        yield who
    else:
        yield _BY_ITSELF[situation]
    result = _result_option(shape["result_shape"])
    offered = possible(record, now, known.sight.parcels)
    released = {one.row for one in offered if one.order is Order.RELEASE}
    for one in offered:
        if one.order is Order.NOT_EXECUTED and one.row in released:
            continue  # no call is open, so this command does the same as a release
        if not one.advisable:
            continue  # `keys bust` explains it
        yield ""
        fill_in = ", with the values from the provider instead of <…>" if one.order is Order.EXECUTED and result else ""
        yield f"{purpose(one.order, record)}{fill_in}:"
        yield from (f"  {line}" for line in broken(command_of(one, record, result), indent=6))
        if one.note:
            yield f"  {one.note}"


def _looking(record: Record, shape: dict[str, Any]) -> Iterator[str]:
    """The steps to find out what happened at the provider."""
    keys = shape["downstream_keys"]
    if record.intent is None and record.effects is not Effects.INLINE:
        yield "No call is open. Fix the problem, then release it:"
        return
    if keys:
        for name, key in keys.items():
            yield f"1. Check with the provider for the call {name!r}; its key there is"
            yield f"   {key}"
    else:
        yield "1. Check with the provider. Its key there is op.downstream_key(NAME):"
        yield f"   oncekey keys show --call NAME {typed(record.id)}"
    if record.reconcile_after is None:
        yield f"   (A resolver has checked {record.reconcile_tries} times, and will not check again.)"
    elif record.reconcile_tries:
        yield f"   (A resolver has checked {record.reconcile_tries} times, and will check again.)"
    yield "2. Record the outcome:"
    if shape["result_shape"] is not None:
        yield f"   The last result of this call had this shape: {_outline(shape['result_shape'])}"


def command_of(one: Possibility, record: Record, result: str | None) -> str:
    """The command for this key. It has no example of a refusal, whose shape is unknown."""
    given = result if one.order is Order.EXECUTED and result else RESULT
    target, last = words_of(record.id)
    return one.typed(target, last=last, result=given)


def _result_shape(known: RecordView) -> Any:
    if known.last is None or key_of_text(known.last.result) is not None:
        return None
    return shape_of(decode(known.last.result))


def _result_option(shape: Any) -> str | None:
    """A template of a result, quoted for a shell. It is invalid JSON until the operator fills it in."""
    return None if shape is None else shlex.quote(_outline(shape))


def _outline(shape: Any) -> str:
    """The shape of a result with a placeholder for each value."""
    if isinstance(shape, dict):
        return "{" + ", ".join(f"{json.dumps(name)}: {_outline(one)}" for name, one in shape.items()) + "}"
    return f"[{', '.join(map(_outline, shape))}]" if isinstance(shape, list) else f"<{shape}>"


def in_doubt(
    record: Record, now: Instant, *, calls: tuple[str, ...] = (), lag: Duration = PROVIDER_LAG
) -> dict[str, Any]:
    """An unknown record: its open call, and the time from which a check with the provider counts."""
    return {
        **line_of(record, now),
        "open_call": open_call(record.intent),
        "downstream_keys": downstream_keys(record, calls),
        "not_executed_is_believed_from": believed(record, lag=lag),
        "reconcile_after": moment(record.reconcile_after),
        "reconcile_tries": record.reconcile_tries,
        "given_up": record.reconcile_after is None,
    }


def believed(record: Record, *, lag: Duration = PROVIDER_LAG) -> str | None:
    """The time from which `--not-executed` is accepted; None if the record is not unknown."""
    return moment(believed_from(record, lag)) if record.state is State.UNKNOWN else None


def open_call(intent: Intent | None) -> dict[str, Any] | None:
    """The call whose outcome is unknown, with its key at the provider."""
    if intent is None:
        return None
    return {
        "phase": intent.phase,
        "downstream_key": intent.downstream_key,
        "sends": intent.sends,
        "first_sent_at": moment(intent.first_sent_at),
        "send_by": moment(intent.send_by),
        "repeatable_until": moment(intent.repeatable_until),
    }


def _open_call_in_full(known: RecordView, record: Record) -> dict[str, Any] | None:
    """The open call, with the time at which its earlier sends were declared not executed: `sends` counts from there."""
    call = open_call(record.intent)
    resent = resent_after(record, known.announced, known.audit)
    return None if call is None else {**call, "declared_not_executed_at": moment(resent)}


def shown_entry(entry: AuditEntry) -> dict[str, Any]:
    """An audit entry as JSON."""
    note = entry.note
    single = bool(note.key_digest)
    return {
        "at": moment(entry.at),
        "from": None if note.source is None else note.source.value,
        "to": None if note.to is None else note.to.value,
        "trigger": note.trigger.value,
        "actor": note.actor.value,
        "who": note.who,
        "why": note.why,
        "fence": note.fence if single else None,
        "operation": note.operation if single else None,
        "incarnation": str(note.incarnation) if single else None,
    }


def _text(value: Any) -> str:
    if isinstance(value, list):
        return "; ".join(_text(one) for one in value)
    if isinstance(value, dict):
        return one if (one := value.get("command")) else json.dumps(value)
    return str(value)


def row_of(record: Record, now: Instant) -> tuple[Any, ...]:
    """A record as a row of `keys list`; `HEAD` names its columns."""
    return (
        record.id.key,
        shown_scope(record.id.scope),
        f"{record.state}{' (stale)' if situate(record, now) is Situation.STALE else ''}",
        record.operation,
        record.effects,
        record.recovery_point,
        record.attempts,
        record.last_error,
        age(record.created_at, now),
    )


HEAD: Final = ("key", "caller", "state", "operation", "effects", "step", "tries", "last error", "age")
FIRST: Final = ("key", "state", "caller", "age", "operation", "last error")
"""The columns, most important first."""
