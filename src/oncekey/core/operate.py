"""The moves that an operator may make by hand, decided by the same table as every other move (A1).

An order names a trigger. `decide` returns the row of TRANSITIONS that allows it, or why none does and what is possible
instead; nothing here writes. An operator's "not executed" has to wait as long as a resolver's.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from types import MappingProxyType
from typing import TYPE_CHECKING, Final

from oncekey.core.guards import Facts, Guard
from oncekey.core.memo import recovery_point
from oncekey.core.model import (
    HOUR,
    MINUTE,
    SECOND,
    Completed,
    Duration,
    Effects,
    EntryKind,
    Instant,
    MemoEntry,
    Outcome,
    ParcelKind,
    Record,
    Snapshot,
    State,
    StoredResponse,
    moment,
)
from oncekey.core.rulings import lease_error
from oncekey.core.transitions import TRANSITIONS, Actor, Illegal, Transition, Trigger, find_transition

if TYPE_CHECKING:
    from uuid import UUID

PROVIDER_LAG: Final[Duration] = 60 * SECOND
"""How long a provider may take until it can find a call that it has executed."""
UNSEEN_OWNER: Final[Duration] = 5 * MINUTE
"""How long after the end of its lease an INLINE owner whose process was suspended may still send."""
_WEEK: Final[Duration] = 7 * 24 * HOUR
RESULT: Final = "JSON"
"""The placeholder for a call's result where an order is shown."""
STEPS_STAY: Final = (
    "The finished steps and their results stay, so no provider is called again: a declined payment is declined "
    "again. For another attempt at the provider the client sends the request with a new key."
)
"""The effect of `keys bust` on a record of a PHASED handler."""
RUNS_TWICE: Final = "It succeeded, and what it did is not undone: a payment would be made twice."
"""The effect of `keys bust --runs-again` on a record without finished steps."""
BUSTED: Final = "busted"
"""The error code of a record whose response an operator removed."""


class Order(StrEnum):
    """An operator's command, as it is typed."""

    EXECUTED = "keys resolve --executed"
    DECLINED = "keys resolve --declined"
    NOT_EXECUTED = "keys resolve --not-executed"
    RELEASE = "keys release"
    BUST = "keys bust"
    EXTEND = "keys extend"
    RETRY = "dlq retry"
    DISCARD = "dlq discard"


@dataclass(frozen=True, slots=True)
class ParcelLocation:
    """Where a parcel of a record is: due in the outbox, held by a worker, or among the dead letters."""

    id: UUID
    kind: ParcelKind
    dead: bool
    held_until: Instant | None = None

    def is_held(self, now: Instant) -> bool:
        """Whether a worker holds it, and may be about to send it."""
        return self.held_until is not None and now < self.held_until


@dataclass(frozen=True, slots=True)
class OperatorCommand:
    """An order with all its options."""

    order: Order
    reason: str
    answer: Completed | None = None
    """The response that clients receive from now on; not for PHASED, whose handler computes it (H5)."""
    result: str | None = None
    """The stored form of the open call's result, for PHASED."""
    closed: bool = False
    """The operator closed the reference at the provider, so no call can arrive there any more (U1)."""
    asked_at: Instant | None = None
    """When the provider was queried, by the store's clock; None: now."""
    runs_again: bool = False
    life: Duration | None = None
    """How long the stored response is kept from now on, at least."""
    version: int | None = None
    """The version that the operator saw: the order is valid only while the record still has it."""
    died_at: Instant | None = None
    """When the parcel that the operator saw became a dead letter: the order is valid only for that occurrence."""
    lag: Duration = PROVIDER_LAG
    actor: Actor = Actor.OPERATOR
    """Who gives the order: resolvers and webhooks settle by the same rows."""
    waited: bool | None = None
    """Whether the waiting time was over when the provider was queried, for an actor with its own clock (U1)."""


@dataclass(frozen=True, slots=True)
class Move:
    """The move to write, and the row that allows it."""

    row: Transition
    seen: Record
    answer: Completed | None = None
    memo: tuple[MemoEntry, ...] = ()
    last_error: str | None = None
    expires_at: Instant | None = None
    """The new expiry of the stored response."""
    forget: bool = False
    """Row 22: the call counts as not made, so its window restarts; otherwise the window continues (F23)."""
    letter: UUID | None = None
    """The dead letter that becomes a parcel again (row 22) or is removed (row 19)."""


@dataclass(frozen=True, slots=True)
class Moved:
    """A move that was made, and the record after it."""

    move: Move
    snapshot: Snapshot


@dataclass(frozen=True, slots=True)
class Forbidden:
    """The reason why nothing is written, and what is possible instead."""

    why: str
    instead: tuple[Possibility, ...] = ()
    rule: str = ""
    """The names of the missing guards, as in the table."""


@dataclass(frozen=True, slots=True)
class Search:
    """Which records an operator wants to see; None is any."""

    scope: str | None = None
    """With the scopes in it: those of a tenant's principals."""
    state: State | None = None
    operation: str | None = None
    effects: Effects | None = None
    older_than: Duration = 0
    stale: bool = False


@dataclass(frozen=True, slots=True)
class Possibility:
    """An order that the table allows for this record now."""

    order: Order
    row: int
    to: State
    options: str = ""
    """The options that are required in addition to the reason."""
    note: str = ""
    letter: UUID | None = None
    """The dead letter that the order concerns."""
    advisable: bool = True
    """False for a second execution of a success: it is possible, and nothing that a record calls for."""

    @property
    def command(self) -> str:
        """The command line, with KEY or ID as a placeholder."""
        return self.typed("KEY", "ID")

    def typed(self, key: str, letter: str | None = None, *, last: str = "", result: str = RESULT) -> str:
        """The command line for one key; JSON stands for values that the operator enters. `last` ends the line."""
        group, verb, *flags = self.order.split()
        by_letter = group == "dlq"
        target, end = ((letter or str(self.letter)), "") if by_letter else (key, last)
        options = self.options.replace(RESULT, result)
        words = ("oncekey", group, verb, target, *flags, options, "--reason '...'", end)
        return " ".join(word for word in words if word)


_NO_RECORD: Final = "there is no record of this key"
_NO_REASON: Final = "a change needs a reason for the audit: add --reason"
_DEFERRED_ALREADY: Final = (
    "its call is in the outbox or a dead letter, and its handler must not run again: "
    "use `oncekey dlq retry` or `oncekey dlq discard`"
)
_PARCELS_LEFT: Final = (
    "{count} of its parcels are not delivered yet, and a second run would write them again: wait until they are "
    "sent, or discard the dead ones"
)
_PHASED_ANSWER: Final = (
    "its handler computes the response itself (PHASED): give the result of the open call with --result JSON instead"
)
_ONLY_PHASED: Final = "--result is only for PHASED: for this record, give the response with --status and --body"
_NO_ANSWER: Final = "give the response that clients will receive: --status, and --body if it has one"
_RELEASE_SETTLES_NOTHING: Final = (
    "a call may have been made, and a release does not settle it: check with the provider, then run "
    "`oncekey keys resolve`"
)
_NOT_DEAD: Final = "its parcel is not a dead letter"

WORDS: Final[Mapping[Guard, str]] = MappingProxyType(
    {
        Guard.INLINE_OR_OUTBOX: "only an INLINE or OUTBOX record accepts a response",
        Guard.PHASED: "only a PHASED record accepts the result of a call",
        Guard.INTENT_OPEN: "it has no open call that needs a result",
        Guard.NO_INTENT: "the next call is already announced, and may have been made with that result",
        Guard.LAST_RESULT_BY_HAND: "only a result that an operator entered can be replaced, before the next step",
        Guard.RESULT_GIVEN: "the result of the open call is missing: add --result JSON",
        Guard.WORKER_NEVER_BEGAN: "its call was deferred, so its handler never runs again",
        Guard.WORKER_BEGAN: "no worker ever claimed its parcel",
        Guard.WAITED_OR_NOTHING_OPEN: "a call may still be under way: --not-executed is accepted only if "
        "the provider is checked after {believed} (or add --closed, if the reference was closed there)",
        Guard.WAITED_OR_PARCEL_REPEATABLE: "sending it again is not known to be safe: its window has passed or it "
        "never had one; --not-executed is accepted only if the provider is checked after {believed} (or "
        "run `oncekey keys resolve --not-executed --closed`, if the reference was closed there)",
        Guard.REASON: _NO_REASON,
        Guard.NOT_OUTBOX: "an OUTBOX response cannot be busted: its handler must not run again",
        Guard.CONFIRMED_IF_SUCCESS: "it succeeded. Without its response a retry would run it again, and what it did "
        "is not undone: a payment would be made twice. `oncekey keys bust --help` explains when to do that",
        Guard.BEFORE_EXPIRY: "it has expired: a request with this key is already a new one",
        Guard.LEASE_OVER: "its owner may be alive: its lease lasts until {lease}",
        Guard.GRACE_OVER: "its owner may be alive: its lease lasts until {lease}",
        Guard.RUNS_AGAIN: "its effects and its recovery do not allow another run",
        Guard.RUNS_NEVER_AGAIN: "its effects and its recovery allow another run",
    }
)
"""The sentence for operators about each guard that does not hold, for every row that they use."""


def decide(command: OperatorCommand, seen: Snapshot, parcels: tuple[ParcelLocation, ...] = ()) -> Move | Forbidden:
    """The move that the table allows, or why it does not."""
    record, now = seen.record, seen.now
    if record is None:
        return Forbidden(_NO_RECORD)
    decided = _objection(command, record, now, parcels) or _judged(command, record, now, parcels)
    if isinstance(decided, Forbidden):
        return replace(decided, instead=possible(record, now, parcels, lag=command.lag))
    return decided


def possible(
    record: Record, now: Instant, parcels: tuple[ParcelLocation, ...] = (), *, lag: Duration = PROVIDER_LAG
) -> tuple[Possibility, ...]:
    """The orders that are possible for this record now, each tried with the most favourable input."""
    found: dict[Order, Possibility] = {}
    for command, options in _best_commands(record, now, lag):
        if command.order not in found and _objection(command, record, now, parcels) is None:
            decided = _judged(command, record, now, parcels)
            if isinstance(decided, Move) and decided.row.to is not None:
                row, to, note = decided.row.number, decided.row.to, _note(command, record)
                letter, advisable = decided.letter, not command.runs_again
                found[command.order] = Possibility(command.order, row, to, options, note, letter, advisable)
    return tuple(found.values())


def refusals(record: Record, now: Instant, parcels: tuple[ParcelLocation, ...] = ()) -> dict[Order, Forbidden]:
    """The orders for records of this state that are not allowed now, or not advisable, and why."""
    allowed = {one.order for one in possible(record, now, parcels) if one.advisable}
    found: dict[Order, Forbidden] = {}
    for order in (Order.EXECUTED, Order.DECLINED, Order.NOT_EXECUTED, Order.RELEASE, Order.BUST, Order.RETRY):
        if order in allowed or (order is Order.RETRY and record.effects is not Effects.OUTBOX):
            continue
        decided = decide(OperatorCommand(order, "-", answer=_SOME_ANSWER), Snapshot(record, now), parcels)
        if isinstance(decided, Forbidden) and not decided.why.startswith(_MEANT_FOR[order]):
            found[order] = decided
    return found


def _note(command: OperatorCommand, record: Record) -> str:
    """A note that the operator needs before using the order."""
    if command.closed:
        return f"or without --closed, checked after {moment(believed_from(record, command.lag))}"
    if command.order is Order.BUST and record.memo:
        return STEPS_STAY
    return RUNS_TWICE if command.runs_again else ""


def believed_from(record: Record, lag: Duration) -> Instant:
    """The instant after which "the provider does not have it" proves that the call was not executed (U1, F34).

    An announced call can be sent until `send_by`. An INLINE owner announces nothing; its lease ended when the record
    was put in doubt, or at its deadline at the latest.
    """
    if record.intent is not None:
        return record.intent.send_by + record.call_timeout + lag
    if record.effects is not Effects.INLINE:
        return record.last_run_at
    doubted = record.reconcile_after if record.reconcile_tries == 0 else None
    ended = record.deadline if doubted is None else min(doubted, record.deadline)
    return ended + UNSEEN_OWNER + lag


def trigger_of(order: Order, record: Record) -> Trigger:
    """The trigger of an order: `release` means a sweep for a stale record, and "not executed" for an unknown one."""
    match order:
        case Order.EXECUTED | Order.DECLINED if _has_no_open_call(record):
            return Trigger.REPLACE
        case Order.EXECUTED | Order.DECLINED | Order.DISCARD:
            return Trigger.EXECUTED
        case Order.NOT_EXECUTED:
            return Trigger.NOT_EXECUTED
        case Order.RELEASE:
            return Trigger.NOT_EXECUTED if record.state is State.UNKNOWN else Trigger.SWEEP
        case Order.BUST:
            return Trigger.BUST
        case Order.EXTEND:
            return Trigger.EXTEND
        case Order.RETRY:
            return Trigger.DLQ_RETRY


def audited_as(order: Order, record: Record) -> Trigger:
    """The trigger in the audit and in events: the table moves a refusal and a discard by EXECUTED, too."""
    match order:
        case Order.DECLINED:
            return Trigger.DECLINED
        case Order.DISCARD:
            return Trigger.DISCARD
        case _:
            return trigger_of(order, record)


def _has_no_open_call(record: Record) -> bool:
    """Whether a result that is entered now can only replace an earlier one (row 34)."""
    resumable = record.effects is Effects.PHASED and record.intent is None and bool(record.memo)
    return record.state is State.FAILED_RETRYABLE or (record.state is State.UNKNOWN and resumable)


def facts_for(command: OperatorCommand, record: Record, now: Instant) -> Facts:
    """The facts for the guards. The time of the operator's query counts only for "not executed" (U1)."""
    # A query cannot have been sent in the future, whichever clock timed it.
    asked = now if command.asked_at is None else min(command.asked_at, now)
    waited = command.closed or (
        asked >= believed_from(record, command.lag) if command.waited is None else command.waited
    )
    intent = record.intent
    window = intent is not None and intent.repeatable_until is not None and now < intent.repeatable_until
    return Facts(
        record,
        now,
        waited=waited and command.order is Order.NOT_EXECUTED,
        result_given=command.result is not None,
        # With a stored result nothing is sent (O1).
        parcel_repeatable=window or bool(record.memo),
        reason=bool(command.reason.strip()),
        runs_again=command.runs_again,
    )


def _objection(
    command: OperatorCommand, record: Record, now: Instant, parcels: tuple[ParcelLocation, ...]
) -> Forbidden | None:
    """The objections to an order that do not depend on the table."""
    if not command.reason.strip():
        return Forbidden(_NO_REASON)
    if command.version is not None and command.version != record.version:
        return Forbidden(
            f"it has changed since you read it: you saw version {command.version}, and it is now at {record.version}"
        )
    held = [one for one in parcels if one.is_held(now)]
    if held:
        until = max(one.held_until or 0 for one in held)
        return Forbidden(f"a worker holds a parcel of it, until {moment(until)} at the latest: wait for it")
    return None


def _judged(
    command: OperatorCommand, record: Record, now: Instant, parcels: tuple[ParcelLocation, ...]
) -> Move | Forbidden:
    trigger, facts = trigger_of(command.order, record), facts_for(command, record, now)
    row = find_transition(trigger, command.actor, facts)
    if isinstance(row, Illegal):
        silent = command.order is Order.RELEASE and trigger is Trigger.NOT_EXECUTED
        why = _RELEASE_SETTLES_NOTHING if silent else _in_words(command.order, trigger, facts, command.lag)
        return Forbidden(why, rule=row.why)
    deferred = [one for one in parcels if one.kind is ParcelKind.DEFER]
    letter = next((one.id for one in deferred if one.dead), None)
    match row.number:
        case 14 | 15:
            return Move(row, record, last_error=lease_error(record))
        case 19:
            missing = _ONLY_PHASED if command.result is not None else _NO_ANSWER if command.answer is None else None
            return Forbidden(missing) if missing else Move(row, record, answer=command.answer, letter=letter)
        case 20 | 34:
            if command.answer is not None:
                return Forbidden(_PHASED_ANSWER)
            stays = record.memo if row.trigger is Trigger.EXECUTED else record.memo[:-1]
            return Move(row, record, memo=(*stays, _entry(command, record)))
        case 21:
            return Forbidden(_DEFERRED_ALREADY) if deferred else Move(row, record)
        case 22:
            if command.order is Order.RELEASE:
                return Forbidden(_DEFERRED_ALREADY)
            return Forbidden(_NOT_DEAD) if letter is None else Move(row, record, forget=facts.waited, letter=letter)
        case 35:
            until = now + (command.life or 0)
            if until <= record.expires_at:
                return Forbidden(f"it is already kept until {moment(record.expires_at)}")
            return Move(row, record, expires_at=until)
        case _:
            left = _PARCELS_LEFT.format(count=len(parcels))
            return Forbidden(left) if parcels else Move(row, record, last_error=BUSTED)


def _entry(command: OperatorCommand, record: Record) -> MemoEntry:
    assert command.result is not None
    name = record.memo[-1].name if record.intent is None else record.intent.phase
    return MemoEntry(name, EntryKind.CALL, command.result, by_hand=command.actor is Actor.OPERATOR)


def _in_words(order: Order, trigger: Trigger, facts: Facts, lag: Duration) -> str:
    """The purpose of the order, or a sentence for each guard that does not hold."""
    record = facts.record
    assert record is not None
    rows = [row for row in TRANSITIONS.get(record.state, {}).get(trigger, ()) if Actor.OPERATOR in row.by]
    if not rows or (trigger is Trigger.REPLACE and not Guard.LAST_RESULT_BY_HAND.holds(facts)):
        return f"{_MEANT_FOR[order]}; this one is {STATES[record.state]}"

    def misfit(row: Transition) -> tuple[int, int]:
        """Prefer the row for this kind of record, then the row that lacks the fewest guards."""
        unmet = [guard for guard in row.when if not guard.holds(facts)]
        return sum(guard in _KINDS for guard in unmet), len(unmet)

    missing = [guard for guard in min(rows, key=misfit).when if not guard.holds(facts)]
    lease = "the end of its parcel's lease" if record.lease_until is None else moment(record.lease_until)
    values = {"believed": moment(believed_from(record, lag)), "lease": lease}
    return "; ".join(WORDS[guard].format_map(values) for guard in missing)


STATES: Final[Mapping[State, str]] = MappingProxyType(
    {
        State.PENDING: "accepted, and waiting for a worker",
        State.IN_PROGRESS: "in progress",
        State.COMPLETED: "done, with a stored response",
        State.FAILED_RETRYABLE: "free to be retried",
        State.UNKNOWN: "unknown",
        State.EXPIRED: "expired",
    }
)
"""A phrase for each state."""

_RESOLVED: Final = (
    "only a key of unknown outcome can be resolved; a result that an operator entered can be replaced until the next "
    "step is stored"
)
_MEANT_FOR: Final[Mapping[Order, str]] = MappingProxyType(
    {
        Order.EXECUTED: _RESOLVED,
        Order.DECLINED: _RESOLVED,
        Order.NOT_EXECUTED: "only a key of unknown outcome can be resolved",
        Order.RELEASE: "only a key in progress whose lease has expired, or an unknown one, can be released",
        Order.BUST: "only a stored response can be busted",
        Order.EXTEND: "only a stored response can be extended: an unfinished key does not expire",
        Order.RETRY: "only a dead letter of an unknown request can be retried",
        Order.DISCARD: "only a dead letter of an unknown request can be discarded",
    }
)

_KINDS: Final = frozenset({Guard.INLINE_OR_OUTBOX, Guard.PHASED, Guard.WORKER_BEGAN, Guard.WORKER_NEVER_BEGAN})
"""Guards that distinguish rows by the kind of record, which no operator can change."""

_SOME_ANSWER: Final = Completed(StoredResponse(200, (), b""), Outcome.SUCCESS)


def _best_commands(record: Record, now: Instant, lag: Duration) -> Iterator[tuple[OperatorCommand, str]]:
    """Each order with the most favourable input, and the options to type for it; the simplest first."""
    phased = record.effects is Effects.PHASED
    for order in (Order.EXECUTED, Order.DECLINED, Order.DISCARD):
        if order is Order.DISCARD and record.effects is not Effects.OUTBOX:
            continue
        command = OperatorCommand(order, "-", lag=lag)
        if phased:
            yield replace(command, result="null"), f"--result {RESULT}"
        else:
            status = "402" if order is Order.DECLINED else "201"
            options = "" if order is Order.DISCARD else f"--status {status} --body answer.json"
            yield replace(command, answer=_SOME_ANSWER), options
    yield OperatorCommand(Order.NOT_EXECUTED, "-", lag=lag), ""
    yield OperatorCommand(Order.NOT_EXECUTED, "-", closed=True, lag=lag), "--closed"
    yield OperatorCommand(Order.RELEASE, "-", lag=lag), ""
    days = (max(record.expires_at - now, 0) + _WEEK) // (24 * HOUR) + 1
    yield OperatorCommand(Order.EXTEND, "-", life=days * 24 * HOUR, lag=lag), f"--for {days}d"
    again = record.outcome is Outcome.SUCCESS
    yield OperatorCommand(Order.BUST, "-", runs_again=again, lag=lag), "--runs-again" if again else ""
    yield OperatorCommand(Order.RETRY, "-", lag=lag), ""


def recovery_point_after(move: Move) -> str:
    """The recovery point of the record after the move."""
    return recovery_point(move.memo or move.seen.memo)
