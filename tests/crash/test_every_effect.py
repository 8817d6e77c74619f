"""The lifecycle itself, cut off before and after every effect and every statement, on both stores, then retried.

R71, R75, R116, R117, R123, R125, R127: a death. R103, R118: a cancellation, with the clock standing still.
"""

from __future__ import annotations

import logging
import uuid
from collections.abc import Callable, Iterator
from contextlib import closing
from functools import partial
from pathlib import Path

import pytest

from crash.places import a_place
from oncekey.core.model import Effects
from oncekey.engine import steps
from oncekey.engine.shell import AsyncEngine
from oncekey.testing.clock import ManualClock
from oncekey.testing.crash.lives import Teller, owned, pass_time, request, wrong
from oncekey.testing.crash.patching import patched
from oncekey.testing.crash.places import Place, keys
from oncekey.testing.crash.runtime import MortalLoop, MortalThreads
from oncekey.testing.crasher import Crasher, Fault, Manner, Point
from oncekey.testing.lives import Heard
from oncekey.wire import Kind

BOTH = (Kind.SQLITE, Kind.POSTGRES)
ROUNDS = 4

SEEN: dict[Effects, set[str]] = {
    Effects.LOCAL: {"before:effect-Begin:1", "after:effect-Call:1", "before:effect-Commit:1", "before:commit:1"},
    Effects.OUTBOX: {"before:effect-Begin:1", "before:effect-Commit:1", "after:put_parcels:1", "before:commit:1"},
    Effects.INLINE: {"after:claim:1", "before:effect-Beat:1", "before:effect-Call:1", "before:effect-settle:1"},
    Effects.PHASED: {"after:claim:1", "after:checkpoint:1", "before:announce:1", "before:effect-Call:2"},
}
"""Places without which the proof would have become empty by accident."""


@pytest.fixture(autouse=True)
def quiet(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL)


@pytest.fixture
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Place]:
    name = f"effects_{uuid.uuid4().hex}"
    with a_place(request.param, tmp_path, lambda: request.getfixturevalue("postgres_server"), name) as made:
        yield made


def cuts(points: list[Point], manner: Manner) -> list[Fault]:
    return [Fault(point, manner) for point in points]


def in_threads(place: Place, clock: ManualClock, effects: Effects, key: str, *faults: Fault) -> list[Point]:
    """One life of a process, and then others that come back for it until there is an answer."""
    with closing(place.blocking(clock)) as engine:
        teller = Teller(place.insert_now)
        crasher = Crasher(*faults)
        MortalThreads(engine, crasher).live(request(engine.store, teller, effects, key))
        assert crasher.struck is bool(faults)
        heard: Heard | None = None
        for _ in range(ROUNDS):
            pass_time(clock)
            heard = MortalThreads(engine, Crasher()).live(request(engine.store, teller, effects, key))
        assert not wrong(effects, heard, place.look(key), teller), f"{effects} cut off at {faults}"
    return crasher.points


@pytest.mark.parametrize("effects", Effects)
@pytest.mark.parametrize("place", BOTH, ids=str, indirect=True)
def test_a_process_dies_at_every_effect_and_statement(place: Place, effects: Effects) -> None:
    names, clock = keys(), ManualClock()
    points = in_threads(place, clock, effects, next(names))
    assert {str(point) for point in points} >= SEEN[effects]

    for fault in cuts(points, Manner.DIE):
        in_threads(place, clock, effects, next(names), fault)


class Interruptions:
    """Lives that are interrupted, in threads or under asyncio; nothing is owned afterwards, and no time passes."""

    def __init__(self, place: Place, effects: Effects) -> None:
        self.place, self.effects, self.clock = place, effects, ManualClock()

    def threads(self, key: str, *faults: Fault) -> list[Point]:
        with closing(self.place.blocking(self.clock)) as engine:
            teller, crasher = Teller(self.place.insert_now), Crasher(*faults)
            runtime = MortalThreads(engine, crasher)
            flow = request(engine.store, teller, self.effects, key)
            runtime.live_on(flow)
            assert flow.gi_frame is None
            runtime.run_errands()
            again = request(engine.store, teller, self.effects, key)
            self._judge(key, faults, crasher, teller, MortalThreads(engine, Crasher()).live_on(again))
        return crasher.points

    async def loop(self, key: str, *faults: Fault) -> list[Point]:
        inner = self.place.engine(self.clock)
        teller, crasher = Teller(self.place.insert), Crasher(*faults)
        try:
            engine = AsyncEngine(inner.store, crasher.driver(inner.driver))
            runtime = MortalLoop(engine, crasher)
            flow = request(engine.store, teller, self.effects, key)
            await runtime.live(flow)
            assert flow.gi_frame is None
            await runtime.run_errands()
            again = request(inner.store, teller, self.effects, key)
            self._judge(key, faults, crasher, teller, await MortalLoop(inner, Crasher()).live(again))
        finally:
            await inner.close()
        return crasher.points

    def _judge(
        self, key: str, faults: tuple[Fault, ...], crasher: Crasher, teller: Teller, heard: Heard | None
    ) -> None:
        left = self.place.look(key)
        where = f"{self.effects} interrupted at {faults}"
        assert crasher.struck is bool(faults), where
        assert not owned(left), where
        assert not wrong(self.effects, heard, left, teller), where


@pytest.mark.parametrize("effects", Effects)
@pytest.mark.parametrize("place", BOTH, ids=str, indirect=True)
def test_a_thread_is_interrupted_at_every_effect_and_statement(place: Place, effects: Effects) -> None:
    trial, names = Interruptions(place, effects), keys()
    points = trial.threads(next(names))
    assert {str(point) for point in points} >= SEEN[effects]

    for fault in cuts(points, Manner.INTERRUPT):
        trial.threads(next(names), fault)


@pytest.mark.parametrize("effects", Effects)
@pytest.mark.parametrize("place", BOTH, ids=str, indirect=True)
async def test_a_task_is_cancelled_at_every_effect_and_statement(place: Place, effects: Effects) -> None:
    trial, names = Interruptions(place, effects), keys()
    points = await trial.loop(next(names))
    assert {str(point) for point in points} >= SEEN[effects]

    for fault in cuts(points, Manner.INTERRUPT):
        await trial.loop(next(names), fault)
