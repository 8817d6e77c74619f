"""What an operator's order does, in words: the button, what happens to the request, and what its client gets."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from oncekey.core.guards import Guard
from oncekey.core.model import Effects, Outcome, Record, State
from oncekey.core.operate import Forbidden, Order

DOCS: Final = "https://github.com/oncekey/oncekey/blob/main/docs"
SLUGS: Final[Mapping[Order, str]] = {
    Order.EXECUTED: "executed",
    Order.DECLINED: "declined",
    Order.NOT_EXECUTED: "not-executed",
    Order.RELEASE: "release",
    Order.BUST: "bust",
    Order.RETRY: "retry",
    Order.DISCARD: "discard",
}
"""Orders in addresses."""
ORDERS: Final[Mapping[str, Order]] = {slug: order for order, slug in SLUGS.items()}
FOR_LETTERS: Final = (Order.RETRY, Order.DISCARD)
"""Orders about a dead letter; the others are about a record."""
TWICE: Final = "If you are wrong, it happens twice."


@dataclass(frozen=True, slots=True)
class Words:
    """An order as its button and its form show it."""

    label: str
    effect: str
    """What it does, and what the client gets."""


MESSAGE: Final[Mapping[Order, Words]] = {
    Order.RETRY: Words(
        "Retry the delivery",
        "The message returns to the outbox, and a worker delivers it again, from its first attempt. A receiver that "
        "already has it detects the repetition by its downstream key. The request keeps its response.",
    ),
    Order.DISCARD: Words(
        "Discard the message", "The message is deleted and never delivered. The request keeps its response."
    ),
}
"""Orders about a dead letter that moves no record."""
_MAY_BE_MADE: Final = "a call may have been made. Check with the provider, then choose one of the actions above"
_DEFERRED: Final = "its call is in the outbox or among the dead letters, so its handler must not run again"
_REFUSED: Final[Mapping[tuple[Order, Guard], str]] = {
    (Order.RETRY, Guard.WAITED_OR_PARCEL_REPEATABLE): "sending it again is not known to be safe, because its window "
    "has passed or it never had one. Check with the provider, then resolve the request",
    (Order.RELEASE, Guard.WAITED_OR_NOTHING_OPEN): _MAY_BE_MADE,
    (Order.RELEASE, Guard.WAITED_OR_PARCEL_REPEATABLE): _MAY_BE_MADE,
    (Order.RELEASE, Guard.LEASE_OVER): "its owner may be running. Wait until its lease ends",
    (Order.NOT_EXECUTED, Guard.WAITED_OR_NOTHING_OPEN): "a call may still be under way. Close the reference at the "
    "provider and tick the box, or wait",
    (Order.NOT_EXECUTED, Guard.WAITED_OR_PARCEL_REPEATABLE): "a call may still be under way. Close the reference at "
    "the provider and tick the box, or wait",
    (Order.BUST, Guard.NOT_OUTBOX): "its handler deferred a call, so it must not run again",
    (Order.BUST, Guard.CONFIRMED_IF_SUCCESS): "the request succeeded, and a retry would execute it again: a payment "
    "would be made twice. If you want that, use `oncekey keys bust --runs-again`",
}
"""Why an order is refused, by the missing guard, in the terms of the console; `Forbidden.why` names commands."""


def words_of(order: Order, record: Record, to: State | None = None) -> Words:
    """An order about a record in words; `to` is the state that it leads to, where that makes a difference."""
    phased, call = record.effects is Effects.PHASED, _call(record)
    replaces = phased and record.intent is None and bool(record.memo)
    match order:
        case Order.EXECUTED if replaces:
            return Words(
                f"Replace the result of {call}",
                "The result that was entered by hand was wrong. The handler resumes with the result that you enter "
                "now, and the next retry gets the response that the handler returns.",
            )
        case Order.DECLINED if replaces:
            return Words(
                f"Replace the result of {call} with a refusal",
                "The provider declined the call. The handler resumes with the refusal, and the next retry gets the "
                "response that the handler returns.",
            )
        case Order.EXECUTED if phased:
            return Words(
                f"Confirm {call}",
                "The call was made. The handler resumes after it with the result that you enter, and the next retry "
                "gets the response that the handler returns.",
            )
        case Order.EXECUTED:
            return Words(
                f"Confirm {call}",
                "It was executed. The next retry gets the response that you enter, such as 201. Nothing runs again.",
            )
        case Order.DECLINED if phased:
            return Words(
                f"Record that {call} was declined",
                "The provider declined the call for good. The handler resumes with the refusal, and the next retry "
                "gets the response that the handler returns.",
            )
        case Order.DECLINED:
            return Words(
                f"Record that {call} was declined",
                "The provider declined it for good. The next retry gets the failure that you enter, such as 402. "
                "Nothing runs again.",
            )
        case Order.NOT_EXECUTED if record.effects is Effects.OUTBOX and to is State.PENDING:
            return Words(
                f"Send {call} again",
                "The call was not made and can no longer arrive. It returns to the outbox, and retries get 202 until "
                f"a worker has made it. {TWICE}",
            )
        case Order.NOT_EXECUTED if phased:
            return Words(
                f"Repeat {call}",
                "The call was not made and can no longer arrive. The next retry, or a worker, resumes the handler, "
                f"which makes the call again. {TWICE}",
            )
        case Order.NOT_EXECUTED:
            return Words(
                f"Allow {call} to run again",
                "It was not executed and can no longer be. The next retry runs the handler from the beginning and "
                f"gets its response. {TWICE}",
            )
        case _:
            return _other(order, record, to, call)


def _other(order: Order, record: Record, to: State | None, call: str) -> Words:
    failed = record.outcome is Outcome.FAILURE
    removal = f"Remove the stored {'failure' if failed else 'response'}"
    match order:
        case Order.RELEASE if record.state is State.UNKNOWN:
            return Words(f"Resume {record.operation}", f"No call is open. {_resumed(record)}")
        case Order.RELEASE if to is State.UNKNOWN:
            return Words(
                "Release the key",
                "Its owner is gone and may have executed it. The outcome becomes unknown, and retries get 409 until "
                "it is resolved.",
            )
        case Order.RELEASE:
            return Words("Release the key", f"Its owner is gone. {_resumed(record)}")
        case Order.BUST if record.memo:
            return Words(
                removal,
                "The finished steps keep their results, so no provider is called again. The next retry gets the "
                "response that the handler computes from them.",
            )
        case Order.BUST:
            return Words(
                removal,
                "The next retry runs the handler from the beginning and gets the new response.",
            )
        case Order.RETRY:
            return Words(
                f"Retry {call}", "A worker makes the call again, from its first attempt. Retries get 202 until then."
            )
        case _:
            return Words(
                f"Discard {call}",
                "The call was not made, or was undone at the provider. The next retry gets a permanent failure, 500 "
                "by default.",
            )


def _resumed(record: Record) -> str:
    if record.memo:
        return (
            f"The next retry, or a worker, resumes the handler after the step {record.recovery_point}. Finished steps "
            "are not repeated, and the client gets the handler's response."
        )
    return "The next retry runs the handler from the beginning and gets its response."


def _call(record: Record) -> str:
    """What the order is about: the open call, else the last step, else the operation."""
    if record.intent is not None:
        return record.intent.phase
    return record.memo[-1].name if record.memo and record.effects is Effects.PHASED else record.operation


def refusal_of(order: Order, forbidden: Forbidden) -> str:
    """Why an order is refused."""
    found = (why for (one, guard), why in _REFUSED.items() if one is order and guard.name.lower() in forbidden.rule)
    return next(found, _DEFERRED if "oncekey dlq" in forbidden.why else forbidden.why)


def runbook_of(order: Order | None, record: Record | None) -> str:
    """The address of the page that describes what to do about a record, or about a dead letter without one."""
    if record is None or order in FOR_LETTERS:
        page = "runbooks/outbox.md#oncekeydeadletters"
    elif record.state is State.UNKNOWN and record.reconcile_after is None:
        page = "runbooks/unknown.md#oncekeygivenup"
    elif record.state is State.UNKNOWN:
        page = "runbooks/unknown.md#oncekeyunknownold"
    elif record.state is State.IN_PROGRESS:
        page = "runbooks/workers.md#oncekeysweeperbehind"
    else:
        page = "howto/operators.md"
    return f"{DOCS}/{page}"
