"""Refusals as exceptions, raised to the caller of a protected function.

There is one class for each reaction: wait, call again, look for the bug, or leave it to a person.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Final

from oncekey.core.answers import is_accepted
from oncekey.core.errors import (
    BodyInvalidError,
    KeyMalformedError,
    OncekeyError,
    RecordUnreadableError,
    StoreUnavailableError,
)
from oncekey.core.model import Code, Refuse
from oncekey.core.problems import PROBLEMS, wait_of

if TYPE_CHECKING:
    from oncekey.core.policy import Policy


class NotRunError(OncekeyError):
    """This call returned no result of the protected function; the subclass says why.

    `retry_after` (seconds) is set if the same call may have another result later.
    """

    def __init__(self, message: str, *, retry_after: int | None = None) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class InProgressError(NotRunError):
    """Another call with this key is running, or a worker resumes it: call again later for the result.

    `accepted` is true if the key's own rows and its parcel are committed: a worker makes the outside call. `value` is
    then what the OUTBOX function returned.
    """

    def __init__(
        self, message: str, *, retry_after: int | None = None, accepted: bool = False, value: object = None
    ) -> None:
        super().__init__(message, retry_after=retry_after)
        self.accepted = accepted
        self.value = value


class OutcomeUnknownError(NotRunError):
    """The call may have been executed; the function does not run again while its outcome is being resolved."""


class KeyReusedError(NotRunError):
    """The key belongs to a call with other arguments."""


class KeyExpiredError(NotRunError):
    """The key was used so long ago that its record is gone."""


class LimitedError(NotRunError):
    """There are too many new keys; this key was not used."""


class ResultNotKeptError(NotRunError):
    """The function was run once, and its result was too large to store."""


class ExecutionFailedError(NotRunError):
    """The function was run and failed for good, or could not finish; the log of that run has the reason."""


_ERRORS: Final[Mapping[Code, tuple[Callable[[str], OncekeyError], str]]] = MappingProxyType(
    {
        Code.KEY_MISSING: (KeyMalformedError, "it has no key"),
        Code.KEY_MALFORMED: (KeyMalformedError, "its key is malformed"),
        Code.KEY_NOT_FOUND: (NotRunError, "there is no call with its key"),
        Code.BODY_INVALID: (BodyInvalidError, "its arguments have no canonical form"),
        Code.BODY_LENGTH_MISSING: (BodyInvalidError, "its arguments have no declared length"),
        Code.BODY_TOO_LARGE: (BodyInvalidError, "its arguments are larger than max_request_bytes"),
        Code.BODY_TOO_SLOW: (BodyInvalidError, "its arguments did not arrive in time"),
        Code.KEY_REUSED: (KeyReusedError, "its key belongs to a call with other arguments"),
        Code.KEY_EXPIRED: (KeyExpiredError, "its key was used too long ago"),
        Code.IN_PROGRESS: (InProgressError, "a call with its key is running"),
        Code.OUTCOME_UNKNOWN: (OutcomeUnknownError, "its outcome is not known yet"),
        Code.RESPONSE_NOT_STORED: (ResultNotKeptError, "it was run, and its result was too large to store"),
        Code.STORE_UNAVAILABLE: (StoreUnavailableError, "the store is unavailable"),
        Code.RECORD_UNREADABLE: (RecordUnreadableError, "the record of its key cannot be read"),
        Code.EXECUTION_FAILED: (ExecutionFailedError, "it failed"),
        Code.TIMED_OUT: (ExecutionFailedError, "it was not finished in time"),
        Code.RATE_LIMITED: (LimitedError, "there are too many new keys"),
        Code.REQUEST_TOO_OLD: (LimitedError, "it is too old"),
    }
)
"""The exception for each refusal, and its message about the function."""


def error_of(refusal: Refuse, policy: Policy, operation: str) -> OncekeyError:
    """The exception that is raised to the caller of a function."""
    code = refusal.code
    kind, sentence = _ERRORS[code]
    message = f"{operation}: {refusal.detail or sentence}"
    wait = wait_of(refusal, policy) if PROBLEMS[code].waiting_helps else None
    if kind is InProgressError:
        return InProgressError(message, retry_after=wait, accepted=is_accepted(refusal.record))
    error = kind(message)
    if isinstance(error, NotRunError):
        error.retry_after = wait
    return error
