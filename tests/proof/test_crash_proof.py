"""Every kind of effects, on both stores, cut off at every statement and every call.

R71, R75, R116, R117, R120, R123, R125, R126, R127, R130; F5, F8, F15, F23, F24, F27, F28, F29, F30, F31, F35; O5.
"""

from __future__ import annotations

import logging
import uuid
from pathlib import Path

import pytest

from oncekey.core.model import Effects
from oncekey.databases.address import Kind
from proof.crash.crasher import Fault, Manner, Point
from proof.crash.places import Place, a_place, keys
from proof.crash.proof import CASES, Case, Stage, Verdict, faults, prove

BOTH = (Kind.SQLITE, Kind.POSTGRES)


@pytest.fixture(autouse=True)
def quiet(caplog: pytest.LogCaptureFixture) -> None:
    """Hundreds of crashes say the same hundreds of times."""
    caplog.set_level(logging.CRITICAL)


@pytest.fixture
def place(request: pytest.FixtureRequest, tmp_path: Path) -> object:
    name = f"proof_{uuid.uuid4().hex}"
    with a_place(request.param, tmp_path, lambda: request.getfixturevalue("postgres_server"), name) as made:
        yield made


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("place", BOTH, ids=str, indirect=True)
async def test_request_survives_a_fault_at_every_point(place: Place, case: Case) -> None:
    names = keys()
    async with Stage(place) as stage:
        seen = await stage.trail(case, next(names))
        assert not seen.broken, str(seen)
        planned = list(faults(seen))
        verdicts = [await stage.prove(case, next(names), fault) for fault in planned]

    missed = [str(verdict.fault) for verdict in verdicts if not verdict.struck]
    assert not missed, "the fault never happened, so nothing was proven"
    broken = [verdict for verdict in verdicts if verdict.broken]
    assert not broken, "\n\n".join(map(str, broken))
    assert_thorough(case, seen, planned)
    assert_doubts(case, verdicts)
    zombies = any(verdict.overtaken for verdict in verdicts)
    stepwise = case.thorough and case.effects in {Effects.PHASED, Effects.OUTBOX}
    assert zombies is stepwise, "nobody was overtaken, or somebody who could not be"


def assert_thorough(case: Case, seen: Verdict, planned: list[Fault]) -> None:
    """A proof that became empty by accident would be green too."""
    said = {str(point) for point in seen.points}
    wanted = {
        Effects.LOCAL: {"before:commit:1", "after:commit:1", "after:business:1", "after:due:1", "after:sent:1"},
        Effects.PHASED: {"after:claim:1", "before:announce:1", "after:charge:1", "before:result:1", "after:commit:2"},
        Effects.OUTBOX: {
            *{"after:commit:1", "after:due:1", "after:commit-take_up:1", "after:charge:1"},
            *({"after:claim:1", "before:settle_deferred:1"} if case.claims_first else set()),
        },
        Effects.INLINE: {"after:claim:1", "before:charge:1", "after:charge:1", "after:settle_completed:1"},
    }[case.effects]
    assert wanted <= said, sorted(said)
    manners = {fault.manner for fault in planned}
    everything = {Manner.DIE, Manner.PAUSE, Manner.OVERTAKE, Manner.LOSE}
    assert manners == (everything if case.thorough else {Manner.DIE})


def assert_doubts(case: Case, verdicts: list[Verdict]) -> None:
    """Where nobody can know, and nowhere else (the proof itself says which is which)."""
    doubts = [verdict for verdict in verdicts if "outcome_unknown" in verdict.ended]
    certain = case.effects is Effects.LOCAL or (case.deduplicates and case.repeatable)
    assert bool(doubts) is not certain


@pytest.mark.parametrize("place", BOTH, ids=str, indirect=True)
async def test_one_charge_and_the_same_201_after_a_death_between_charge_and_commit(place: Place) -> None:
    verdict = await prove(place, Case(Effects.PHASED), "the-key-of-one-charge", at("after:charge:1"))

    assert (verdict.struck, verdict.ended, verdict.broken) == (True, "201", [])


@pytest.mark.parametrize("place", BOTH, ids=str, indirect=True)
async def test_crash_without_provider_deduplication_becomes_unknown(place: Place) -> None:
    blind = Case(Effects.PHASED, deduplicates=False, repeatable=False)
    verdict = await prove(place, blind, "the-key-of-one-call", at("after:charge:1"))

    assert verdict.struck
    assert (verdict.ended, verdict.broken) == ("409 idempotency_outcome_unknown", [])


def at(point: str) -> Fault:
    return Fault(Point.parse(point), Manner.DIE)
