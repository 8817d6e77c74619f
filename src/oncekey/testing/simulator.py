"""The simulator: thousands of hostile days in the life of a key, each replayable from its seed.

    python -m oncekey.testing.simulator --seed 7

runs the real flows and the memory store's real statements under a scheduler that crashes, pauses, loses
replies and sets clocks, and then asks the checker whether every promise was kept.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from oncekey.testing.checker import Rule, check
from oncekey.testing.sim.parts import REAL, Parts
from oncekey.testing.sim.world import Scenario, World

if TYPE_CHECKING:
    from oncekey.testing.checker import Violation
    from oncekey.testing.history import History
    from oncekey.testing.sim.scheduler import Event

EVERYDAY: Final = Scenario()


@dataclass(frozen=True, slots=True)
class Run:
    """What came of one seed."""

    seed: int
    history: History
    violations: tuple[Violation, ...]
    trace: tuple[Event, ...]

    def __str__(self) -> str:
        lines = [_line(event) for event in self.trace]
        lines += ["", *(str(violation) for violation in self.violations)] if self.violations else []
        lines.append(f"seed {self.seed}: {len(self.violations)} violations in {len(self.trace)} events")
        return "\n".join(lines)


def simulate(
    seed: int,
    parts: Parts = REAL,
    scenario: Scenario = EVERYDAY,
    rules: frozenset[Rule] = frozenset(Rule),
) -> Run:
    """Run one seed to its end and check it."""
    world = World(seed, parts, scenario)
    history = world.run()
    return Run(seed, history, check(history, rules), tuple(world.scheduler.trace))


def _line(event: Event) -> str:
    turn, elapsed, offset, who, what = event
    clock = f" store {offset / 1_000_000:+.1f} s" if offset else ""
    return f"{turn:>5} {elapsed / 1_000_000:>9.3f} s{clock}  {who}: {what}"
