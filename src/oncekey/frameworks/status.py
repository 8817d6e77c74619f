"""The status resource: what became of a key, for the caller whose key it is (R84)."""

from __future__ import annotations

import json
import logging
import time
from dataclasses import dataclass
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
from oncekey.engine.telling import tell_failure
from oncekey.observe.events import LookedUp

if TYPE_CHECKING:
    from oncekey.engine.claiming import Caller
    from oncekey.engine.effects import Life
    from oncekey.frameworks.premises import Premises
    from oncekey.ports import Store

log = logging.getLogger("oncekey")


def status_of(premises: Premises, store: Store, caller: Caller, key: str) -> Life[Answer]:
    """The answer to a caller who asks about a key; who observes hears what it was."""
    began = time.monotonic()
    found = yield from _found(premises, store, caller, key)
    return answered(premises, found, time.monotonic() - began)


def answered(premises: Premises, found: Shown | Refuse, seconds: float) -> Answer:
    """What was found, or why nothing was, as an answer."""
    if premises.tell is not None:
        premises.tell(LookedUp(found.code if isinstance(found, Refuse) else found.state, seconds))
    return refusal(found, premises.policy) if isinstance(found, Refuse) else _answer(found)


@dataclass(frozen=True, slots=True)
class Shown:
    """What the caller is shown, and the seconds after which it may have changed."""

    state: State
    description: dict[str, Any]
    wait: int | None


def _found(premises: Premises, store: Store, caller: Caller, key: str) -> Life[Shown | Refuse]:
    """The key's state; a stranger's key, an expired one and one that never was are all the same 404 (R29)."""
    policy = premises.policy
    if not (key.isascii() and key.isprintable()):
        # No request could have had such a key, and not every store can be asked for it.
        return Refuse(Code.KEY_NOT_FOUND)
    tenant, principal, token = caller
    scope = bound_scope(policy.bind_to, policy.namespace or NO_NAMESPACE, tenant, principal=principal, token=token)
    turned_away = yield from premises.limits.looks_up(scope, policy)
    if turned_away is not None:
        return turned_away
    record_id = RecordId(scope, key)
    try:
        # A request of LOCAL in one commit that is under way has no row yet, but a lock (L8, F21).
        sight = yield from look(store, record_id, lock_number(SCHEMA, record_id, policy.secret))
    except RecordUnreadableError as error:
        log.error("oncekey: %s", error)
        return Refuse(Code.RECORD_UNREADABLE)
    except StoreError as error:
        tell_failure(premises.tell, "status", error)
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
