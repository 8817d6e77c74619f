"""The proof's own test: with one rule broken it must find a violation at the place that the page names."""

from __future__ import annotations

import logging
import uuid
from pathlib import Path

import pytest

from oncekey.databases.address import Kind
from proof.crash.__main__ import main
from proof.crash.mutants import MUTANTS, Mutant
from proof.crash.page import page
from proof.crash.places import a_place
from proof.crash.proof import Variant, prove

PAGE = Path(__file__).parents[2] / "docs" / "explanation" / "crash-proof.md"
HUNTS = [(mutant, kind) for mutant in MUTANTS.values() for kind in mutant.stores]


@pytest.fixture(autouse=True)
def quiet(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL)


# F1: no_fence, unconditional_unlock_of_calls. F8, F20: lost_commit_is_failure. F12: lock_in_the_select_list.
# F14: upsert. F24: key_from_the_attempt. F29: reruns_pending. F38: key_from_the_incarnation. R78, R123, R125.
@pytest.mark.parametrize(("mutant", "kind"), HUNTS, ids=[f"{mutant.name}-{kind}" for mutant, kind in HUNTS])
async def test_a_mutant_is_caught(mutant: Mutant, kind: Kind, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    name = f"mutant_{uuid.uuid4().hex}"
    with a_place(kind, tmp_path, lambda: request.getfixturevalue("postgres_server"), name) as place:
        honest = Variant(own_clock=mutant.variant.own_clock)
        real = await prove(place, mutant.case, "the-key-of-the-real-code", mutant.fault, honest)
        caught = await prove(place, mutant.case, "the-key-of-a-mutant", mutant.fault, mutant.variant)

    # The same fault in the same world: it is the broken rule that is caught, not the world.
    assert real.struck
    assert not real.broken, str(real)
    assert caught.struck
    assert [sentence for sentence in caught.broken if sentence.startswith(mutant.breaks)], str(caught)


def test_the_page_is_fresh() -> None:
    assert PAGE.read_text("utf-8") == page(), (
        "run: PYTHONPATH=tests python -m proof.crash.page > docs/explanation/crash-proof.md"
    )


def test_the_proof_can_be_run_by_hand(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--store", f"sqlite:///{tmp_path / 'proof.db'}", "--case", "inline-no-dedup-client"]) == 0
    said = capsys.readouterr().out.split()
    assert said[:3] == ["inline-no-dedup-client", "10", "points"]
    assert said[-2:] == ["0", "broken"]
