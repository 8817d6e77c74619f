"""The settings of a policy that are a choice between named ways."""

from __future__ import annotations

from enum import StrEnum


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
