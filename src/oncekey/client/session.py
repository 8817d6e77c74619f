"""What every adapter does before and after the tries: choose the key, store it, and return or raise the outcome."""

from __future__ import annotations

import random
import time
import warnings
from collections.abc import Callable, Container
from dataclasses import dataclass, field
from typing import Final, assert_never
from uuid import uuid4

from oncekey.client.attempts import (
    Answered,
    Attempts,
    Misused,
    Outcome,
    RetryRules,
    Surroundings,
    Unknown,
    Unsettled,
    attempts,
)
from oncekey.client.exchange import (
    Call,
    Failure,
    KeyExpiredError,
    KeyReusedError,
    OutcomeUnknownError,
    PersonalKeyWarning,
    Reply,
)
from oncekey.client.journal import Journal, JournalEntry
from oncekey.core.errors import ConfigurationError
from oncekey.core.keys import looks_personal

OPERATION_FIELD: Final = "Oncekey-Operation"
"""A header field by which a caller names the operation in the journal. It is not sent."""

HOURS_23: Final = 23 * 3600.0
"""An hour before the day for which servers usually keep keys."""


def _new_key() -> str:
    return str(uuid4())


def _real_world() -> Surroundings:
    return Surroundings(clock=time.monotonic, time=time.time, chance=random.SystemRandom().random)


@dataclass(frozen=True, slots=True)
class KeyedCall:
    """A call with its key in place, ready for any number of tries."""

    key: str
    call: Call


@dataclass(frozen=True, slots=True)
class RetrySession:
    """Rules, journal and surroundings. `max_age`: seconds after which a key from the journal is no longer sent."""

    rules: RetryRules = field(default_factory=RetryRules)
    journal: Journal | None = None
    world: Surroundings = field(default_factory=_real_world)
    new_key: Callable[[], str] = _new_key
    max_age: float = HOURS_23

    def enrols(self, method: str) -> bool:
        """Whether requests of this method carry a key."""
        return method.upper() in self.rules.methods

    def begin(self, call: Call) -> KeyedCall | Reply:
        """Give the call its key, on disk if there is a journal; or return the answer that an earlier call got.

        Raises:
            KeyReusedError: The journal knows the key or the name for another request.
            KeyExpiredError: The journal knows the operation, and its key is too old to be sent.
        """
        name = call.field(OPERATION_FIELD)
        call = call.without(OPERATION_FIELD)
        profile = self.rules.profile
        given = profile.key_of(call)
        if given is not None and looks_personal(given):
            warnings.warn("an Idempotency-Key looks like personal data, and keys are logged", PersonalKeyWarning, 4)
        key = given or self.new_key()
        operation = KeyedCall(key, profile.put(call, key))
        if self.journal is None:
            return operation
        entry = self.journal.begin(call, key, name=name, profile=profile.name)
        if entry.reply is not None:
            return entry.reply
        return self._checked(self.journal, entry, profile.put(call, entry.key))

    def unfinished(self, only: Container[str] | None = None) -> list[JournalEntry]:
        """The entries of the journal without an answer, for the APIs of this client; `only` names the keys."""
        if self.journal is None:
            raise ConfigurationError("there is nothing to resume without a journal")
        ours = [entry for entry in self.journal.unfinished() if entry.profile == self.rules.profile.name]
        return [entry for entry in ours if only is None or entry.key in only]

    def take_up(self, entry: JournalEntry, call: Call) -> KeyedCall:
        """Go on with an entry of the journal; `call` is its call, completed with what the journal does not keep."""
        assert self.journal is not None
        return self._checked(self.journal, entry, self.rules.profile.put(call, entry.key))

    def tries(self, operation: KeyedCall) -> Attempts:
        """The flow for an adapter to drive."""
        return attempts(operation.call, self.rules, self.world)

    def conclude(self, operation: KeyedCall, outcome: Outcome) -> Reply | Failure:
        """Store the outcome and return it: an answer, or a failure before anything was sent; otherwise raise.

        Raises:
            KeyReusedError: The server knows the key for another request.
            OutcomeUnknownError: It may have happened.
        """
        key, journal = operation.key, self.journal
        match outcome:
            case Answered(reply):
                if journal is not None:
                    journal.answer(key, reply)
                return reply
            case Unsettled(last):
                # The entry stays open: the same key may still be sent.
                return last
            case Misused(reply):
                if journal is not None:
                    journal.answer(key, reply)
                raise KeyReusedError("the key belongs to another request; it was not sent again", key=key, reply=reply)
            case Unknown(why, last, expired):
                if journal is not None:
                    journal.doubt(key, why)
                kind = KeyExpiredError if expired else OutcomeUnknownError
                message = f"the operation may have happened: {why}"
                if isinstance(last, Failure):
                    raise kind(message, call=operation.call, key=key) from last.error
                raise kind(message, call=operation.call, key=key, reply=last)
            case _:
                assert_never(outcome)

    def _checked(self, journal: Journal, entry: JournalEntry, call: Call) -> KeyedCall:
        if journal.age(entry) > self.max_age:
            why = "its key is older than servers keep keys"
            journal.doubt(entry.key, why)
            raise KeyExpiredError(f"the operation may have happened: {why}", call=call, key=entry.key)
        return KeyedCall(entry.key, call)
