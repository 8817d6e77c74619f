"""The exceptions: outages, misuse and bugs. A refusal is a value (`Refuse`); only `MalformedError` becomes one."""

from __future__ import annotations

from typing import Any, ClassVar, Final, Generic, TypeVar, overload

T = TypeVar("T")


class OncekeyError(Exception):
    """The base class of all exceptions of oncekey."""


class ConfigurationError(OncekeyError):
    """A setting or an enrolment is wrong; the message names it and how to fix it."""


class MalformedError(OncekeyError, ValueError):
    """The request cannot be understood: it receives 400, and nothing is stored."""


class KeyMalformedError(MalformedError):
    """The `Idempotency-Key` field is not a key."""


class BodyInvalidError(MalformedError):
    """The body has no canonical form, so two different bodies could share one fingerprint."""


class StoreError(OncekeyError):
    """The store did not do what was requested."""

    outage: ClassVar[bool] = False
    """Whether the store itself is unreachable or broken. If not, it answered, and refused what the handler did."""

    @property
    def reason(self) -> str:
        """Its class and that of its cause, for the log: the texts may contain client data."""
        cause = self.__cause__
        return type(self).__name__ + ("" if cause is None else f" from {type(cause).__name__}")


class StoreUnavailableError(StoreError):
    """The store could not be reached, or refused to work; nothing of this transaction happened."""

    outage = True


_LOST = "__oncekey_lost__"


def mark_lost(error: BaseException) -> None:
    """Mark another package's error: it means that a connection to the store was lost or could not be opened."""
    setattr(error, _LOST, True)


def is_outage(error: BaseException) -> bool:
    """Whether an error means that the store did not respond: oncekey's own, or a marked one of the driver."""
    return isinstance(error, StoreError) or getattr(error, _LOST, False) is True


class RolledBackError(StoreUnavailableError):
    """The database answered, and rolled the transaction back because of what the handler did in it (F20)."""

    outage = False


class StoreBusyError(StoreUnavailableError):
    """The store is available, but every connection, or its only writer, was in use for too long; nothing happened."""


class CommitAmbiguousError(StoreError):
    """The connection was lost while a commit was under way: it may or may not have happened (P7)."""


class SchemaError(StoreError):
    """The store's schema is not the one this version of oncekey works with."""

    outage = True


class RecordUnreadableError(StoreError):
    """A record exists but cannot be read, because a newer version or another program wrote it. Nothing may run."""

    outage = True


class LeaseLostError(OncekeyError):
    """Another owner has the record now; nothing that this operation still does is stored (P3)."""


class TransactionControlError(OncekeyError):
    """A handler tried to end its transaction, or used it after it had ended (L5)."""


class ReplayDivergedError(OncekeyError):
    """A resumed handler has other steps than those that are stored: nothing more is run (H4)."""


class ResultNotStorableError(OncekeyError):
    """A step's result has no stored form, or one over `max_result_bytes`: return plain data (H1)."""


class ResultInvalidError(OncekeyError):
    """A call's result does not fit its `result=` declaration. It is stored, so the call is not made again (H1)."""


class CallUncertainError(OncekeyError):
    """A call of this operation has no known outcome, so no further step may run; the response reports it (P4)."""


class StoppingError(OncekeyError):
    """This process is stopping: a retry or the completer does the rest of the operation (P5)."""


class NotExecutedError(OncekeyError):
    """Raised by a handler that is certain that nothing reached the outside: a retry with the same key may run.

    If it has `retry_after` (seconds), a worker does not try again sooner.
    """

    def __init__(self, message: str = "", *, retry_after: float | None = None) -> None:
        super().__init__(message)
        self.retry_after = retry_after


CONTROL_ERRORS: Final = (NotExecutedError, LeaseLostError, StoppingError)
"""Exceptions that end a handler without being a server error: oncekey sends the response."""


class RejectedError(OncekeyError, Generic[T]):
    """The provider's final refusal of this call. Its `value` is stored, and raised again in a resumed handler (H2)."""

    value: T

    @overload
    def __init__(self: RejectedError[None]) -> None: ...

    @overload
    def __init__(self, value: T) -> None: ...

    def __init__(self, value: Any = None) -> None:
        super().__init__("the provider refused the call")
        self.value = value
