"""What an ended handler means: from how it ended to what is done, and no other place decides it (P4, L6).

First the ending gets a name (`read`), then the handler's effects say what is done about an ending of that
name (`ACTS`). What may have reached the outside is not run again.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from types import MappingProxyType
from typing import TYPE_CHECKING, Final, assert_never

from oncekey.core.choices import On5xx
from oncekey.core.headers import ALWAYS_KEPT, NEVER_KEPT, field_name
from oncekey.core.model import (
    Completed,
    Discarded,
    Doubtful,
    Effects,
    Headers,
    Outcome,
    Retryable,
    Settlement,
    StoredResponse,
)

if TYPE_CHECKING:
    from oncekey.core.policy import Policy

NEVER_STORED: Final = frozenset({401, 403, 408, 425, 429})
"""Answers about the caller or the moment, not about the request: they cannot be a key's result (R113)."""

_CODE: Final = re.compile(r"[a-z][a-z0-9_]{0,63}")


@dataclass(frozen=True, slots=True)
class Ending:
    """How a handler ended, as the adapter saw it.

    `status` is None if there is no complete response, `body` is None if it is over the cap. `raised` is true
    even where an exception handler turned the exception into a response.
    """

    status: int | None
    headers: Headers
    body: bytes | None
    entered: bool
    raised: bool
    not_executed: bool
    kept: bool = False
    rolled_back: bool = False
    error: str | None = None
    intent_open: bool = False


class Business(StrEnum):
    """What becomes of the rows that the handler wrote through the transaction it was handed, if it was."""

    COMMIT = "commit"
    ROLLBACK = "rollback"


@dataclass(frozen=True, slots=True)
class Decision:
    """How the record is settled, and whether the business rows go with it."""

    settlement: Settlement
    business: Business


class Reading(StrEnum):
    """The name of an ending."""

    CALL_OPEN = "call_open"
    NOT_ENTERED = "not_entered"
    DONE = "done"
    NOT_EXECUTED = "not_executed"
    DECLINED = "declined"
    NEVER_STORED = "never_stored"
    SERVER_ERROR = "server_error"
    INCOMPLETE = "incomplete"


class Act(StrEnum):
    """What is done about it."""

    STORE = "store"
    RETRY = "retry"
    DOUBT = "doubt"
    DISCARD = "discard"


# Endings that mean the same whatever the handler does; an open call is in doubt whatever was answered (F6).
_ALWAYS: Final[Mapping[Reading, Act]] = {
    Reading.CALL_OPEN: Act.DOUBT,
    Reading.NOT_ENTERED: Act.DISCARD,
    Reading.DONE: Act.STORE,
    Reading.NOT_EXECUTED: Act.RETRY,
    Reading.DECLINED: Act.STORE,
}
# One transaction that is rolled back has left nothing behind.
_ROLLED_BACK: Final[Mapping[Reading, Act]] = {
    **_ALWAYS,
    Reading.NEVER_STORED: Act.RETRY,
    Reading.SERVER_ERROR: Act.RETRY,
    Reading.INCOMPLETE: Act.RETRY,
}
# What was sent cannot be taken back, and the status does not say whether it was sent (F5).
_SENT: Final[Mapping[Reading, Act]] = {
    **_ALWAYS,
    Reading.NEVER_STORED: Act.DOUBT,
    Reading.SERVER_ERROR: Act.DOUBT,
    Reading.INCOMPLETE: Act.DOUBT,
}

ACTS: Final[Mapping[tuple[Effects, On5xx], Mapping[Reading, Act]]] = MappingProxyType(
    {
        **{(Effects.LOCAL, on_5xx): _ROLLED_BACK for on_5xx in On5xx},
        # Up to its defer an outbox handler is one transaction like a local one (O1).
        **{(Effects.OUTBOX, on_5xx): _ROLLED_BACK for on_5xx in On5xx},
        **{(Effects.PHASED, on_5xx): _SENT for on_5xx in On5xx},
        (Effects.INLINE, On5xx.CLASSIFY): _SENT,
        # Refused at enrolment unless running twice does no harm (F7); then no failure is worth a doubt.
        (Effects.INLINE, On5xx.RETRY_FRESH): _ROLLED_BACK,
        (Effects.INLINE, On5xx.STORE): {**_SENT, Reading.SERVER_ERROR: Act.STORE},
    }
)
"""Effects and `on_5xx` -> reading -> act, total. `on_5xx` changes the inline handler's row only (F7)."""

# A status of any other class is no final answer.
_BY_CLASS: Final[Mapping[int, Reading]] = {
    2: Reading.DONE,
    3: Reading.DONE,
    4: Reading.DECLINED,
    5: Reading.SERVER_ERROR,
}
_HANDED_A_TRANSACTION: Final = frozenset({Effects.LOCAL, Effects.OUTBOX})


def decide(effects: Effects, policy: Policy, ending: Ending) -> Decision:
    """The settlement of an ended handler, and what becomes of its business rows."""
    reading = read(ending, policy)
    act = ACTS[effects, policy.on_5xx][reading]
    match act:
        case Act.STORE:
            return Decision(Completed(stored_response(ending, policy), _outcome(reading)), _rows(effects, ending))
        case Act.RETRY:
            return Decision(Retryable(_error_of(reading, ending)), Business.ROLLBACK)
        case Act.DOUBT:
            return Decision(Doubtful(_error_of(reading, ending)), Business.ROLLBACK)
        case Act.DISCARD:
            return Decision(Discarded(), Business.ROLLBACK)
        case _:
            assert_never(act)


def read(ending: Ending, policy: Policy) -> Reading:
    """The name of an ending: the first line that fits, so the order is the precedence."""
    status = ending.status or 0
    by_class = _BY_CLASS.get(status // 100, Reading.INCOMPLETE)
    lines = (
        (ending.intent_open, Reading.CALL_OPEN),
        (not ending.entered, Reading.NOT_ENTERED),
        # Told "done", a client will not come back: that answer is kept whatever else was claimed.
        (by_class is Reading.DONE, Reading.DONE),
        (ending.not_executed or status in policy.not_executed_statuses, Reading.NOT_EXECUTED),
        (status in NEVER_STORED, Reading.NEVER_STORED),
        (True, by_class),
    )
    return next(reading for fits, reading in lines if fits)


def kept_headers(headers: Headers, policy: Policy) -> Headers:
    """The response headers that are stored: the allow-list, in their order, repeated ones included (R90)."""
    wanted = ALWAYS_KEPT.union(map(field_name, policy.replay_headers))
    lowered = tuple((name.lower(), value) for name, value in headers)
    dropped = NEVER_KEPT | _hop_by_hop(lowered)
    return tuple((name, value) for name, value in lowered if name in wanted and name not in dropped)


def stored_response(ending: Ending, policy: Policy) -> StoredResponse:
    """The answer as it is kept; over the cap a tombstone: done, and where to read the result (A4, R97)."""
    if ending.status is None:
        raise ValueError("an incomplete response cannot be stored")
    headers = kept_headers(ending.headers, policy)
    if ending.body is None or len(ending.body) > policy.max_response_bytes:
        place = tuple((name, value) for name, value in headers if name == b"location")
        return StoredResponse(ending.status, place, None)
    return StoredResponse(ending.status, headers, ending.body)


def _hop_by_hop(headers: Headers) -> frozenset[bytes]:
    """The fields that this response names as being of its connection only (RFC 9110, 7.6.1)."""
    lists = (value for name, value in headers if name == b"connection")
    return frozenset(token.strip().lower() for value in lists for token in value.split(b","))


def _outcome(reading: Reading) -> Outcome:
    return Outcome.SUCCESS if reading is Reading.DONE else Outcome.FAILURE


def _rows(effects: Effects, ending: Ending) -> Business:
    """Returned commits, raised rolls back; `op.keep()` and `op.rollback()` are the exceptions (F17)."""
    if effects not in _HANDED_A_TRANSACTION:
        return Business.COMMIT
    undone = ending.rolled_back or (ending.raised and not ending.kept)
    return Business.ROLLBACK if undone else Business.COMMIT


def _error_of(reading: Reading, ending: Ending) -> str:
    """A short code, never a text of an exception: those quote what the client sent (R143)."""
    if ending.error is not None and _CODE.fullmatch(ending.error):
        return ending.error
    match reading:
        case Reading.CALL_OPEN:
            return "call_uncertain"
        case Reading.NOT_EXECUTED:
            return "not_executed"
        case Reading.INCOMPLETE:
            return "handler_raised" if ending.raised else "response_incomplete"
        case _:
            return f"status_{ending.status}"
