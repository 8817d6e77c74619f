"""The lifecycle itself, cut off before and after every action and every statement, on both stores, then retried.

R71, R75, R116, R117, R123, R125, R127: a death. R72, R101: a cancellation, with the clock standing still.
"""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import TypeVar

import pytest

from oncekey.core.model import Code, Effects
from oncekey.databases.address import Kind
from oncekey.engine import steps
from oncekey.engine.actions import Life
from oncekey.engine.shell import AsyncEngine, Engine
from oncekey.testing.claims import ManualClock
from proof.crash.crasher import Crasher, Fault, Manner, Point
from proof.crash.places import Place, a_place, keys
from proof.crash.runtime import MortalLoop, MortalThreads, Notifier, owned, pass_time, request, wrong
from proof.lives import CallReport
from proof.patching import patched

T = TypeVar("T")

BOTH = (Kind.SQLITE, Kind.POSTGRES)
ROUNDS = 4
MOMENTS = 250
CONFLICT = 409

SEEN: dict[Effects, set[str]] = {
    Effects.LOCAL: {"before:action-Begin:1", "after:action-Call:1", "before:action-Commit:1", "before:commit:1"},
    Effects.OUTBOX: {"before:action-Begin:1", "before:action-Commit:1", "after:put_parcels:1", "before:commit:1"},
    Effects.INLINE: {"after:claim:1", "before:action-Beat:1", "before:action-Call:1", "before:action-settle:1"},
    Effects.PHASED: {"after:claim:1", "after:checkpoint:1", "before:announce:1", "before:action-Call:2"},
}
"""Places without which the proof would have become empty by accident."""

FOLDED = {"before:action-Begin:1", "after:action-Begin:1", "before:action-Commit:1", "after:action-Commit:1"}
"""The same where the record travels with the COMMIT: between those two there is no place."""

LIVES = [*((effects, False) for effects in Effects), (Effects.LOCAL, True)]
NAMES = [f"{effects}{'-folded' if folds else ''}" for effects, folds in LIVES]


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


class Deaths:
    """Lives of a process that ends at a point, and of others that come back for what it left behind."""

    def __init__(self, place: Place, engine: Engine, effects: Effects, clock: ManualClock, *, folds: bool) -> None:
        self.place, self.engine, self.effects, self.clock, self.folds = place, engine, effects, clock, folds

    def die(self, key: str, *faults: Fault) -> list[Point]:
        teller, crasher = Notifier(self.place.insert_now, emits=not self.folds), Crasher(*faults)
        self._live(crasher, teller, key)
        assert crasher.struck is bool(faults)
        report: CallReport | None = None
        for _ in range(ROUNDS):
            pass_time(self.clock)
            report = self._live(Crasher(), teller, key)
        assert not wrong(self.effects, report, self.place.look(key), teller), f"{self.effects} died at {faults}"
        return crasher.points

    def _live(self, crasher: Crasher, teller: Notifier, key: str) -> CallReport | None:
        runtime = MortalThreads(self.engine, crasher, folds=self.folds)
        return runtime.live(request(self.engine.store, teller, self.effects, key))


@pytest.mark.parametrize(("effects", "folds"), LIVES, ids=NAMES)
@pytest.mark.parametrize("place", BOTH, ids=str, indirect=True)
def test_a_process_dies_at_every_action_and_statement(place: Place, effects: Effects, folds: bool) -> None:
    names, clock = keys(), ManualClock()
    with closing(place.blocking(clock)) as engine:
        deaths = Deaths(place, engine, effects, clock, folds=folds)
        points = deaths.die(next(names))
        assert {str(point) for point in points} >= (FOLDED | {"before:commit_with:1"} if folds else SEEN[effects])

        for fault in cuts(points, Manner.DIE):
            deaths.die(next(names), fault)


class Interruptions:
    """Lives that are interrupted, in threads or under asyncio; nothing is owned afterwards, and no time passes."""

    def __init__(self, place: Place, effects: Effects, *, folds: bool = False) -> None:
        self.place, self.effects, self.folds = place, effects, folds

    def threads(self, engine: Engine, key: str, *faults: Fault) -> list[Point]:
        teller, crasher = Notifier(self.place.insert_now, emits=not self.folds), Crasher(*faults)
        runtime = MortalThreads(engine, crasher, folds=self.folds)
        flow = request(engine.store, teller, self.effects, key)
        runtime.live_on(flow)
        assert flow.gi_frame is None
        assert not runtime.open
        runtime.settle_in_background()
        again = request(engine.store, teller, self.effects, key)
        self._judge(key, faults, crasher, teller, MortalThreads(engine, Crasher()).live_on(again))
        return crasher.points

    async def loop(self, inner: AsyncEngine, key: str, *faults: Fault) -> list[Point]:
        teller, crasher = Notifier(self.place.insert, emits=not self.folds), Crasher(*faults)
        engine = inner if self.folds else AsyncEngine(inner.store, crasher.driver(inner.driver))
        runtime = MortalLoop(engine, crasher)
        flow = request(engine.store, teller, self.effects, key)
        await runtime.live(flow)
        assert flow.gi_frame is None
        assert not crasher.holds
        await runtime.settle_in_background()
        self._judge(key, faults, crasher, teller, await self._again(inner, teller, key))
        return crasher.points

    async def _again(self, inner: AsyncEngine, teller: Notifier, key: str) -> CallReport | None:
        """A retry. A COMMIT that was cut off takes its connection with it, and the server needs a moment to notice."""
        for _ in range(MOMENTS):
            report = await MortalLoop(inner, Crasher()).live(request(inner.store, teller, self.effects, key))
            if report is None or report.status != CONFLICT or report.code is not Code.IN_PROGRESS:
                return report
            await asyncio.sleep(0.02)
        return report

    def _judge(
        self, key: str, faults: tuple[Fault, ...], crasher: Crasher, teller: Notifier, report: CallReport | None
    ) -> None:
        left = self.place.look(key)
        where = f"{self.effects} interrupted at {faults}"
        assert crasher.struck is bool(faults), where
        assert not owned(left), where
        assert not wrong(self.effects, report, left, teller), where
        in_the_call = any("action-Call" in fault.point.what for fault in faults)
        assert len(teller.charges) <= 1 or in_the_call, f"{where}: a result that was there is paid for twice"


@pytest.mark.parametrize(("effects", "folds"), LIVES, ids=NAMES)
@pytest.mark.parametrize("place", BOTH, ids=str, indirect=True)
def test_a_thread_is_interrupted_at_every_action_and_statement(place: Place, effects: Effects, folds: bool) -> None:
    trial, names = Interruptions(place, effects, folds=folds), keys()
    with closing(place.blocking(ManualClock())) as engine:
        points = trial.threads(engine, next(names))
        assert {str(point) for point in points} >= (FOLDED if folds else SEEN[effects])

        for fault in cuts(points, Manner.INTERRUPT):
            trial.threads(engine, next(names), fault)


@pytest.mark.parametrize(("effects", "folds"), LIVES, ids=NAMES)
@pytest.mark.parametrize("place", BOTH, ids=str, indirect=True)
async def test_a_task_is_cancelled_at_every_action_and_statement(place: Place, effects: Effects, folds: bool) -> None:
    trial, names = Interruptions(place, effects, folds=folds), keys()
    engine = place.engine(ManualClock())
    try:
        points = await trial.loop(engine, next(names))
        assert {str(point) for point in points} >= (FOLDED if folds else SEEN[effects])

        for fault in cuts(points, Manner.INTERRUPT):
            await trial.loop(engine, next(names), fault)
    finally:
        await engine.close()


def dropped(flow: Callable[[], Life[T]]) -> Life[T]:
    """What is interrupted while it is written down is not written down once more."""
    return (yield from flow())


@pytest.mark.parametrize("place", BOTH, ids=str, indirect=True)
def test_the_mutant_that_drops_a_result_at_a_cancellation_is_caught(place: Place) -> None:
    """The result of a call was there, and whoever goes on has to make the call again."""
    trial, names = Interruptions(place, Effects.PHASED), keys()
    at = Fault(Point.parse("before:action-result"), Manner.INTERRUPT)
    with closing(place.blocking(ManualClock())) as engine:
        trial.threads(engine, next(names), at)
        with patched((steps, "_to_its_end", dropped)), pytest.raises(AssertionError, match="paid for twice"):
            trial.threads(engine, next(names), at)
