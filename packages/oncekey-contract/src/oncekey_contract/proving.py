"""Every move compares the values that its caller has read, and reads and writes only its own record.

For each move some records are planted on which the table allows it. Each has neighbours in another scope and under
another key: two that are otherwise equal, and some with another memo or open call. The caller then passes another
version, fence, incarnation or memo than the record has, as if another writer had come between its read and its write:
the store must refuse. It must also refuse the move on a neighbour that does not allow it. With the right values the
store must write the record, and neither change its neighbours nor copy anything from them. A move must not leave rows
without a record (`World.leftovers`).
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from oncekey.core import model
from oncekey.core.transitions import Proof
from oncekey.testing.claims import a_claim
from oncekey_contract.walking import MOVES, Walked, cell_of, facts_of, records

if TYPE_CHECKING:
    from oncekey.core.flow import Flow
    from oncekey_contract.world import World

_FEW: Final = 5
"""How many records are tried for each state in which a move starts."""
STEPS: Final = frozenset({"checkpoint", "announce", "result"})
"""Moves that compare the memo, because a resolver may have extended it."""
_ONE_COMMIT: Final = "finish what failed"
"""This move keeps nothing of earlier attempts: it is only for records without finished steps."""
DONE: Final = (model.MemoEntry("stranger", model.EntryKind.PHASE, "9"),)
_OTHER: Final = (model.MemoEntry("another", model.EntryKind.PHASE, "8"),)


class Proving:
    """No move is written with less proof than the table requires, or to another record."""

    def test_every_move_compares_the_values_that_were_read(self, world: World) -> None:
        """Version, fence, incarnation and memo: each is wrong in turn (P1, F1)."""
        kinds = tuple(records(world.clock.now))
        wrong = [line for move in MOVES for line in unproved(world, move, kinds)]
        assert not wrong, "\n".join(wrong)

    def test_every_move_leaves_no_orphaned_rows(self, world: World) -> None:
        """Rows that belong to a record are deleted or changed with it."""
        kinds = tuple(records(world.clock.now))
        wrong = [line for move in MOVES for line in left_behind(world, move, kinds)]
        assert not wrong, "\n".join(wrong)


def unproved(world: World, move: Walked, kinds: Sequence[model.Record]) -> list[str]:
    """The errors of the store for this move: it wrote although it must not, or did not although it must."""
    wrong: list[str] = []
    tries: list[tuple[Flow[bool], Sequence[dict[str, object]]]] = []
    planted: list[model.Record] = []
    now = world.clock.now

    def attempt(seen: model.Record, what: str, record: model.Record) -> None:
        flow = move.tried(world.store, seen)
        if flow is not None:
            tries.append((_expect_refused(flow, f"{move.name} is written {what}", record, wrong), (cell_of(record),)))

    for record in chosen(move, kinds, now):
        flow = move.tried(world.store, record)
        if flow is None:
            break
        strangers = tuple(_different_neighbours(record, now))
        others = _equal_neighbours(record)
        planted += (*strangers[:2], *others, record, *strangers[2:])
        for seen, what in _stale_reads(move, record, strangers):
            attempt(seen, f"with another {what}", record)
        for stranger in strangers:
            if not move.expected(stranger, now):
                attempt(stranger, "as another record allows it", stranger)
        tries.append(
            (_expect_written_alone(world, flow, move, record, wrong), [cell_of(one) for one in (record, *others)])
        )
    world.plant([cell_of(one) for one in planted])
    world.undone(tries)
    return wrong


def chosen(move: Walked, kinds: Sequence[model.Record], now: model.Instant) -> Iterator[model.Record]:
    """Some records of each state on which the table allows the move, as varied as possible, under new keys."""
    fits = [record for record in kinds if move.expected(record, now)]
    for source in {row.source for row in move.rows}:
        near = [record for record in fits if record.state is source]
        for at, record in enumerate(near[:: max(1, len(near) // _FEW)]):
            yield replace(record, id=a_claim().id, incarnation=uuid.uuid4(), reconcile_tries=at % 2)


def _stale_reads(
    move: Walked, record: model.Record, strangers: Sequence[model.Record]
) -> Iterator[tuple[model.Record, str]]:
    """The record as read by a caller before another writer changed it."""
    for incarnation in (uuid.uuid4(), *(one.incarnation for one in strangers)):
        yield replace(record, incarnation=incarnation), "incarnation"
    if by_owner(move):
        yield replace(record, fence=record.fence - 1), "fence"
        yield replace(record, fence=record.fence + 1), "fence"
    else:
        yield replace(record, version=record.version - 1), "version"
        yield replace(record, version=record.version + 1), "version"
    if move.name in STEPS:
        yield replace(record, memo=() if record.memo else _OTHER), "memo"


def by_owner(move: Walked) -> bool:
    """Whether the move proves the fence; otherwise it proves the version that was read."""
    return {row.proof for row in move.rows} <= {Proof.OWNER, Proof.OWNER_AND_PARCEL}


def _equal_neighbours(record: model.Record) -> tuple[model.Record, model.Record]:
    """The same record in another scope, and under another key."""
    scope, key = record.id.scope, record.id.key
    return (
        replace(record, id=model.RecordId(f"{scope}-other", key)),
        replace(record, id=model.RecordId(scope, f"{key}-other")),
    )


def _different_neighbours(record: model.Record, now: model.Instant) -> Iterator[model.Record]:
    """Records with other finished steps, each once in another scope and once under another key."""
    call = model.Intent("charge", "oncekey-7", "d1", 1, now - model.SECOND, now, None)
    done = replace(record, memo=() if record.memo else DONE)
    called = replace(record, intent=None if record.intent else call)
    for at, kind in enumerate((done, called, replace(called, memo=done.memo))):
        if kind.state is model.State.COMPLETED and kind.intent is not None:
            continue  # stores may refuse such a row, and no move leads to one
        where = (f"{record.id.scope}-{at}", record.id.key), (record.id.scope, f"{record.id.key}-{at}")
        yield from (replace(kind, id=model.RecordId(*one), incarnation=uuid.uuid4()) for one in where)


def _expect_refused(flow: Flow[bool], what: str, record: model.Record, wrong: list[str]) -> Flow[bool]:
    written = yield from flow
    if written:
        wrong.append(f"{what}: {facts_of(record)}")
    return written


def _expect_written_alone(
    world: World, flow: Flow[bool], move: Walked, record: model.Record, wrong: list[str]
) -> Flow[bool]:
    written = yield from flow
    if not written:
        wrong.append(f"{move.name} is refused: {facts_of(record)}")
    moved = (yield from world.store.find(record.id)).record
    if moved is not None and moved.incarnation == record.incarnation:
        if moved.reconcile_tries < record.reconcile_tries and move.name != _ONE_COMMIT:
            wrong.append(f"{move.name} resets the number of resolver tries: {facts_of(record)}")
        if not record.memo and set(moved.memo) & set(DONE):
            wrong.append(f"{move.name} takes the memo of another record: {facts_of(record)}")
    for other in _equal_neighbours(record):
        there = (yield from world.store.find(other.id)).record
        if there is None or there.version != other.version:
            wrong.append(f"{move.name} of {record.id} writes {other.id}, too")
    return True


def left_behind(world: World, move: Walked, kinds: Sequence[model.Record]) -> list[str]:
    """The rules that rows break after this move and did not break before, with an example for each."""
    wrong: list[str] = []
    planted = [record for record in chosen(move, kinds, world.clock.now) if move.tried(world.store, record)]
    world.plant([cell_of(record) for record in planted])

    before = world.go(world.leftovers())

    def watched(record: model.Record) -> Flow[bool]:
        nonlocal before
        flow = move.tried(world.store, record)
        assert flow is not None
        yield from flow
        after = yield from world.leftovers()
        new = [name for name, rows in after.items() if rows > before.get(name, 0)]
        before = after
        wrong.extend(f"{move.name} leaves what breaks {name}: {facts_of(record)}" for name in new)
        return True

    world.undone([(watched(record), (cell_of(record),)) for record in planted])
    return wrong
