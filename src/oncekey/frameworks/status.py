"""The status resource: what became of a key, for the caller whose key it is (R84)."""

from __future__ import annotations

import json
import logging
from typing import TYPE_CHECKING, Any

from oncekey.core.answers import Answer, retry_after
from oncekey.core.errors import RecordUnreadableError, StoreError
from oncekey.core.locks import lock_number
from oncekey.core.model import SECOND, UNAVAILABLE, Code, RecordId, Refuse, State
from oncekey.core.rulings import Situation, situate
from oncekey.core.scope import bound_scope
from oncekey.core.showing import describe, in_flight
from oncekey.engine.answering import refusal
from oncekey.engine.enrolment import NO_NAMESPACE, SCHEMA
from oncekey.engine.operate import look

if TYPE_CHECKING:
    from oncekey.engine.claiming import Caller
    from oncekey.engine.effects import Life
    from oncekey.frameworks.premises import Premises
    from oncekey.ports import Store

log = logging.getLogger("oncekey")


def status_of(premises: Premises, store: Store, caller: Caller, key: str) -> Life[Answer]:
    """The key's state; a stranger's key, an expired one and one that never was are all the same 404 (R29)."""
    policy = premises.policy
    if not (key.isascii() and key.isprintable()):
        # No request could have had such a key, and not every store can be asked for it.
        return refusal(Refuse(Code.KEY_NOT_FOUND), policy)
    tenant, principal, token = caller
    scope = bound_scope(policy.bind_to, policy.namespace or NO_NAMESPACE, tenant, principal=principal, token=token)
    turned_away = yield from premises.limits.looks_up(scope, policy)
    if turned_away is not None:
        return refusal(turned_away, policy)
    record_id = RecordId(scope, key)
    try:
        # A request of LOCAL in one commit that is under way has no row yet, but a lock (L8, F21).
        sight = yield from look(store, record_id, lock_number(SCHEMA, record_id, policy.secret))
    except RecordUnreadableError as error:
        log.error("oncekey: %s", error)
        return refusal(Refuse(Code.RECORD_UNREADABLE), policy)
    except StoreError:
        return refusal(UNAVAILABLE, policy)
    record, now = sight.snapshot.record, sight.snapshot.now
    if record is None or situate(record, now) is Situation.EXPIRED:
        if sight.busy:
            return _shown(in_flight(key), wait=1)
        return refusal(Refuse(Code.KEY_NOT_FOUND), policy)
    wait = None
    if record.state in (State.PENDING, State.IN_PROGRESS, State.UNKNOWN):
        left = (record.lease_until or record.reconcile_after or now) - now
        wait = retry_after(max(left, SECOND), running_for=now - record.last_run_at)
    return _shown(describe(record), wait=wait)


def _shown(description: dict[str, Any], *, wait: int | None) -> Answer:
    body = json.dumps(description, separators=(",", ":")).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
    if wait is not None:
        headers.append((b"retry-after", b"%d" % wait))
    return Answer(200, (*headers, (b"cache-control", b"no-store")), body)
