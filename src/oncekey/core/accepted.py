"""The 202 of an OUTBOX request: from when on a request is accepted, and what its client gets until a worker is done.

A request is accepted when its parcel is committed, and the record alone proves that (O5). The response is stored with
the record in that same commit, so the first request and every retry get the same one.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Final

from oncekey.core.envelopes import disclose
from oncekey.core.guards import is_plain
from oncekey.core.model import Effects, Headers, Record, State

_EMPTY: Final = frozenset({b"", b"null"})
_JSON: Final[Headers] = ((b"content-type", b"application/json"),)


@dataclass(frozen=True, slots=True)
class AcceptedResponse:
    """The part of the 202 that the handler gives."""

    headers: Headers
    body: bytes


def is_accepted(record: Record | None) -> bool:
    """Whether the request's parcel is committed: it waits for a worker, or a worker has begun its call (O5)."""
    if record is None or record.effects is not Effects.OUTBOX:
        return False
    return record.state is State.PENDING or not is_plain(record)


def accepted_form(headers: Headers, body: bytes | None) -> bytes | None:
    """The stored form of what a handler returned. None: it returned nothing, or more than is stored."""
    if body is None or body in _EMPTY:
        return None
    lines = [[name.decode("latin-1"), value.decode("latin-1")] for name, value in headers]
    return json.dumps(lines, separators=(",", ":")).encode("ascii") + b"\n" + body


def accepted_of(record: Record | None) -> AcceptedResponse | None:
    """What the handler returned when the request was accepted. None: it is not accepted, or this cannot be opened."""
    kept = record.request if record is not None and is_accepted(record) else None
    if kept is None or disclose(kept) is not None:
        return None
    head, _, body = kept.partition(b"\n")
    headers = tuple((name.encode("latin-1"), value.encode("latin-1")) for name, value in json.loads(head))
    return AcceptedResponse(headers, body)


def default_of(status_url: str | None) -> AcceptedResponse:
    """The response for a handler that returned nothing: the state, and where to read it later."""
    members = {"state": State.PENDING.value}
    if status_url is not None:
        members["status_url"] = status_url
    return AcceptedResponse(_JSON, json.dumps(members, separators=(",", ":")).encode("ascii"))
