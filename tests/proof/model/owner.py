"""Owners and the provider that they call: what a handler of each kind of effects does from its claim to its end.

Where a handler has an end that the rules forbid (an answer that hides an open call, an eviction after a call),
it asks for it all the same: that it does not get it is the table's doing, and what the model proves. The provider
counts effects, may recognise a key it has seen, and does not answer everybody.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from oncekey.core.model import Effects, Proceed, Replay, State
from oncekey.core.transitions import Actor, Proof, Trigger
from proof.model.law import Trial
from proof.model.world import (
    CHARGE,
    REFUSED_BY_PROVIDER,
    REST,
    Answer,
    At,
    Breach,
    CallUnderWay,
    Charge,
    Move,
    Proc,
    Rec,
    World,
)
from proof.model.writes import NOTHING, Said, canonical, count_effect, put, written


class Try(NamedTuple):
    """A write that an owner would like to make, and where it stands after it; no place is the end."""

    trigger: Trigger
    then: At | None = None
    said: Said = NOTHING
    worker: bool = False


_LOOK = Try(Trigger.RENEW)
_EVICT = Try(Trigger.DISCARD)
_NEVER_BEGAN = Try(Trigger.DISCARD, said=Said(("not entered",)))
_HAND_BACK = Try(Trigger.HAND_BACK)
_DOUBT = Try(Trigger.DOUBT)
_NOT_EXECUTED = Try(Trigger.NOT_EXECUTED, said=Said(("never sent",)))
_WITHDRAW = Try(Trigger.WITHDRAW, At.START, Said(("never sent",)))
_WITHDRAW_SENT = Try(Trigger.WITHDRAW, At.START)
_SWALLOW = Try(Trigger.SETTLE, said=Said(("call open",), answer=Answer(ok=False, value="", by="owner")))
_DECLINE = Try(Trigger.SETTLE, said=Said(answer=Answer(ok=False, value="", by="owner")))
_ANNOUNCE = Try(Trigger.ANNOUNCE, At.ANNOUNCED, Said(phase=CHARGE))
_TRY_AGAIN = Try(Trigger.TRY_AGAIN, worker=True)
_TRY_UNSENT = Try(Trigger.TRY_AGAIN, said=Said(("parcel not sent",)), worker=True)
_WORKER_DOUBT = Try(Trigger.DOUBT, worker=True)
_DEAD_LETTER = Try(Trigger.DEAD_LETTER, worker=True)


def steps(trial: Trial, world: World, proc: Proc) -> Iterator[Move]:
    """Everything that this owner may do next."""
    match proc.at:
        case At.START:
            yield from _start(trial, world, proc)
        case At.ANNOUNCED:
            yield from send(trial, world, proc)
        case At.UNSENT:
            yield from _unsent(trial, world, proc)
        case At.UNCERTAIN:
            yield from _uncertain(trial, world, proc)
        case At.GOT:
            yield from _got(trial, world, proc)
        case At.CHARGED:
            yield from _charged(trial, world, proc)
        case At.DONE:
            yield from act(trial, world, proc, _settle(proc))
        case At.LOOKING | At.CLAIMED:
            yield from _look(trial, world, proc)
        case At.HUNG:
            pass
        case _:
            raise AssertionError(proc.at)
    rec = world.rec
    if rec is not None and rec.lease is False and not proc.then and owns(trial, proc, rec):
        row = trial.judged(Trigger.RENEW, Actor.OWNER, rec)
        if row is not None:
            yield written(trial, world, "owner renews", row, actor=proc, becomes=proc)


def standing(trial: Trial, rec: Rec, proc: Proc) -> Proc:
    """Where a new owner of this record begins: after what is stored."""
    if rec.result(CHARGE) is None:
        value = trial.downstream_key(rec) if rec.effects is Effects.INLINE else ""
        return proc._replace(at=At.START, value=value)
    at = At.CHARGED if rec.result(REST) is None else At.DONE
    return proc._replace(at=at, value=rec.result(CHARGE) or "")


def owns(trial: Trial, proc: Proc, rec: Rec) -> bool:
    """The owner's proof, as the statement checks it (P1)."""
    law = trial.law
    named = proc.incarnation == rec.incarnation or not law.owner_proves_incarnation
    return named and (proc.held or not law.owner_proves_fence)


def act(trial: Trial, world: World, proc: Proc, *tries: Try) -> Iterator[Move]:
    """The first of these writes that the table allows; an owner that may make none has lost the record (P3)."""
    rec = world.rec
    if rec is not None and owns(trial, proc, rec):
        for wanted in tries:
            actor = Actor.WORKER if wanted.worker else Actor.OWNER
            row = trial.judged(wanted.trigger, actor, rec, world.parcel, wanted.said.facts, phase=wanted.said.phase)
            if row is None or (row.proof is Proof.OWNER_AND_PARCEL and not proc.parcel):
                continue
            becomes = None if wanted.then is None else _onward(trial, rec, proc, wanted)
            label = f"{proc.body}: {actor} {wanted.trigger}"
            yield written(trial, world, label, row, wanted.said, actor=proc, becomes=becomes)
            if trial.scenario.losses:
                lost = (becomes or proc)._replace(at=At.LOOKING, then=wanted.then or "")
                move = written(trial, world, label, row, wanted.said, actor=proc, becomes=lost)
                yield reply_lost(move)
            return
    yield refused(trial, world, proc, tries[0])


def reply_lost(move: Move) -> Move:
    """The same write, of which its maker hears nothing."""
    return Move(f"{move.label}, and the reply is lost", move.world, fault=True)


def refused(trial: Trial, world: World, proc: Proc, wanted: Try) -> Move:
    """A write was refused: the caller hears what the record says, and no more is written (P3)."""
    rec = world.rec
    label = f"{proc.body}: {wanted.trigger} of {proc.incarnation}'s owner is refused"
    try:
        _hear(trial, rec, proc, wanted)
    except Breach as breach:
        breach.step = label
        raise
    return Move(label, put(world, proc, None))


def _hear(trial: Trial, rec: Rec | None, proc: Proc, wanted: Try) -> None:
    unheard = (
        rec is not None
        and wanted.trigger in {Trigger.RESULT, Trigger.DEFERRED_RESULT, Trigger.SETTLE}
        and proc.last
        and proc.incarnation == rec.incarnation
        and proc.at is At.GOT
        and rec.state is not State.COMPLETED
        and rec.result(CHARGE) is None
    )
    if unheard:
        raise Breach("an owner that nobody replaced made the call, and its result was refused")
    verdict = trial.answered(rec, proc)
    if rec is None or not isinstance(verdict, Replay):
        return
    if verdict.record.fingerprint != proc.body:
        raise Breach("a refused owner was handed the answer of another request")
    heard = rec.answer
    if proc.at is At.GOT and not trial.law.record_answers:
        heard = Answer(ok=True, value=proc.value, by="owner")
    if heard != rec.answer:
        raise Breach("two answers: the owner's own, and the one that the record holds")


def _onward(trial: Trial, rec: Rec, proc: Proc, wanted: Try) -> Proc:
    value = proc.value
    if wanted.then is At.ANNOUNCED:
        value = trial.downstream_key(rec)
    parcel = proc.parcel or wanted.trigger is Trigger.DEFERRED_RESULT
    return proc._replace(at=wanted.then or proc.at, value=value, parcel=parcel)


def _settle(proc: Proc) -> Try:
    if proc.value == REFUSED_BY_PROVIDER:
        return _DECLINE
    return Try(Trigger.SETTLE, said=Said(answer=Answer(ok=True, value=proc.value, by="owner")))


def _start(trial: Trial, world: World, proc: Proc) -> Iterator[Move]:
    match proc.route:
        case Effects.LOCAL:
            done = Said(answer=Answer(ok=True, value=proc.body, by="owner"))
            yield from act(trial, world, proc, Try(Trigger.SETTLE, said=done))
            yield from act(trial, world, proc, _DECLINE)
            yield from act(trial, world, proc, _NOT_EXECUTED, _DOUBT)
            yield from act(trial, world, proc, _NEVER_BEGAN)
            if trial.scenario.hangs:
                yield Move("owner hangs", put(world, proc, proc._replace(at=At.HUNG)), fault=True)
        case Effects.INLINE:
            yield from send(trial, world, proc)
            yield from act(trial, world, proc, _NEVER_BEGAN)
        case Effects.PHASED:
            yield from act(trial, world, proc, _ANNOUNCE, _DOUBT)
            yield from act(trial, world, proc, _NEVER_BEGAN, _HAND_BACK, _DOUBT)
        case Effects.OUTBOX:
            yield from act(trial, world, proc, Try(Trigger.DEFER))
            yield from act(trial, world, proc, _NOT_EXECUTED, _DOUBT)
            yield from act(trial, world, proc, _NEVER_BEGAN)


def _unsent(trial: Trial, world: World, proc: Proc) -> Iterator[Move]:
    """This attempt provably did not send; it may not have been the first."""
    if proc.worker:
        counted = trial.law.sends_are_counted
        first = world.rec is not None and (world.rec.sends <= 1 or not counted)
        yield from act(trial, world, proc, _TRY_UNSENT if first else _TRY_AGAIN, _DEAD_LETTER)
        if first:
            yield from act(trial, world, proc, _DEAD_LETTER)
    else:
        yield from act(trial, world, proc, _NOT_EXECUTED, _HAND_BACK, _DOUBT)
        if proc.route is Effects.PHASED:
            yield from act(trial, world, proc, _WITHDRAW, _HAND_BACK, _DOUBT)


def _uncertain(trial: Trial, world: World, proc: Proc) -> Iterator[Move]:
    if proc.worker:
        yield from act(trial, world, proc, _TRY_AGAIN, _WORKER_DOUBT)
        yield from act(trial, world, proc, _DEAD_LETTER)
    elif proc.route is Effects.INLINE:
        yield from act(trial, world, proc, _DOUBT)
    else:
        yield from act(trial, world, proc, _SWALLOW, _WITHDRAW_SENT, _HAND_BACK, _DOUBT)


def _got(trial: Trial, world: World, proc: Proc) -> Iterator[Move]:
    if proc.route is Effects.INLINE:
        yield from act(trial, world, proc, _settle(proc))
        if proc.value != REFUSED_BY_PROVIDER:
            yield from act(trial, world, proc, _EVICT, _DOUBT)
    else:
        trigger = Trigger.DEFERRED_RESULT if proc.worker else Trigger.RESULT
        yield from act(trial, world, proc, Try(trigger, At.CHARGED, Said(phase=CHARGE, value=proc.value)))


def _charged(trial: Trial, world: World, proc: Proc) -> Iterator[Move]:
    if proc.worker or proc.value == REFUSED_BY_PROVIDER:
        yield from act(trial, world, proc, _settle(proc))
        return
    yield from act(trial, world, proc, Try(Trigger.CHECKPOINT, At.DONE, Said(phase=REST, value=proc.body)))
    yield from act(trial, world, proc, _EVICT, _HAND_BACK, _DOUBT)


def _look(trial: Trial, world: World, proc: Proc) -> Iterator[Move]:
    """The reply of a write was lost. What the record says is what happened (P7)."""
    rec = world.rec
    ours = rec is not None and bool(proc.then) and owns(trial, proc, rec)
    if ours and proc.at is At.CLAIMED:
        ruled = trial.ruled(rec, proc.body, proc.route, ours=True)
        ours = isinstance(ruled, Proceed)
        if not ours and rec is not None and rec.state is State.IN_PROGRESS:
            raise Breach("a claim whose reply was lost is ours, and was not recognised")
    if ours:
        onward = proc._replace(at=At(proc.then), then="")
        yield Move(f"{proc.body}: looks again, and it was written", put(world, proc, onward))
    else:
        yield refused(trial, world, proc, _LOOK)


def send(trial: Trial, world: World, proc: Proc) -> Iterator[Move]:
    """Make the call: it is answered, it is not heard of again, or it provably never left."""
    who = f"{proc.body}: owner of {proc.incarnation}"
    call = CallUnderWay(proc.value, proc.body, proc.incarnation)
    arrived, value = _arrive(trial, world, call, f"{who} calls the provider")
    yield Move(f"{who} calls the provider and gets {value}", put(arrived, proc, proc._replace(at=At.GOT, value=value)))
    lost = world._replace(flight=tuple(sorted({*world.flight, call})))
    yield Move(f"{who} calls the provider and hears nothing", put(lost, proc, proc._replace(at=At.UNCERTAIN, value="")))
    yield Move(f"{who} cannot reach the provider", put(world, proc, proc._replace(at=At.UNSENT, value="")))


def deliver(trial: Trial, world: World) -> Iterator[Move]:
    """A call that nobody waits for arrives after all, or never does."""
    for call in world.flight:
        rest = tuple(other for other in world.flight if other != call)
        left = world._replace(flight=rest)
        label = f"the call of {call.incarnation} arrives at the provider"
        arrived, _ = _arrive(trial, left, call, label)
        yield Move(label, canonical(arrived))
        yield Move(f"the call of {call.incarnation} is lost", canonical(left))


def _arrive(trial: Trial, world: World, call: CallUnderWay, label: str) -> tuple[World, str]:
    """The call reaches the provider: the world after it, and whose effect the provider names."""
    try:
        return _execute(trial, world, call)
    except Breach as breach:
        breach.step = label
        raise


def _execute(trial: Trial, world: World, call: CallUnderWay) -> tuple[World, str]:
    if call.key in world.closed:
        return world, REFUSED_BY_PROVIDER
    known = [charge for charge in world.ledger if charge.key == call.key and charge.remembered]
    if known:
        return world, known[0].body
    if any(charge.body == call.body and charge.remembered for charge in world.ledger):
        raise Breach("double effect: the provider would have recognised the request by its key, had it been the same")
    books = count_effect(trial, world.books, call.incarnation)
    charge = Charge(call.key, call.body, trial.scenario.dedup)
    ledger = tuple(sorted({*world.ledger, charge}))
    return world._replace(books=books, ledger=ledger), call.body
