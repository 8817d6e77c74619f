"""The two resources beside the application's own: the status of a key, and the page that every refusal links to."""

from __future__ import annotations

import json
import logging
import time
from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING, Any

from oncekey.core.answers import Answer, retry_after
from oncekey.core.envelopes import check_open
from oncekey.core.errors import RecordUnreadableError, StoreError
from oncekey.core.keys import HeaderSyntax, KeyFormat
from oncekey.core.model import SECOND, UNAVAILABLE, Code, RecordId, Refuse, State
from oncekey.core.onecommit import lock_number
from oncekey.core.policy import InProgress, Policy
from oncekey.core.problems import PROBLEMS
from oncekey.core.rulings import Situation, situate
from oncekey.core.scope import bound_scope
from oncekey.engine.deciding import refusal
from oncekey.engine.enrolment import NO_NAMESPACE, SAFE, SCHEMA
from oncekey.engine.notifying import notify_failure
from oncekey.engine.operate import look
from oncekey.observe.events import LookedUp
from oncekey.ops.explain_retry import describe, in_flight

if TYPE_CHECKING:
    from oncekey.engine.actions import Life
    from oncekey.engine.claiming import Caller
    from oncekey.frameworks.shared import ApplicationShared
    from oncekey.ports import Store

log = logging.getLogger("oncekey")

_SYNTAX = {
    HeaderSyntax.STRICT: 'a structured-field string in double quotes (<code>"8e03978e-…"</code>)',
    HeaderSyntax.COMPAT: "in double quotes or bare; both forms name the same key",
    HeaderSyntax.BARE: "the bare value, without quotes",
}
_FORMAT = {KeyFormat.OPAQUE: "any", KeyFormat.UUID: "a UUID,"}
_IN_FLIGHT = {
    InProgress.CONFLICT: "409 with <code>Retry-After</code>",
    InProgress.ACCEPTED: "202 with <code>Retry-After</code> and the <code>Location</code> of its status",
    InProgress.WAIT: "the first request's answer, as soon as there is one",
}
_STYLE = "body{font:16px/1.6 system-ui,sans-serif;max-width:46rem;margin:2rem auto;padding:0 1rem}code{font-size:.9em}"


def status_of(shared: ApplicationShared, store: Store, caller: Caller, key: str, *, trace_id: str = "") -> Life[Answer]:
    """The response to a caller who asks about a key; the observers get an event of it."""
    began = time.monotonic()
    found = yield from _found(shared, store, caller, key)
    return answered(shared, found, time.monotonic() - began, trace_id)


def answered(shared: ApplicationShared, found: Shown | Refuse, seconds: float, trace_id: str) -> Answer:
    """What was found, or why nothing was, as a response."""
    if shared.notify is not None:
        shared.notify(LookedUp(found.code if isinstance(found, Refuse) else found.state, seconds))
    return refusal(found, shared.policy, trace_id=trace_id) if isinstance(found, Refuse) else _answer(found)


@dataclass(frozen=True, slots=True)
class Shown:
    """What the caller is shown, and the seconds after which it may have changed."""

    state: State
    description: dict[str, Any]
    wait: int | None


def _found(shared: ApplicationShared, store: Store, caller: Caller, key: str) -> Life[Shown | Refuse]:
    """The key's state; a stranger's key, an expired one and one that never was are all the same 404."""
    policy = shared.policy
    if not (key.isascii() and key.isprintable()):
        # No request could have had such a key, and not every store can be asked for it.
        return Refuse(Code.KEY_NOT_FOUND)
    tenant, principal, token = caller
    scope = bound_scope(policy.bind_to, policy.namespace or NO_NAMESPACE, tenant, principal=principal, token=token)
    turned_away = yield from shared.limits.looks_up(scope, policy)
    if turned_away is not None:
        return turned_away
    record_id = RecordId(scope, key)
    try:
        # A request of LOCAL in one commit that is under way has no row yet, but a lock (L8, F21).
        sight = yield from look(store, record_id, lock_number(SCHEMA, record_id, policy.secret))
        if sight.snapshot.record is not None:
            check_open(sight.snapshot.record)
    except RecordUnreadableError as error:
        log.error("oncekey: %s", error)
        return Refuse(Code.RECORD_UNREADABLE)
    except StoreError as error:
        notify_failure(shared.notify, "status", error)
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


def is_served(policy: Policy) -> bool:
    """Whether the policy's link leads to this application, and not to a page that is kept elsewhere."""
    return policy.docs_url.startswith("/") and not policy.docs_url.startswith("//")


def documentation(policy: Policy) -> Answer:
    """The page: how this API uses keys, written from its policy."""
    body = _page(policy).encode()
    headers = (
        (b"content-type", b"text/html; charset=utf-8"),
        (b"content-length", b"%d" % len(body)),
        (b"cache-control", b"max-age=300"),
    )
    return Answer(200, headers, body)


def _page(policy: Policy) -> str:
    hours = f"{policy.ttl.total_seconds() / 3600:g}"
    problems = "\n".join(
        f'<h3 id="{escape(problem.slug)}">{problem.status_in(policy.flavor)} <code>{code.value}</code></h3>\n'
        f"<p>{escape(problem.detail)}</p>"
        for code, problem in PROBLEMS.items()
    )
    return f"""<!doctype html>
<html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<title>Retrying requests safely</title><style>{_STYLE}</style>
<h1>Retrying requests safely</h1>
<p>Send a new random key with each new request that changes something, and the same key with every retry of it. The
request is executed once, and each repeat gets the original answer.</p>
<pre><code>{policy.key_header}: "8e03978e-40d5-43e8-bc93-6894a57f9324"</code></pre>
<ul>
<li>The key: {_FORMAT[policy.key_format]} {policy.shortest_key} to {policy.max_key_length} characters,
{_SYNTAX[policy.header_syntax]}. No personal data.</li>
<li>On {", ".join(sorted(SAFE - {"TRACE"}))} the header has no effect.</li>
<li>A repeat gets the first answer's status and body for {hours} hours, with
<code>{escape(policy.replayed_header)}: true</code>; <code>{escape(policy.expires_header)}</code> says until when.</li>
<li>A repeat while the first request runs gets {_IN_FLIGHT[policy.on_in_progress]}.</li>
<li>The same key with another request gets {PROBLEMS[Code.KEY_REUSED].status_in(policy.flavor)}, and nothing is
executed.</li>
<li>Retry with the same key after a time-out, a lost connection, 408, 409 with <code>Retry-After</code>, 429 and 5xx.
Never retry an answer that is marked as a replay: it is final.</li>
</ul>
<p>Status codes follow the {policy.flavor.value} flavour. The header is described by an IETF draft
(draft-ietf-httpapi-idempotency-key-header-07), which has expired and is no standard.</p>
<h2>Problems</h2>
{problems}
</html>
"""
