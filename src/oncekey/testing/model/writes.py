"""What a write does to everybody: `written` is the only way a record changes.

It moves the version and the fence as the row says: who looked before must look again, and who is not the owner
any more finds its fence overtaken.
"""

from __future__ import annotations

from oncekey.core.model import Effects, State
from oncekey.core.transitions import Fence, Row, Trigger
from oncekey.testing.model import books as ledger
from oncekey.testing.model.law import Trial
from oncekey.testing.model.sets import NOTHING, Said, after
from oncekey.testing.model.world import At, Book, Books, Breach, Item, Move, Proc, Rec, World

_NEW_OWNER = frozenset(
    {
        Trigger.CLAIM,
        Trigger.COMMIT,
        Trigger.TAKE_OVER,
        Trigger.SUPERSEDE,
        Trigger.WORKER_CLAIM,
        Trigger.BUST,
        Trigger.REPLACE,
    }
)


def written(
    trial: Trial,
    world: World,
    label: str,
    row: Row,
    said: Said = NOTHING,
    *,
    actor: Proc | None = None,
    becomes: Proc | None = None,
    new: Rec | None = None,
    client: bool = False,
) -> Move:
    """The move that this write is: by `actor`, who then is what `becomes` says; `new` is a new incarnation."""
    label = f"{label} (row {row.number})"
    trial.used.add(trial.places[id(row)])
    try:
        rec, item = _left(trial, world, row, said, new)
        books = _booked(trial, world, row, rec, actor)
    except Breach as breach:
        breach.step = label
        raise
    carried = 0
    if world.rec is not None and row.trigger is Trigger.DISCARD:
        carried = ledger.book_of(books, world.rec.incarnation).effects
    procs = _others(trial, world, row, actor, gone=rec is None or new is not None)
    moved = World(
        rec=rec,
        item=item,
        ledger=world.ledger,
        closed=world.closed,
        flight=world.flight,
        procs=procs if becomes is None else (*procs, becomes),
        query=None if trial.law.version_moves else world.query,
        books=books,
        carried=carried,
    )
    return Move(label, canonical(moved), client=client)


def put(world: World, proc: Proc, becomes: Proc | None) -> World:
    """Somebody goes on, or goes away, without writing anything."""
    rest = _without(world.procs, proc)
    return canonical(world._replace(procs=rest if becomes is None else (*rest, becomes)))


def canonical(world: World) -> World:
    """One form for worlds that differ only in names, or in what can never matter again."""
    procs, books = world.procs, world.books
    if len(procs) > 1:
        procs = tuple(sorted(procs))
    if world.rec is None or len(books) > 1:
        needed = {proc.incarnation for proc in procs}
        needed.update(parcel.incarnation for parcel in world.flight)
        if world.rec is not None:
            needed.add(world.rec.incarnation)
        books = tuple(book if number in needed else None for number, book in enumerate(books, 1))
    if procs is world.procs and books is world.books:
        return world
    return world._replace(procs=procs, books=books)


def _without(procs: tuple[Proc, ...], proc: Proc) -> tuple[Proc, ...]:
    index = procs.index(proc)
    return procs[:index] + procs[index + 1 :]


def _left(trial: Trial, world: World, row: Row, said: Said, new: Rec | None) -> tuple[Rec | None, Item | None]:
    """The record and the item that the write leaves."""
    if new is not None:
        return new, Item() if row.to is State.PENDING else None
    if world.rec is None:
        return None, None
    return after(trial, world.rec, world.item, row, said)


def _booked(trial: Trial, world: World, row: Row, rec: Rec | None, actor: Proc | None) -> Books:
    """The books after the write, if it broke no promise."""
    old, books = world.rec, world.books
    ledger.keep_promise(world, row, rec)
    if rec is None:
        return books
    if rec.incarnation > len(books):
        books = (*books, Book(effects=world.carried))
    if old is not None and row.trigger is Trigger.BUST:
        books = ledger.take_back(books, old)
    if row.trigger in {Trigger.DEFER, Trigger.CHECKPOINT}:
        books = ledger.count_rows(books, rec)
    if rec.state is State.COMPLETED and (old is None or old.answer != rec.answer or old.body != rec.body):
        # A local handler's effect is in the same commit as its record, whoever's record it is.
        if actor is not None and actor.route is Effects.LOCAL and rec.answer is not None and rec.answer.ok:
            books = ledger.count_effect(trial, books, rec.incarnation)
        books = ledger.completed(trial, world, books, rec)
    return books


def _others(trial: Trial, world: World, row: Row, actor: Proc | None, *, gone: bool) -> tuple[Proc, ...]:
    """Everyone else after the write: whose look is stale, whose fence is overtaken, whose item is gone."""
    others = world.procs if actor is None else _without(world.procs, actor)
    stale = trial.law.version_moves or gone
    overtaken = row.fence is Fence.UP
    replaced = row.trigger in _NEW_OWNER
    item = row.trigger is Trigger.WORKER_CLAIM or (row.trigger is Trigger.DEFERRED_RESULT and world.item is not None)
    left = []
    for proc in others:
        if proc.fresh and stale and _gives_up(trial, proc):
            continue
        after = proc._replace(
            held=proc.held and not overtaken,
            last=proc.last and not replaced,
            item=proc.item and not item,
            fresh=proc.fresh and not stale,
        )
        if not (after.incarnation and _is_lost(trial, after, gone=gone)):
            left.append(after)
    return tuple(left)


def _is_lost(trial: Trial, proc: Proc, *, gone: bool) -> bool:
    """A replaced owner is refused whatever it does, and that changes nothing; it matters if it can still call."""
    calls = proc.at is At.ANNOUNCED or (proc.at is At.START and proc.route is Effects.INLINE)
    by_incarnation = gone and trial.law.owner_proves_incarnation
    by_fence = not proc.held and not proc.last and trial.law.owner_proves_fence
    return not calls and (by_incarnation or by_fence)


def _gives_up(trial: Trial, proc: Proc) -> bool:
    """Its compare-and-swap would fail; it looks again, as any new request does."""
    return proc.at is not At.OPEN or trial.law.commit_proves_version
