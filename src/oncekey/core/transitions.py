"""TRANSITIONS: the state machine of a record: every legal move, who may make it, and what it must prove.

A record is what the store keeps about one idempotency key. Either the store has no row for it, or it is in one of
six states. The numbers are those of the rows below.

                             2 commit (LOCAL)
     +---------------------------------------------------------+
     |                                                         v
 no row ----1 claim---> IN_PROGRESS --7 settle-----------> COMPLETED --29 expire--> EXPIRED
     |                   |   ^   ^ |                           ^
     |  10 not executed, |   |   | |  12 doubt,                |  19 executed
     |  11 hand back,    |   |   | |  15 sweep                 |
     |  14 sweep         |   |   | +-----------------------> UNKNOWN
     |                   v   |   |                            |  |
     |    FAILED_RETRYABLE---+   |                            |  |
     |           ^  16 take over |                            |  |
     |           |               |                            |  |
     |           +---------------|-----21 not executed--------+  |
     |                           |  24 worker claim              |
     +--3 defer--------------> PENDING <--22 not executed--------+

Only the main moves are drawn. Of the others, 9 discards a claim whose handler was not called; 6 and 8 let an owner that
was swept still report; 17 is a LOCAL commit over FAILED_RETRYABLE; 18, 25 and 27 end in UNKNOWN; 20, 32 and 34 in
FAILED_RETRYABLE; 26 returns a parcel to PENDING; 28 abandons one; 30 and 31 free the row of a finished record. The rest
(4, 5, 13, 23, 33, 35) do not change the state. A number may have several lines.

In words (LOCAL, PHASED, OUTBOX and INLINE are the *effects* of a handler, `core.model.Effects`: what its crash means):

- A request that finds no row claims its key. It becomes the owner of the new record and holds a lease. A LOCAL request
  skips that: under a lock on the key it writes its record once, COMPLETED, in the commit of the handler's rows: into no
  row (2), over a retryable record (17) or an expired one (31). The common case, row 2, does not look it up here:
  `engine.local.NEW` is that row, and a test compares the two.
- The owner runs the handler and settles the record. COMPLETED has the response for every retry. FAILED_RETRYABLE
  means that nothing was executed, or that the work can be resumed. UNKNOWN means that an external call may have been
  executed and must not be repeated.
- An OUTBOX request commits a *parcel*, the external call that a worker makes later, and leaves its record PENDING. A
  worker claims the parcel, makes the call and settles the record.
- If the owner dies, its lease expires. A retry takes the record over, or the *completer* (the worker task that resumes
  PHASED requests), or the sweeper moves it; the effects that are stored in the record decide which.
- An UNKNOWN record waits for a resolver, a webhook or an operator.
- Time ends only what is finished: the reaper removes a record whose ttl is over (30), or a new request begins in its
  row (31).

A pair of state and trigger that has no row is illegal. If a pair has several rows, their guards differ, and at most one
row fits. docs/explanation/states.md shows the same rows; comments elsewhere cite them as "row 13".

Two numbers protect a record against late writers. Every write raises the `version`. Every new owner raises the
`fence`, and so does an operator who removes or replaces what an owner may rely on. The store compares the proof of a
move in the statement that writes (see `Proof`). The core decides all guards, from a snapshot; the store compares its
own guards again in the write. So it accepts a move exactly if the proof fits and the store's guards of a row hold
(`upheld`).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from types import MappingProxyType
from typing import TYPE_CHECKING, TypeAlias

from oncekey.core.guards import CheckedBy, Facts, Guard
from oncekey.core.keys import key_digest
from oncekey.core.model import Instant, Record, State

if TYPE_CHECKING:
    from uuid import UUID


class Actor(StrEnum):
    """Who moves a record."""

    REQUESTER = "requester"  # a request that has claimed nothing yet
    OWNER = "owner"  # the request or worker that holds the claim
    COMPLETER = "completer"  # the worker task that resumes PHASED requests without their client
    WORKER = "worker"  # the worker task that delivers parcels
    SWEEPER = "sweeper"  # the worker task that looks for expired leases
    REAPER = "reaper"  # the worker task that looks for expired records
    RESOLVER = "resolver"  # the worker task that queries the provider about an unknown outcome
    WEBHOOK = "webhook"  # a message of the provider
    OPERATOR = "operator"  # a person, at the console or the command line


class Trigger(StrEnum):
    """What happened."""

    CLAIM = "claim"  # a request got the right to run
    COMMIT = "commit"  # a LOCAL request committed its rows and its record together
    DEFER = "defer"  # an OUTBOX request committed its parcel
    RENEW = "renew"  # the owner is alive
    CHECKPOINT = "checkpoint"  # a step is finished
    ANNOUNCE = "announce"  # an external call is about to be made
    RESULT = "result"  # an external call returned
    DEFERRED_RESULT = "deferred_result"  # the call of a parcel returned
    SETTLE = "settle"  # the operation has its response
    DISCARD = "discard"  # the handler was never called
    NOT_EXECUTED = "not_executed"  # it is certain that nothing was executed
    WITHDRAW = "withdraw"  # an announced call was not sent
    HAND_BACK = "hand_back"  # the owner stops before the end, and the work can be resumed
    DOUBT = "doubt"  # a call may have been executed, and its reply was lost
    TAKE_OVER = "take_over"  # another owner continues the work
    SWEEP = "sweep"  # a lease is over
    EXPIRE = "expire"  # a ttl is over
    EXECUTED = "executed"  # it is certain that the call was executed
    DECLINED = "declined"  # EXECUTED or REPLACE by a final refusal of the provider; only in the audit
    STILL_UNKNOWN = "still_unknown"  # the provider was queried, and could not tell
    DLQ_RETRY = "dlq_retry"  # an operator wants a dead letter sent again
    WORKER_CLAIM = "worker_claim"  # a worker claimed the parcel
    TRY_AGAIN = "try_again"  # an attempt to deliver failed
    DEAD_LETTER = "dead_letter"  # too many attempts failed
    ABANDON = "abandon"  # the ttl ended before any worker claimed the parcel
    PURGE = "purge"  # the record is removed
    SUPERSEDE = "supersede"  # a new request uses the row of a finished one
    BUST = "bust"  # an operator removes a stored response, so that a retry runs
    REPLACE = "replace"  # an operator corrects a result that was given by hand
    EXTEND = "extend"  # an operator lets a key live longer
    DISCLOSE = "disclose"  # an operator was shown the content: the record does not move, and the audit has a line
    LOG_OUT = "log_out"  # an operator ended a console session: the audit line ends every copy of it


class Proof(StrEnum):
    """What the store compares in the statement that writes, so that a late writer changes nothing."""

    NO_ROW = "no row"  # the key has no record
    OWNER = "owner"  # incarnation and fence: the writer is still the owner
    VERSION = "version"  # incarnation and version: nothing was written since the record was read
    PARCEL = "parcel"  # the claim of the parcel: the worker still holds it
    OWNER_AND_PARCEL = "owner, parcel"


class Fence(StrEnum):
    """What a move does to the fence: a new owner and an operator's bust or replace raise it; nothing resets it (P1)."""

    FIRST = "1"
    SAME = "same"
    UP = "+1"
    GONE = "-"


@dataclass(frozen=True, slots=True)
class Transition:
    """One legal move: `trigger` takes a record from `source` to `to` if all guards of `when` hold."""

    number: int
    source: State | None
    trigger: Trigger
    to: State | None
    by: frozenset[Actor]
    proof: Proof
    fence: Fence
    when: tuple[Guard, ...]
    sets: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class MoverRows:
    """The rows of one kind of mover, and their description."""

    about: str
    rows: tuple[Transition, ...]


@dataclass(frozen=True, slots=True)
class Illegal:
    """No row allows the move; `why` tells operators what is missing."""

    why: str


Table: TypeAlias = Mapping[State | None, Mapping[Trigger, tuple[Transition, ...]]]

_NO_ROW = None
_PENDING, _IN_PROGRESS, _COMPLETED = State.PENDING, State.IN_PROGRESS, State.COMPLETED
_RETRYABLE, _UNKNOWN, _EXPIRED = State.FAILED_RETRYABLE, State.UNKNOWN, State.EXPIRED
_FINISHED = (_COMPLETED, _EXPIRED, _RETRYABLE)

# The fields of the record that a move sets, in addition to state, fence and version.
_LEASE = ("owner", "lease_until", "attempts")
_NEW = ("incarnation", "effects", "recovery", "seed", "lease_until", "deadline", "expires_at")
_ANEW = (*_NEW, "fingerprint")
_STEP = ("memo", "recovery_point", "intent", "lease_until")
_ANSWER = ("response", "outcome", "finished_at", "expires_at")


def _row(  # noqa: PLR0917  (a line of a table reads by position)
    number: int,
    sources: State | tuple[State, ...] | None,
    trigger: Trigger,
    to: State | None,
    by: tuple[Actor, ...],
    proof: Proof,
    fence: Fence,
    when: tuple[Guard, ...] = (),
    sets: tuple[str, ...] = (),
) -> tuple[Transition, ...]:
    """One line of the table: a transition from each of its sources."""
    listed = sources if isinstance(sources, tuple) else (sources,)
    return tuple(Transition(number, source, trigger, to, frozenset(by), proof, fence, when, sets) for source in listed)


def _moves(about: str, *lines: tuple[Transition, ...]) -> MoverRows:
    return MoverRows(about, tuple(row for line in lines for row in line))


_REQUESTER, _OWNER, _WORKER, _REAPER = (Actor.REQUESTER,), (Actor.OWNER,), (Actor.WORKER,), (Actor.REAPER,)
_SETTLERS, _OPERATOR = (Actor.RESOLVER, Actor.WEBHOOK, Actor.OPERATOR), (Actor.OPERATOR,)

# fmt: off
MOVERS: tuple[MoverRows, ...] = (
    _moves(
        "A requester creates a record, takes over one whose owner is gone, or reuses the row of a finished one. The completer takes over as a request does.",
        _row(1, _NO_ROW, Trigger.CLAIM, _IN_PROGRESS, _REQUESTER, Proof.NO_ROW, Fence.FIRST,
             sets=_NEW),
        _row(2, _NO_ROW, Trigger.COMMIT, _COMPLETED, _REQUESTER, Proof.NO_ROW, Fence.FIRST,
             when=(Guard.LOCAL, Guard.LOCKED), sets=(*_NEW, *_ANSWER)),
        _row(3, _NO_ROW, Trigger.DEFER, _PENDING, _REQUESTER, Proof.NO_ROW, Fence.FIRST,
             when=(Guard.OUTBOX,), sets=(*_NEW, "parcel")),
        _row(13, _IN_PROGRESS, Trigger.TAKE_OVER, _IN_PROGRESS, (Actor.REQUESTER, Actor.COMPLETER), Proof.VERSION, Fence.UP,
             when=(Guard.LEASE_OVER, Guard.RUNS_AGAIN, Guard.ATTEMPTS_LEFT), sets=_LEASE),
        _row(16, _RETRYABLE, Trigger.TAKE_OVER, _IN_PROGRESS, _REQUESTER, Proof.VERSION, Fence.UP,
             when=(Guard.WORKER_NEVER_BEGAN,), sets=(*_LEASE, "last_error")),
        _row(16, _RETRYABLE, Trigger.TAKE_OVER, _IN_PROGRESS, (Actor.COMPLETER,), Proof.VERSION, Fence.UP,
             when=(Guard.BEGUN, Guard.WORKER_NEVER_BEGAN), sets=(*_LEASE, "last_error")),
        _row(17, _RETRYABLE, Trigger.COMMIT, _COMPLETED, _REQUESTER, Proof.VERSION, Fence.UP,
             when=(Guard.LOCAL, Guard.LOCKED, Guard.PLAIN, Guard.BEFORE_EXPIRY), sets=_ANSWER),
        _row(31, _FINISHED, Trigger.SUPERSEDE, _IN_PROGRESS, _REQUESTER, Proof.VERSION, Fence.UP,
             when=(Guard.FREE,), sets=_ANEW),
        _row(31, _FINISHED, Trigger.COMMIT, _COMPLETED, _REQUESTER, Proof.VERSION, Fence.UP,
             when=(Guard.FREE, Guard.REQUEST_LOCAL, Guard.LOCKED), sets=(*_ANEW, *_ANSWER)),
        _row(31, _FINISHED, Trigger.DEFER, _PENDING, _REQUESTER, Proof.VERSION, Fence.UP,
             when=(Guard.FREE, Guard.REQUEST_OUTBOX), sets=(*_ANEW, "parcel")),
    ),
    _moves(
        "The owner runs the handler, stores its steps and settles the record. An owner that was only swept may still report what it did (6, 8).",
        _row(3, _IN_PROGRESS, Trigger.DEFER, _PENDING, _OWNER, Proof.OWNER, Fence.SAME,
             when=(Guard.OUTBOX, Guard.PLAIN), sets=("parcel",)),
        _row(4, _IN_PROGRESS, Trigger.RENEW, _IN_PROGRESS, _OWNER, Proof.OWNER, Fence.SAME,
             when=(Guard.BEFORE_DEADLINE,), sets=("lease_until",)),
        _row(5, _IN_PROGRESS, Trigger.CHECKPOINT, _IN_PROGRESS, _OWNER, Proof.OWNER, Fence.SAME,
             when=(Guard.NO_INTENT,), sets=_STEP),
        _row(5, _IN_PROGRESS, Trigger.ANNOUNCE, _IN_PROGRESS, _OWNER, Proof.OWNER, Fence.SAME,
             when=(Guard.NO_INTENT_OR_SAME_AGAIN,), sets=_STEP),
        _row(6, (_IN_PROGRESS, _RETRYABLE, _UNKNOWN), Trigger.RESULT, _IN_PROGRESS, _OWNER, Proof.OWNER, Fence.SAME,
             when=(Guard.PHASED, Guard.NO_RESULT_YET), sets=_STEP),
        _row(6, _IN_PROGRESS, Trigger.DEFERRED_RESULT, _IN_PROGRESS, _OWNER, Proof.OWNER, Fence.SAME,
             when=(Guard.OUTBOX, Guard.NO_RESULT_YET), sets=_STEP),
        _row(6, (_UNKNOWN, _PENDING), Trigger.DEFERRED_RESULT, _IN_PROGRESS, _OWNER, Proof.OWNER, Fence.SAME,
             when=(Guard.OUTBOX, Guard.NO_RESULT_YET), sets=(*_STEP, "parcel")),
        _row(7, _IN_PROGRESS, Trigger.SETTLE, _COMPLETED, _OWNER, Proof.OWNER, Fence.SAME,
             when=(Guard.NO_INTENT, Guard.CALLS_KNOWN), sets=_ANSWER),
        _row(8, (_UNKNOWN, _RETRYABLE), Trigger.SETTLE, _COMPLETED, _OWNER, Proof.OWNER, Fence.SAME,
             when=(Guard.NO_INTENT_OR_INLINE, Guard.NOT_RESUMABLE, Guard.CALLS_KNOWN), sets=(*_ANSWER, "late")),
        _row(9, _IN_PROGRESS, Trigger.DISCARD, _NO_ROW, _OWNER, Proof.OWNER, Fence.GONE,
             when=(Guard.NOT_ENTERED, Guard.PLAIN)),
        _row(10, _IN_PROGRESS, Trigger.NOT_EXECUTED, _RETRYABLE, _OWNER, Proof.OWNER, Fence.SAME,
             when=(Guard.ENTERED, Guard.NO_MEMO, Guard.NO_INTENT), sets=("last_error",)),
        _row(11, _IN_PROGRESS, Trigger.HAND_BACK, _RETRYABLE, _OWNER, Proof.OWNER, Fence.SAME,
             when=(Guard.RESUMABLE, Guard.ATTEMPTS_LEFT), sets=("lease_until", "reconcile_after")),
        _row(12, _IN_PROGRESS, Trigger.DOUBT, _UNKNOWN, _OWNER, Proof.OWNER, Fence.SAME,
             sets=("last_error", "reconcile_after")),
        _row(33, _IN_PROGRESS, Trigger.WITHDRAW, _IN_PROGRESS, _OWNER, Proof.OWNER, Fence.SAME,
             when=(Guard.PHASED, Guard.SENT_ONCE, Guard.NEVER_SENT), sets=("intent",)),
    ),
    _moves(
        "A worker delivers the parcel of a pending record. With its claim it becomes the owner; result and response follow by rows 6 and 7.",
        _row(24, (_PENDING, _IN_PROGRESS), Trigger.WORKER_CLAIM, _IN_PROGRESS, _WORKER, Proof.PARCEL, Fence.UP,
             when=(Guard.OUTBOX, Guard.PARCEL_SAFE), sets=("intent", "parcel")),
        _row(25, (_PENDING, _IN_PROGRESS), Trigger.WORKER_CLAIM, _UNKNOWN, _WORKER, Proof.PARCEL, Fence.SAME,
             when=(Guard.OUTBOX, Guard.PARCEL_UNSAFE), sets=("parcel",)),
        _row(26, _IN_PROGRESS, Trigger.TRY_AGAIN, _PENDING, _WORKER, Proof.OWNER_AND_PARCEL, Fence.SAME,
             when=(Guard.OUTBOX, Guard.PARCEL_SAFE), sets=("parcel",)),
        _row(27, _IN_PROGRESS, Trigger.DEAD_LETTER, _UNKNOWN, _WORKER, Proof.OWNER_AND_PARCEL, Fence.SAME,
             when=(Guard.OUTBOX,), sets=("parcel", "last_error")),
        _row(27, _IN_PROGRESS, Trigger.DOUBT, _UNKNOWN, _WORKER, Proof.OWNER_AND_PARCEL, Fence.SAME,
             when=(Guard.OUTBOX,), sets=("parcel", "last_error")),
    ),
    _moves(
        "The sweeper moves a record whose lease has expired. A retry that finds it first makes it unknown by the same row, and an operator may sweep by hand.",
        _row(14, _IN_PROGRESS, Trigger.SWEEP, _RETRYABLE, (Actor.SWEEPER, Actor.OPERATOR), Proof.VERSION, Fence.SAME,
             when=(Guard.LEASE_OVER, Guard.GRACE_OVER, Guard.RUNS_AGAIN, Guard.ATTEMPTS_LEFT), sets=("last_error",)),
        _row(15, _IN_PROGRESS, Trigger.SWEEP, _UNKNOWN, (Actor.SWEEPER, Actor.REQUESTER, Actor.OPERATOR), Proof.VERSION, Fence.SAME,
             when=(Guard.LEASE_OVER, Guard.RUNS_NEVER_AGAIN), sets=("last_error", "reconcile_after")),
    ),
    _moves(
        "A resolver, a webhook or an operator settles an unknown record by what the provider did.",
        _row(19, _UNKNOWN, Trigger.EXECUTED, _COMPLETED, _SETTLERS, Proof.VERSION, Fence.SAME,
             when=(Guard.INLINE_OR_OUTBOX,), sets=(*_ANSWER, "parcel")),
        _row(20, _UNKNOWN, Trigger.EXECUTED, _RETRYABLE, _SETTLERS, Proof.VERSION, Fence.SAME,
             when=(Guard.PHASED, Guard.INTENT_OPEN, Guard.RESULT_GIVEN), sets=("memo", "intent")),
        _row(21, _UNKNOWN, Trigger.NOT_EXECUTED, _RETRYABLE, _SETTLERS, Proof.VERSION, Fence.SAME,
             when=(Guard.WORKER_NEVER_BEGAN, Guard.WAITED_OR_NOTHING_OPEN), sets=("intent",)),
        _row(22, _UNKNOWN, Trigger.NOT_EXECUTED, _PENDING, _SETTLERS, Proof.VERSION, Fence.SAME,
             when=(Guard.WORKER_BEGAN, Guard.WAITED_OR_PARCEL_REPEATABLE), sets=("parcel", "intent")),
        _row(22, _UNKNOWN, Trigger.DLQ_RETRY, _PENDING, _OPERATOR, Proof.VERSION, Fence.SAME,
             when=(Guard.WORKER_BEGAN, Guard.WAITED_OR_PARCEL_REPEATABLE), sets=("parcel", "intent")),
        _row(23, _UNKNOWN, Trigger.STILL_UNKNOWN, _UNKNOWN, (Actor.RESOLVER,), Proof.VERSION, Fence.SAME,
             sets=("reconcile_after", "reconcile_tries")),
    ),
    _moves(
        "The reaper ends what is past its time. It removes only what is finished; what was begun and not finished becomes unknown.",
        _row(18, _RETRYABLE, Trigger.EXPIRE, _UNKNOWN, _REAPER, Proof.VERSION, Fence.SAME,
             when=(Guard.BEGUN, Guard.PAST_EXPIRY), sets=("reconcile_after",)),
        _row(28, _PENDING, Trigger.ABANDON, _COMPLETED, _REAPER, Proof.VERSION, Fence.SAME,
             when=(Guard.PAST_EXPIRY, Guard.PARCEL_NEVER_CLAIMED), sets=(*_ANSWER, "parcel")),
        _row(29, _COMPLETED, Trigger.EXPIRE, _EXPIRED, _REAPER, Proof.VERSION, Fence.SAME,
             when=(Guard.PAST_EXPIRY, Guard.SOFT)),
        _row(30, _FINISHED, Trigger.PURGE, _NO_ROW, _REAPER, Proof.VERSION, Fence.GONE,
             when=(Guard.FREE,)),
    ),
    _moves(
        "An operator corrects a finished record or a result, and gives a reason for the audit.",
        _row(32, _COMPLETED, Trigger.BUST, _RETRYABLE, _OPERATOR, Proof.VERSION, Fence.UP,
             when=(Guard.REASON, Guard.NOT_OUTBOX, Guard.CONFIRMED_IF_SUCCESS), sets=("response",)),
        _row(34, (_RETRYABLE, _UNKNOWN), Trigger.REPLACE, _RETRYABLE, _OPERATOR, Proof.VERSION, Fence.UP,
             when=(Guard.PHASED, Guard.NO_INTENT, Guard.SOME_MEMO, Guard.LAST_RESULT_BY_HAND, Guard.RESULT_GIVEN, Guard.REASON), sets=("memo",)),
        _row(35, _COMPLETED, Trigger.EXTEND, _COMPLETED, _OPERATOR, Proof.VERSION, Fence.SAME,
             when=(Guard.REASON, Guard.BEFORE_EXPIRY), sets=("expires_at",)),
    ),
)
# fmt: on
"""All rows, by mover."""

ROWS: tuple[Transition, ...] = tuple(row for movers in MOVERS for row in movers.rows)


def tabulate(rows: tuple[Transition, ...]) -> Table:
    """The rows indexed by state, then by trigger."""
    table: dict[State | None, dict[Trigger, tuple[Transition, ...]]] = defaultdict(dict)
    for row in rows:
        table[row.source][row.trigger] = (*table[row.source].get(row.trigger, ()), row)
    return MappingProxyType({state: MappingProxyType(moves) for state, moves in table.items()})


TRANSITIONS: Table = tabulate(ROWS)


def find_transition(trigger: Trigger, actor: Actor, facts: Facts, table: Table = TRANSITIONS) -> Transition | Illegal:
    """The one row that allows this move, or why none does. Only tests of the table pass another table."""
    source = facts.record.state if facts.record else None
    rows = table.get(source, {}).get(trigger, ())
    where = source or "no row"
    if not rows:
        return Illegal(f"{trigger} is not possible from {where}")
    mine = [row for row in rows if actor in row.by]
    if not mine:
        return Illegal(f"{trigger} from {where} is not for the {actor}")
    for row in mine:
        if all(guard.holds(facts) for guard in row.when):
            return row
    missing = ", ".join(sorted({g.name.lower() for row in mine for g in row.when if not g.holds(facts)}))
    return Illegal(f"{trigger} from {where} needs {missing}")


def upheld(row: Transition, facts: Facts) -> bool:
    """Whether a store has to accept a write by this row if its proof fits: the guards that are the store's hold."""
    source = facts.record.state if facts.record else None
    return source is row.source and all(guard.holds(facts) for guard in row.when if guard.checked_by is CheckedBy.STORE)


@dataclass(frozen=True, slots=True)
class Mover:
    """Who makes a move: the role, and the process or the person in it."""

    actor: Actor
    who: str


@dataclass(frozen=True, slots=True)
class Note:
    """One line of the audit as it is written; the store adds the instant.

    It has no key: an operator who knows a key finds its lines by the digest, which does not reveal the key.
    """

    scope: str
    key_digest: str
    incarnation: UUID
    operation: str
    fence: int
    source: State | None
    to: State | None
    trigger: Trigger
    actor: Actor
    who: str
    why: str

    @classmethod
    def of(cls, seen: Record, to: State | None, trigger: Trigger, mover: Mover, why: str) -> Note:
        """The line about a move of `seen`, with the fence before the move."""
        return cls(
            scope=seen.id.scope,
            key_digest=key_digest(seen.id.key),
            incarnation=seen.incarnation,
            operation=seen.operation,
            fence=seen.fence,
            source=seen.state,
            to=to,
            trigger=trigger,
            actor=mover.actor,
            who=mover.who,
            why=why,
        )


@dataclass(frozen=True, slots=True)
class AuditEntry:
    """One line of the audit as it is read."""

    at: Instant
    note: Note
