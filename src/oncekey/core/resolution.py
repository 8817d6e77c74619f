"""What a provider reports about a call of unknown outcome, and when its report counts as a fact (U1-U3, H5).

"Executed" and "finally refused" are facts whenever they arrive. "Not found" is only an observation. It
becomes a fact if no process can send the call any more, and the query must have *begun* after that.

A webhook is a signed message: `t=1700000000,v1=<hex>`, a keyed hash over the time and the body. A signature
proves who sent a message and when, not that the message is new: the receiver stores event ids for that.
"""

from __future__ import annotations

import hashlib
import hmac
import re
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from oncekey.core.memo import is_rejection, was_not_sent
from oncekey.core.model import Duration, Effects, Instant, Outcome, Record, RecordId, State
from oncekey.core.operate import UNSEEN_OWNER, believed_from

if TYPE_CHECKING:
    from uuid import UUID

EXHAUSTED: Final = "reconcile_exhausted"
"""Why the reconciler stopped: it queried the provider as often as it may, and an operator has to decide."""


@dataclass(frozen=True, slots=True)
class Executed:
    """The call was executed. `result`: the client's response (INLINE, OUTBOX) or the open call's result (PHASED)."""

    result: Any = None
    provider_id: str | None = None


@dataclass(frozen=True, slots=True)
class Rejected:
    """The call was finally refused: the client receives `value`, or the phased handler a `RejectedError` with it."""

    result: Any = None
    provider_id: str | None = None


@dataclass(frozen=True, slots=True)
class NotExecuted:
    """The provider does not have the call. `closed`: and never will, because its reference was closed there."""

    closed: bool = False


@dataclass(frozen=True, slots=True)
class Undecided:
    """The provider cannot tell yet: query it again later."""

    why: str = "still_unknown"


Resolution: TypeAlias = Executed | Rejected | NotExecuted | Undecided


@dataclass(frozen=True, slots=True)
class AnnouncedCall:
    """An announced call, with everything that a resolver needs to look it up."""

    id: RecordId
    incarnation: UUID
    operation: str
    phase: str
    downstream_key: str
    provider_id: str | None
    at: Instant


class EvidenceVerdict(StrEnum):
    """The result of comparing evidence with its record."""

    SETTLED = "settled"
    """It settled its record."""
    AGREES = "agrees"
    """The record already had the same outcome."""
    CONTRADICTS = "contradicts"
    """The record has another outcome: an operator has to check."""


@dataclass(frozen=True, slots=True)
class CallReport:
    """A statement about a call, before it is compared with the record."""

    source: str
    event_id: str
    resolution: str
    """The resolution, in its stored form."""
    downstream_key: str | None = None
    provider_id: str | None = None


@dataclass(frozen=True, slots=True)
class Evidence:
    """A statement about a call, as it is stored."""

    id: int
    at: Instant
    report: CallReport
    verdict: EvidenceVerdict | None


@dataclass(frozen=True, slots=True)
class Patience:
    """The times after the owner's last activity before "not executed" counts."""

    lag: Duration
    """How long a provider may take until it can find a call that it has executed."""
    send_window: Duration
    lease: Duration


@dataclass(frozen=True, slots=True)
class Sight:
    """When an actor first saw that a record is unknown: by the store's clock, and by one that cannot be set."""

    store: Instant
    boot: Instant


def is_open(record: Record) -> bool:
    """Whether a call of this record may be under way. INLINE announces none, so one always may."""
    return record.effects is Effects.INLINE or record.intent is not None


def wait_span(record: Record, patience: Patience) -> Duration:
    """How long the former owner may still send, and the provider needs until it can find the call."""
    if not is_open(record):
        return 0
    if record.effects is Effects.INLINE:
        return max(patience.lease, UNSEEN_OWNER) + patience.lag
    return patience.send_window + record.call_timeout + patience.lag


def not_before(record: Record, patience: Patience, first: Sight) -> Instant:
    """The earliest instant of the store at which the query may begin.

    An INLINE owner's lease had ended before any actor saw the record in doubt, so the first sight is a bound.
    """
    if record.effects is not Effects.INLINE:
        return believed_from(record, patience.lag)
    ended = min(first.store, believed_from(record, 0) - UNSEEN_OWNER)
    return ended + wait_span(record, patience)


def has_waited(record: Record, patience: Patience, first: Sight, asked: Sight) -> bool:
    """Whether "the provider does not have it" is a fact, if the query began at `asked` (U1, F34).

    Both the store's clock and the actor's own are compared: the store's may have been set in the meantime.
    """
    by_store = asked.store >= not_before(record, patience, first)
    return by_store and asked.boot - first.boot >= wait_span(record, patience)


def still_to_wait(record: Record, patience: Patience, first: Sight, asked: Sight) -> Duration:
    """How long until `has_waited`, so that the reconciler does not query too early."""
    by_store = not_before(record, patience, first) - asked.store
    return max(by_store, wait_span(record, patience) - (asked.boot - first.boot), 0)


def is_about(record: Record, downstream_key: str) -> bool:
    """Whether the call with this downstream key is the open one: evidence about one call settles no other."""
    if record.effects is Effects.INLINE:
        return True
    return record.intent is not None and record.intent.downstream_key == downstream_key


def known_outcome(record: Record, phase: str) -> Outcome | None:
    """The outcome of a call according to the record; None: none yet."""
    for entry in record.memo:
        if entry.name == phase:
            return Outcome.FAILURE if is_rejection(entry) or was_not_sent(entry) else Outcome.SUCCESS
    return record.outcome if record.state in {State.COMPLETED, State.EXPIRED} else None


SIGNATURE_HEADER: Final = b"oncekey-signature"
SIGNATURE_TOLERANCE: Final = 300
"""Seconds that a sender's clock may be away from ours, in both directions."""

_TIME: Final = re.compile(r"[0-9]{1,12}", re.ASCII)
_DIGEST: Final = re.compile(r"[0-9a-f]{64}", re.ASCII)
_MOST_DIGESTS: Final = 10


def sign(body: bytes, secret: bytes, at: int) -> str:
    """The header's value for a body that is sent at this second since the epoch."""
    return f"t={at},v1={_digest(body, secret, at)}"


def is_genuine(
    header: str, body: bytes, secrets: tuple[bytes, ...], now: float, tolerance: float = SIGNATURE_TOLERANCE
) -> bool:
    """Whether one of the secrets signed the body recently; every secret is tried, in constant time."""
    time, digests = _parts(header)
    if time is None or abs(now - time) > tolerance:
        return False
    expected = [_digest(body, secret, time) for secret in secrets]
    matches = [hmac.compare_digest(one, given) for one in expected for given in digests]
    return any(matches)


def _parts(header: str) -> tuple[int | None, list[str]]:
    times: list[int] = []
    digests: list[str] = []
    for part in header.split(","):
        name, _, value = part.strip().partition("=")
        if name == "t" and _TIME.fullmatch(value):
            times.append(int(value))
        elif name == "v1" and _DIGEST.fullmatch(value):
            digests.append(value)
    # With two times it is not clear which of them was signed.
    return (times[0] if len(times) == 1 else None), digests[:_MOST_DIGESTS]


def _digest(body: bytes, secret: bytes, at: int) -> str:
    return hmac.new(secret, b"%d.%b" % (at, body), hashlib.sha256).hexdigest()
