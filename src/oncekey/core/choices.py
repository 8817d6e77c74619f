"""The settings of a policy that are a choice between named ways, and which of them a handler's effects allow.

A knob may make a crash mean less, never more (P2, F7). `UNKNOWN` and `FAIL` are the strict ends and always allowed.
Whatever would let a retry run again what may have happened is refused, or needs the promise
`naturally_idempotent=True`.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from types import MappingProxyType
from typing import Final, TypeAlias

from oncekey.core.model import Effects, Recovery


class Flavor(StrEnum):
    """Whose status codes the answers use."""

    IETF = "ietf"
    STRIPE = "stripe"


class InProgress(StrEnum):
    """What a duplicate is answered while the first request is still running."""

    CONFLICT = "conflict"
    ACCEPTED = "accepted"
    WAIT = "wait"


class On5xx(StrEnum):
    """What a server error of an inline handler means for its key."""

    CLASSIFY = "classify"
    RETRY_FRESH = "retry_fresh"
    STORE = "store"


class StoreErrorPolicy(StrEnum):
    """What happens to a request when its key cannot be claimed."""

    FAIL_CLOSED = "fail_closed"
    FAIL_OPEN = "fail_open"


class ExpiryMode(StrEnum):
    """Whether an expired record is deleted, or kept and marked."""

    HARD = "hard"
    SOFT = "soft"


class OnExpired(StrEnum):
    """What a key means once its record has expired."""

    NEW = "new"
    GONE = "gone"


class ErrorFormat(StrEnum):
    """The shape of the bodies of our own refusals."""

    PROBLEM = "problem"
    FAULT = "fault"
    CODE = "code"


class PiiCheck(StrEnum):
    """What is done about a key that looks like an e-mail address or a telephone number."""

    OFF = "off"
    WARN = "warn"
    REJECT = "reject"


BY_EFFECTS: Final[Mapping[Effects, Recovery]] = MappingProxyType(
    {
        Effects.LOCAL: Recovery.RETRY,
        Effects.PHASED: Recovery.RESUME,
        # Up to its defer an outbox request is one transaction; after it the parcel decides (O1).
        Effects.OUTBOX: Recovery.RETRY,
        Effects.INLINE: Recovery.UNKNOWN,
    }
)
"""What a lease that ran out means if the policy does not say."""


class Stance(StrEnum):
    """Whether a setting may go with a handler's effects."""

    ALLOWED = "allowed"
    PROMISED = "promised"
    REFUSED = "refused"


Choice: TypeAlias = Recovery | On5xx | StoreErrorPolicy

_OK, _PROMISE, _NO = Stance.ALLOWED, Stance.PROMISED, Stance.REFUSED
_LOCAL, _PHASED, _OUTBOX, _INLINE = Effects.LOCAL, Effects.PHASED, Effects.OUTBOX, Effects.INLINE

STANCES: Final[Mapping[Choice, Mapping[Effects, Stance]]] = MappingProxyType(
    {
        Recovery.UNKNOWN: {_LOCAL: _OK, _PHASED: _OK, _OUTBOX: _OK, _INLINE: _OK},
        Recovery.FAIL: {_LOCAL: _OK, _PHASED: _OK, _OUTBOX: _OK, _INLINE: _OK},
        Recovery.RETRY: {_LOCAL: _OK, _PHASED: _NO, _OUTBOX: _OK, _INLINE: _PROMISE},
        Recovery.RESUME: {_LOCAL: _NO, _PHASED: _OK, _OUTBOX: _NO, _INLINE: _NO},
        On5xx.CLASSIFY: {_LOCAL: _OK, _PHASED: _OK, _OUTBOX: _OK, _INLINE: _OK},
        On5xx.RETRY_FRESH: {_LOCAL: _NO, _PHASED: _NO, _OUTBOX: _NO, _INLINE: _PROMISE},
        On5xx.STORE: {_LOCAL: _NO, _PHASED: _NO, _OUTBOX: _NO, _INLINE: _OK},
        StoreErrorPolicy.FAIL_CLOSED: {_LOCAL: _OK, _PHASED: _OK, _OUTBOX: _OK, _INLINE: _OK},
        StoreErrorPolicy.FAIL_OPEN: {_LOCAL: _NO, _PHASED: _NO, _OUTBOX: _NO, _INLINE: _PROMISE},
    }
)
"""The whole matrix: every choice with every kind of effects."""

_SETTING: Final[Mapping[type[Choice], str]] = MappingProxyType(
    {Recovery: "on_lease_expired", On5xx: "on_5xx", StoreErrorPolicy: "on_store_error"}
)

_REFUSALS: Final[Mapping[Choice, str]] = MappingProxyType(
    {
        Recovery.RETRY: "it would do finished phases again; use 'resume', or leave it out",
        Recovery.RESUME: "only effects='phased' has phases to resume after; leave it out",
        On5xx.RETRY_FRESH: "only effects='inline' needs it: these effects already run again whatever "
        "left nothing behind; use 'classify'",
        On5xx.STORE: "only effects='inline' needs it: these effects roll back or go on where they "
        "stopped; use 'classify'",
        StoreErrorPolicy.FAIL_OPEN: "such a handler works through the store and cannot run without it; "
        "use 'fail_closed'",
    }
)

_PROMISES: Final[Mapping[Choice, str]] = MappingProxyType(
    {
        Recovery.RETRY: "a crash may come after the outside call was made",
        On5xx.RETRY_FRESH: "a server error may come after the outside call was made",
        StoreErrorPolicy.FAIL_OPEN: "without the store a duplicate is not noticed",
    }
)


def objection(effects: Effects, choice: Choice, *, naturally_idempotent: bool) -> str | None:
    """Why `choice` may not go with `effects`, with the sentence that fixes it; None if it may."""
    stance = STANCES[choice][effects]
    named = f"{_SETTING[type(choice)]}={choice.value!r} with effects={effects.value!r}"
    if stance is Stance.REFUSED:
        return f"{named} is refused: {_REFUSALS[choice]}"
    if stance is Stance.PROMISED and not naturally_idempotent:
        return (
            f"{named} lets the handler run twice, because {_PROMISES[choice]}: set naturally_idempotent=True "
            f"if that does no harm, else leave {_SETTING[type(choice)]} at its default"
        )
    return None
