"""The passing of time, and the faults: each is an event that may come at any moment at which it can."""

from __future__ import annotations

from collections.abc import Iterator

from oncekey.core.model import Effects, State
from oncekey.core.transitions import Actor, Trigger
from oncekey.testing.model.books import book_of, with_book
from oncekey.testing.model.law import Trial
from oncekey.testing.model.world import At, Move, Proc, World
from oncekey.testing.model.writes import canonical, put


def events(trial: Trial, world: World) -> Iterator[Move]:
    """Everything that time can do next."""
    rec, item = world.rec, world.item
    if rec is not None:
        if rec.lease and not _beats(trial, world):
            yield Move("clock: the lease is over", world._replace(rec=rec._replace(lease=False)))
        if trial.scenario.hangs and not rec.deadline_over and rec.state is State.IN_PROGRESS:
            yield Move("clock: the deadline is over", world._replace(rec=rec._replace(deadline_over=True)))
        if not rec.expired and rec.state is not State.EXPIRED:
            yield Move("clock: the record expires", _expire(world))
        if rec.state is State.UNKNOWN and not rec.waited and _quiet(trial, world):
            yield Move("clock: the waiting time is over", world._replace(rec=rec._replace(waited=True)))
    if item is not None and item.lease:
        yield Move("clock: the item's lease is over", world._replace(item=item._replace(lease=False)))
    if any(_announced(proc) for proc in world.procs):
        yield Move("clock: the send window is over", _close(world))
    if trial.scenario.dedup and trial.scenario.forgets and not world.flight:
        aging = rec is not None and rec.sends and not rec.window_over
        if aging or any(charge.remembered for charge in world.ledger):
            yield Move("clock: a day passes, and the provider forgets", _forget(world))


def crashes(world: World) -> Iterator[Move]:
    """Anybody may die between any two steps."""
    for proc in dict.fromkeys(world.procs):
        yield Move(f"{proc.body}: dies ({proc.at})", put(world, proc, None), fault=True)


def _beats(trial: Trial, world: World) -> bool:
    """A handler that hangs keeps its lease for as long as its heartbeat is let (P5)."""
    hangs = any(proc.at is At.HUNG and proc.held for proc in world.procs)
    return hangs and trial.judged(Trigger.RENEW, Actor.OWNER, world.rec) is not None


def _announced(proc: Proc) -> bool:
    return proc.at is At.ANNOUNCED or (proc.at is At.LOOKING and proc.then == At.ANNOUNCED)


def _quiet(trial: Trial, world: World) -> bool:
    """Nothing can reach the provider any more that was announced before: what the waiting time is made for."""
    if trial.scenario.residual:
        return True
    inline = world.rec is not None and world.rec.effects is Effects.INLINE
    sending = any(_announced(proc) or (inline and proc.at is At.START) for proc in world.procs)
    return not sending and not world.flight


def _close(world: World) -> World:
    procs = tuple(
        (proc._replace(at=At.UNSENT, value="") if proc.at is At.ANNOUNCED else proc._replace(then=At.UNSENT))
        if _announced(proc)
        else proc
        for proc in world.procs
    )
    return canonical(world._replace(procs=procs))


def _expire(world: World) -> World:
    rec = world.rec
    if rec is None:
        return world
    books = world.books
    if rec.state is State.COMPLETED:
        book = book_of(books, rec.incarnation)
        books = with_book(books, rec.incarnation, book._replace(promised=False))
    return world._replace(rec=rec._replace(expired=True), books=books)


def _forget(world: World) -> World:
    rec = world.rec
    if rec is not None and rec.sends:
        rec = rec._replace(window_over=True)
    ledger = tuple(sorted({charge._replace(remembered=False) for charge in world.ledger}))
    return _close(world._replace(rec=rec, ledger=ledger))
