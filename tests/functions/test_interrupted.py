"""A call that is interrupted before and after every action of its life: by a signal in a thread, by a cancellation."""

from __future__ import annotations

import asyncio
from itertools import count
from typing import Any

import pytest

from functions.stage import Order, Stage
from harness.interrupting import InterruptedLoop, InterruptedThreads, Signal, Trial
from oncekey import OutcomeUnknownError

PATIENCE = 60.0
LEFT: dict[str, Any] = {
    "local": lambda item: [item],
    "inline": lambda _: [],
    "phased": lambda item: [item, f"{item} paid"],
}


class Interrupting:
    """Puts a runtime that is interrupted into the place of the stage's own."""

    def __init__(self, stage: Stage, trial: Trial) -> None:
        self.stage, self.trial = stage, trial

    async def __aenter__(self) -> None:
        functions = self.stage.once._functions
        if self.stage.blocking:
            self.threads: Any = functions.threads
            self.plain = self.threads.runtime
            self.threads.runtime = InterruptedThreads(self.plain.engine, self.trial)
            return
        self.loops: Any = functions.loops
        runtime, site = self.plain = self.loops.runtime_and_site()
        self.trial.blocking = False
        self.loops._last_pair = (InterruptedLoop(runtime.engine, self.trial), site)

    async def __aexit__(self, *_: object) -> None:
        if self.stage.blocking:
            assert await asyncio.to_thread(self.threads.runtime.shut_down, PATIENCE)
            self.threads.runtime = self.plain
            return
        assert await self.loops._last_pair[0].running_work.wait(PATIENCE)
        self.loops._last_pair = self.plain


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("kind", ["local", "inline", "phased"])
async def test_a_call_may_be_interrupted_at_every_action(small_stage: Stage, kind: str, when: str) -> None:
    # P4, P7: nothing stays open, no key is left owned, and nothing is done twice
    stage, unknown = small_stage, set()
    call = stage.function(kind)
    async with stage.open():
        await call("first", Order("first"))
        for at in count(1):
            item, sent, trial = f"item {at}", len(stage.charges), Trial(at, when)
            async with Interrupting(stage, trial):
                try:
                    await call(item, Order(item))
                except (Signal, asyncio.CancelledError):
                    assert trial.interrupted is not None
            assert trial.open == [], trial.names
            try:
                assert (await call(item, Order(item))).item == item
            except OutcomeUnknownError:
                # What became of a call that was being made, nobody knows: it was made at most once.
                unknown.add(trial.interrupted)
                assert len(stage.charges) - sent <= 1
            else:
                assert len(stage.charges) - sent == (kind != "local"), trial.names
                assert [row for row in stage.rows if row.startswith(item)] == LEFT[kind](item), trial.names
            if trial.interrupted is None:
                break
    assert unknown == ({"Call"} if kind == "phased" else set())
    assert at >= {"local": 3, "inline": 4, "phased": 14}[kind]
