"""What a write does to everybody: `written` is the only way a record changes.

It moves the version and the fence as the row says: who looked before must look again, and who is not the owner
any more finds its fence overtaken. `after` is what a row sets, as the statements of a store would leave it. The books
are what really happened, which no rule may consult, and what must be true of it at every step.
"""

from __future__ import annotations

from typing import NamedTuple

from oncekey.core.model import Effects, State
from oncekey.core.transitions import Fence, Transition, Trigger
from proof.model.law import Trial
from proof.model.world import CHARGE, REST, Answer, At, Book, Books, Breach, Move, Parcel, Proc, Rec, World


def book_of(books: Books, incarnation: int) -> Book:
    """The book of one incarnation; one that nobody can add to any more is blank."""
    return books[incarnation - 1] or Book()


def with_book(books: Books, incarnation: int, book: Book) -> Books:
    """The books with one of them changed."""
    return (*books[: incarnation - 1], book, *books[incarnation:])


def count_effect(trial: Trial, books: Books, incarnation: int) -> Books:
    """The effect happened once more."""
    book = book_of(books, incarnation)
    if book.effects and not trial.scenario.forgives:
        raise Breach("double effect: one request was executed twice")
    if book.answer is not None and not book.answer.ok:
        raise Breach("a request that was answered as failed was executed afterwards")
    return with_book(books, incarnation, book._replace(effects=min(book.effects + 1, 2)))


def count_rows(books: Books, rec: Rec) -> Books:
    """The handler's own rows were committed once more."""
    book = book_of(books, rec.incarnation)
    if book.rows:
        raise Breach(f"double effect: the rows of a handler with {rec.effects} effects were written twice")
    return with_book(books, rec.incarnation, book._replace(rows=1))


def keep_promise(world: World, row: Transition, rec: Rec | None) -> None:
    """An answer that may have been given stays, until its time is over or an operator takes it back."""
    old = world.rec
    if old is None or old.state is not State.COMPLETED or row.trigger is Trigger.BUST:
        return
    book = book_of(world.books, old.incarnation)
    if book.promised and (rec is None or rec.answer != book.answer):
        raise Breach(f"an acknowledged answer was lost: {row.trigger} over a completed record")


def take_back(books: Books, old: Rec) -> Books:
    """An operator took the answer back; whether a success may run again is the guard's business."""
    book = book_of(books, old.incarnation)
    return with_book(books, old.incarnation, book._replace(answer=None, promised=False))


def completed(trial: Trial, world: World, books: Books, rec: Rec) -> Books:
    """A new answer, held against what really happened."""
    answer, book = rec.answer, book_of(books, rec.incarnation)
    if answer is None:
        raise Breach("completed without an answer")
    happened = book.effects > 0 or any(charge.body == rec.body for charge in world.ledger)
    if answer.ok:
        _hold_success(rec, answer, happened=happened)
    elif book.effects > 0 and not trial.scenario.forgives:
        raise Breach("wrong answer: told a failure, and it happened")
    return with_book(books, rec.incarnation, book._replace(answer=answer, promised=True))


def _hold_success(rec: Rec, answer: Answer, *, happened: bool) -> None:
    if answer.value != rec.body:
        raise Breach(f"wrong answer: {rec.body} was told about the effect of {answer.value or 'nobody'}")
    if not happened:
        raise Breach("wrong answer: told a success, and nothing happened")
    if rec.effects is Effects.PHASED and rec.result(REST) is None:
        raise Breach("the rest of the handler was skipped: the call is made, and what follows it is not")


class Said(NamedTuple):
    """What goes with a write: facts for the guards, the phase it is about, and the values it stores."""

    facts: tuple[str, ...] = ()
    phase: str = ""
    value: str = ""
    answer: Answer | None = None


NOTHING = Said()


def after(
    trial: Trial, rec: Rec, parcel: Parcel | None, row: Transition, said: Said
) -> tuple[Rec | None, Parcel | None]:
    """The record and the parcel as this row leaves them."""
    if row.to is None:
        return None, None
    rec = rec._replace(state=row.to, waited=False, lease=True if row.to is State.IN_PROGRESS else None)
    if row.to is State.COMPLETED and row.trigger is not Trigger.EXTEND:
        expired = rec.expired and not trial.law.completion_extends
        return rec.closed()._replace(answer=said.answer, expired=expired), None
    match row.trigger:
        case Trigger.ANNOUNCE:
            rec = rec._replace(sends=min(rec.sends + 1, 2))
        case Trigger.CHECKPOINT:
            rec = rec.learned(said.phase, said.value)
        case Trigger.RESULT | Trigger.DEFERRED_RESULT | Trigger.EXECUTED:
            rec = rec.learned(CHARGE, said.value).closed()._replace(by_hand="by hand" in said.facts)
        case Trigger.REPLACE:
            rec = rec._replace(memo=(*rec.memo[:-1], (CHARGE, said.value)))
        case Trigger.WITHDRAW:
            rec = rec.closed()
        case Trigger.NOT_EXECUTED if parcel is None:
            rec = rec.closed()
        case Trigger.TAKE_OVER:
            rec = _begun_again(trial, rec)
        case Trigger.BUST:
            rec = rec._replace(answer=None)
        case _:
            pass
    if parcel is None and row.trigger is not Trigger.DEFER:
        return rec, None
    return _with_parcel(trial, rec, parcel or Parcel(), row, said)


def _with_parcel(trial: Trial, rec: Rec, parcel: Parcel, row: Transition, said: Said) -> tuple[Rec, Parcel]:
    """A deferred record: the parcel's lease is its only lease (O1)."""
    rec = rec._replace(lease=None)
    match row.trigger:
        case Trigger.DEFERRED_RESULT if trial.law.parcel_follows_result:
            parcel = parcel._replace(lease=True, parked=False)
        case Trigger.WORKER_CLAIM if row.to is State.IN_PROGRESS:
            sends = 0 if rec.result(CHARGE) else min(rec.sends + 1, 2)
            rec, parcel = _begun_again(trial, rec)._replace(sends=sends), Parcel(claimed=True, lease=True)
        case Trigger.WORKER_CLAIM | Trigger.DEAD_LETTER | Trigger.DOUBT:
            parcel = Parcel(claimed=True, parked=True)
        case Trigger.TRY_AGAIN:
            rec = rec.closed() if "parcel not sent" in said.facts else rec
            parcel = Parcel(claimed=True)
        case Trigger.NOT_EXECUTED | Trigger.DLQ_RETRY:
            # Sent again because that is safe, or because it is taken for not sent: only the second forgets.
            repeatable = trial.scenario.dedup and not rec.window_over
            rec = rec if repeatable and "waited" not in said.facts else rec.closed()
            parcel = parcel._replace(lease=None, parked=False)
        case _:
            pass
    return rec, parcel


def _begun_again(trial: Trial, rec: Rec) -> Rec:
    return rec._replace(attempts=min(rec.attempts + 1, trial.scenario.max_attempts))


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
    row: Transition,
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
        rec, parcel = _left(trial, world, row, said, new)
        books = _booked(trial, world, row, rec, actor)
    except Breach as breach:
        breach.step = label
        raise
    carried = 0
    if world.rec is not None and row.trigger is Trigger.DISCARD:
        carried = book_of(books, world.rec.incarnation).effects
    procs = _others(trial, world, row, actor, gone=rec is None or new is not None)
    moved = World(
        rec=rec,
        parcel=parcel,
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
        needed.update(call.incarnation for call in world.flight)
        if world.rec is not None:
            needed.add(world.rec.incarnation)
        books = tuple(book if number in needed else None for number, book in enumerate(books, 1))
    if procs is world.procs and books is world.books:
        return world
    return world._replace(procs=procs, books=books)


def _without(procs: tuple[Proc, ...], proc: Proc) -> tuple[Proc, ...]:
    index = procs.index(proc)
    return procs[:index] + procs[index + 1 :]


def _left(trial: Trial, world: World, row: Transition, said: Said, new: Rec | None) -> tuple[Rec | None, Parcel | None]:
    """The record and the parcel that the write leaves."""
    if new is not None:
        return new, Parcel() if row.to is State.PENDING else None
    if world.rec is None:
        return None, None
    return after(trial, world.rec, world.parcel, row, said)


def _booked(trial: Trial, world: World, row: Transition, rec: Rec | None, actor: Proc | None) -> Books:
    """The books after the write, if it broke no promise."""
    old, books = world.rec, world.books
    keep_promise(world, row, rec)
    if rec is None:
        return books
    if rec.incarnation > len(books):
        books = (*books, Book(effects=world.carried))
    if old is not None and row.trigger is Trigger.BUST:
        books = take_back(books, old)
    if row.trigger in {Trigger.DEFER, Trigger.CHECKPOINT}:
        books = count_rows(books, rec)
    if rec.state is State.COMPLETED and (old is None or old.answer != rec.answer or old.body != rec.body):
        # A local handler's effect is in the same commit as its record, whoever's record it is.
        if actor is not None and actor.route is Effects.LOCAL and rec.answer is not None and rec.answer.ok:
            books = count_effect(trial, books, rec.incarnation)
        books = completed(trial, world, books, rec)
    return books


def _others(trial: Trial, world: World, row: Transition, actor: Proc | None, *, gone: bool) -> tuple[Proc, ...]:
    """Everyone else after the write: whose look is stale, whose fence is overtaken, whose parcel is gone."""
    others = world.procs if actor is None else _without(world.procs, actor)
    stale = trial.law.version_moves or gone
    overtaken = row.fence is Fence.UP
    replaced = row.trigger in _NEW_OWNER
    parcel = row.trigger is Trigger.WORKER_CLAIM or (
        row.trigger is Trigger.DEFERRED_RESULT and world.parcel is not None
    )
    left = []
    for proc in others:
        if proc.fresh and stale and _gives_up(trial, proc):
            continue
        after = proc._replace(
            held=proc.held and not overtaken,
            last=proc.last and not replaced,
            parcel=proc.parcel and not parcel,
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
