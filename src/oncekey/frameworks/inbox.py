"""Messages that are delivered at least once and handled once: the broker's message id is the key of a function's call.

A consumer reacts to a delivery in one of five ways, with any broker. `Receipt` names it; the consumer translates it to
the broker's own calls.

    handled     the function has run, and its result is stored,         acknowledge
                or its rows and its parcel are committed and a worker
                does the rest
    duplicate   an earlier delivery was handled                         acknowledge
    busy        another delivery is being handled, or the store is      do not acknowledge: have it redelivered
                unavailable: nothing was done
    unknown     it may have been handled; the reconciler checks         acknowledge, and leave it to the reconciler;
                                                                        never requeue it at once
    dead        it can never be handled: rejected permanently, the id   dead-letter it
                of another message, not readable

Exceptions of the function are raised to the consumer, as without oncekey, and the broker's own rules for redelivery and
poison messages apply. That includes errors of oncekey that do not concern this delivery: those of another protected
function that the function calls, or of a database that it writes to.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Final

from oncekey.core import not_run
from oncekey.core.errors import RecordUnreadableError, RejectedError, StoreError

if TYPE_CHECKING:
    from oncekey.frameworks.functions import CallOutcome, Function

AGAIN: Final = 1
"""Seconds before a redelivery is useful, unless an error has its own delay."""


class Handling(StrEnum):
    """How to react to a delivery."""

    HANDLED = "handled"
    DUPLICATE = "duplicate"
    BUSY = "busy"
    UNKNOWN = "unknown"
    DEAD = "dead"


@dataclass(frozen=True, slots=True)
class Receipt:
    """The outcome of one delivery, for its consumer."""

    handling: Handling
    result: Any = None
    """The function's result, now or from an earlier delivery; for a dead message, the value of its rejection.

    For an OUTBOX function it is the function's own value until the worker is done, then the topic's.
    """
    retry_after: int = 0
    """Seconds before a busy message should be redelivered, or an unknown one checked."""
    reason: str = ""
    """Why it was not handled, for a log or a dead-letter queue. It quotes nothing from the message."""

    @property
    def acknowledge(self) -> bool:
        """Whether to acknowledge the message to the broker."""
        return self.handling in (Handling.HANDLED, Handling.DUPLICATE, Handling.UNKNOWN)


def received(function: Function) -> Callable[..., Receipt | Awaitable[Receipt]]:
    """The consumer: called with the message's id and the function's arguments, it returns a `Receipt`."""

    def take(message_id: str, /, *args: Any, **kwargs: Any) -> Receipt:  # noqa: ANN401
        return _receipt(function.run(args, kwargs, message_id))

    async def take_async(message_id: str, /, *args: Any, **kwargs: Any) -> Receipt:  # noqa: ANN401
        return _receipt(await function.arun(args, kwargs, message_id))

    consumer: Any = take if function.__oncekey__.blocking else take_async
    consumer.__name__, consumer.__doc__ = function.__wrapped__.__name__, function.__wrapped__.__doc__
    consumer.__qualname__, consumer.__module__ = function.__wrapped__.__qualname__, function.__wrapped__.__module__
    consumer.__oncekey_function__ = function
    return consumer  # type: ignore[no-any-return]


def _receipt(outcome: CallOutcome) -> Receipt:
    error, reason = outcome.refusal, str(outcome.refusal)
    match error:
        case None:
            return Receipt(Handling.DUPLICATE if outcome.replayed else Handling.HANDLED, outcome.value)
        case not_run.InProgressError(accepted=True):
            return Receipt(Handling.HANDLED, error.value, reason=reason)
        case not_run.InProgressError() | not_run.LimitedError():
            return Receipt(Handling.BUSY, retry_after=error.retry_after or AGAIN, reason=reason)
        case not_run.OutcomeUnknownError() | RecordUnreadableError():
            return Receipt(Handling.UNKNOWN, retry_after=getattr(error, "retry_after", None) or AGAIN, reason=reason)
        case not_run.ResultNotKeptError():
            return Receipt(Handling.DUPLICATE, reason=reason)
        case RejectedError():
            return Receipt(Handling.DEAD, error.value, reason=reason)
        case StoreError():
            return Receipt(Handling.BUSY, retry_after=AGAIN, reason=reason)
        case _:
            return Receipt(Handling.DEAD, reason=reason)
