"""The status resource: the state of a caller's key."""

from __future__ import annotations

import base64
import json
import logging
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import parse_qs

from oncekey.core.answers import Answer, retry_after
from oncekey.core.envelopes import check_open, described, key_of_answer
from oncekey.core.errors import RecordUnreadableError, StoreError
from oncekey.core.lazy import Lazy
from oncekey.core.model import SECOND, UNAVAILABLE, Code, Record, RecordId, Refuse, State, StoredResponse, moment
from oncekey.core.onecommit import lock_number
from oncekey.core.rulings import Situation, situate
from oncekey.engine.claiming import Caller, scope_for
from oncekey.engine.deciding import refusal
from oncekey.engine.enrolment import NO_NAMESPACE, SCHEMA
from oncekey.engine.request import look

if TYPE_CHECKING:
    from oncekey.engine.actions import Life
    from oncekey.frameworks.shared import ApplicationShared
    from oncekey.observe import events
    from oncekey.ports.store import Store
else:
    events = Lazy("oncekey.observe.events")

log = logging.getLogger("oncekey")

NO_OPERATION: Final = "In this API each operation has its own keys: add ?operation=NAME to the URL."


def status_of(
    shared: ApplicationShared, store: Store, caller: Caller, key: str, *, query: str = "", trace_id: str = ""
) -> Life[Answer]:
    """The response to a status query; it is reported to the observers."""
    began = time.monotonic()
    found = yield from _found(shared, store, caller, key, query)
    return answered(shared, found, time.monotonic() - began, trace_id)


def answered(shared: ApplicationShared, found: Shown | Refuse, seconds: float, trace_id: str) -> Answer:
    """The state of the key, or a refusal, as a response."""
    if shared.notify is not None:
        shared.notify(events.LookedUp(found.code if isinstance(found, Refuse) else found.state, seconds))
    return refusal(found, shared.policy, trace_id=trace_id) if isinstance(found, Refuse) else _answer(found)


@dataclass(frozen=True, slots=True)
class Shown:
    """The body of the response, and the seconds after which it may have changed."""

    state: State
    description: dict[str, Any]
    wait: int | None


def _found(shared: ApplicationShared, store: Store, caller: Caller, key: str, query: str) -> Life[Shown | Refuse]:
    """The key's state; another caller's key, an expired one and one that never existed are the same 404."""
    policy = shared.policy
    if not (key.isascii() and key.isprintable()):
        # No request could have had such a key, and not every store can query it.
        return Refuse(Code.KEY_NOT_FOUND)
    operation = ""
    if policy.separate_operations:
        operation = parse_qs(query).get("operation", [""])[0]
        if not operation:
            return Refuse(Code.KEY_NOT_FOUND, detail=NO_OPERATION)
    scope = scope_for(policy, policy.namespace or NO_NAMESPACE, caller, operation)
    if policy.max_lookups_per_second is not None:
        turned_away = yield from shared.limits.looks_up(scope, policy)
        if turned_away is not None:
            return turned_away
    record_id = RecordId(scope, key)
    try:
        # A LOCAL request in progress (in one commit) has no row yet, but a lock.
        sight = yield from look(store, record_id, lock_number(SCHEMA, record_id, policy.secret))
        if sight.snapshot.record is not None:
            check_open(sight.snapshot.record)
    except RecordUnreadableError as error:
        log.error("oncekey: %s", error)
        return Refuse(Code.RECORD_UNREADABLE)
    except StoreError as error:
        shared.failed("status", error)
        return UNAVAILABLE
    record, now = sight.snapshot.record, sight.snapshot.now
    if record is None or situate(record, now) is Situation.EXPIRED:
        if sight.busy:
            return Shown(State.IN_PROGRESS, in_flight(key), 1)
        return Refuse(Code.KEY_NOT_FOUND)
    wait = None
    if record.state in (State.PENDING, State.IN_PROGRESS, State.UNKNOWN):
        left = (record.lease_until or record.reconcile_after or now) - now
        wait = retry_after(max(left, SECOND), running_for=now - record.last_run_at)
    return Shown(record.state, describe(record), wait)


def _answer(shown: Shown) -> Answer:
    body = json.dumps(shown.description, separators=(",", ":")).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
    if shown.wait is not None:
        headers.append((b"retry-after", b"%d" % shown.wait))
    return Answer(200, (*headers, (b"cache-control", b"no-store")), body)


def describe(record: Record) -> dict[str, Any]:
    """A record for an operator or its caller; without fingerprint, seed and scope."""
    return {
        "key": record.id.key,
        "state": record.state.value,
        "outcome": record.outcome.value if record.outcome else None,
        "operation": record.operation,
        "method": record.method,
        "path": record.path,
        "recovery_point": record.recovery_point,
        "attempts": record.attempts,
        "last_error": record.last_error,
        "created_at": moment(record.created_at),
        "last_run_at": moment(record.last_run_at),
        "finished_at": moment(record.finished_at),
        "expires_at": moment(record.expires_at),
        "response": None if record.response is None else _response(record.response),
    }


def in_flight(key: str) -> dict[str, Any]:
    """The state of a running LOCAL request, which has no row until it is done."""
    return {"key": key, "state": State.IN_PROGRESS.value}


def _response(response: StoredResponse) -> dict[str, Any]:
    key_id = key_of_answer(response)
    if key_id is not None:
        return {"status": response.status, "sealed": described(key_id)}
    shown: dict[str, Any] = {
        "status": response.status,
        "headers": [[name.decode("latin-1"), value.decode("latin-1")] for name, value in response.headers],
    }
    if response.body is None:
        return {**shown, "stored": False}
    try:
        return {**shown, "body": response.body.decode("utf-8")}
    except UnicodeDecodeError:
        return {**shown, "body_base64": base64.b64encode(response.body).decode("ascii")}
