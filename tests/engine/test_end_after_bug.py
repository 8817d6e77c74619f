"""A life that a fault of ours keeps from its end: nothing stays open, and what may have happened is not forgotten."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from harness import flows
from oncekey.core.model import Effects, State
from oncekey.core.policy import Policy
from oncekey.engine.actions import STOPPED_AT_HANDLER, Life
from oncekey.engine.enrolment import Enrolment
from oncekey.engine.run import Breaker, Run, Site
from oncekey.engine.serve import end_after_bug, serve
from oncekey.runtimes.threads import ThreadRuntime
from oncekey.testing.claims import a_claim, again
from oncekey.wire import connect
from proof.crash.runtime import Unasked

POLICY = Policy()


@pytest.fixture
def runtime(tmp_path: Path) -> Iterator[ThreadRuntime]:
    engine = connect(f"sqlite:///{tmp_path}/shop.db")
    engine.migrate()
    yield ThreadRuntime(engine)
    engine.close()


def resting(runtime: ThreadRuntime, effects: Effects, claim: object = None) -> tuple[Run, Life[object]]:
    """A life whose handler is about to be called."""
    made = claim or replace(a_claim(effects=effects), recovery=POLICY.recovery_for(effects))
    site = Site(runtime.engine.store, Breaker(), float, float)
    run = Run(site, made, Enrolment("pay", effects, POLICY, None), Unasked())  # type: ignore[arg-type]
    life = serve(run)
    assert runtime.run(life) is STOPPED_AT_HANDLER
    return run, life


@pytest.mark.parametrize("effects", [Effects.INLINE, Effects.PHASED, Effects.LOCAL])
def test_bug_before_the_handler_releases_the_claim(runtime: ThreadRuntime, effects: Effects) -> None:
    run, life = resting(runtime, effects)
    runtime.instead(life, end_after_bug(run, life, entered=False))
    assert flows.find(runtime.engine, run.claim.id).record is None
    assert runtime.shut_down(0.0)
    second, life = resting(runtime, effects, again(run.claim))  # the key is as good as new
    runtime.instead(life, end_after_bug(second, life, entered=False))


def test_bug_after_handler_start_leaves_the_lease(runtime: ThreadRuntime) -> None:
    run, life = resting(runtime, Effects.INLINE)
    runtime.instead(life, end_after_bug(run, life, entered=True))
    record = flows.find(runtime.engine, run.claim.id).record
    assert record is not None
    assert record.state is State.IN_PROGRESS  # the sweeper will find it
    assert run.pulse is not None
    assert run.pulse._renew is None  # type: ignore[attr-defined]
    assert runtime.shut_down(0.0)


def test_bug_rolls_back_undecided_rows(runtime: ThreadRuntime) -> None:
    run, life = resting(runtime, Effects.LOCAL)
    run.tx.connection.execute("CREATE TABLE sold (item TEXT)")
    runtime.instead(life, end_after_bug(run, life, entered=True))
    assert flows.find(runtime.engine, run.claim.id).record is None
    run, life = resting(runtime, Effects.LOCAL)  # the only writer is free
    run.tx.connection.execute("CREATE TABLE sold (item TEXT)")
    runtime.instead(life, end_after_bug(run, life, entered=True))
