"""Exceptions: an outage or a bug. A refusal is a value (`Refuse`), never an exception."""

from __future__ import annotations

from typing import Any, Final, Generic, TypeVar, overload

T = TypeVar("T")


class OncekeyError(Exception):
    """Everything that oncekey raises."""


class ConfigurationError(OncekeyError):
    """A setting or an enrolment is wrong; the message names it and says what fixes it."""


class MalformedError(OncekeyError, ValueError):
    """The request cannot be understood, so it gets 400 and nothing is stored."""


class KeyMalformedError(MalformedError):
    """The `Idempotency-Key` field is not a key."""


class BodyInvalidError(MalformedError):
    """The body has no canonical form, so two different bodies could share one fingerprint."""


class StoreError(OncekeyError):
    """The store did not do what it was asked."""


class StoreUnavailableError(StoreError):
    """The store could not be reached, or refused to work; nothing of this transaction happened."""


class RolledBackError(StoreUnavailableError):
    """The database is there and undid the transaction, for what the handler did in it: its rows are gone (F20)."""


class StoreBusyError(StoreUnavailableError):
    """The store is there, but every connection, or its only writer, was in use for too long; nothing happened."""


class CommitAmbiguousError(StoreError):
    """The connection was lost while a commit was under way: it may or may not have happened (P7)."""


class SchemaError(StoreError):
    """The store's schema is not the one this version of oncekey works with."""


class RecordUnreadableError(StoreError):
    """A record is there and cannot be read: a newer version wrote it, or something else did. Nothing may run."""


class LeaseLostError(OncekeyError):
    """Somebody else owns the record now; whatever this operation still does is not stored (P3)."""


class TransactionControlError(OncekeyError):
    """A handler tried to end the transaction that it was handed (L5)."""


class ReplayDivergedError(OncekeyError):
    """A resumed handler asked for other steps than those that were stored: nothing more is run (H4)."""


class ResultNotStorableError(OncekeyError):
    """A step's result has no stored form, or one over `max_result_bytes`: return plain data (H1)."""


class ResultInvalidError(OncekeyError):
    """A call's result is not what its `result=` declares. It is stored, so the call is not made again (H1)."""


class CallUncertainError(OncekeyError):
    """A call of this operation has no known outcome, so nothing may follow it; the answer says so (P4)."""


class StoppingError(OncekeyError):
    """This process is being stopped: what is left of the operation is done by whoever goes on with it (P5)."""


class NotExecuted(OncekeyError):  # noqa: N818  (a statement that a handler makes, not a fault)
    """Raised by a handler that knows that nothing reached the outside: the same key may run again.

    `retry_after` (seconds) is passed on by a worker, which does not try again sooner.
    """

    def __init__(self, message: str = "", *, retry_after: float | None = None) -> None:
        super().__init__(message)
        self.retry_after = retry_after


SAID_TO_US: Final = (NotExecuted, LeaseLostError, StoppingError)
"""What ends a handler and is no fault that a server has to hear of: it was said to oncekey, which answers."""


class Rejected(OncekeyError, Generic[T]):  # noqa: N818  (the provider's statement, not a fault)
    """The provider's final no to this call. Its `value` is stored, and a resumed handler hears the same (H2)."""

    value: T

    @overload
    def __init__(self: Rejected[None]) -> None: ...

    @overload
    def __init__(self, value: T) -> None: ...

    def __init__(self, value: Any = None) -> None:
        super().__init__("the provider's answer is final: no")
        self.value = value
