"""Exceptions: an outage or a bug. A refusal is a value (`Refuse`), never an exception."""

from __future__ import annotations


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


class CommitAmbiguousError(StoreError):
    """The connection was lost while a commit was under way: it may or may not have happened (P7)."""


class SchemaError(StoreError):
    """The store's schema is not the one this version of oncekey works with."""


class LeaseLostError(OncekeyError):
    """Somebody else owns the record now; whatever this operation still does is not stored (P3)."""


class TransactionControlError(OncekeyError):
    """A handler tried to end the transaction that it was handed (L5)."""


class NotExecuted(OncekeyError):  # noqa: N818  (a statement that a handler makes, not a fault)
    """Raised by a handler that knows that nothing reached the outside: the same key may run again (R102)."""
