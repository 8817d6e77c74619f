"""Laws with one rule left out. Each is a mistake that looks right, and the model must find what it breaks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import TYPE_CHECKING

from oncekey.core.guards import Guard
from oncekey.core.model import State
from oncekey.core.rulings import Next, Supersede, rule
from oncekey.core.transitions import ROWS, Fence, Transition
from proof.model.law import Downstream, Law

if TYPE_CHECKING:
    from oncekey.core.model import Claim, Snapshot
    from oncekey.core.policy import Policy
    from oncekey.core.transitions import Table


_FR, _DONE = State.FAILED_RETRYABLE, State.COMPLETED


@dataclass(frozen=True, slots=True)
class Mutant:
    """A law without one of its rules, where its hole shows, and what is broken there."""

    name: str
    finding: str
    law: Law
    scenario: str
    breaks: str


def _changed(numbers: tuple[int, ...], change: Callable[[Transition], Transition | None]) -> tuple[Transition, ...]:
    made = (change(row) if row.number in numbers else row for row in ROWS)
    return tuple(row for row in made if row is not None)


def _without(guard: Guard, *numbers: int) -> Law:
    """The rows of these numbers, not asking for this guard any more."""
    return Law(rows=_changed(numbers, lambda row: replace(row, when=tuple(g for g in row.when if g is not guard))))


def _instead(old: Guard, new: Guard, *numbers: int) -> Law:
    """The rows of these numbers, asking for another guard."""
    return Law(rows=_changed(numbers, lambda row: replace(row, when=tuple(new if g is old else g for g in row.when))))


def _leading(to: State, *numbers: int) -> Law:
    """The rows of these numbers, leading to another state."""
    return Law(rows=_changed(numbers, lambda row: replace(row, to=to)))


def _not_from(source: State, *numbers: int) -> Law:
    """The rows of these numbers, not leaving from this state any more."""
    return Law(rows=_changed(numbers, lambda row: None if row.source is source else row))


def _also(guard: Guard, beside: Guard) -> Law:
    """Every row that asks for `beside` asks for `guard` too."""
    numbers = tuple({row.number for row in ROWS})
    return Law(rows=_changed(numbers, lambda row: replace(row, when=(*row.when, guard)) if beside in row.when else row))


def _without_all(number: int) -> Law:
    """The row of this number, asking for nothing."""
    return Law(rows=_changed((number,), lambda row: replace(row, when=())))


def _expiry_first(snapshot: Snapshot, claim: Claim, policy: Policy, table: Table) -> Next:
    record = snapshot.record
    if record is not None and record.expires_at <= snapshot.now:
        return Supersede(record)
    return rule(snapshot, claim, policy, table)


def _nobody_is_us(snapshot: Snapshot, claim: Claim, policy: Policy, table: Table) -> Next:
    return rule(snapshot, replace(claim, owner="somebody new"), policy, table)


def _mismatch_last(snapshot: Snapshot, claim: Claim, policy: Policy, table: Table) -> Next:
    record = snapshot.record
    if record is not None and record.state is not State.COMPLETED:
        claim = replace(claim, fingerprint=record.fingerprint)
    return rule(snapshot, claim, policy, table)


_SWEPT = Law(rows=_changed((14, 15), lambda row: replace(row, fence=Fence.UP)))
_ALL = (
    Mutant("an owner proves no incarnation", "F1", Law(owner_proves_incarnation=False), "inline", "wrong answer"),
    Mutant("completion keeps the old expiry", "F2", Law(completion_extends=False), "inline", "an acknowledged answer"),
    Mutant("expiry before state", "F3", Law(rule=_expiry_first), "inline", "another body was not refused"),
    Mutant(
        "the route's effects decide", "F4", Law(record_names_effects=False), "inline, after a deploy", "double effect"
    ),
    Mutant("an unstored answer evicts, phased", "F5", _without_all(9), "phased, used anew", "double effect"),
    Mutant("an unstored answer evicts, inline", "F5", _without_all(9), "inline", "double effect"),
    Mutant("a swallowed call settles", "F6", _without_all(7), "phased", "answered as failed"),
    Mutant("a swallowed call settles late", "F6", _without(Guard.CALLS_KNOWN, 8), "phased", "told a failure"),
    Mutant("a lost claim is not recognised", "F8", Law(rule=_nobody_is_us), "inline", "not recognised"),
    Mutant("a refused owner answers from memory", "F8", Law(record_answers=False), "inline", "two answers"),
    Mutant("the heartbeat has no deadline", "F9", _without(Guard.BEFORE_DEADLINE, 4), "local", "wedged"),
    Mutant("sweeping puts the fence up, inline", "F11", _SWEPT, "inline", "nobody replaced"),
    Mutant("sweeping puts the fence up, phased", "F11", _SWEPT, "phased", "nobody replaced"),
    Mutant(
        "one commit writes over what it did not see", "F14", Law(commit_proves_version=False), "local", "wrong answer"
    ),
    Mutant("an executed call completes the record", "F22", _leading(_DONE, 20), "phased", "the rest of the handler"),
    Mutant("repeatable for ever, phased", "F23", Law(window_closes=False), "phased, repeatable", "double effect"),
    Mutant("repeatable for ever, outbox", "F23", Law(window_closes=False), "outbox, repeatable", "double effect"),
    Mutant(
        "any failed attempt means not executed", "F24", Law(sends_are_counted=False), "phased, repeatable", "double"
    ),
    Mutant("any failed attempt means not sent", "F24", Law(sends_are_counted=False), "outbox, repeatable", "double"),
    Mutant(
        "a second announcement is taken back",
        "ADR 0011",
        _without(Guard.SENT_ONCE, 33),
        "phased, repeatable",
        "double effect",
    ),
    Mutant(
        "a call that was made is taken back",
        "ADR 0011",
        _without(Guard.NEVER_SENT, 33),
        "phased",
        "double",
    ),
    Mutant("a deferred request may run again", "F29", _leading(_FR, 22), "outbox", "double effect"),
    Mutant(
        "abandoned while the parcel lives",
        "F30",
        _without(Guard.PARCEL_NEVER_CLAIMED, 28),
        "outbox, repeatable",
        "fail",
    ),
    Mutant(
        "a parcel that may be sent is claimed again", "F31", _without(Guard.PARCEL_SAFE, 24), "outbox", "double effect"
    ),
    Mutant("not executed at once, inline", "F34", _without(Guard.WAITED_OR_NOTHING_OPEN, 21), "inline", "double"),
    Mutant("not executed at once, phased", "F34", _without(Guard.WAITED_OR_NOTHING_OPEN, 21), "phased", "double"),
    Mutant("not executed at once, outbox", "F34", _without(Guard.WAITED_OR_PARCEL_REPEATABLE, 22), "outbox", "double"),
    Mutant("asked before the waiting time, written after", "F34", Law(asks_after_waiting=False), "phased", "double"),
    Mutant("late inline owner refused", "F35", _not_from(_FR, 8), "inline, beyond the waiting rule", "nobody replaced"),
    Mutant("late phased owner refused", "F35", _not_from(_FR, 6), "phased, beyond the waiting rule", "nobody replaced"),
    Mutant(
        "a late result needs an open call",
        "F35",
        _instead(Guard.NO_RESULT_YET, Guard.INTENT_OPEN, 6),
        "phased, beyond the waiting rule",
        "nobody replaced",
    ),
    Mutant(
        "downstream key from the incarnation",
        "F38",
        Law(downstream=Downstream.INCARNATION),
        "phased, repeatable, used anew",
        "double effect",
    ),
    Mutant(
        "downstream key from the attempt",
        "F38",
        Law(downstream=Downstream.ATTEMPT),
        "phased, repeatable",
        "double effect",
    ),
    Mutant(
        "downstream key from the key alone",
        "F38",
        Law(downstream=Downstream.KEY),
        "phased, repeatable, used anew",
        "wrong answer",
    ),
    Mutant("a success is busted silently", "F39", _without(Guard.CONFIRMED_IF_SUCCESS, 32), "inline", "double effect"),
    Mutant("no fence for owners", "P1", Law(owner_proves_fence=False), "phased", "double effect"),
    Mutant("writes do not move the version", "P1", Law(version_moves=False), "local", "acknowledged answer"),
    Mutant("inline is taken over", "P2", _without(Guard.RUNS_AGAIN, 13), "inline", "double effect"),
    Mutant("the fingerprint is compared last", "C8", Law(rule=_mismatch_last), "local", "another body"),
    Mutant(
        "a doubtful local record cannot be released",
        "ADR 0009",
        _instead(Guard.WORKER_NEVER_BEGAN, Guard.INTENT_OPEN, 21),
        "local, in doubt by policy",
        "wedged",
    ),
    Mutant(
        "a call without a memo never ends",
        "ADR 0009",
        _also(Guard.NO_INTENT, Guard.BEGUN),
        "phased, repeatable",
        "wedged",
    ),
    Mutant("a late result leaves the parcel parked", "ADR 0009", Law(parcel_follows_result=False), "outbox", "wedged"),
    Mutant(
        "a finished call waits for ever",
        "ADR 0009",
        _instead(Guard.WAITED_OR_NOTHING_OPEN, Guard.WAITED_OR_PARCEL_REPEATABLE, 21),
        "phased",
        "wedged",
    ),
)

MUTANTS: Mapping[str, Mutant] = MappingProxyType({mutant.name: mutant for mutant in _ALL})
"""All mutants by their names."""
