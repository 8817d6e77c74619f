"""Complete HTTP responses as bytes: refusals, replays, and the header fields that are added to a first response.

The last part is the 202 of an OUTBOX request: when the request counts as accepted, and what its client receives until
a worker is done. A request is accepted when its parcel is committed, and the record alone proves that (O5). The
response is stored with the record in that same commit, so the first request and every retry receive the same one.
"""

from __future__ import annotations

import json
from dataclasses import field
from functools import lru_cache
from typing import Final

from oncekey.core.envelopes import disclose
from oncekey.core.guards import is_plain
from oncekey.core.headers import PRINTABLE, field_name, first, http_date, target
from oncekey.core.model import SECOND, Code, Duration, Effects, Headers, Instant, Record, Refuse, Replay, State, value
from oncekey.core.policy import Flavor, InProgress, Policy
from oncekey.core.problems import PROBLEMS, documentation_of, render, wait_of

LONGEST_WAIT: Final = 60
"""The longest `Retry-After` in seconds that is sent: widespread clients ignore a longer one."""

_EMPTY: Final = frozenset({b"", b"null"})
_JSON: Final[Headers] = ((b"content-type", b"application/json"),)
_ACCEPTED: Final = 202
# A response with one of these has no content, not even content of length 0 (RFC 9110, 8.6).
_WITHOUT_CONTENT: Final = frozenset({204, 304})
_NO_STORE: Final = (b"cache-control", b"no-store")
_CONFLICT: Final = 409
_FAULTS: Final = 500


@value
class Answer:
    """A complete response; header names are in lower case."""

    status: int
    headers: Headers
    body: bytes
    verdict: Refuse | Replay | None = field(default=None, repr=False, compare=False)
    """The verdict that this response expresses in HTTP, for callers that are not HTTP clients, such as functions."""


def refuse(
    refusal: Refuse,
    policy: Policy,
    *,
    echo: bytes | None = None,
    status_url: str | None = None,
    fault_id: str = "",
    trace_id: str = "",
) -> Answer:
    """The response to a request that is not executed."""
    code, record = refusal.code, refusal.record
    if code is Code.IN_PROGRESS and record is not None and is_accepted(record):
        return _accepted(refusal, record, policy, echo, status_url)
    status = _status_of(refusal, policy)
    page = render(
        code, status, policy, detail=refusal.detail, final=refusal.final, fault_id=fault_id, trace_id=trace_id
    )
    headers = [
        (b"content-type", page.media_type),
        (b"content-language", b"en"),
        (b"content-length", b"%d" % len(page.body)),
        (b"link", b'<%s>; rel="describedby"; type="text/html"' % target(documentation_of(code, policy))),
        _NO_STORE,
    ]
    if PROBLEMS[code].waiting_helps:
        headers.append((b"retry-after", b"%d" % wait_of(refusal, policy)))
    headers += should_retry(policy, retryable=PROBLEMS[code].retryable and not refusal.final)
    if status_url is not None and (status == _ACCEPTED or code is Code.OUTCOME_UNKNOWN):
        headers.append((b"location", target(status_url)))
    return Answer(status, (*headers, *marks(policy, echo=echo, expires_at=None)), page.body, refusal)


def replay(
    verdict: Replay,
    policy: Policy,
    *,
    echo: bytes | None = None,
    status_url: str | None = None,
    fault_id: str = "",
    trace_id: str = "",
) -> Answer:
    """The stored response, byte for byte, marked as a replay."""
    record, stored = verdict.record, verdict.record.response
    marked = (
        (field_name(policy.replayed_header), b"true"),
        *marks(policy, echo=echo, expires_at=record.expires_at),
    )
    if stored is None or stored.body is None:
        kept: Headers = () if stored is None else stored.headers
        lost = refuse(Refuse(Code.RESPONSE_NOT_STORED), policy, fault_id=fault_id, trace_id=trace_id)
        return _tombstone(lost, verdict, kept, marked, status_url)
    headers, has_cache_control = list(stored.headers), False
    for name, _ in stored.headers:
        has_cache_control = has_cache_control or name.lower() == b"cache-control"
    if not has_cache_control:
        headers.append(_NO_STORE)
    if stored.status not in _WITHOUT_CONTENT:
        headers.append((b"content-length", b"%d" % len(stored.body)))
    if stored.status == _CONFLICT or stored.status >= _FAULTS:
        headers += should_retry(policy, retryable=False)  # a retry would receive the same response
    return Answer(stored.status, (*headers, *marked), stored.body, verdict)


def marks(policy: Policy, *, echo: bytes | None, expires_at: Instant | None) -> Headers:
    """The header fields that are added to a first response: the key as received, and how long the response is kept."""
    echoed = None if echo is None or not PRINTABLE.fullmatch(echo) else (field_name(policy.key_header), echo)
    if expires_at is None:
        return () if echoed is None else (echoed,)
    until = (field_name(policy.expires_header), http_date(expires_at // SECOND))
    return (until,) if echoed is None else (echoed, until)


def marked_lines(
    headers: Headers, policy: Policy, *, echo: bytes | None, expires_at: Instant | None
) -> list[tuple[bytes, bytes]]:
    """The header lines of a first response as they are sent: the handler's own, and those that oncekey adds.

    A handler that forwards another service's response may include fields that only oncekey sets; those are removed.
    The list is new for each response, because an outer middleware may change it in place.
    """
    ours = _our_names(policy.key_header, policy.expires_header, policy.replayed_header)
    lines = [line for line in headers if line[0].lower() not in ours]
    lines += marks(policy, echo=echo, expires_at=expires_at)
    return lines


@lru_cache(maxsize=64)
def _our_names(*headers: str) -> frozenset[bytes]:
    return frozenset(map(field_name, headers))


def should_retry(policy: Policy, *, retryable: bool) -> Headers:
    """The `Stripe-Should-Retry` field: Stripe's clients obey it before the status, and would retry all 409 and 5xx."""
    if policy.flavor is not Flavor.STRIPE:
        return ()
    return ((b"stripe-should-retry", b"true" if retryable else b"false"),)


def retry_after(left: Duration, /, *, running_for: Duration = 0) -> int:
    """Whole seconds that the client is advised to wait: at least one, and never past the end of the lease.

    The wait is as long as the operation has been running: short for a quick operation, longer for a slow one,
    so that clients back off.
    """
    return max(1, min(_ceil(left), _ceil(running_for), LONGEST_WAIT))


def _ceil(span: Duration) -> int:
    return -(-span // SECOND)


def _status_of(refusal: Refuse, policy: Policy) -> int:
    match refusal.code:
        case Code.IN_PROGRESS if policy.on_in_progress is InProgress.ACCEPTED:
            return _ACCEPTED
        case Code.OUTCOME_UNKNOWN:
            return policy.on_unknown
        case code:
            return PROBLEMS[code].status_in(policy.flavor)


def _accepted(refusal: Refuse, record: Record, policy: Policy, echo: bytes | None, status_url: str | None) -> Answer:
    """The 202 of an accepted request: the handler's own response, with the URL of its state."""
    given = accepted_of(record) or default_of(None if status_url is None else target(status_url).decode("ascii"))
    place: Headers = () if status_url is None else ((b"location", target(status_url)),)
    headers = (
        *(line for line in given.headers if not (place and line[0] == b"location")),
        (b"content-length", b"%d" % len(given.body)),
        *(() if any(name == b"cache-control" for name, _ in given.headers) else (_NO_STORE,)),
        (b"retry-after", b"%d" % wait_of(refusal, policy)),
        *should_retry(policy, retryable=True),
        *place,
        *marks(policy, echo=echo, expires_at=None),
    )
    return Answer(_ACCEPTED, headers, given.body, refusal)


def _tombstone(answer: Answer, verdict: Replay, kept: Headers, marked: Headers, status_url: str | None) -> Answer:
    """The response for a completed record without a stored body: where to read the result, and not to retry (A4)."""
    place = first(kept, b"location") or (None if status_url is None else target(status_url))
    where: Headers = () if place is None else ((b"location", place),)
    return Answer(answer.status, (*answer.headers, *where, *marked), answer.body, verdict)


@value
class AcceptedResponse:
    """The part of the 202 that the handler returned."""

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
    """What the handler returned when the request was accepted. None: it was not, or this cannot be opened."""
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
