"""The meaning of each response for the operation: the profiles of APIs, and the retry matrix.

A profile defines where the key goes and what a response means for it; the matrix defines the client's next move.

Server codes about a key are parsed in the same way for all profiles, because they do not collide; a profile adds the
codes of its vendor only.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Final, assert_never

from oncekey_client.exchange import Call, ClientConfigurationError, Failure, Loss, Reply
from oncekey_client.keys import NotAStringItemError, parse_string_item

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

_QUOTABLE: Final = re.compile(r"[\x20-\x7e]+", re.ASCII)
_XML_CODE: Final = re.compile(rb"<Code>([A-Za-z.]{1,100})</Code>")
_VISIBLE: Final = re.compile(r"[\x21-\x7e]+", re.ASCII)


class KeyPlace(StrEnum):
    """Where the key is."""

    QUOTED = "quoted"
    """A header, as a String of RFC 9651."""
    BARE = "bare"
    """A header, unquoted."""
    BODY = "body"
    """A member of the JSON body."""


class Sign(StrEnum):
    """What a response means for its key, beyond its status."""

    IN_PROGRESS = "in_progress"
    MISMATCH = "mismatch"
    UNKNOWN = "unknown"
    EXPIRED = "expired"
    NOT_EXECUTED = "not_executed"
    RETRY = "retry"
    FINAL = "final"


OURS: Final = (
    ("idempotency_key_in_progress", "IDEMPOTENCY_KEY_IN_PROGRESS", Sign.IN_PROGRESS),
    ("idempotency_key_reused_with_different_payload", "IDEMPOTENCY_CONFLICT", Sign.MISMATCH),
    ("idempotency_outcome_unknown", "IDEMPOTENCY_OUTCOME_UNKNOWN", Sign.UNKNOWN),
    ("idempotency_record_unreadable", "IDEMPOTENCY_RECORD_UNREADABLE", Sign.UNKNOWN),
    ("idempotency_key_expired", "IDEMPOTENCY_KEY_EXPIRED", Sign.EXPIRED),
    ("idempotency_store_unavailable", "IDEMPOTENCY_STORE_UNAVAILABLE", Sign.NOT_EXECUTED),
    ("idempotency_response_not_stored", "IDEMPOTENCY_RESPONSE_NOT_STORED", Sign.FINAL),
)
"""The refusals of oncekey's servers that mean more than their status, in both of their error formats."""

_WORDS: Final[Mapping[str, Sign]] = {
    **{word: sign for code, fault, sign in OURS for word in (code, fault)},
    # Servers that follow the IETF draft have only the titles of its examples in common.
    "Idempotency-Key is already used": Sign.MISMATCH,
    "A request is outstanding for this Idempotency-Key": Sign.IN_PROGRESS,
    "idempotency_key_in_use": Sign.IN_PROGRESS,  # Stripe
    "lock_timeout": Sign.RETRY,  # Stripe
    "IDEMPOTENCY_KEY_REUSED": Sign.MISMATCH,  # Square
    "DUPLICATE_REQUEST_ID": Sign.MISMATCH,  # PayPal
    "IdempotentParameterMismatch": Sign.MISMATCH,  # AWS
    "IdempotentParameterMismatchException": Sign.MISMATCH,
}
# Stripe's type covers both a used key and one in use, so it counts only if no code is more specific.
_FALLBACK_SIGNS: Final[Mapping[str, Sign]] = {"idempotency_error": Sign.MISMATCH}


@dataclass(frozen=True, slots=True)
class Profile:
    """One way to carry keys. `transient` and `busy` are a response header and code for a retry with the same key."""

    name: str
    place: KeyPlace = KeyPlace.QUOTED
    field: str = "Idempotency-Key"
    max_length: int = 255
    replayed: str = "Idempotent-Replayed"
    should_retry: tuple[str, ...] = ("Stripe-Should-Retry", "X-Should-Retry")
    transient: str | None = None
    busy: str | None = None

    def key_of(self, call: Call) -> str | None:
        """The key that the caller set, if any."""
        if self.place is KeyPlace.BODY:
            key = _object(call.body).get(self.field)
            return key if isinstance(key, str) else None
        value = call.field(self.field)
        if value is None or not value.startswith('"'):
            return value
        try:
            return parse_string_item(value.encode("latin-1", "replace"))
        except NotAStringItemError as error:
            raise ClientConfigurationError(f"the given {self.field} cannot be parsed: {error}") from None

    def put(self, call: Call, key: str) -> Call:
        """The call with its key. A key that the caller set keeps its spelling, byte for byte."""
        self._check(key)
        if self.key_of(call) == key:
            return call
        match self.place:
            case KeyPlace.QUOTED:
                escaped = key.replace("\\", "\\\\").replace('"', '\\"')
                return call.with_field(self.field, f'"{escaped}"')
            case KeyPlace.BARE:
                return call.with_field(self.field, key)
            case KeyPlace.BODY:
                return call.with_body(_with_member(call.body, self.field, key))
            case _:
                assert_never(self.place)

    def read(self, reply: Reply) -> Sign | None:
        """What the response means for the key; None if its status is enough."""
        for name in self.should_retry:
            if (value := (reply.field(name) or "").lower()) in {"true", "false"}:
                return Sign.RETRY if value == "true" else Sign.FINAL
        if self.transient is not None and (reply.field(self.transient) or "").lower() == "true":
            return Sign.RETRY
        words = [*_words(reply.body), *_aws_words(reply)]
        if self.busy is not None and self.busy in words:
            return Sign.IN_PROGRESS
        said_first = (_WORDS[word] for word in words if word in _WORDS)
        fallback = (_FALLBACK_SIGNS[word] for word in words if word in _FALLBACK_SIGNS)
        return next(said_first, None) or next(fallback, None)

    def is_replay(self, reply: Reply) -> bool:
        """Whether the server marks this response as a replay."""
        return (reply.field(self.replayed) or "").strip().lower() == "true"

    def _check(self, key: str) -> None:
        pattern = _VISIBLE if self.place is KeyPlace.BARE else _QUOTABLE
        if not pattern.fullmatch(key) or not key.strip():
            raise ClientConfigurationError("a key must be printable ASCII, and not empty")
        if len(key) > self.max_length:
            raise ClientConfigurationError(f"{self.name} accepts keys of at most {self.max_length} characters")


IETF: Final = Profile("ietf")
STRIPE: Final = Profile("stripe", KeyPlace.BARE)
PAYPAL: Final = Profile("paypal", KeyPlace.BARE, "PayPal-Request-Id", max_length=38)
ADYEN: Final = Profile("adyen", KeyPlace.BARE, max_length=64, transient="Transient-Error", busy="704")
# The shortest time of its endpoints, so that a key is valid for all of them.
SQUARE: Final = Profile("square", KeyPlace.BODY, "idempotency_key", max_length=45)
# The services that use JSON; each names its own token (clientToken, ClientRequestToken): replace(AWS, field=...).
AWS: Final = Profile("aws", KeyPlace.BODY, "ClientToken", max_length=64)

PROFILES: Final[Mapping[str, Profile]] = {each.name: each for each in (IETF, STRIPE, PAYPAL, ADYEN, SQUARE, AWS)}


def _object(body: bytes) -> dict[str, Any]:
    try:
        found = json.loads(body)
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def _with_member(body: bytes, name: str, value: str) -> bytes:
    """A JSON object with one more member; the others keep their bytes, because parsing may change a number."""
    rest = body.strip() or b"{}"
    members = _object(rest)
    if name in members or (not members and rest[:1] + rest[1:-1].strip() + rest[-1:] != b"{}"):
        raise ClientConfigurationError(f"the body must be a JSON object, and its {name}, if any, a key")
    comma = b"," if members else b""
    return b"{%s:%s%s%s" % (json.dumps(name).encode(), json.dumps(value).encode(), comma, rest[1:])


def _words(body: bytes) -> Iterator[str]:
    """The codes, types and titles of an error body, in any of the known envelopes."""
    page = _object(body)
    fault = page.get("fault")
    lists = [page.get("errors"), page.get("details"), fault.get("errors") if isinstance(fault, dict) else None]
    nested = [one for found in lists if isinstance(found, list) for one in found]
    for members in (page, page.get("error"), *nested):
        if isinstance(members, dict):
            for name in ("code", "errorCode", "issue", "name", "title", "type"):
                if isinstance(word := members.get(name), str):
                    yield word


def _aws_words(reply: Reply) -> Iterator[str]:
    """The error code of an AWS service: a header or `__type` of JSON, with a prefix or a URL; `Code` of XML."""
    kinds = [reply.field("x-amzn-errortype"), _object(reply.body).get("__type")]
    for kind in kinds:
        if isinstance(kind, str):
            yield kind.rpartition("#")[2].partition(":")[0]
    for code in _XML_CODE.findall(reply.body):
        yield code.decode()


class NextMove(StrEnum):
    """What to do after a response."""

    ACCEPT = "accept"
    """It is the operation's response."""
    RETRY = "retry"
    """Send the same request after a delay; counts as an attempt."""
    WAIT = "wait"
    """It is in progress: retry with the same key. Limited by the deadline only."""
    POLL = "poll"
    """Accepted, not finished: poll `Location`, or retry with the same key."""
    REDIRECT = "redirect"
    """Send the same request to `Location`."""
    STOP = "stop"
    """Refused before the key was looked up: the caller may correct the request and send it with the same key."""
    EXPIRED = "expired"
    """The key has expired at the server: the caller must find out the outcome by other means, and not send it again."""
    MISUSED = "misused"
    """The key belongs to another request."""


@dataclass(frozen=True, slots=True)
class Row:
    """One row. `doubt`: after this response the operation may have happened without confirmation."""

    move: NextMove
    doubt: bool = False


_ACCEPT: Final = Row(NextMove.ACCEPT)
_RETRY_UNDONE: Final = Row(NextMove.RETRY)
_RETRY_DOUBTFUL: Final = Row(NextMove.RETRY, doubt=True)
_WAIT: Final = Row(NextMove.WAIT, doubt=True)

BY_SIGN: Final[Mapping[Sign, Row]] = {
    Sign.IN_PROGRESS: _WAIT,
    Sign.UNKNOWN: _WAIT,
    Sign.MISMATCH: Row(NextMove.MISUSED),
    Sign.EXPIRED: Row(NextMove.EXPIRED, doubt=True),
    Sign.NOT_EXECUTED: _RETRY_UNDONE,
    Sign.RETRY: _RETRY_DOUBTFUL,
    Sign.FINAL: _ACCEPT,
}

BY_LOSS: Final[Mapping[Loss, Row]] = {
    Loss.NOT_SENT: _RETRY_UNDONE,
    Loss.LOST: _RETRY_DOUBTFUL,
    Loss.HOPELESS: Row(NextMove.STOP),
}

BY_STATUS: Final[Mapping[int, Row]] = {
    202: Row(NextMove.POLL, doubt=True),
    307: Row(NextMove.REDIRECT),
    308: Row(NextMove.REDIRECT),
    401: Row(NextMove.STOP),
    403: Row(NextMove.STOP),
    407: Row(NextMove.STOP),
    408: _RETRY_DOUBTFUL,
    423: _RETRY_UNDONE,
    425: _RETRY_UNDONE,
    429: _RETRY_UNDONE,
    501: _ACCEPT,
    505: _ACCEPT,
}
"""Statuses that differ from their class; of the others, 5xx are retried and everything else is the response."""

_ACCEPTED: Final = 202
_CONFLICT: Final = 409
_FIRST_ERROR: Final = 400
_FIRST_SERVER_ERROR: Final = 500


def next_move(reply: Reply | Failure, profile: Profile) -> Row:
    """The row for a response, or for the lack of one."""
    if isinstance(reply, Failure):
        return BY_LOSS[reply.loss]
    # First, because a stored 408 or 500 is returned every time the key is sent.
    if profile.is_replay(reply):
        return _ACCEPT
    if reply.status >= _FIRST_ERROR and (sign := profile.read(reply)) is not None:
        return BY_SIGN[sign]
    match reply.status:
        case status if status == _CONFLICT:
            # The code of another server, but it means that the request is in progress.
            return _ACCEPT if reply.field("Retry-After") is None else _WAIT
        case status if status == _ACCEPTED:
            return BY_STATUS[status] if _unfinished(reply, profile) else _ACCEPT
        case status if status in BY_STATUS:
            return BY_STATUS[status]
        case status:
            return _RETRY_DOUBTFUL if status >= _FIRST_SERVER_ERROR else _ACCEPT


def polled(reply: Reply | Failure) -> NextMove:
    """The meaning of a status resource's response: poll again, or it is done."""
    if isinstance(reply, Failure):
        return NextMove.WAIT
    match reply.status:
        case 202 | 408 | 423 | 425 | 429:
            return NextMove.WAIT
        case status if status >= _FIRST_SERVER_ERROR:
            return NextMove.WAIT
        case _:
            return NextMove.WAIT if reply.field("Retry-After") is not None else NextMove.ACCEPT


def is_ours(reply: Reply, profile: Profile) -> bool:
    """Whether a 202 means "in progress under this key", so that the response is fetched with the key."""
    sign = profile.read(reply)
    match sign:
        case Sign.IN_PROGRESS | Sign.UNKNOWN:
            return True
        case None | Sign.MISMATCH | Sign.EXPIRED | Sign.NOT_EXECUTED | Sign.RETRY | Sign.FINAL:
            return False
        case _:
            assert_never(sign)


def is_status_of(seen: Reply, key: str | None) -> bool:
    """Whether this is oncekey's status resource of the key: it reports the state, and the key fetches the response."""
    page = _object(seen.body)
    return key is not None and page.get("key") == key and "state" in page


def _unfinished(reply: Reply, profile: Profile) -> bool:
    """Whether the operation is not finished; a 202 without a delay is the final response."""
    return reply.field("Retry-After") is not None or is_ours(reply, profile)
