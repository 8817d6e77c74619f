"""The page of states, generated from RULINGS and TRANSITIONS."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Final

from oncekey.core.guards import Guard
from oncekey.core.model import State
from oncekey.core.rulings import RULINGS, Ruling, Situation
from oncekey.core.transitions import MOVERS, ROWS, Transition

from .markdown import title

NO_ROW: Final = "no row"

_MEANINGS: Final[Mapping[State, str]] = {
    State.PENDING: "Deferred: the request received 202, and a worker will make the call to the provider.",
    State.IN_PROGRESS: "An owner runs it for as long as its lease lasts.",
    State.COMPLETED: "Done, with a final response: success or refusal. Every retry receives this response.",
    State.FAILED_RETRYABLE: "It had no effect, or it stopped at a step from which it can resume. A retry runs.",
    State.UNKNOWN: "It may have been executed. No retry runs it; a resolver or an operator settles it.",
    State.EXPIRED: "Completed and past its ttl. The key may be used again, unless `on_expired=gone`.",
}

_SITUATIONS: Final[Mapping[Situation, str]] = {
    Situation.ABSENT: "The key has no record.",
    Situation.PENDING: "A worker will finish it.",
    Situation.LIVE: "An owner runs it, and its lease has not ended.",
    Situation.STALE: "An owner ran it, and its lease has ended.",
    Situation.COMPLETED: "It is done and has not expired.",
    Situation.RETRYABLE: "It may run again or resume.",
    Situation.UNKNOWN: "Its outcome is unknown.",
    Situation.EXPIRED: "It is finished and has expired, and no step is left to resume.",
}

_RULINGS: Final[Mapping[Ruling, str]] = {
    Ruling.CLAIM: "claim it",
    Ruling.REFUSE_IN_PROGRESS: "refuse: in progress",
    Ruling.RECOVER: "take over, or mark it unknown: the stored effects decide",
    Ruling.REPLAY: "replay the response",
    Ruling.TAKE_OVER: "take over",
    Ruling.OUTCOME_UNKNOWN: "refuse: outcome unknown",
    Ruling.SUPERSEDE: "start again, or refuse: expired",
    Ruling.MISMATCH: "refuse: key reused",
}

_NEEDS: Final[Mapping[Guard, str]] = {
    Guard.LOCAL: "the record's effects are local",
    Guard.PHASED: "the record's effects are phased",
    Guard.OUTBOX: "the record's effects are outbox",
    Guard.INLINE_OR_OUTBOX: "the record's effects are inline or outbox",
    Guard.NOT_OUTBOX: "the record's effects are not outbox",
    Guard.REQUEST_LOCAL: "the new request's effects are local",
    Guard.REQUEST_OUTBOX: "the new request's effects are outbox",
    Guard.BEFORE_DEADLINE: "the handler's deadline has not passed",
    Guard.LEASE_OVER: "there is a lease, and it has ended",
    Guard.GRACE_OVER: "the lease ended at least one sweeper's grace ago",
    Guard.NO_INTENT: "no call is open",
    Guard.INTENT_OPEN: "a call is open: recorded, without a result",
    Guard.NO_INTENT_OR_INLINE: "no call is open, or the effects are inline",
    Guard.SENT_ONCE: "the open call was recorded once",
    Guard.NEVER_SENT: "the owner proves that the open call was not sent",
    Guard.NO_INTENT_OR_SAME_AGAIN: "no call is open, or this same call may be repeated now",
    Guard.NO_RESULT_YET: "the phase has no result yet",
    Guard.CALLS_KNOWN: "the owner has the result of every call that it made",
    Guard.SOME_MEMO: "a step is finished",
    Guard.NO_MEMO: "no step is finished",
    Guard.NOT_RESUMABLE: "it is not a retryable record with finished steps",
    Guard.NOT_ENTERED: "the handler was not called",
    Guard.ENTERED: "the handler was called",
    Guard.RESUMABLE: "phased with recovery `resume`; no call is open, or the open call may be repeated now",
    Guard.RUNS_AGAIN: "its stored effects and recovery allow another run: it left no effect, or it is resumable",
    Guard.ATTEMPTS_LEFT: "a phased handler has attempts left",
    Guard.RUNS_NEVER_AGAIN: "its stored effects and recovery allow no further run, or no attempts are left",
    Guard.PAST_EXPIRY: "it has expired",
    Guard.BEFORE_EXPIRY: "it has not expired",
    Guard.FREE: "it has expired, and a retryable record has no step to resume",
    Guard.PLAIN: "no step is finished and no call is open",
    Guard.BEGUN: "a step is finished or a call is open",
    Guard.WORKER_BEGAN: "outbox, and a worker has claimed its deferred call",
    Guard.WORKER_NEVER_BEGAN: "not outbox, or no worker has claimed its deferred call yet",
    Guard.WAITED_OR_NOTHING_OPEN: "the provider was checked after the waiting time, or no call can be in transit",
    Guard.WAITED_OR_PARCEL_REPEATABLE: "the provider was checked after the waiting time, or sending again is safe now",
    Guard.LAST_RESULT_BY_HAND: "the last finished step is a result that an operator entered",
    Guard.RESULT_GIVEN: "the result of the open call is given",
    Guard.LOCKED: "the key's lock is held by the transaction",
    Guard.PARCEL_SAFE: "the message was never sent, may be sent again now, or already has its result",
    Guard.PARCEL_UNSAFE: "the message may have been sent, must not be sent again now, and has no result",
    Guard.PARCEL_NEVER_CLAIMED: "no worker ever claimed the message",
    Guard.SOFT: "expired records are kept",
    Guard.REASON: "the operator gives a reason",
    Guard.CONFIRMED_IF_SUCCESS: "the operator confirms that a success will run again",
}

_DRAWN: Final = """\
The numbers are those of the rows below. Rows 30 and 31 are left out: the reaper removes an expired record
(30), or a new request reuses its row (31)."""

_PROOFS: Final = """\
The store compares the proof of a move in the statement that writes. *No row*: the key has no record. *Owner*:
incarnation and fence; the writer is still the owner. *Version*: incarnation and version; nothing was written since the
record was read. *Parcel*: the claim of the message; the worker still holds it. Every write raises the version, so
anyone who read earlier has to read again. Every new owner raises the fence, and so does an operator who removes a
response or replaces a result (32, 34). An owner that was only swept may still report what it did; an owner that was
replaced writes nothing."""

_WHOSE: Final = """\
The store checks its conditions again in the statement that writes, by its own clock: a decision based on an older read
is refused. The mover is the actor that writes. Only the mover can check some conditions (was the handler called? was a
call made? what does the policy allow?). The store contract that ships with oncekey tries every move with every
combination of these conditions; a store must accept exactly the combinations that the store's conditions allow."""

_INTRODUCTION: Final = """\
This page lists the states of a key's record, what a request receives in each state, and every move between states. The
code decides with three tables. Two are shown here: `RULINGS` (what a request receives) and `TRANSITIONS` (the moves);
a pair of state and trigger that is not listed cannot happen. The third, `ACTS` in `core/endings.py`, defines what the
end of a handler means: see [crashes](crashes.md).

Common requests take shortcuts, and tests compare each with its table: a new key of a `LOCAL` request
(`engine.local.NEW`, [test](../../tests/engine/test_new_key.py)), the ordinary success of a handler
(`core.endings.returned`, [`test_fast_path_decides_like_the_table`](../../tests/core/test_endings.py)), and the
replay of a finished record (`core.rulings.rule_finished`,
[`test_rule_finished_agrees_with_rule`](../../tests/core/test_rulings.py))."""

_HEARING: Final = """\
The state is checked first and the clock second, so time alone never turns an unfinished record into a free key.
The fingerprint is compared before anything else: a different request with a used key takes no lease, resumes nothing,
and its client learns only that the key is taken."""

_BELIEF: Final = """\
The model in `tests/proof/model` visits every state that one key can reach: requests with the same body and with
another body, owners of all four kinds of effects, workers, sweeper, reaper, completer, resolver and operator, a
provider that counts, a crash or a lost reply at every step, and a clock that may advance at any time. It runs over
these tables and searches for a double effect, a lost or wrong response, another client's response, and a record that
is never finished. Then it removes one rule at a time and must find the resulting hole. [ADR
0009](../adr/0009-the-models-findings-are-rows-of-the-table.md) describes what it changed."""


def page() -> str:
    """The whole page."""
    return "\n\n".join(_parts()) + "\n"


def transitions(rows: Iterable[Transition] = ROWS) -> str:
    """TRANSITIONS as a Markdown table; rows that differ only in where they start are one line."""
    lines: dict[tuple[object, ...], list[str]] = {}
    for row in rows:
        said = (row.number, _words(row.trigger), _name(row.to), _actors(row), row.proof, row.fence, _needs(row))
        lines.setdefault(said, []).append(_name(row.source))
    head = ("#", "From", "Trigger", "To", "Actor", "Proof", "Fence", "Conditions")
    return _table(
        head,
        (
            (str(number), ", ".join(sources), str(trigger), *map(str, rest))
            for (number, trigger, *rest), sources in lines.items()
        ),
    )


def rulings() -> str:
    """RULINGS as a Markdown table."""
    return _table(
        ("Situation", "Meaning", "The same request", "A different request"),
        (
            (_words(situation), _SITUATIONS[situation], _RULINGS[answers[True]], _RULINGS[answers[False]])
            for situation, answers in RULINGS.items()
        ),
    )


def needs() -> str:
    """The conditions of moves, as a Markdown table."""
    return _table(
        ("Condition", "Meaning", "Checked by"),
        ((_words(guard.name.lower()), _NEEDS[guard], guard.checked_by.value) for guard in Guard),
    )


def _parts() -> Iterator[str]:
    yield title("States")
    yield _INTRODUCTION
    yield _table(("State", "Meaning"), ((f"`{state}`", _MEANINGS[state]) for state in State))
    yield "## What a request receives"
    yield _HEARING
    yield rulings()
    yield "## Moves"
    yield "![The states and the moves between them](states.svg)"
    yield _DRAWN
    yield _PROOFS
    for movers in MOVERS:
        yield movers.about
        yield transitions(movers.rows)
    yield "## Conditions"
    yield _WHOSE
    yield needs()
    yield "## Model checking"
    yield _BELIEF


def _words(name: str) -> str:
    return name.replace("_", " ")


def _name(state: State | None) -> str:
    return _words(state) if state else NO_ROW


def _actors(row: Transition) -> str:
    return ", ".join(sorted(row.by))


def _needs(row: Transition) -> str:
    return ", ".join(_words(guard.name.lower()) for guard in row.when)


def _table(head: Iterable[str], lines: Iterable[Iterable[str]]) -> str:
    named = tuple(head)
    shown = [named, tuple("---" for _ in named), *map(tuple, lines)]
    return "\n".join(f"| {' | '.join(line)} |".replace("|  |", "| |") for line in shown)
