"""Compares a store with TRANSITIONS: a walk over every row and every combination of facts that its guards read.

The walk plants each record directly, because reaching it by requests would take too long, and tries each move on it.
The store has to accept the move exactly if the store's guards of one of its rows hold; guards that the caller checks
are taken as checked. So a store that checks less than the table, or more, fails here with the record in question. If a
store shares transactions, all tries of a move are made in one that is rolled back.

Effects, recovery, memo and open call are combined in every way. No guard reads two times of a record, so only one of
lease, deadline and expiry is in the past at a time. For states in which no row of a move starts, every thirteenth
record is tried, because only the state matters there. The world must have no other records.
"""

from __future__ import annotations

import json
import uuid
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import product
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from oncekey.cells import Cells, Seen
from oncekey.core import model
from oncekey.core.errors import StoreUnavailableError
from oncekey.core.flow import Body, Flow, Mode, Transaction, Value
from oncekey.core.guards import Facts
from oncekey.core.onecommit import WriteKind, WriteTarget
from oncekey.core.operate import Move as Operators
from oncekey.core.transitions import ROWS, Actor, Mover, Note, Transition, Trigger, upheld
from oncekey.core.upkeep import Expired, Gone
from oncekey.stores.rows import COLUMNS, memo_text, owner_proof, response_params, version_proof
from oncekey.stores.statements import Statements, execute
from oncekey.testing.claims import LEASE, a_claim, again, answered

if TYPE_CHECKING:
    from oncekey.ports.store import Store
    from oncekey_contract.world import Plant, World

Try: TypeAlias = "Callable[[Store, model.Record], Flow[bool] | None]"
"""Tries a move, and returns whether the store wrote it; None: this store has no such move."""

UNWALKED: Final[Mapping[int, str]] = MappingProxyType({})
"""Rows that the walk omits, with the reason. The list may only become shorter."""

EXCEPTIONS: Final[Mapping[str, str]] = MappingProxyType({})
"""Moves of the shipped stores that accept more or less than the table, with the reason. It may only become shorter."""

_MEMO = (model.MemoEntry("order", model.EntryKind.PHASE, "7"),)
_CHARGE = model.MemoEntry("charge", model.EntryKind.CALL, '"ch_1"')
_NEW = "walked"
_STRIDE: Final = 13
_RECOVERIES: Final = (model.Recovery.RETRY, model.Recovery.RESUME, model.Recovery.UNKNOWN)


def records(now: model.Instant) -> Iterator[model.Record]:
    """One record for every combination of facts that a guard reads, when the store's clock is at `now`."""
    intents = (
        None,
        _intent(now, None),
        _intent(now, now + 1),
        _intent(now, now),
        _intent(now, now + 1, sends=2),
    )
    for state in model.State:
        facts = product(model.Effects, _RECOVERIES, ((), _MEMO), intents, _clocks(state, now))
        for effects, recovery, memo, intent, (lease, deadline, expires_at) in facts:
            if state is model.State.COMPLETED and intent is not None:
                continue  # stores may refuse such a row, and no move leads to one
            yield _record(
                state,
                effects=effects,
                recovery=recovery,
                memo=memo,
                intent=intent,
                lease_until=lease,
                deadline=deadline,
                expires_at=expires_at,
            )


def _clocks(
    state: model.State, now: model.Instant
) -> tuple[tuple[model.Instant | None, model.Instant, model.Instant], ...]:
    """Lease, deadline and expiry; only a record in progress has a lease."""
    over, left = now, now + 1
    if state is model.State.IN_PROGRESS:
        return (over, left, left), (left, over, left), (left, left, over)
    return (None, left, over), (None, left, left)


def planting(cells: Cells) -> Plant:
    """A function that plants records in a store of cells, by unconditional swaps."""

    def plant(planted: Sequence[Mapping[str, Any]]) -> None:
        for cell in planted:
            there, _ = cells.look(cell["scope"], cell["key"])
            seen = None if there is None else Seen(there["incarnation"], there["version"])
            assert cells.swap(cell["scope"], cell["key"], seen, cell, None)

    return plant


def cell_of(record: model.Record) -> dict[str, Any]:
    """A record as the columns of its row, for a store to plant it."""
    answer: dict[str, Any] = {} if record.response is None else {**response_params(record.response, record, None)}
    plain = {name: getattr(record, name) for name in COLUMNS if hasattr(record, name)}
    return {
        **dict.fromkeys(COLUMNS),
        **plain,
        **answer,
        "scope": record.id.scope,
        "key": record.id.key,
        "incarnation": str(record.incarnation),
        "effects": record.effects.value,
        "recovery": record.recovery.value,
        "state": record.state.value,
        "outcome": None if record.outcome is None else record.outcome.value,
        "memo": memo_text(record.memo, record, None),
        "intent": None if record.intent is None else json.dumps(asdict(record.intent)),
    }


@dataclass(frozen=True, slots=True)
class Walked:
    """One move of a store, and its rows in the table."""

    name: str
    rows: tuple[Transition, ...]
    tried: Try
    effects: model.Effects = model.Effects.LOCAL
    """The effects of the request that makes the move, if the move starts a new incarnation."""

    def expected(self, record: model.Record, now: model.Instant) -> bool:
        """Whether the table requires the store to accept it."""
        facts = Facts(record, now, effects=self.effects, phase="charge")
        return any(upheld(row, facts) for row in self.rows)

    def meant(self, planted: Sequence[model.Record]) -> list[model.Record]:
        """All records of the states in which its rows start, and some of the others."""
        sources = {row.source for row in self.rows}
        near = [record for record in planted if record.state in sources]
        return near + [record for record in planted if record.state not in sources][::_STRIDE]


def _rows(*numbers: int, trigger: Trigger | None = None, to: model.State | None = None) -> tuple[Transition, ...]:
    chosen = (row for row in ROWS if row.number in numbers and trigger in (None, row.trigger))
    return tuple(row for row in chosen if to in (None, row.to))


def _record(state: model.State, **facts: Any) -> model.Record:  # noqa: ANN401  (fields of a record)
    done = state in {model.State.COMPLETED, model.State.EXPIRED}
    claim = a_claim()
    return model.Record(
        id=claim.id,
        incarnation=claim.incarnation,
        operation=claim.operation,
        method=claim.method,
        path=claim.path,
        fingerprint=claim.fingerprint,
        seed=claim.seed,
        state=state,
        outcome=model.Outcome.SUCCESS if done else None,
        entered=True,
        fence=3,
        version=7,
        owner="planted" if state is model.State.IN_PROGRESS else None,
        call_timeout=claim.call_timeout,
        ttl=claim.ttl,
        attempts=1,
        recovery_point="started",
        response=answered(b"planted").response if done else None,
        last_error="planted" if state is model.State.UNKNOWN else None,
        reconcile_after=None,
        reconcile_tries=0,
        created_at=1,
        last_run_at=1,
        finished_at=2 if done else None,
        **facts,
    )


def _intent(now: model.Instant, until: model.Instant | None, *, sends: int = 1) -> model.Intent:
    return model.Intent("charge", "oncekey-7", "d1", sends, now - model.SECOND, now, until)


def _written(snapshot: model.Snapshot | None, seen: model.Record) -> bool:
    """Whether the store wrote: if it only read, the version has not changed."""
    there = None if snapshot is None else snapshot.record
    return there is not None and there.version == seen.version + 1


def _claim_of(seen: model.Record, effects: model.Effects = model.Effects.LOCAL) -> model.Claim:
    return again(a_claim(id=seen.id, effects=effects))


def _claiming(store: Store, seen: model.Record) -> Flow[bool]:
    claim = _claim_of(seen)
    snapshot = yield from store.claim(claim)
    return snapshot.record is None or snapshot.record.incarnation == claim.incarnation


def _swapping(name: str) -> Try:
    def tried(store: Store, seen: model.Record) -> Flow[bool]:
        swap = getattr(store, name)
        snapshot = yield from (swap(seen, _NEW) if name == "mark_unknown" else swap(_claim_of(seen), seen))
        return _written(snapshot, seen)

    return tried


def _renewing(store: Store, seen: model.Record) -> Flow[bool]:
    return (yield from store.renew(model.Lease.of(seen), LEASE)) is not None


def _settling(made: Callable[[model.Record], model.Settlement]) -> Try:
    def tried(store: Store, seen: model.Record) -> Flow[bool]:
        def body() -> Body[bool]:
            # A refused settlement reads the record and is repeated; its first statement is enough.
            steps = store.settling(replace(model.Lease.of(seen), alone=False), made(seen))
            rows = yield next(steps)
            steps.close()
            return bool(rows)

        return execute(Transaction("settle", Mode.ATOMIC, body))

    return tried


def _deferring(store: Store, seen: model.Record) -> Flow[bool] | None:
    return None if store.outbox is None else _settling(lambda one: model.Deferred(_parcel(one)))(store, seen)


def _parcel(seen: model.Record) -> model.Parcel:
    return model.Parcel(uuid.uuid4(), model.ParcelKind.DEFER, seen.id, seen.incarnation, "walk", "{}", "oncekey-7")


def _checkpointing(store: Store, seen: model.Record) -> Flow[bool]:
    def body() -> Body[bool]:
        memo = (*seen.memo, replace(_MEMO[0], name=_NEW))
        return _written((yield from store.phases.checkpointing(model.Lease.of(seen), seen.memo, memo, LEASE)), seen)

    return execute(Transaction("checkpoint", Mode.ATOMIC, body))


def _announcing(store: Store, seen: model.Record) -> Flow[bool]:
    sends = 1 if seen.intent is None else seen.intent.sends + 1
    call = model.Announcement("charge", "oncekey-7", "d1", sends, model.SECOND, model.SECOND, model.SECOND)
    return _written((yield from store.phases.announce(model.Lease.of(seen), seen.memo, seen.memo, call)), seen)


def _reporting(store: Store, seen: model.Record) -> Flow[bool]:
    memo = (*seen.memo, _CHARGE)
    return _written((yield from store.phases.result(model.Lease.of(seen), seen.memo, memo, LEASE)), seen)


def _withdrawing(store: Store, seen: model.Record) -> Flow[bool]:
    return _written((yield from store.phases.withdraw(model.Lease.of(seen))), seen)


def _sweeping(to: model.State) -> Try:
    return lambda store, seen: None if store.upkeep is None else store.upkeep.sweep(seen, to, _NEW)


def _asking_later(store: Store, seen: model.Record) -> Flow[bool] | None:
    return None if store.reconcile is None else store.reconcile.later(seen, model.SECOND)


def _stating(name: str, params: dict[str, Any], proof: Callable[[model.Record], dict[str, Any]]) -> Try:
    """A move of a record with its parcel, by its statement only: the caller checks the parcel."""

    def tried(store: Store, seen: model.Record) -> Flow[bool] | None:
        statements = getattr(store, "_statements", None)
        if not isinstance(statements, Statements) or not statements.has(name):
            return None

        def body() -> Body[bool]:
            return bool((yield statements.statement(name, {**params, **proof(seen)})))

        return execute(Transaction(name, Mode.ATOMIC, body))

    return tried


_CALL: Final = {
    "owner": _NEW,
    "phase": "charge",
    "downstream_key": "oncekey-7",
    "digest": "d1",
    "sends": 1,
    "repeatable": model.SECOND,
    "send_window": model.SECOND,
}
_TIMED_OUT: Final = {"outcome": model.Outcome.FAILURE.value, "kept": model.SECOND}


def _timing_out(seen: model.Record) -> dict[str, Value]:
    return {**version_proof(seen), **response_params(answered().response, seen, None)}


def _operating(number: int) -> Try:
    row = next(row for row in ROWS if row.number == number)

    def tried(store: Store, seen: model.Record) -> Flow[bool]:
        assert store.operate is not None
        replaced = number == 34  # noqa: PLR2004  (the row)
        memo = (*seen.memo[:-1], _CHARGE) if replaced else (*seen.memo, _CHARGE)
        move = Operators(row, seen, answer=answered(), memo=memo, last_error=_NEW, expires_at=seen.expires_at + 1)
        note = Note.of(seen, row.to, row.trigger, Mover(Actor.OPERATOR, _NEW), _NEW)
        try:
            yield from store.operate.move(seen.id, lambda _snapshot, _parcels: move, lambda _: note)
        except StoreUnavailableError:  # the locked rows do not match
            return False
        return True

    return lambda store, seen: None if store.operate is None else tried(store, seen)


def _finishing(kind: WriteKind, effects: model.Effects) -> Try:
    def tried(store: Store, seen: model.Record) -> Flow[bool] | None:
        locks = store.locks
        if locks is None:
            return None
        claim, target = _claim_of(seen, effects), WriteTarget(kind, None if kind is WriteKind.NEW else seen)
        settlement = answered() if effects is model.Effects.LOCAL else model.Deferred(_parcel(seen))

        def body() -> Body[bool]:
            return (yield from locks.completing(claim, target, settlement, None)) is not None

        return execute(Transaction("complete", Mode.ATOMIC, body))

    return tried


MOVES: Final = (
    Walked("claim", _rows(1), _claiming),
    Walked("take_over", _rows(13, 16), _swapping("take_over")),
    Walked("supersede", _rows(31, trigger=Trigger.SUPERSEDE), _swapping("supersede")),
    Walked("mark_unknown", _rows(15), _swapping("mark_unknown")),
    Walked("renew", _rows(4), _renewing),
    Walked("settle as completed", _rows(7, 8), _settling(lambda _: answered(b"walked"))),
    Walked("settle as retryable", _rows(10), _settling(lambda _: model.Retryable(_NEW))),
    Walked("settle as unknown", _rows(12), _settling(lambda _: model.Doubtful(_NEW))),
    Walked("settle as handed back", _rows(11), _settling(lambda _: model.HandedBack(_NEW))),
    Walked("settle as deferred", tuple(row for row in _rows(3) if row.source is not None), _deferring),
    Walked("discard", _rows(9), _settling(lambda _: model.Discarded())),
    Walked("checkpoint", _rows(5, trigger=Trigger.CHECKPOINT), _checkpointing),
    Walked("announce", _rows(5, trigger=Trigger.ANNOUNCE), _announcing),
    Walked("result", _rows(6, trigger=Trigger.RESULT), _reporting),
    Walked("withdraw", _rows(33), _withdrawing),
    Walked("sweep to retryable", _rows(14), _sweeping(model.State.FAILED_RETRYABLE)),
    Walked("sweep to unknown", _rows(15, 18), _sweeping(model.State.UNKNOWN)),
    Walked("ask later", _rows(23), _asking_later),
    Walked("take up a parcel", _rows(24), _stating("take_up", _CALL, version_proof)),
    Walked("park with a parcel", _rows(25, 27), _stating("park_record", {"last_error": _NEW}, version_proof)),
    Walked(
        "try the call again",
        _rows(26),
        _stating("pend", {"error": _NEW, "unsent": False}, lambda seen: owner_proof(model.Lease.of(seen))),
    ),
    Walked(
        "abandon",
        _rows(28),
        _stating(
            "abandon",
            _TIMED_OUT,
            _timing_out,
        ),
    ),
    Walked("answer by hand", _rows(19), _operating(19)),
    Walked("result by hand", _rows(20), _operating(20)),
    Walked("not executed", _rows(21), _operating(21)),
    Walked("try the parcel again", _rows(22), _operating(22)),
    Walked("bust", _rows(32), _operating(32)),
    Walked("replace a result", _rows(34), _operating(34)),
    Walked("extend", _rows(35), _operating(35)),
    Walked("finish a new key", _rows(2), _finishing(WriteKind.NEW, model.Effects.LOCAL)),
    Walked("finish what failed", _rows(17), _finishing(WriteKind.RETRYABLE, model.Effects.LOCAL)),
    Walked(
        "finish expired", _rows(31, trigger=Trigger.COMMIT), _finishing(WriteKind.REPLACE_EXPIRED, model.Effects.LOCAL)
    ),
    Walked(
        "defer expired",
        _rows(31, trigger=Trigger.DEFER),
        _finishing(WriteKind.REPLACE_EXPIRED, model.Effects.OUTBOX),
        effects=model.Effects.OUTBOX,
    ),
)

_BATCHES: Final = (
    ("purge", _rows(30), frozenset({model.State.COMPLETED, model.State.FAILED_RETRYABLE})),
    ("purge_kept", _rows(30), frozenset({model.State.EXPIRED})),
    ("mark", _rows(29), frozenset({model.State.COMPLETED})),
)
"""Moves of many records in one statement, and the states that they select."""


class Accepting:
    """The store accepts a move exactly if the guards that are the store's hold."""

    def test_every_move_follows_the_transition_table(self, world: World) -> None:
        """Every row of the table, with every combination of facts (P1, P2)."""
        planted = tuple(records(world.clock.now))
        world.plant([cell_of(record) for record in planted])
        wrong = [line for move in MOVES if move.name not in EXCEPTIONS for line in misjudged(world, move, planted)]
        assert not wrong, "\n".join(wrong)

    def test_every_batch_move_follows_the_transition_table(self, world: World) -> None:
        """Finished, expired records are removed without being read, by the same guards (29, 30)."""
        upkeep = world.store.upkeep
        if upkeep is None:
            return
        now = world.clock.now
        planted = tuple(records(now))
        cells = [cell_of(record) for record in planted]
        world.plant(cells)
        for name, rows, states in _BATCHES:
            expected = [
                record
                for record in planted
                if record.state in states and any(upheld(row, Facts(record, now)) for row in rows)
            ]

            def body(name: str = name, expected: Sequence[model.Record] = expected) -> Flow[tuple[int, list[str]]]:
                gone: Gone = yield from getattr(upkeep, name)(Expired(age=0, until=now), len(planted))
                left = []
                for record in expected:
                    there = (yield from world.store.find(record.id)).record
                    if there is not None and there.version == record.version:
                        left.append(facts_of(record))
                return gone.moved, left

            ((moved, left),) = world.undone([(body(), cells)])
            assert (moved, left) == (len(expected), []), name


def misjudged(world: World, move: Walked, planted: Sequence[model.Record]) -> list[str]:
    """Where the store accepts this move and the table does not, or vice versa: a line for each, with an example."""
    now = world.clock.now
    wrong: Counter[str] = Counter()
    example: dict[str, model.Record] = {}
    meant = move.meant(planted)
    tries = [(flow, (cell_of(record),)) for record in meant if (flow := move.tried(world.store, record))]
    if not tries:
        return []
    for record, written in zip(meant, world.undone(tries), strict=True):
        if written != move.expected(record, now):
            case = f"{move.name} is {'written' if written else 'refused'}"
            wrong[case] += 1
            example.setdefault(case, record)
    return [f"{case} {wrong[case]} times, as for {facts_of(record)}" for case, record in example.items()]


def facts_of(record: model.Record) -> str:
    """The facts that guards read, in words for the author of a store."""
    seen = ("state", "effects", "recovery", "memo", "intent", "lease_until", "deadline", "expires_at")
    return ", ".join(f"{name}={getattr(record, name)}" for name in seen)


def walked_rows() -> frozenset[int]:
    """The numbers of the rows that the walk covers."""
    return frozenset({row.number for move in MOVES for row in move.rows} | {29, 30})
