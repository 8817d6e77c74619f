"""The status resource: what became of a key, for the caller whose key it is (R84)."""

from __future__ import annotations

import base64
import json
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from oncekey.core.answers import Answer, refuse, retry_after
from oncekey.core.errors import StoreError
from oncekey.core.locks import lock_number
from oncekey.core.model import SECOND, Code, RecordId, Refuse, State
from oncekey.core.rulings import Situation, situate
from oncekey.flow import adrive
from oncekey.frameworks.asgi.claiming import scope_for
from oncekey.frameworks.asgi.one_commit import SCHEMA

if TYPE_CHECKING:
    from oncekey.core.model import Instant, Record, Snapshot, StoredResponse
    from oncekey.core.policy import Policy
    from oncekey.engine.shell import AsyncEngine
    from oncekey.frameworks.asgi.installation import Installation
    from oncekey.frameworks.asgi.types import Scope


async def status_of(installation: Installation, scope: Scope, key: str) -> Answer:
    """The key's state; a stranger's key, an expired one and one that never was are all the same 404 (R29)."""
    policy = installation.policy
    record_id = RecordId(await scope_for(installation, policy, scope), key)
    turned_away = await installation.limits.looks_up(record_id.scope, policy)
    if turned_away is not None:
        return refuse(turned_away, policy)
    try:
        snapshot, busy = await _find(installation.engines.asynchronous(), record_id, policy)
    except StoreError:
        return refuse(Refuse(Code.STORE_UNAVAILABLE, retry_after=1), policy)
    record, now = snapshot.record, snapshot.now
    if record is None or situate(record, now) is Situation.EXPIRED:
        if busy:
            return _shown({"key": key, "state": State.IN_PROGRESS.value}, wait=1)
        return refuse(Refuse(Code.KEY_NOT_FOUND), policy)
    wait = None
    if record.state in (State.PENDING, State.IN_PROGRESS, State.UNKNOWN):
        left = (record.lease_until or record.reconcile_after or now) - now
        wait = retry_after(max(left, SECOND), running_for=now - record.last_run_at)
    return _shown(describe(record), wait=wait)


async def _find(engine: AsyncEngine, record_id: RecordId, policy: Policy) -> tuple[Snapshot, bool]:
    """The record, and whether a request of LOCAL in one commit is under way: that one has no row yet (L8, F21)."""
    snapshot, locks = await engine.find(record_id), engine.store.locks
    if locks is None or situate(snapshot.record, snapshot.now) not in (Situation.ABSENT, Situation.EXPIRED):
        return snapshot, False
    held = await adrive(locks.held(lock_number(SCHEMA, record_id, policy.secret)), engine.driver.run)
    # Its commit may have come between the two looks.
    return (snapshot, True) if held else (await engine.find(record_id), False)


def _shown(description: dict[str, Any], *, wait: int | None) -> Answer:
    body = json.dumps(description, separators=(",", ":")).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
    if wait is not None:
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
