"""The status resource: what became of a key, for the caller whose key it is (R84)."""

from __future__ import annotations

import base64
import json
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from oncekey.core.answers import Answer, refuse, retry_after
from oncekey.core.errors import StoreError
from oncekey.core.model import SECOND, Code, RecordId, Refuse, State
from oncekey.core.rulings import Situation, situate
from oncekey.frameworks.asgi.claiming import scope_for

if TYPE_CHECKING:
    from oncekey.core.model import Instant, Record, StoredResponse
    from oncekey.frameworks.asgi.installation import Installation
    from oncekey.frameworks.asgi.types import Scope


async def status_of(installation: Installation, scope: Scope, key: str) -> Answer:
    """The key's state; a stranger's key, an expired one and one that never was are all the same 404 (R29)."""
    policy = installation.policy
    record_id = RecordId(await scope_for(installation, policy, scope), key)
    try:
        snapshot = await installation.engines.asynchronous().find(record_id)
    except StoreError:
        return refuse(Refuse(Code.STORE_UNAVAILABLE, retry_after=1), policy)
    record, now = snapshot.record, snapshot.now
    if record is None or situate(record, now) is Situation.EXPIRED:
        return refuse(Refuse(Code.KEY_NOT_FOUND), policy)
    body = json.dumps(describe(record), separators=(",", ":")).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
    if record.state in (State.PENDING, State.IN_PROGRESS, State.UNKNOWN):
        left = (record.lease_until or record.reconcile_after or now) - now
        wait = retry_after(max(left, SECOND), running_for=now - record.last_run_at)
        headers.append((b"retry-after", b"%d" % wait))
    return Answer(200, (*headers, (b"cache-control", b"no-store")), body)


def describe(record: Record) -> dict[str, Any]:
    """A record as an operator or its caller may read it; fingerprint, seed and scope stay with us (R42)."""
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


def moment(instant: Instant | None) -> str | None:
    """RFC 3339, in UTC."""
    if instant is None:
        return None
    return datetime.fromtimestamp(instant / SECOND, tz=UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _response(response: StoredResponse) -> dict[str, Any]:
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
