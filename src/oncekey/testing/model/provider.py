"""The provider: it counts effects, may recognise a key it has seen, and does not answer everybody."""

from __future__ import annotations

from collections.abc import Iterator

from oncekey.testing.model.books import count_effect
from oncekey.testing.model.law import Trial
from oncekey.testing.model.world import (
    REFUSED_BY_PROVIDER,
    At,
    Breach,
    Charge,
    Move,
    Parcel,
    Proc,
    World,
)
from oncekey.testing.model.writes import canonical, put


def send(trial: Trial, world: World, proc: Proc) -> Iterator[Move]:
    """Make the call: it is answered, it is not heard of again, or it provably never left."""
    who = f"{proc.body}: owner of {proc.incarnation}"
    parcel = Parcel(proc.value, proc.body, proc.incarnation)
    arrived, value = _arrive(trial, world, parcel, f"{who} calls the provider")
    yield Move(f"{who} calls the provider and gets {value}", put(arrived, proc, proc._replace(at=At.GOT, value=value)))
    lost = world._replace(flight=tuple(sorted({*world.flight, parcel})))
    yield Move(f"{who} calls the provider and hears nothing", put(lost, proc, proc._replace(at=At.UNCERTAIN, value="")))
    yield Move(f"{who} cannot reach the provider", put(world, proc, proc._replace(at=At.UNSENT, value="")))


def deliver(trial: Trial, world: World) -> Iterator[Move]:
    """A call that nobody waits for arrives after all, or never does."""
    for parcel in world.flight:
        rest = tuple(other for other in world.flight if other != parcel)
        left = world._replace(flight=rest)
        label = f"the call of {parcel.incarnation} arrives at the provider"
        arrived, _ = _arrive(trial, left, parcel, label)
        yield Move(label, canonical(arrived))
        yield Move(f"the call of {parcel.incarnation} is lost", canonical(left))


def _arrive(trial: Trial, world: World, parcel: Parcel, label: str) -> tuple[World, str]:
    """The call reaches the provider: the world after it, and whose effect the provider names."""
    try:
        return _execute(trial, world, parcel)
    except Breach as breach:
        breach.step = label
        raise


def _execute(trial: Trial, world: World, parcel: Parcel) -> tuple[World, str]:
    if parcel.key in world.closed:
        return world, REFUSED_BY_PROVIDER
    known = [charge for charge in world.ledger if charge.key == parcel.key and charge.remembered]
    if known:
        return world, known[0].body
    if any(charge.body == parcel.body and charge.remembered for charge in world.ledger):
        raise Breach("double effect: the provider would have recognised the request by its key, had it been the same")
    books = count_effect(trial, world.books, parcel.incarnation)
    charge = Charge(parcel.key, parcel.body, trial.scenario.dedup)
    ledger = tuple(sorted({*world.ledger, charge}))
    return world._replace(books=books, ledger=ledger), parcel.body
