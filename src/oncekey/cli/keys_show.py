"""How `oncekey keys` and `oncekey unknown` show records: shapes that programs may rely on."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from oncekey.cli.desk import possibility
from oncekey.core.keys import key_digest
from oncekey.core.model import State
from oncekey.core.operate import PROVIDER_LAG, believed_from, possible
from oncekey.core.prospects import prospect
from oncekey.core.rulings import Situation, situate
from oncekey.core.showing import describe, in_flight, moment

if TYPE_CHECKING:
    from oncekey.core.audit import AuditEntry
    from oncekey.core.model import Duration, Instant, Intent, Record
    from oncekey.engine.operate import Sight


def line_of(record: Record, now: Instant) -> dict[str, Any]:
    """A record as one of many."""
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


def shown(sight: Sight, key: str) -> dict[str, Any]:
    """A key with everything that an operator needs to decide."""
    record, now = sight.snapshot.record, sight.snapshot.now
    if record is None or (sight.busy and situate(record, now) is Situation.EXPIRED):
        retry = "A retry hears that the request is in progress. Nothing is executed beside it."
        return {**in_flight(key), "retry": retry, "possible": [], "now": moment(now)}
    return {
        **describe(record),
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
        "steps": [{"name": entry.name, "kind": entry.kind.value, "result": entry.result} for entry in record.memo],
        "open_call": open_call(record.intent),
        "not_executed_is_believed_from": believed(record),
        "parcels": [
            {"id": str(one.id), "kind": one.kind.value, "dead": one.dead, "held_until": moment(one.held_until)}
            for one in sight.parcels
        ],
        "evidence": [
            {"at": moment(one.at), "source": one.heard.source, "event_id": one.heard.event_id, "said": one.heard.said}
            for one in sight.evidence
        ],
        "retry": prospect(record, now),
        "possible": [possibility(one) for one in possible(record, now, sight.parcels)],
        "now": moment(now),
    }


def in_doubt(record: Record, now: Instant, *, lag: Duration = PROVIDER_LAG) -> dict[str, Any]:
    """An unknown record: what it was about to do, and from when on a look at the provider counts."""
    return {
        **line_of(record, now),
        "open_call": open_call(record.intent),
        "not_executed_is_believed_from": believed(record, lag=lag),
        "reconcile_after": moment(record.reconcile_after),
        "reconcile_tries": record.reconcile_tries,
        "given_up": record.reconcile_after is None,
    }


def believed(record: Record, *, lag: Duration = PROVIDER_LAG) -> str | None:
    """From when on `--not-executed` is believed; None where nobody asks."""
    return moment(believed_from(record, lag)) if record.state is State.UNKNOWN else None


def open_call(intent: Intent | None) -> dict[str, Any] | None:
    """The call whose outcome is not known, with the key that the provider knows it by."""
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


def shown_entry(entry: AuditEntry) -> dict[str, Any]:
    """A line of the audit."""
    note = entry.note
    return {
        "at": moment(entry.at),
        "from": None if note.source is None else note.source.value,
        "to": None if note.to is None else note.to.value,
        "trigger": note.trigger.value,
        "actor": note.actor.value,
        "who": note.who,
        "why": note.why,
        "fence": note.fence,
        "operation": note.operation,
        "incarnation": str(note.incarnation),
    }
