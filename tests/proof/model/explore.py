"""Visit every world that can be reached, and look for a broken promise or a wedge."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

from oncekey.core.model import Code, Refuse, Replay, State
from oncekey.core.transitions import Transition
from proof.model import other_actors, owner
from proof.model.law import SOUND, Law, Trial
from proof.model.world import At, Breach, Move, Rec, Scenario, World

_LOOKED = (At.TAKING_OVER, At.SUPERSEDING, At.DOUBTING, At.OPEN)


@dataclass(frozen=True, slots=True)
class Proven:
    """No promise can be broken and nothing can be stuck, in this many worlds."""

    worlds: int
    steps: int
    rows: frozenset[Transition]
    """The rows of the table that were made use of."""


@dataclass(frozen=True, slots=True)
class Counterexample:
    """A promise that is broken, and the steps that break it."""

    scenario: str
    broken: str
    trace: tuple[str, ...]

    def __str__(self) -> str:
        steps = "\n".join(f"  {number:2}. {step}" for number, step in enumerate(self.trace, 1))
        return f"{self.scenario}: {self.broken}\n{steps}"


def explore(scenario: Scenario, law: Law = SOUND) -> Proven | Counterexample:
    """Breadth first, so the trace of a counterexample is a shortest one."""
    trial = Trial(law, scenario)
    start = World()
    number: dict[World, int] = {start: 0}
    came: list[tuple[int, str]] = [(-1, "")]
    into: list[list[int]] = [[]]
    ends: list[int] = [0]
    queue = deque([start])
    steps = 0
    while queue:
        world = queue.popleft()
        here = number[world]
        try:
            _inspect(trial, world)
            for move in moves(trial, world):
                steps += 1
                there = number.get(move.world)
                if there is None:
                    there = number[move.world] = len(came)
                    came.append((here, move.label))
                    into.append([])
                    queue.append(move.world)
                    if _settled(move.world.rec):
                        ends.append(there)
                if not (move.fault or move.client):
                    into[there].append(here)
        except Breach as breach:
            return Counterexample(scenario.name, str(breach), _trace(came, here, breach.step))
    stuck = _stuck(into, ends)
    if stuck is not None:
        return Counterexample(scenario.name, "wedged: nothing that is sure to come ends it", _trace(came, stuck))
    return Proven(len(came), steps, frozenset(law.rows[place] for place in trial.used))


def moves(trial: Trial, world: World) -> Iterator[Move]:
    """Every step that anybody can take."""
    for proc in dict.fromkeys(world.procs):
        if proc.at in _LOOKED:
            yield from other_actors.swaps(trial, world, proc)
        else:
            yield from owner.steps(trial, world, proc)
    yield from other_actors.requests(trial, world)
    yield from other_actors.upkeep(trial, world)
    yield from other_actors.resolver(trial, world)
    yield from other_actors.completer(trial, world)
    yield from other_actors.worker(trial, world)
    yield from other_actors.operators(trial, world)
    yield from owner.deliver(trial, world)
    yield from other_actors.events(trial, world)
    yield from other_actors.crashes(world)


def _inspect(trial: Trial, world: World) -> None:
    """What every client would hear now."""
    rec = world.rec
    if rec is None:
        return
    book = world.books[rec.incarnation - 1]
    for body in trial.scenario.bodies:
        for route in trial.scenario.routes or (trial.scenario.effects,):
            ruled = trial.ruled(rec, body, route)
            if body != rec.body:
                if _live(rec) and not (isinstance(ruled, Refuse) and ruled.code is Code.KEY_REUSED):
                    raise Breach(f"another body was not refused while the key is {rec.state}")
                continue
            if book is not None and book.promised and not isinstance(ruled, Replay):
                raise Breach("an acknowledged answer was lost: a retry does not get it")
    for proc in world.procs:
        mine = proc.at not in _LOOKED and proc.held and proc.incarnation == rec.incarnation
        if mine and proc.body != rec.body:
            raise Breach("another body executes under a live key")


def _live(rec: Rec) -> bool:
    """Said again, from the protocol's words and not from the code: what may not be let go of yet (P6)."""
    if rec.state is State.EXPIRED:
        return False
    plain = rec.state is State.FAILED_RETRYABLE and not rec.memo and not rec.sends
    return not (rec.expired and (rec.state is State.COMPLETED or plain))


def _settled(rec: Rec | None) -> bool:
    return rec is None or rec.state in {State.COMPLETED, State.EXPIRED}


def _stuck(into: list[list[int]], ends: list[int]) -> int | None:
    """The first world from which no end can be reached without luck and without another request."""
    free = bytearray(len(into))
    todo = list(ends)
    for end in todo:
        free[end] = 1
    while todo:
        for before in into[todo.pop()]:
            if not free[before]:
                free[before] = 1
                todo.append(before)
    return next((index for index, fine in enumerate(free) if not fine), None)


def _trace(came: list[tuple[int, str]], here: int, last: str = "") -> tuple[str, ...]:
    steps = [last] if last else []
    while here > 0:
        here, label = came[here]
        steps.append(label)
    return tuple(reversed(steps))
