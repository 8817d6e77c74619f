"""The simulator's own test: with one rule broken it must find a violation, within a fixed range of seeds."""

from __future__ import annotations

from pathlib import Path

import pytest

from harness.selection import assert_caught
from proof.sim.mutants import MUTANTS, Mutant
from proof.sim.scenarios import EVERYDAY, SCENARIOS
from proof.sim.simulator import BOUND, CHUNK, catch, main, simulate

PAGE = Path(__file__).parents[2] / "docs" / "explanation" / "simulation.md"


# F1: fence_without_incarnation. F2: born_expired. F3: expiry_before_state, reaps_anything. F4, F7: inline_retries.
# F8, F20: lost_commit_is_failure. F9: no_deadline. F11: sweeper_fences. F34: never_waits. F38: seed_*.
# F39: releases_live. F40, A2: stale_cache. F41: reaps_by_any_clock. R78: each of them is a state trace that is not the
# model's, or one that the model's promises do not survive.
@pytest.mark.parametrize("mutant", MUTANTS.values(), ids=MUTANTS.keys())
def test_a_mutant_is_caught(mutant: Mutant) -> None:
    run = catch(mutant, range(BOUND))

    assert run is not None, f"{mutant.name} got away: {mutant.what}"
    # The same seed in the same world: it is the broken rule that was caught, not the world.
    assert not simulate(run.seed, scenario=mutant.scenario).violations
    assert_caught(mutant.name, "proof/test_simulator.py", [_test_of(mutant, run.seed)])


def _test_of(mutant: Mutant, seed: int) -> str:
    """The test of the sound simulator that runs this seed in this mutant's world."""
    if mutant.scenario == EVERYDAY:
        return f"test_no_seed_breaks_a_promise[{seed // CHUNK}]"
    (name,) = (name for name, scenario in SCENARIOS.items() if scenario == mutant.scenario)
    return f"test_no_seed_of_a_narrower_world_breaks_one[{name}-{seed // CHUNK}]"


def test_a_catch_is_replayed_by_its_seed() -> None:
    mutant = MUTANTS["acknowledges_before_commit"]
    run = catch(mutant)
    assert run is not None

    again = simulate(run.seed, mutant.build(), mutant.scenario)

    assert (again.trace, again.violations) == (run.trace, run.violations)


def test_a_mutant_that_gets_away_is_reported() -> None:
    assert catch(MUTANTS["never_waits"], range(1)) is None


def test_the_page_lists_every_mutant() -> None:
    lines = [f"| `{mutant.name}` | {mutant.what} | {mutant.harm} | {mutant.breaks} |" for mutant in MUTANTS.values()]

    assert [line for line in PAGE.read_text().splitlines() if line.startswith("| `")] == lines


def test_mutant_search_runs_from_the_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--mutants", "--mutant", "born_expired"]) == 0
    assert capsys.readouterr().out.split() == ["born_expired", "seed", "0", "S7", "legal", "moves", "only"]
