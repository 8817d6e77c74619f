"""A record as people may read it: the status resource and `oncekey keys show` say the same."""

from __future__ import annotations

import base64
from typing import TYPE_CHECKING, Any

from oncekey.core.envelopes import key_of_answer, said_of
from oncekey.core.model import State, moment

if TYPE_CHECKING:
    from oncekey.core.model import Record, StoredResponse


def describe(record: Record) -> dict[str, Any]:
    """A record for an operator or its caller; fingerprint, seed and scope are left out."""
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
    """A LOCAL request, which has no row until it is done: all that is known is that it runs (L8)."""
    return {"key": key, "state": State.IN_PROGRESS.value}


def _response(response: StoredResponse) -> dict[str, Any]:
    key_id = key_of_answer(response)
    if key_id is not None:
        return {"status": response.status, "sealed": said_of(key_id)}
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
