"""The simulator: thousands of hostile days in the life of a key, each replayable from its seed.

It runs the real flows and the memory store's real statements under a scheduler that crashes, pauses, loses
replies and sets clocks, and then asks the checker whether every promise was kept.

    python -m proof.sim.simulator --seed 7                     # one run, with its trace
    python -m proof.sim.simulator --seeds 0:2000               # many, told in a line
    python -m proof.sim.simulator --seed 5 --mutant no_fence   # the same with one rule broken
    python -m proof.sim.simulator --mutants                    # is each of them caught?
"""

from __future__ import annotations

import sys
from argparse import ArgumentParser, Namespace
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from oncekey.testing.checker import check
from proof.sim.mutants import MUTANTS
from proof.sim.scenarios import EVERYDAY, SCENARIOS
from proof.sim.world import REAL, Parts, World

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from oncekey.testing.checker import Violation
    from oncekey.testing.history import History
    from proof.sim.mutants import Mutant
    from proof.sim.scenarios import Scenario
    from proof.sim.scheduler import Event


CHUNK: Final = 100
"""How many seeds one test runs."""
BOUND: Final = 400
"""How many runs may pass before a mutant must have been caught."""


@dataclass(frozen=True, slots=True)
class Run:
    """What came of one seed."""

    seed: int
    history: History
    violations: tuple[Violation, ...]
    trace: tuple[Event, ...]

    def __str__(self) -> str:
        told = [_line(event) for event in self.trace]
        broken = [f"\n{violation}" for violation in self.violations]
        return "\n".join((*told, *broken, self.verdict))

    @property
    def verdict(self) -> str:
        """The run in a sentence."""
        return f"seed {self.seed}: {len(self.violations)} violations in {len(self.trace)} events"


def simulate(seed: int, parts: Parts = REAL, scenario: Scenario = EVERYDAY) -> Run:
    """Run one seed to its end and check it. The same arguments give the same run, event by event."""
    world = World(seed, parts, scenario)
    history = world.run()
    return Run(seed, history, check(history, scenario.rules), tuple(world.scheduler.trace))


def catch(mutant: Mutant, seeds: Iterable[int] = range(BOUND)) -> Run | None:
    """The first run in which the mutant breaks the promise that it should break; None if there is none."""
    for seed in seeds:
        run = simulate(seed, mutant.build(), mutant.scenario)
        if any(violation.rule is mutant.breaks for violation in run.violations):
            return run
    return None


def main(arguments: Sequence[str] | None = None) -> int:
    """Run what the command line asks for; 1 if a promise was broken, or a mutant got away."""
    asked = _parser().parse_args(arguments)
    mutant = MUTANTS[asked.mutant] if asked.mutant else None
    if asked.mutants:
        return max(_hunt(one) for one in ([mutant] if mutant else MUTANTS.values()))
    scenario = SCENARIOS[asked.scenario] if asked.scenario else mutant.scenario if mutant else EVERYDAY
    first, last = _range(asked)
    broken = 0
    for seed in range(first, last):
        run = simulate(seed, mutant.build() if mutant else REAL, scenario)
        broken += bool(run.violations)
        if asked.seed is not None:
            _say(str(run))
        elif run.violations:
            _say(run.verdict)
    if asked.seed is None:
        _say(f"{broken} of {last - first} runs broke a promise")
    return int(broken > 0)


def _hunt(mutant: Mutant) -> int:
    run = catch(mutant)
    where = "NOT CAUGHT" if run is None else f"seed {run.seed}"
    _say(f"{mutant.name:<28} {where:<11} {mutant.breaks}")
    return int(run is None)


def _parser() -> ArgumentParser:
    parser = ArgumentParser(prog="python -m proof.sim.simulator", description="Replay or search seeds.")
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--seed", type=int, help="run this one and print its trace")
    what.add_argument("--seeds", default="0:200", metavar="A:B", help="run these and print those that fail")
    what.add_argument("--mutants", action="store_true", help="see whether each mutant is caught")
    parser.add_argument("--mutant", choices=MUTANTS, help="break one rule")
    parser.add_argument("--scenario", choices=SCENARIOS, help="where the chances lie")
    return parser


def _range(asked: Namespace) -> tuple[int, int]:
    if asked.seed is not None:
        return asked.seed, asked.seed + 1
    first, _, last = asked.seeds.partition(":")
    return int(first), int(last)


def _line(event: Event) -> str:
    turn, elapsed, offset, who, what = event
    clock = f"store {offset / 1_000_000:+.1f} s  " if offset else ""
    return f"{turn:>5} {elapsed / 1_000_000:>9.3f} s  {clock}{who}: {what}"


def _say(text: str) -> None:
    sys.stdout.write(text + "\n")


if __name__ == "__main__":
    sys.exit(main())
