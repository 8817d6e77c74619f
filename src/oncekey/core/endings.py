"""What the end of a handler means: how its record is settled. No other module decides it (P4, L6).

`read` gives the ending a name; then the handler's effects decide what is done about an ending of that
name (`ACTS`). A call that may have reached the outside is not repeated.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from enum import StrEnum
from functools import lru_cache
from types import MappingProxyType
from typing import Final, assert_never

from oncekey.core.answers import accepted_form
from oncekey.core.headers import ALWAYS_KEPT, NEVER_KEPT, field_name
from oncekey.core.model import (
    Completed,
    Deferred,
    Discarded,
    Doubtful,
    Duration,
    Effects,
    HandedBack,
    Headers,
    Outcome,
    Parcel,
    Retryable,
    Settlement,
    StoredResponse,
    value,
)
from oncekey.core.policy import On5xx, Policy

NEVER_STORED: Final = frozenset({401, 403, 408, 425, 429})
"""Responses about the caller or the moment, not about the request: they cannot be a key's stored response."""

_CODE: Final = re.compile(r"[a-z][a-z0-9_]{0,63}")


@value
class Progress:
    """How far a phased handler came: what its record has, and what its response must not hide."""

    begun: bool = False
    """Something was stored: a step, or a call that was announced."""
    call_open: bool = False
    """The owner made a call of unknown outcome."""
    repeatable: bool = False
    """That call may be made once more, with the same key, now."""
    exhausted: bool = False
    """The handler has started as often as it may (H6)."""
    parked: str | None = None
    """Why no retry and no worker may resume it: the steps diverged, or a result could not be stored."""
    halted: bool = False
    """The process is stopping, and that ended it, however the handler reacted (P5)."""
    unused: bool = False
    """The handler did not reach all stored steps, so its response cannot be final (H4)."""
    undone: bool = False
    """The last step that began is a phase that failed: its rows are rolled back."""


@value
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
    progress: Progress = Progress()
    deferred: tuple[Parcel, ...] = ()
    resume_after: Duration = 0


class Business(StrEnum):
    """What happens to the rows that the handler wrote in its transaction, if it had one."""

    COMMIT = "commit"
    ROLLBACK = "rollback"


@value
class Decision:
    """How the record is settled, and whether the business rows are committed with it."""

    settlement: Settlement
    business: Business


NOT_CALLED: Final = Decision(Discarded(), Business.ROLLBACK)
"""The handler was not called: the key counts as unused."""


class Reading(StrEnum):
    """The name of an ending."""

    PARKED = "parked"
    CALL_REPEATABLE = "call_repeatable"
    CALL_OPEN = "call_open"
    DEFERRED = "deferred"
    NOT_DEFERRED = "not_deferred"
    NOT_ENTERED = "not_entered"
    UNDONE = "undone"
    DONE = "done"
    NOT_EXECUTED = "not_executed"
    DECLINED = "declined"
    NEVER_STORED = "never_stored"
    SERVER_ERROR = "server_error"
    INCOMPLETE = "incomplete"


class Act(StrEnum):
    """What is done about an ending."""

    STORE = "store"
    RETRY = "retry"
    HAND_BACK = "hand_back"
    DEFER = "defer"
    DOUBT = "doubt"
    DISCARD = "discard"


# Endings with the same meaning for all effects; an open call is in doubt whatever the response was (F6).
_ALWAYS: Final[Mapping[Reading, Act]] = {
    Reading.PARKED: Act.DOUBT,
    Reading.CALL_REPEATABLE: Act.HAND_BACK,
    Reading.CALL_OPEN: Act.DOUBT,
    Reading.DEFERRED: Act.DEFER,
    Reading.NOT_DEFERRED: Act.RETRY,
    Reading.NOT_ENTERED: Act.DISCARD,
    Reading.UNDONE: Act.RETRY,
    Reading.DONE: Act.STORE,
    Reading.NOT_EXECUTED: Act.RETRY,
    Reading.DECLINED: Act.STORE,
}
# A rolled-back transaction leaves nothing behind.
_ROLLED_BACK: Final[Mapping[Reading, Act]] = {
    **_ALWAYS,
    Reading.NEVER_STORED: Act.RETRY,
    Reading.SERVER_ERROR: Act.RETRY,
    Reading.INCOMPLETE: Act.RETRY,
}
# A sent call cannot be taken back, and the status does not show whether it was sent (F5).
_SENT: Final[Mapping[Reading, Act]] = {
    **_ALWAYS,
    Reading.NEVER_STORED: Act.DOUBT,
    Reading.SERVER_ERROR: Act.DOUBT,
    Reading.INCOMPLETE: Act.DOUBT,
}
# Finished steps stay; the client's retry or the completer can do the rest (H6).
_BEGUN: Final[Mapping[Reading, Act]] = {
    **_ALWAYS,
    Reading.UNDONE: Act.HAND_BACK,
    Reading.NOT_EXECUTED: Act.HAND_BACK,
    Reading.NEVER_STORED: Act.HAND_BACK,
    Reading.SERVER_ERROR: Act.HAND_BACK,
    Reading.INCOMPLETE: Act.HAND_BACK,
}

ACTS: Final[Mapping[tuple[Effects, On5xx], Mapping[Reading, Act]]] = MappingProxyType(
    {
        **{(Effects.LOCAL, on_5xx): _ROLLED_BACK for on_5xx in On5xx},
        # Up to its defer, an outbox handler is one transaction like a local one (O1).
        **{(Effects.OUTBOX, on_5xx): _ROLLED_BACK for on_5xx in On5xx},
        **{(Effects.PHASED, on_5xx): _BEGUN for on_5xx in On5xx},
        (Effects.INLINE, On5xx.CLASSIFY): _SENT,
        # Refused at enrolment unless running twice does no harm (F7), so no failure needs to be in doubt.
        (Effects.INLINE, On5xx.RETRY_FRESH): _ROLLED_BACK,
        (Effects.INLINE, On5xx.STORE): {**_SENT, Reading.SERVER_ERROR: Act.STORE},
    }
)
"""Effects and `on_5xx` -> reading -> act, total. `on_5xx` changes the inline handler's row only (F7)."""

# A status of any other class is not a final response.
_BY_CLASS: Final[Mapping[int, Reading]] = {
    2: Reading.DONE,
    3: Reading.DONE,
    4: Reading.DECLINED,
    5: Reading.SERVER_ERROR,
}
_DONE_FROM: Final = 200
_DONE_UNTIL: Final = 400
_HANDED_A_TRANSACTION: Final = frozenset({Effects.LOCAL, Effects.OUTBOX})

DIVERGED: Final = "replay_diverged"
STOPPED: Final = "stopped"
_STRONGER_THAN_A_STOP: Final = frozenset({Reading.PARKED, Reading.CALL_REPEATABLE, Reading.CALL_OPEN})
EXHAUSTED: Final = "attempts_exhausted"
NOT_DEFERRED: Final = "not_deferred_once"


def decide(effects: Effects, policy: Policy, ending: Ending) -> Decision:
    """The settlement of an ended handler, and what becomes of its business rows."""
    progress = ending.progress
    odd = ending.raised or ending.rolled_back or progress.call_open or progress.halted or progress.unused
    if ending.entered and not odd and progress.parked is None:
        decision = returned(effects, policy, ending.status, ending.headers, ending.body)
        if decision is not None:
            return decision
    return by_table(effects, policy, ending)


def returned(
    effects: Effects, policy: Policy, status: int | None, headers: Headers, body: bytes | None
) -> Decision | None:
    """The decision for the most common ending, without the table; None: use the table.

    Nearly every request ends so: no exception, no open call, no stored step left unused, no rows rolled back. If such
    a handler returned a success, the response is stored and the rows are committed, whatever its effects are. Only
    for an outbox handler it depends on what it deferred.
    """
    if status is None or not _DONE_FROM <= status < _DONE_UNTIL or effects is Effects.OUTBOX:
        return None
    if body is None or len(body) > policy.max_response_bytes:
        return None
    stored = StoredResponse(status, kept_headers(headers, policy), body)
    return Decision(Completed(stored, Outcome.SUCCESS), Business.COMMIT)


def by_table(effects: Effects, policy: Policy, ending: Ending) -> Decision:
    """`decide` without its shortcut: the name of the ending, then `ACTS`."""
    reading = read(effects, ending, policy)
    act = _tempered(ACTS[effects, policy.on_5xx][reading], ending.progress)
    if ending.progress.halted and reading not in _STRONGER_THAN_A_STOP:
        # A stop is not the handler's failure, so the attempt does not count.
        return Decision(HandedBack(STOPPED, counted=False), Business.ROLLBACK)
    if ending.progress.unused and act in (Act.STORE, Act.DEFER):
        return Decision(Doubtful(DIVERGED), Business.ROLLBACK)
    match act:
        case Act.STORE:
            outcome = Outcome.SUCCESS if reading is Reading.DONE else Outcome.FAILURE
            return Decision(Completed(stored_response(ending, policy), outcome), _rows(effects, ending))
        case Act.RETRY:
            return Decision(Retryable(_error_of(reading, ending)), Business.ROLLBACK)
        case Act.HAND_BACK:
            return Decision(HandedBack(_error_of(reading, ending), ending.resume_after), Business.ROLLBACK)
        case Act.DEFER:
            return Decision(Deferred(ending.deferred[0], _accepted(ending, policy)), Business.COMMIT)
        case Act.DOUBT:
            return Decision(Doubtful(_error_of(reading, ending)), Business.ROLLBACK)
        case Act.DISCARD:
            return Decision(Discarded(), Business.ROLLBACK)
        case _:
            assert_never(act)


def _tempered(act: Act, progress: Progress) -> Act:
    """The act, changed where nothing was stored (nothing to resume) or the last attempt is used up (no hand-back)."""
    if act in (Act.DISCARD, Act.RETRY) and progress.begun:
        # Validation or a login ended this run before its handler, or the handler no longer has steps: the steps of
        # earlier runs are still stored.
        act = Act.HAND_BACK
    if act is not Act.HAND_BACK:
        return act
    if not progress.begun:
        return Act.RETRY
    return Act.DOUBT if progress.exhausted else Act.HAND_BACK


def read(effects: Effects, ending: Ending, policy: Policy) -> Reading:
    """The name of an ending: the first that fits, so the order is the precedence."""
    progress = ending.progress
    if progress.parked is not None:
        return Reading.PARKED
    if progress.call_open:
        return Reading.CALL_REPEATABLE if progress.repeatable else Reading.CALL_OPEN
    if not ending.entered:
        return Reading.NOT_ENTERED
    status = ending.status or 0
    by_class = _BY_CLASS.get(status // 100, Reading.INCOMPLETE)
    if by_class is Reading.DONE:
        if _undone(effects, ending):
            return Reading.UNDONE
        if effects is Effects.OUTBOX:
            # Exactly one parcel is the request's own call: with none or two the response would be undefined (O1).
            return Reading.DEFERRED if len(ending.deferred) == 1 else Reading.NOT_DEFERRED
        # A client that received a success does not retry: that response is stored whatever else the handler claimed.
        return Reading.DONE
    if ending.not_executed or status in policy.not_executed_statuses:
        return Reading.NOT_EXECUTED
    return Reading.NEVER_STORED if status in NEVER_STORED else by_class


def kept_headers(headers: Headers, policy: Policy) -> Headers:
    """The response headers that are stored: the allowed ones in their order, repeated ones included."""
    wanted = _kept_names(policy.replay_headers)
    kept: list[tuple[bytes, bytes]] = []
    named = False
    for line in headers:
        name = line[0].lower()
        if name in wanted:
            kept.append((name, line[1]))
        elif name == b"connection":
            named = True
    if named:
        dropped = _hop_by_hop(headers)
        return tuple([line for line in kept if line[0] not in dropped])
    return tuple(kept)


@lru_cache(maxsize=64)
def _kept_names(replay_headers: tuple[str, ...]) -> frozenset[bytes]:
    return ALWAYS_KEPT.union(map(field_name, replay_headers)) - NEVER_KEPT


def stored_response(ending: Ending, policy: Policy) -> StoredResponse:
    """The response as it is stored; over the size limit a tombstone: done, and where to read the result (A4)."""
    if ending.status is None:
        raise ValueError("an incomplete response cannot be stored")
    headers = kept_headers(ending.headers, policy)
    if ending.body is None or len(ending.body) > policy.max_response_bytes:
        place = tuple((name, value) for name, value in headers if name == b"location")
        return StoredResponse(ending.status, place, None)
    return StoredResponse(ending.status, headers, ending.body)


def _accepted(ending: Ending, policy: Policy) -> bytes | None:
    """The stored form of what an OUTBOX handler returned; None over the size limit."""
    body = ending.body
    if body is None or len(body) > policy.max_response_bytes:
        return None
    return accepted_form(kept_headers(ending.headers, policy), body)


def _hop_by_hop(headers: Headers) -> frozenset[bytes]:
    """The fields that this response names as valid for its connection only (RFC 9110, 7.6.1)."""
    lists = (value for name, value in headers if name.lower() == b"connection")
    return frozenset(token.strip().lower() for value in lists for token in value.split(b","))


def _rows(effects: Effects, ending: Ending) -> Business:
    """Commit if the handler returned, roll back if it raised; `op.keep()` and `op.rollback()` override that (F17)."""
    if effects not in _HANDED_A_TRANSACTION:
        return Business.COMMIT
    undone = ending.rolled_back or (ending.raised and not ending.kept)
    return Business.ROLLBACK if undone else Business.COMMIT


def _undone(effects: Effects, ending: Ending) -> bool:
    """Whether the response is a success although the rows are rolled back, and the handler did not request that."""
    if effects is Effects.OUTBOX and ending.rolled_back:
        return True  # the parcel of the promised call is rolled back with the rows
    if effects in _HANDED_A_TRANSACTION:
        return ending.raised and not (ending.kept or ending.rolled_back)
    return ending.raised and ending.progress.undone


def _error_of(reading: Reading, ending: Ending) -> str:
    """A short code, never the text of an exception, which may quote what the client sent."""
    if ending.progress.parked is not None:
        return ending.progress.parked
    if ending.progress.exhausted and reading is not Reading.CALL_OPEN:
        return EXHAUSTED
    if ending.error is not None and _CODE.fullmatch(ending.error):
        return ending.error
    match reading:
        case Reading.CALL_OPEN | Reading.CALL_REPEATABLE:
            return "call_uncertain"
        case Reading.NOT_DEFERRED:
            return NOT_DEFERRED
        case Reading.NOT_ENTERED:
            return "not_entered"
        case Reading.UNDONE:
            return "success_rolled_back"
        case Reading.NOT_EXECUTED:
            return "not_executed"
        case Reading.INCOMPLETE:
            return "handler_raised" if ending.raised else "response_incomplete"
        case _:
            return f"status_{ending.status}"
