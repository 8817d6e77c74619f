"""Everyone who moves a record without owning it, and time.

Requesters, sweeper, reaper, completer, resolver, operator and worker take steps. The passing of time and the faults are
events, each of which may come at any moment at which it can.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from oncekey.core.model import Effects, State
from oncekey.core.onecommit import WriteKind
from oncekey.core.rulings import ClaimAgain, MarkUnknown, Next, Supersede, TakeOver
from oncekey.core.transitions import Actor, Trigger
from oncekey.engine.local import LockHeld
from proof.model.law import Trial, must
from proof.model.owner import reply_lost, standing
from proof.model.world import CHARGE, Answer, At, Move, Proc, Query, Rec, World
from proof.model.writes import Said, book_of, canonical, put, with_book, written

_SWAPS: Mapping[type[Next], tuple[At, Trigger]] = {
    TakeOver: (At.TAKING_OVER, Trigger.TAKE_OVER),
    Supersede: (At.SUPERSEDING, Trigger.SUPERSEDE),
    MarkUnknown: (At.DOUBTING, Trigger.SWEEP),
}
_UPKEEP = (
    (Actor.SWEEPER, Trigger.SWEEP),
    (Actor.REAPER, Trigger.EXPIRE),
    (Actor.REAPER, Trigger.PURGE),
    (Actor.REAPER, Trigger.ABANDON),
)
_OPERATOR = (Trigger.SWEEP, Trigger.NOT_EXECUTED, Trigger.DLQ_RETRY)
_GOING_ON = 17
_REASON = Said(("reason",))


def requests(trial: Trial, world: World) -> Iterator[Move]:
    """A new request looks. If all it gets is an answer, nothing moves, and the checks have looked at it."""
    scenario = trial.scenario
    if len(world.procs) >= scenario.procs:
        return
    bodies = scenario.bodies if world.books else scenario.bodies[:1]
    for body in bodies:
        for route in scenario.routes if scenario.routes and world.books else (scenario.effects,):
            yield from _request(trial, world, Proc(body, At.START, route=route))


def _request(trial: Trial, world: World, proc: Proc) -> Iterator[Move]:
    ruled = trial.ruled(world.rec, proc.body, proc.route)
    used_up = len(world.books) >= trial.scenario.incarnations
    if isinstance(ruled, ClaimAgain | Supersede) and used_up:
        return
    if trial.scenario.one_commit:
        yield from _open(trial, world, proc)
    if isinstance(ruled, ClaimAgain):
        yield from _claim(trial, world, proc)
    elif type(ruled) in _SWAPS:
        at, trigger = _SWAPS[type(ruled)]
        # What is decided at the look is written later, whatever the clock has done since; only a write stops it.
        row = trial.judged(trigger, Actor.REQUESTER, world.rec, world.parcel, route=proc.route)
        looked = proc._replace(at=at, fresh=True, value=str(trial.places[id(must(row, trigger))]))
        yield _arrives(world, looked, f"{proc.body}: looks, is {looked.at}")
        deferred = trial.judged(Trigger.DEFER, Actor.REQUESTER, world.rec, route=proc.route)
        if deferred is not None:
            new = _new(trial, world, proc)._replace(state=State.PENDING, lease=None)
            label = f"{proc.body}: starts anew and defers"
            yield written(trial, world, label, deferred, new=new, client=True)


def _arrives(world: World, proc: Proc, label: str) -> Move:
    return Move(label, canonical(world._replace(procs=(*world.procs, proc))), client=True)


def _claim(trial: Trial, world: World, proc: Proc) -> Iterator[Move]:
    rec = _new(trial, world, proc)
    owner = standing(trial, rec, proc._replace(incarnation=rec.incarnation, held=True, last=True))
    label = f"{proc.body}: claims {rec.incarnation}"
    row = must(trial.judged(Trigger.CLAIM, Actor.REQUESTER, None, route=proc.route), Trigger.CLAIM)
    yield written(trial, world, label, row, new=rec, becomes=owner, client=True)
    if trial.scenario.losses:
        looking = owner._replace(at=At.CLAIMED, then=owner.at)
        yield reply_lost(written(trial, world, label, row, new=rec, becomes=looking))
    deferred = trial.judged(Trigger.DEFER, Actor.REQUESTER, None, route=proc.route)
    if deferred is not None:
        new = rec._replace(state=State.PENDING, lease=None)
        yield written(trial, world, f"{label} and defers", deferred, new=new, client=True)


def _new(trial: Trial, world: World, proc: Proc) -> Rec:
    scenario = trial.scenario
    return Rec(len(world.books) + 1, proc.body, scenario.effects, scenario.recovery, State.IN_PROGRESS, attempts=1)


def _open(trial: Trial, world: World, proc: Proc) -> Iterator[Move]:
    """LOCAL in one commit: the lock is taken and the record read in one statement, and `enter` says what that means."""
    taken = any(other.at is At.OPEN for other in world.procs)
    entry = trial.entered(world.rec, proc.body, proc.route, taken=taken)
    if isinstance(entry, LockHeld):
        opened = proc._replace(at=At.OPEN, fresh=True, value="" if entry.target.kind is WriteKind.RETRYABLE else "anew")
        yield _arrives(world, opened, f"{proc.body}: takes the lock and looks")


def swaps(trial: Trial, world: World, proc: Proc) -> Iterator[Move]:
    """The compare-and-swap of somebody who looked before: it fits only if nobody wrote since."""
    rec = world.rec
    if proc.at is At.OPEN:
        yield from _commit(trial, world, proc)
        return
    if rec is None or not proc.fresh:
        yield Move(f"{proc.body}: looked too early, looks again", put(world, proc, None))
        return
    row = trial.law.rows[int(proc.value)]
    label = f"{proc.body}: {row.trigger}"
    new = _new(trial, world, proc) if proc.at is At.SUPERSEDING else None
    becomes = None
    if proc.at is not At.DOUBTING:
        owned = new or rec._replace(attempts=rec.attempts + 1)
        becomes = proc._replace(incarnation=owned.incarnation, held=True, last=True, fresh=False)
        becomes = standing(trial, owned, becomes)
    yield written(trial, world, label, row, actor=proc, becomes=becomes, new=new)
    if becomes is not None and trial.scenario.losses:
        looking = becomes._replace(at=At.CLAIMED, then=becomes.at)
        yield reply_lost(written(trial, world, label, row, actor=proc, becomes=looking, new=new))


def _commit(trial: Trial, world: World, proc: Proc) -> Iterator[Move]:
    """The business and the finished record in one commit; anything else is a roll-back (L2, L3)."""
    yield Move(f"{proc.body}: rolls back", put(world, proc, None))
    if not proc.fresh and trial.law.commit_proves_version:
        return
    row = trial.judged(Trigger.COMMIT, Actor.REQUESTER, world.rec, world.parcel, ("locked",), route=proc.route)
    answer = Answer(ok=True, value=proc.body, by="one commit")
    new = None
    if proc.value == "anew":
        new = _new(trial, world, proc)._replace(state=State.COMPLETED, lease=None, answer=answer)
    # The statement repeats the predicate it was made for: going on is not starting anew.
    if row is not None and (new is None) is (row.number == _GOING_ON):
        yield written(trial, world, f"{proc.body}: commits", row, Said(answer=answer), actor=proc, new=new)


def upkeep(trial: Trial, world: World) -> Iterator[Move]:
    """Sweeper and reaper: they look and write in one statement."""
    rec = world.rec
    if rec is None:
        return
    gone = Said(answer=Answer(ok=False, value="", by="reaper"))
    for actor, trigger in _UPKEEP:
        row = trial.judged(trigger, actor, rec, world.parcel)
        if row is not None:
            yield written(trial, world, f"{actor}: {trigger}", row, gone)


def operators(trial: Trial, world: World) -> Iterator[Move]:
    """A person releases a record, retries a dead letter, busts or extends an answer, and has nothing but a reason."""
    rec = world.rec
    if rec is None:
        return
    for trigger in (*_OPERATOR, Trigger.BUST, Trigger.EXTEND) if trial.scenario.busts else _OPERATOR:
        row = trial.judged(trigger, Actor.OPERATOR, rec, world.parcel, _REASON.facts)
        if row is not None:
            yield written(trial, world, f"operator: {trigger}", row, _REASON)
    if trial.scenario.by_hand and any(charge.body == rec.body for charge in world.ledger):
        said = Said(("result given", "reason", "by hand"), "", rec.body, Answer(ok=True, value=rec.body, by="operator"))
        for trigger in (Trigger.EXECUTED, Trigger.REPLACE):
            row = trial.judged(trigger, Actor.OPERATOR, rec, world.parcel, said.facts)
            if row is not None:
                yield written(trial, world, f"operator: {trigger}", row, said)


def completer(trial: Trial, world: World) -> Iterator[Move]:
    """Resume what nobody asks for any more, with the stored request (H7)."""
    rec = world.rec
    if rec is None or rec.effects is not Effects.PHASED or len(world.procs) >= trial.scenario.procs:
        return
    row = trial.judged(Trigger.TAKE_OVER, Actor.COMPLETER, rec)
    if row is not None:
        proc = Proc(rec.body, At.START, rec.incarnation, held=True, last=True, route=rec.effects)
        becomes = standing(trial, rec, proc)
        yield written(trial, world, "completer: take_over", row, becomes=becomes)


def worker(trial: Trial, world: World) -> Iterator[Move]:
    """Claim the parcel, if it is due and nobody's: the parcel's claim and the record's in one transaction."""
    rec, parcel = world.rec, world.parcel
    if rec is None or parcel is None or parcel.parked or parcel.lease or len(world.procs) >= trial.scenario.procs:
        return
    row = trial.judged(Trigger.WORKER_CLAIM, Actor.WORKER, rec, parcel)
    if row is None:
        return
    becomes = None
    if row.to is State.IN_PROGRESS:
        becomes = Proc(rec.body, At.ANNOUNCED, rec.incarnation, worker=True, held=True, last=True, parcel=True)
        becomes = becomes._replace(route=rec.effects, value=trial.downstream_key(rec))
        if rec.result(CHARGE) is not None:
            becomes = standing(trial, rec, becomes)
    yield written(trial, world, "worker claims the parcel", row, becomes=becomes)


def resolver(trial: Trial, world: World) -> Iterator[Move]:
    """Ask the provider and write down what it said: "executed" at once, "not executed" in two steps."""
    rec, query = world.rec, world.query
    if query is not None:
        yield from _write_down(trial, world, query)
    if rec is None or rec.state is not State.UNKNOWN:
        return
    if any(charge.body == rec.body for charge in world.ledger):
        said = Said(("result given",), "", rec.body, Answer(ok=True, value=rec.body, by="resolver"))
        row = trial.judged(Trigger.EXECUTED, Actor.RESOLVER, rec, world.parcel, said.facts)
        if row is not None:
            yield written(trial, world, "resolver: executed", row, said)
    elif query is None:
        closes = trial.scenario.closes
        asked = world._replace(query=Query(rec.incarnation, waited=rec.waited or closes))
        if closes:
            asked = asked._replace(closed=tuple(sorted({*world.closed, trial.downstream_key(rec)})))
        label = "closes the reference" if closes else "asks"
        yield Move(f"resolver {label}, and sees nothing", canonical(asked))


def _write_down(trial: Trial, world: World, query: Query) -> Iterator[Move]:
    rec = world.rec
    done = world._replace(query=None)
    if rec is None or rec.incarnation != query.incarnation:
        yield Move("resolver looked too early", canonical(done))
        return
    waited = query.waited if trial.law.asks_after_waiting else rec.waited
    said = Said(("waited",) if waited else ())
    row = trial.judged(Trigger.NOT_EXECUTED, Actor.RESOLVER, rec, world.parcel, said.facts)
    if row is not None:
        yield written(trial, done, "resolver: not_executed", row, said)
        return
    row = trial.judged(Trigger.STILL_UNKNOWN, Actor.RESOLVER, rec)
    if row is not None:
        yield written(trial, done, "resolver: still_unknown", row)


def events(trial: Trial, world: World) -> Iterator[Move]:
    """Everything that time can do next."""
    rec, parcel = world.rec, world.parcel
    if rec is not None:
        if rec.lease and not _beats(trial, world):
            yield Move("clock: the lease is over", world._replace(rec=rec._replace(lease=False)))
        if trial.scenario.hangs and not rec.deadline_over and rec.state is State.IN_PROGRESS:
            yield Move("clock: the deadline is over", world._replace(rec=rec._replace(deadline_over=True)))
        if not rec.expired and rec.state is not State.EXPIRED:
            yield Move("clock: the record expires", _expire(world))
        if rec.state is State.UNKNOWN and not rec.waited and _quiet(trial, world):
            yield Move("clock: the waiting time is over", world._replace(rec=rec._replace(waited=True)))
    if parcel is not None and parcel.lease:
        yield Move("clock: the parcel's lease is over", world._replace(parcel=parcel._replace(lease=False)))
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
