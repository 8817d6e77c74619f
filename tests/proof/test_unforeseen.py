"""An error that nobody has foreseen, at every action of a life: a listener of the application, a fault of our own.

It is answered by the application's error page. But no transaction stays open, and with it no lock; no heartbeat goes on
and keeps the key for its whole deadline; and who comes again when the lease is over is answered.
"""

from __future__ import annotations

import contextlib
import logging
import uuid
from collections.abc import Iterator
from contextlib import closing
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from oncekey.core.model import Effects
from oncekey.databases.address import Kind
from oncekey.engine.actions import Action, Beat
from oncekey.engine.shell import Engine
from oncekey.testing.claims import ManualClock
from proof.crash.crasher import Crasher
from proof.crash.places import Place, a_place, keys
from proof.crash.runtime import MortalThreads, Notifier, name_of, pass_time, request, wrong
from proof.lives import CallReport

ROUNDS = 4
EFFECTS = {Effects.LOCAL: 2, Effects.OUTBOX: 2, Effects.INLINE: 4, Effects.PHASED: 10}
"""So many effects, and more, a life has: fewer would mean that the proof has become empty."""


class UnforeseenError(Exception):
    """No error of ours and none of a database."""


class Pulse:
    """A heartbeat that knows whether somebody has stopped it."""

    lost = False
    beats = True

    def stop(self) -> None:
        self.beats = False


class Failing(MortalThreads):
    """A runtime whose n-th action fails."""

    def __init__(self, engine: Engine, at: int) -> None:
        super().__init__(engine, Crasher())
        self.at = at
        self.names: list[str] = []
        self.pulses: list[Pulse] = []

    def perform(self, action: Action) -> Any:
        self.names.append(name_of(action))
        if len(self.names) == self.at:
            raise UnforeseenError
        if isinstance(action, Beat):
            self.pulses.append(Pulse())
            return self.pulses[-1]
        return super().perform(action)


@pytest.fixture
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Place]:
    name = f"unforeseen_{uuid.uuid4().hex}"
    with a_place(request.param, tmp_path, lambda: request.getfixturevalue("postgres_server"), name) as made:
        yield made


class Lockless:
    """A store of an older version, where LOCAL claims first."""

    locks = None

    def __init__(self, store: Any) -> None:
        self._store = store

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)


@pytest.mark.parametrize("claims_first", [False, True], ids=["", "claims-first"])
@pytest.mark.parametrize("effects", Effects, ids=str)
@pytest.mark.parametrize("place", [Kind.SQLITE, Kind.POSTGRES], ids=str, indirect=True)
def test_nothing_is_left_open(
    place: Place, effects: Effects, claims_first: bool, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.CRITICAL)
    names, clock = keys(), ManualClock()
    with closing(place.blocking(clock)) as engine:
        store: Any = Lockless(engine.store) if claims_first else engine.store
        for at in count(1):
            key, teller = next(names), Notifier(place.insert_now, emits=True)
            runtime = Failing(engine, at)
            flow = request(store, teller, effects, key)
            with contextlib.suppress(UnforeseenError):
                runtime.live(flow)
            where = f"{effects}: {runtime.names} and an error at the {at}."
            assert flow.gi_frame is None
            assert not runtime.open, where
            runtime.settle_in_background()
            assert not any(pulse.beats for pulse in runtime.pulses), where
            report: CallReport | None = None
            for _ in range(ROUNDS):
                pass_time(clock)
                report = MortalThreads(engine, Crasher()).live(request(store, teller, effects, key))
            assert not wrong(effects, report, place.look(key), teller), where
            if at > len(runtime.names):
                break
    assert at > EFFECTS[effects]
