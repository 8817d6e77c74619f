"""One key, all actors, every interleaving: the tables hold, and without any one of their rules they do not."""

from dataclasses import replace

import pytest

from harness.selection import assert_caught
from oncekey.core.transitions import ROWS
from proof.model import MUTANTS, SCENARIOS, SOUND, Counterexample, Proven, explore

# Small worlds that together make every move of the table.
TOUR = (
    "local",
    "phased",
    "phased, closing",
    "phased, by hand",
    "outbox, used anew",
    "outbox, repeatable",
    "outbox, in doubt by policy",
    "outbox, beyond the waiting rule",
)

FOUND_AGAIN = {
    *("F1", "F2", "F3", "F4", "F5", "F6", "F8", "F9", "F11", "F14", "F22", "F23", "F24"),
    *("F29", "F30", "F31", "F34", "F35", "F38", "F39"),
    *("P1", "P2", "C8", "ADR 0009", "ADR 0011"),
}


@pytest.mark.parametrize("name", SCENARIOS)
def test_model_holds_in_every_interleaving(name):  # R50, S1-S8, S11, L1
    outcome = explore(SCENARIOS[name])
    if isinstance(outcome, Counterexample):
        pytest.fail(str(outcome))
    assert outcome.worlds > 250
    assert outcome.steps > outcome.worlds


@pytest.mark.parametrize("name", MUTANTS)
def test_model_without_one_rule_is_refuted(name):  # F1-F39
    mutant = MUTANTS[name]
    outcome = explore(SCENARIOS[mutant.scenario], mutant.law)
    if isinstance(outcome, Proven):
        pytest.fail(f"{mutant.finding} went unseen: {name}, in {outcome.worlds} worlds of {mutant.scenario!r}")
    assert mutant.breaks in outcome.broken, str(outcome)
    assert outcome.trace
    proof = f"test_model_holds_in_every_interleaving[{mutant.scenario}]"
    assert_caught(name, "proof/test_model.py", [proof])


def test_every_known_finding_has_a_mutant():
    assert {mutant.finding for mutant in MUTANTS.values()} == FOUND_AGAIN
    assert all(mutant.law != SOUND for mutant in MUTANTS.values())
    assert all(mutant.scenario in SCENARIOS for mutant in MUTANTS.values())


def test_every_row_of_the_table_is_walked():
    """A row that no world makes use of would be proven by nothing."""
    walked = set()
    for name in TOUR:
        outcome = explore(replace(SCENARIOS[name], procs=2, losses=False))
        assert isinstance(outcome, Proven), str(outcome)
        walked |= outcome.rows
    assert [row for row in ROWS if row not in walked] == []


def test_counterexample_contains_its_trace():  # F1
    """The first finding, step by step: the old owner settles a stranger's request."""
    mutant = MUTANTS["an owner proves no incarnation"]
    outcome = explore(SCENARIOS[mutant.scenario], mutant.law)
    assert isinstance(outcome, Counterexample)
    story = str(outcome)
    assert story.startswith("inline: wrong answer: b was told about the effect of a\n")
    claimed = [step for step in outcome.trace if "claims" in step or "supersede" in step]
    assert claimed == ["a: claims 1 (row 1)", "b: claims 2 (row 1)"]
    assert outcome.trace[-1] == "a: owner settle (row 7)"
    assert explore(SCENARIOS[mutant.scenario], mutant.law) == outcome


class TestUnfencedPause:  # U1, F34
    """Between the last check and the send a process may stand still for as long as it likes."""

    @pytest.mark.parametrize("effects", ["inline", "phased", "outbox"])
    def test_unfenced_pause_can_repeat_a_call(self, effects):
        """So it is documented; a model that did not find it would not be looking."""
        outcome = explore(replace(SCENARIOS[f"{effects}, beyond the waiting rule"], forgives=False))
        assert isinstance(outcome, Counterexample)
        assert "double effect" in outcome.broken

    @pytest.mark.parametrize("effects", ["inline", "phased"])
    def test_closing_the_reference_prevents_the_repeated_call(self, effects):
        outcome = explore(replace(SCENARIOS[f"{effects}, closing"], residual=True))
        assert isinstance(outcome, Proven), str(outcome)

    @pytest.mark.parametrize("effects", ["phased", "outbox"])
    def test_repeatable_call_prevents_a_second_effect_while_remembered(self, effects):
        scenario = replace(SCENARIOS[f"{effects}, repeatable"], residual=True, procs=2, max_attempts=2)
        outcome = explore(replace(scenario, forgets=False))
        assert isinstance(outcome, Proven), str(outcome)
        outcome = explore(scenario)
        assert isinstance(outcome, Counterexample)
        assert "clock: a day passes, and the provider forgets" in outcome.trace
