"""TRANSITIONS: every legal move of a record, who may make it, what it must prove, and what the audit keeps of it.

A pair of state and trigger that is missing here is illegal. Where a pair has several rows, their guards tell them apart,
and at most one holds. `None` as a state means that the record does not exist. The numbers of the rows are those of
docs/explanation/states.md; comments elsewhere cite them as "row 13".

Proofs are checked by the store in the same statement as the write: OWNER is incarnation and fence, VERSION is
incarnation and version as read, NO_ROW is the primary key, PARCEL is the parcel's own claim. Every write raises the
version by one. All guards are decided here, from a snapshot. Those that are the store's are compared once more in the
write, so a store accepts a move exactly if its proof fits and the store's guards of a row hold (`upheld`).

The audit does not keep the key itself. An operator who knows a key finds its lines by its digest, which does not reveal
the key.
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

    REQUESTER = "requester"
    OWNER = "owner"
    COMPLETER = "completer"
    SWEEPER = "sweeper"
    REAPER = "reaper"
    RESOLVER = "resolver"
    WEBHOOK = "webhook"
    OPERATOR = "operator"
    WORKER = "worker"


class Trigger(StrEnum):
    """What happened."""

    CLAIM = "claim"
    COMMIT = "commit"
    DEFER = "defer"
    RENEW = "renew"
    CHECKPOINT = "checkpoint"
    ANNOUNCE = "announce"
    RESULT = "result"
    DEFERRED_RESULT = "deferred_result"
    SETTLE = "settle"
    DISCARD = "discard"
    NOT_EXECUTED = "not_executed"
    WITHDRAW = "withdraw"
    HAND_BACK = "hand_back"
    DOUBT = "doubt"
    TAKE_OVER = "take_over"
    SWEEP = "sweep"
    EXPIRE = "expire"
    EXECUTED = "executed"
    STILL_UNKNOWN = "still_unknown"
    DLQ_RETRY = "dlq_retry"
    WORKER_CLAIM = "worker_claim"
    TRY_AGAIN = "try_again"
    DEAD_LETTER = "dead_letter"
    ABANDON = "abandon"
    PURGE = "purge"
    SUPERSEDE = "supersede"
    BUST = "bust"
    REPLACE = "replace"
    EXTEND = "extend"
    DISCLOSE = "disclose"
    """An operator was shown the record's content: the record does not move, and the audit has a line about it."""
    LOG_OUT = "log_out"
    """An operator ended a session of the console: no record moves, and the line in the audit ends every copy of it."""


class Proof(StrEnum):
    """What the store compares in the statement that writes."""

    NO_ROW = "N"
    OWNER = "O"
    VERSION = "V"
    PARCEL = "parcel"
    OWNER_AND_PARCEL = "O+parcel"


class Fence(StrEnum):
    """What a move does to the fence: a new owner and an operator's bust or replace raise it; nothing resets it (P1)."""

    FIRST = "1"
    SAME = "same"
    UP = "+1"
    GONE = "-"


@dataclass(frozen=True, slots=True)
class Transition:
    """One legal move."""

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
class Illegal:
    """No row allows the move; `why` names what is missing, for an operator to read."""

    why: str


Table: TypeAlias = Mapping[State | None, Mapping[Trigger, tuple[Transition, ...]]]

_PENDING, _RUNNING, _DONE = State.PENDING, State.IN_PROGRESS, State.COMPLETED
_FR, _UNKNOWN, _EXPIRED = State.FAILED_RETRYABLE, State.UNKNOWN, State.EXPIRED
_EXPIRABLE = (_DONE, _EXPIRED, _FR)
_SETTLERS = (Actor.RESOLVER, Actor.WEBHOOK, Actor.OPERATOR)
_LEASE = ("owner", "lease_until", "attempts")
_NEW = ("incarnation", "effects", "recovery", "seed", "lease_until", "deadline", "expires_at")
_ANEW = (*_NEW, "fingerprint")
_STEP = ("memo", "recovery_point", "intent", "lease_until")
_ANSWER = ("response", "outcome", "finished_at", "expires_at")


def _rows() -> tuple[Transition, ...]:  # noqa: PLR0915  (a table)
    g = Guard
    rows: list[Transition] = []

    def row(  # noqa: PLR0917  (a line of a table reads by position)
        number: int,
        sources: tuple[State | None, ...],
        trigger: Trigger,
        to: State | None,
        by: tuple[Actor, ...],
        proof: Proof,
        fence: Fence,
        when: tuple[Guard, ...] = (),
        sets: tuple[str, ...] = (),
    ) -> None:
        made = (Transition(number, source, trigger, to, frozenset(by), proof, fence, when, sets) for source in sources)
        rows.extend(made)

    own, req = (Actor.OWNER,), (Actor.REQUESTER,)
    o, v, n = Proof.OWNER, Proof.VERSION, Proof.NO_ROW
    same, up = Fence.SAME, Fence.UP
    t = Trigger
    # fmt: off
    row(1, (None,), t.CLAIM, _RUNNING, req, n, Fence.FIRST, (), _NEW)
    row(2, (None,), t.COMMIT, _DONE, req, n, Fence.FIRST, (g.LOCAL, g.LOCKED), (*_NEW, *_ANSWER))
    row(3, (None,), t.DEFER, _PENDING, req, n, Fence.FIRST, (g.OUTBOX,), (*_NEW, "parcel"))
    row(3, (_RUNNING,), t.DEFER, _PENDING, own, o, same, (g.OUTBOX, g.PLAIN), ("parcel",))
    row(4, (_RUNNING,), t.RENEW, _RUNNING, own, o, same, (g.BEFORE_DEADLINE,), ("lease_until",))
    row(5, (_RUNNING,), t.CHECKPOINT, _RUNNING, own, o, same, (g.NO_INTENT,), _STEP)
    row(5, (_RUNNING,), t.ANNOUNCE, _RUNNING, own, o, same, (g.NO_INTENT_OR_SAME_AGAIN,), _STEP)
    row(6, (_RUNNING, _FR, _UNKNOWN), t.RESULT, _RUNNING, own, o, same, (g.PHASED, g.NO_RESULT_YET), _STEP)
    row(6, (_RUNNING,), t.DEFERRED_RESULT, _RUNNING, own, o, same, (g.OUTBOX, g.NO_RESULT_YET), _STEP)
    row(6, (_UNKNOWN, _PENDING), t.DEFERRED_RESULT, _RUNNING, own, o, same, (g.OUTBOX, g.NO_RESULT_YET), (*_STEP, "parcel"))
    row(7, (_RUNNING,), t.SETTLE, _DONE, own, o, same, (g.NO_INTENT, g.CALLS_KNOWN), _ANSWER)
    row(8, (_UNKNOWN, _FR), t.SETTLE, _DONE, own, o, same, (g.NO_INTENT_OR_INLINE, g.NOT_RESUMABLE, g.CALLS_KNOWN), (*_ANSWER, "late"))
    row(9, (_RUNNING,), t.DISCARD, None, own, o, Fence.GONE, (g.NOT_ENTERED, g.PLAIN))
    row(10, (_RUNNING,), t.NOT_EXECUTED, _FR, own, o, same, (g.ENTERED, g.NO_MEMO, g.NO_INTENT), ("last_error",))
    row(11, (_RUNNING,), t.HAND_BACK, _FR, own, o, same, (g.RESUMABLE, g.ATTEMPTS_LEFT), ("lease_until", "reconcile_after"))
    row(12, (_RUNNING,), t.DOUBT, _UNKNOWN, own, o, same, (), ("last_error", "reconcile_after"))
    row(13, (_RUNNING,), t.TAKE_OVER, _RUNNING, (Actor.REQUESTER, Actor.COMPLETER), v, up, (g.LEASE_OVER, g.RUNS_AGAIN, g.ATTEMPTS_LEFT), _LEASE)
    row(14, (_RUNNING,), t.SWEEP, _FR, (Actor.SWEEPER, Actor.OPERATOR), v, same, (g.LEASE_OVER, g.GRACE_OVER, g.RUNS_AGAIN, g.ATTEMPTS_LEFT), ("last_error",))
    row(15, (_RUNNING,), t.SWEEP, _UNKNOWN, (Actor.SWEEPER, Actor.REQUESTER, Actor.OPERATOR), v, same, (g.LEASE_OVER, g.RUNS_NEVER_AGAIN), ("last_error", "reconcile_after"))
    row(16, (_FR,), t.TAKE_OVER, _RUNNING, req, v, up, (g.WORKER_NEVER_BEGAN,), (*_LEASE, "last_error"))
    row(16, (_FR,), t.TAKE_OVER, _RUNNING, (Actor.COMPLETER,), v, up, (g.BEGUN, g.WORKER_NEVER_BEGAN), (*_LEASE, "last_error"))
    row(17, (_FR,), t.COMMIT, _DONE, req, v, up, (g.LOCAL, g.LOCKED, g.PLAIN, g.BEFORE_EXPIRY), _ANSWER)
    row(18, (_FR,), t.EXPIRE, _UNKNOWN, (Actor.REAPER,), v, same, (g.BEGUN, g.PAST_EXPIRY), ("reconcile_after",))
    row(19, (_UNKNOWN,), t.EXECUTED, _DONE, _SETTLERS, v, same, (g.INLINE_OR_OUTBOX,), (*_ANSWER, "parcel"))
    row(20, (_UNKNOWN,), t.EXECUTED, _FR, _SETTLERS, v, same, (g.PHASED, g.INTENT_OPEN, g.RESULT_GIVEN), ("memo", "intent"))
    row(21, (_UNKNOWN,), t.NOT_EXECUTED, _FR, _SETTLERS, v, same, (g.WORKER_NEVER_BEGAN, g.WAITED_OR_NOTHING_OPEN), ("intent",))
    row(22, (_UNKNOWN,), t.NOT_EXECUTED, _PENDING, _SETTLERS, v, same, (g.WORKER_BEGAN, g.WAITED_OR_PARCEL_REPEATABLE), ("parcel", "intent"))
    row(22, (_UNKNOWN,), t.DLQ_RETRY, _PENDING, (Actor.OPERATOR,), v, same, (g.WORKER_BEGAN, g.WAITED_OR_PARCEL_REPEATABLE), ("parcel", "intent"))
    row(23, (_UNKNOWN,), t.STILL_UNKNOWN, _UNKNOWN, (Actor.RESOLVER,), v, same, (), ("reconcile_after", "reconcile_tries"))
    row(24, (_PENDING, _RUNNING), t.WORKER_CLAIM, _RUNNING, (Actor.WORKER,), Proof.PARCEL, up, (g.OUTBOX, g.PARCEL_SAFE), ("intent", "parcel"))
    row(25, (_PENDING, _RUNNING), t.WORKER_CLAIM, _UNKNOWN, (Actor.WORKER,), Proof.PARCEL, same, (g.OUTBOX, g.PARCEL_UNSAFE), ("parcel",))
    row(26, (_RUNNING,), t.TRY_AGAIN, _PENDING, (Actor.WORKER,), Proof.OWNER_AND_PARCEL, same, (g.OUTBOX, g.PARCEL_SAFE), ("parcel",))
    for doubt in (t.DEAD_LETTER, t.DOUBT):
        row(27, (_RUNNING,), doubt, _UNKNOWN, (Actor.WORKER,), Proof.OWNER_AND_PARCEL, same, (g.OUTBOX,), ("parcel", "last_error"))
    row(28, (_PENDING,), t.ABANDON, _DONE, (Actor.REAPER,), v, same, (g.PAST_EXPIRY, g.PARCEL_NEVER_CLAIMED), (*_ANSWER, "parcel"))
    row(29, (_DONE,), t.EXPIRE, _EXPIRED, (Actor.REAPER,), v, same, (g.PAST_EXPIRY, g.SOFT))
    row(30, _EXPIRABLE, t.PURGE, None, (Actor.REAPER,), v, Fence.GONE, (g.FREE,))
    row(31, _EXPIRABLE, t.SUPERSEDE, _RUNNING, req, v, up, (g.FREE,), _ANEW)
    row(31, _EXPIRABLE, t.COMMIT, _DONE, req, v, up, (g.FREE, g.REQUEST_LOCAL, g.LOCKED), (*_ANEW, *_ANSWER))
    row(31, _EXPIRABLE, t.DEFER, _PENDING, req, v, up, (g.FREE, g.REQUEST_OUTBOX), (*_ANEW, "parcel"))
    row(32, (_DONE,), t.BUST, _FR, (Actor.OPERATOR,), v, up, (g.REASON, g.NOT_OUTBOX, g.CONFIRMED_IF_SUCCESS), ("response",))
    row(33, (_RUNNING,), t.WITHDRAW, _RUNNING, own, o, same, (g.PHASED, g.SENT_ONCE, g.NEVER_SENT), ("intent",))
    row(34, (_FR, _UNKNOWN), t.REPLACE, _FR, (Actor.OPERATOR,), v, up, (g.PHASED, g.NO_INTENT, g.SOME_MEMO, g.LAST_RESULT_BY_HAND, g.RESULT_GIVEN, g.REASON), ("memo",))
    row(35, (_DONE,), t.EXTEND, _DONE, (Actor.OPERATOR,), v, same, (g.REASON, g.BEFORE_EXPIRY), ("expires_at",))
    # fmt: on
    return tuple(rows)


ROWS: tuple[Transition, ...] = _rows()


def tabulate(rows: tuple[Transition, ...]) -> Table:
    """The rows indexed by state, then by trigger."""
    table: dict[State | None, dict[Trigger, tuple[Transition, ...]]] = defaultdict(dict)
    for row in rows:
        table[row.source][row.trigger] = (*table[row.source].get(row.trigger, ()), row)
    return MappingProxyType({state: MappingProxyType(moves) for state, moves in table.items()})


TRANSITIONS: Table = tabulate(ROWS)


def find_transition(trigger: Trigger, actor: Actor, facts: Facts, table: Table = TRANSITIONS) -> Transition | Illegal:
    """The one row that allows this move, or why none does. Only a test of the table gives another table."""
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
    """Who makes a move: the part it plays, and the process or the person that plays it."""

    actor: Actor
    who: str


@dataclass(frozen=True, slots=True)
class Note:
    """One line of the audit as it is written; the store adds the instant."""

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
        """The line about a move of `seen`; its fence is the one it had."""
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
