"""The real flows and statements, under every schedule that the seeds give: no promise is ever broken."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace

import pytest

from harness.each import each
from oncekey.core.model import MINUTE, Code, Effects
from oncekey_demo.checker import Rule
from oncekey_demo.history import ClientSaw, stories
from proof.sim.scenarios import DEADLINE, LEASE, OUTSIDE, SCENARIOS, FaultRates, Scenario
from proof.sim.simulator import CHUNK, Run, main, simulate


def chunk(number: int) -> range:
    return range(number * CHUNK, (number + 1) * CHUNK)


def broken(runs: list[Run]) -> str:
    return "\n".join(str(run) for run in runs if run.violations)


@pytest.mark.parametrize("number", range(20))
def test_no_seed_breaks_a_promise(number: int) -> None:
    """R78, S1-S8, S11-S14, S16; F1-F3, F9, F11, F39-F41: 2,000 runs of the lifecycle that ships."""
    assert not broken([simulate(seed) for seed in chunk(number)])


NARROWER = [(name, number) for name in ("outside", "reused", "unheard", "restored") for number in range(3)]


@pytest.mark.parametrize(("name", "number"), [*NARROWER, ("claimed", 0), ("mixed", 0), ("mixed", 3)])
def test_no_seed_of_a_narrower_world_breaks_one(name: str, number: int) -> None:
    """F34 where everybody is busy around the lease, F1 where keys are reused, F8 where replies are lost, F38.

    And R116, R123 where some hosts run LOCAL in one commit while others claim first.
    """
    assert not broken([simulate(seed, scenario=SCENARIOS[name]) for seed in chunk(number)])


def test_a_seed_is_one_exact_run() -> None:
    first, second = simulate(11), simulate(11)

    assert first.trace == second.trace
    assert first.history == second.history


def test_seeds_differ() -> None:
    assert simulate(11).trace != simulate(12).trace


def test_a_replay_in_another_process_is_the_same_run() -> None:
    """No order of a set and no hash of a string has a say in it."""
    command = [sys.executable, "-m", "proof.sim.simulator", "--seed", "11"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(part for part in sys.path if part)}
    told = [
        subprocess.run(
            command, env={**environment, "PYTHONHASHSEED": seed}, check=True, capture_output=True, text=True
        ).stdout
        for seed in ("1", "2")
    ]

    assert told[0] == told[1] == f"{simulate(11)}\n"


MOVES = {
    ("claim", None, "in_progress"),
    ("renew", "in_progress", "in_progress"),
    ("take_over", "in_progress", "in_progress"),
    ("take_over", "failed_retryable", "in_progress"),
    ("supersede", "completed", "in_progress"),
    ("supersede", "failed_retryable", "in_progress"),
    ("supersede", "expired", "in_progress"),
    ("mark_unknown", "in_progress", "unknown"),
    ("settle_completed", "in_progress", "completed"),
    ("settle_completed", "unknown", "completed"),
    ("settle_completed", "failed_retryable", "completed"),
    ("settle_retryable", "in_progress", "failed_retryable"),
    ("settle_unknown", "in_progress", "unknown"),
    ("discard", "in_progress", None),
    ("sweep", "in_progress", "failed_retryable"),
    ("sweep", "in_progress", "unknown"),
    ("resolve_executed", "unknown", "completed"),
    ("resolve_not_executed", "unknown", "failed_retryable"),
    ("still_unknown", "unknown", "unknown"),
    ("expire", "completed", "expired"),
    ("purge", "completed", None),
    ("purge", "failed_retryable", None),
    ("purge", "expired", None),
    # In one commit.
    ("commit_new", None, "completed"),
    ("commit_retryable", "failed_retryable", "completed"),
    ("commit_anew", "completed", "completed"),
    ("commit_anew", "failed_retryable", "completed"),
    ("commit_anew", "expired", "completed"),
    ("defer_new", None, "pending"),
    ("defer_anew", "completed", "pending"),
    ("defer_anew", "failed_retryable", "pending"),
    # Steps.
    ("checkpoint", "in_progress", "in_progress"),
    ("announce", "in_progress", "in_progress"),
    ("result", "in_progress", "in_progress"),
    ("result", "unknown", "in_progress"),
    ("withdraw", "in_progress", "in_progress"),
    ("settle_handed_back", "in_progress", "failed_retryable"),
    ("resolve_result", "unknown", "failed_retryable"),
    ("expire", "failed_retryable", "unknown"),
    # A call that a worker makes.
    ("settle_deferred", "in_progress", "pending"),
    ("take_up", "pending", "in_progress"),
    ("deliver", "in_progress", "completed"),
    ("postpone", "in_progress", "pending"),
    ("park", "in_progress", "unknown"),
    ("resolve_not_executed", "unknown", "pending"),
}


RARE = {
    ("settle_completed", "failed_retryable", "completed"),
    ("defer_anew", "failed_retryable", "pending"),
    ("defer_anew", "expired", "pending"),
}
"""Moves that three hundred runs may do without."""


@pytest.fixture(scope="class")
def crowd() -> list[Run]:
    return [simulate(seed) for seed in range(300)]


class TestCrowd:
    """What three hundred runs show; harness.sharing gives these tests to one worker, which simulates them once."""

    def test_runs_cover_every_request_transition(self, crowd: list[Run]) -> None:
        """R78: the trace of states is the model's, and no part of the model is left out."""
        made = {
            (after.name, before and before.state, after.state)
            for run in crowd
            for story in stories(run.history)
            for before, after in story.changes()
        }

        assert MOVES - RARE <= made <= MOVES | RARE

    @each(
        "sign",
        [
            "crashes before",
            "stands still before",
            ": StoreUnavailableError",
            ": CommitAmbiguousError",
            "'s lost claim",
            "'s lost commit: commits",
            "'s lost commit: rolls back",
            "waits for a lock",
            "is interrupted before",
            "is interrupted after",
            "is interrupted before commit",
            "is interrupted after commit",
            "is interrupted before result",
            "background settlement: claim",
            "holder: holder other",
            "holder: holder somebody",
            "sets the store's clock to +",
            "sets the store's clock to -",
            "does not trust the clock",
            "the provider: charged, reply lost",
            "the provider: lost on the way",
            "the provider: connection refused",
            "the provider: declined",
        ],
    )
    def test_runs_cover_every_fault(self, crowd: list[Run], sign: str) -> None:
        assert any(sign in f"{event[3]}: {event[4]}" for run in crowd for event in run.trace)

    @each(
        ("kind", "code", "replayed"),
        [
            (ClientSaw.OK, None, False),
            (ClientSaw.OK, None, True),
            (ClientSaw.FAIL, Code.IN_PROGRESS, False),
            (ClientSaw.FAIL, Code.OUTCOME_UNKNOWN, False),
            (ClientSaw.FAIL, Code.KEY_REUSED, False),
            (ClientSaw.FAIL, Code.STORE_UNAVAILABLE, False),
            (ClientSaw.FAIL, None, False),
            (ClientSaw.INFO, Code.IN_PROGRESS, False),
            (ClientSaw.INFO, Code.EXECUTION_FAILED, False),
            (ClientSaw.INFO, Code.OUTCOME_UNKNOWN, False),
            (ClientSaw.INFO, None, False),
        ],
    )
    def test_runs_cover_every_response(
        self, crowd: list[Run], kind: ClientSaw, code: Code | None, replayed: bool
    ) -> None:
        heard = {(op.kind, op.code, op.replayed) for run in crowd for op in run.history.operations}

        assert (kind, code, replayed) in heard

    def test_runs_cover_success_of_every_effect(self, crowd: list[Run]) -> None:
        """LOCAL in one commit and by a claim, OUTBOX too; PHASED and INLINE by a claim."""
        kinds = {effect.kind for run in crowd for effect in (*run.history.business, *run.history.ledger)}
        wrote = {write.name for run in crowd for write in run.history.writes}

        assert kinds == {"order", "transfer", "payment", "settlement", "charge"}
        assert wrote >= {"commit_new", "defer_new", "settle_completed", "settle_deferred", "checkpoint", "deliver"}


def test_hung_handler_loses_its_key_after_the_deadline() -> None:
    """F9: its heartbeat stops at the deadline, and what clients hear changes within deadline and lease."""
    hung = Scenario(rates=FaultRates(hang=1.0))
    for seed in range(40):
        run = simulate(seed, scenario=hung)
        assert not run.violations, run
        for story in stories(run.history):
            begun: dict[tuple[str, int], int] = {}
            for _, write in story.changes():
                assert write.elapsed is not None
                began = begun.setdefault((write.incarnation, write.fence), write.elapsed)
                # A beat that is on its way when the deadline comes may take a moment.
                assert write.name != "renew" or write.elapsed - began < DEADLINE + LEASE // 3, run


STALLED = replace(OUTSIDE, send_slack=60 * MINUTE, quiet=(), wakes=(5,), rates=FaultRates(pause=0.6))


def doubles(scenario: Scenario) -> list[int]:
    """The seeds that end in two charges for one request, by its key and body."""
    found = []
    for seed in range(60):
        charges = [(one.key, one.fingerprint) for one in simulate(seed, scenario=scenario).history.ledger]
        if len(charges) != len(set(charges)):
            found.append(seed)
    return found


def test_unfenced_pause_is_found_by_the_simulator() -> None:
    """U1: an owner that stands still between its last look and its send, for longer than anybody waits."""
    runs = (simulate(seed, scenario=STALLED) for seed in range(200))

    assert any(found.rule is Rule.ONE_EFFECT for run in runs for found in run.violations)


def test_provider_with_key_memory_prevents_double_charges() -> None:
    """U1, D1, F38: the second charge has the first one's downstream key, in every life of the key."""
    assert doubles(STALLED)
    assert not doubles(replace(STALLED, provider_remembers=True))


def test_runs_without_faults_have_no_outage_or_doubt() -> None:
    """Without faults nobody hears of an outage or a doubt, and no record is ever swept or unknown."""
    calm = Scenario(effects=(Effects.LOCAL,), rates=FaultRates())
    usual = {None, Code.IN_PROGRESS, Code.KEY_REUSED, Code.EXECUTION_FAILED}
    for seed in range(20):
        run = simulate(seed, scenario=calm)
        assert not run.violations
        assert {op.code for op in run.history.operations} <= usual
        assert {write.name for write in run.history.writes}.isdisjoint({"sweep", "mark_unknown", "settle_unknown"})


class TestCommandLine:
    def test_a_seed_prints_its_trace(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert main(["--seed", "11"]) == 0
        assert capsys.readouterr().out == f"{simulate(11)}\n"

    def test_a_range_prints_a_line(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert main(["--seeds", "3:6"]) == 0
        assert capsys.readouterr().out == "0 of 3 runs broke a promise\n"

    def test_command_line_mutant_prints_its_violation(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert main(["--seed", "0", "--mutant", "no_version_bump"]) == 1
        assert "changed the version from 1 to 1" in capsys.readouterr().out

    def test_a_range_with_a_mutant_names_the_seeds(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert main(["--seeds", "0:2", "--mutant", "born_expired"]) == 1
        said = capsys.readouterr().out.splitlines()
        assert said[0].startswith("seed 0: ")
        assert said[-1] == "2 of 2 runs broke a promise"

    @pytest.mark.parametrize("name", SCENARIOS)
    def test_a_scenario_is_chosen_by_name(self, name: str, capsys: pytest.CaptureFixture[str]) -> None:
        assert main(["--seed", "4", "--scenario", name]) == 0
        assert capsys.readouterr().out == f"{simulate(4, scenario=SCENARIOS[name])}\n"
