"""RULINGS and TRANSITIONS as a page for people: drawn from the tables, so that it cannot say anything else."""

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
    State.PENDING: "Deferred: the request is answered with 202, and a worker will make the outside call.",
    State.IN_PROGRESS: "An owner runs it, for as long as the lease lasts.",
    State.COMPLETED: "Done, with an answer, be it a yes or a final no. Every retry gets this answer.",
    State.FAILED_RETRYABLE: "Proven to have done nothing, or stopped at a point that can be resumed. A retry runs.",
    State.UNKNOWN: "It may have happened. No retry runs it; a resolver or a person settles it.",
    State.EXPIRED: "Completed once, kept for the record. The key may be used anew, unless `on_expired=gone`.",
}

_SITUATIONS: Final[Mapping[Situation, str]] = {
    Situation.ABSENT: "There is no record.",
    Situation.PENDING: "A worker will finish it.",
    Situation.LIVE: "An owner runs it, and the lease is not over.",
    Situation.STALE: "An owner ran it, and the lease is over.",
    Situation.COMPLETED: "It is done, and its time is not over.",
    Situation.RETRYABLE: "It may run again, or be resumed.",
    Situation.UNKNOWN: "Its outcome is not known.",
    Situation.EXPIRED: "It is finished and its time is over, and nothing is left to resume.",
}

_RULINGS: Final[Mapping[Ruling, str]] = {
    Ruling.CLAIM: "claim it",
    Ruling.REFUSE_IN_PROGRESS: "refuse: in progress",
    Ruling.RECOVER: "take over, or make it unknown: the record's own effects decide",
    Ruling.REPLAY: "replay the answer",
    Ruling.TAKE_OVER: "take over",
    Ruling.OUTCOME_UNKNOWN: "refuse: outcome unknown",
    Ruling.SUPERSEDE: "start anew, or refuse: gone",
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
    Guard.BEFORE_DEADLINE: "the handler's deadline is not over",
    Guard.LEASE_OVER: "there is a lease, and it is over",
    Guard.GRACE_OVER: "the lease has been over for as long as the sweeper's grace",
    Guard.NO_INTENT: "no outside call is open",
    Guard.INTENT_OPEN: "an outside call is open",
    Guard.NO_INTENT_OR_INLINE: "no outside call is open, or the effects are inline",
    Guard.SENT_ONCE: "the open outside call was announced once",
    Guard.NEVER_SENT: "the owner proves that the open call was not sent",
    Guard.NO_INTENT_OR_SAME_AGAIN: "no outside call is open, or this very one may be repeated now",
    Guard.NO_RESULT_YET: "the phase has no result yet",
    Guard.CALLS_KNOWN: "the owner knows what became of every call it made",
    Guard.SOME_MEMO: "a phase is finished",
    Guard.NO_MEMO: "no phase is finished",
    Guard.NOT_RESUMABLE: "it is not a retryable record with finished phases",
    Guard.NOT_ENTERED: "the handler was not called",
    Guard.ENTERED: "the handler was called",
    Guard.RESUMABLE: "phased with recovery `resume`; no call is open, or the open one may be repeated now",
    Guard.RUNS_AGAIN: "its stored effects and recovery allow another run: nothing is left behind, or it is resumable",
    Guard.ATTEMPTS_LEFT: "a phased handler was not begun too often",
    Guard.RUNS_NEVER_AGAIN: "its stored effects and recovery allow no other run, or no attempts are left",
    Guard.PAST_EXPIRY: "its time is over",
    Guard.BEFORE_EXPIRY: "its time is not over",
    Guard.FREE: "its time is over, and a retryable record has nothing to resume",
    Guard.PLAIN: "no phase is finished and no call is open",
    Guard.BEGUN: "a phase is finished or a call is open",
    Guard.WORKER_BEGAN: "outbox, and a worker has had its parcel",
    Guard.WORKER_NEVER_BEGAN: "not outbox, or no worker has had its parcel yet",
    Guard.WAITED_OR_NOTHING_OPEN: "the provider was asked after the waiting time, or no call can be under way",
    Guard.WAITED_OR_PARCEL_REPEATABLE: "the provider was asked after the waiting time, or sending again is safe now",
    Guard.LAST_RESULT_BY_HAND: "the last finished step is a result that an operator gave",
    Guard.RESULT_GIVEN: "the result of the open call is given",
    Guard.LOCKED: "the key's lock is held by the transaction",
    Guard.PARCEL_SAFE: "the parcel was never sent, may be sent again now, or has its result already",
    Guard.PARCEL_UNSAFE: "the parcel may have been sent, may not be sent again now, and has no result",
    Guard.PARCEL_NEVER_CLAIMED: "no worker ever had the parcel",
    Guard.SOFT: "expired records are kept",
    Guard.REASON: "the operator says why",
    Guard.CONFIRMED_IF_SUCCESS: "the operator confirms that a success will run again",
}

_DRAWN: Final = """\
The numbers are those of the rows below. Rows 30 and 31 are left out: the reaper removes a finished record whose time
is over (30), or a new request begins anew in its row (31)."""

_PROOFS: Final = """\
The store compares the proof of a move in the statement that writes. *No row*: the key has no record. *Owner*:
incarnation and fence; the writer is still the owner. *Version*: incarnation and version; nothing was written since the
record was read. *Parcel*: the claim of the parcel; the worker still holds it. Every write raises the version, so anyone
who read earlier has to read again. Every new owner raises the fence, and so does an operator who removes a response or
replaces a result (32, 34). An owner that was only swept may still report what it did; an owner that was replaced writes
nothing."""

_WHOSE: Final = """\
What the store answers for is compared once more in the statement that writes, by the store's own clock: who decided by
an older look is refused. The mover is the actor that writes. It alone can know some conditions (was the handler called?
was a call made? what does the policy allow?); the store cannot check those. The contract that ships with oncekey walks
over every move and every combination of these facts, and a store has to accept exactly what the store's needs allow."""

_INTRODUCTION: Final = """\
What a key's record is, what a request gets that meets it, and every move that a record can make. The code decides by
three tables and nowhere else. Two of them are drawn here: `RULINGS`, what a request gets, and `TRANSITIONS`, the moves;
a pair of state and trigger that is missing here cannot happen. The third is `ACTS` in `core/endings.py`, what the end
of a handler means: [what a crash means](crashes.md) has it in words."""

_HEARING: Final = """\
The state is looked at first and the clock afterwards, so time alone never turns an unfinished record into a free key.
The fingerprint is compared before anything is done: another request under a live key takes no lease, resumes nothing
and learns only that the key is taken."""

_BELIEF: Final = """\
The model in `tests/proof/model` visits every world that one key can be in: requests with the same and with another
body, owners of all four kinds of effects, workers, sweeper, reaper, completer, resolver and operator, a provider that
counts, a crash or a lost reply at every step, and a clock that moves whenever it may. It runs over these very tables
and looks for a double effect, a lost or wrong answer, a stranger's answer, and a record that nothing ends. Then it
leaves out one rule after the other and must find each hole again. What it changed is
[a decision of its own](../adr/0009-the-models-findings-are-rows-of-the-table.md)."""


def page() -> str:
    """The whole page."""
    return "\n\n".join(_parts()) + "\n"


def transitions(rows: Iterable[Transition] = ROWS) -> str:
    """TRANSITIONS as a Markdown table; rows that differ only in where they start are one line."""
    lines: dict[tuple[object, ...], list[str]] = {}
    for row in rows:
        said = (row.number, _words(row.trigger), _name(row.to), _actors(row), row.proof, row.fence, _needs(row))
        lines.setdefault(said, []).append(_name(row.source))
    head = ("#", "From", "Trigger", "To", "Who", "Proof", "Fence", "Needs")
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
        ("Situation", "What it means", "The same request", "Another request"),
        (
            (_words(situation), _SITUATIONS[situation], _RULINGS[answers[True]], _RULINGS[answers[False]])
            for situation, answers in RULINGS.items()
        ),
    )


def needs() -> str:
    """What the needs of a move mean, as a Markdown table."""
    return _table(
        ("Needs", "What that means", "Who answers for it"),
        ((_words(guard.name.lower()), _NEEDS[guard], guard.checked_by.value) for guard in Guard),
    )


def _parts() -> Iterator[str]:
    yield title("States")
    yield _INTRODUCTION
    yield _table(("State", "Meaning"), ((f"`{state}`", _MEANINGS[state]) for state in State))
    yield "## What a request gets"
    yield _HEARING
    yield rulings()
    yield "## The moves"
    yield "![The states and the moves between them](states.svg)"
    yield _DRAWN
    yield _PROOFS
    for movers in MOVERS:
        yield movers.about
        yield transitions(movers.rows)
    yield "## What the moves need"
    yield _WHOSE
    yield needs()
    yield "## Why to believe it"
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
