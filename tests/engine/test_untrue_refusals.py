"""What a client hears when a settlement cannot be written: "not accepted" only where nothing of it was done."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from oncekey.core.errors import NotExecutedError, StoreUnavailableError
from oncekey.core.flow import Transaction
from oncekey.core.model import Code, Effects
from oncekey.core.policy import Policy
from oncekey.databases.memory import MemoryDriver
from oncekey.engine import steps
from oncekey.engine.actions import Action, Beat, Call, Later, Life
from oncekey.engine.enrolment import Enrolment
from oncekey.engine.run import Breaker, Run, Site
from oncekey.stores.memory import MemoryStore
from oncekey.testing.claims import a_claim
from proof.crash.runtime import Still, Unasked
from proof.lives import CallReport, Said, life

POLICY = Policy()


def heard(
    effects: Effects, handler: Callable[[Run], Life[Said]], settling: Callable[[MemoryDriver], None]
) -> CallReport:
    """One life over a memory store, in which something happens just before the settlement."""
    store, driver = MemoryStore(), MemoryDriver()
    claim = replace(a_claim(effects=effects), recovery=POLICY.recovery_for(effects))
    site = Site(store, Breaker(), float, float)
    flow = life(Run(site, claim, Enrolment("pay", effects, POLICY, None), Unasked()), handler)

    def perform(action: Action) -> Any:
        match action:
            case Transaction(name="settle"):
                settling(driver)
                return driver.run(action)
            case Transaction():
                return driver.run(action)
            case Call(fn=fn, arguments=arguments):
                return fn(*arguments)
            case Beat():
                return Still()
            case Later():
                return None
            case _:
                return None

    try:
        action = next(flow)
        while True:
            try:
                result = perform(action)
            except Exception as error:
                action = flow.throw(error)
            else:
                action = flow.send(result)
    except StopIteration as stop:
        told: CallReport = stop.value
        return told


def charged_and_failed(run: Run) -> Life[Said]:
    assert run.phased_run is not None
    yield from steps.call(run.store, run.phased_run, "charge", lambda _: "ch_1", repeatable=True, parameters=None)
    raise RuntimeError


def not_sent(run: Run) -> Life[Said]:
    yield Call(lambda: None)
    raise NotExecutedError("nobody was reached")


def charged(run: Run) -> Life[Said]:
    yield Call(lambda: "ch_1")
    return Said(201, b"{}")


def outage(_: MemoryDriver) -> None:
    raise StoreUnavailableError("down")


def restored_backup(driver: MemoryDriver) -> None:
    driver.table.clear()


@pytest.mark.parametrize(
    ("effects", "handler", "settling", "code"),
    [
        (Effects.PHASED, charged_and_failed, outage, Code.OUTCOME_UNKNOWN),
        (Effects.PHASED, not_sent, outage, Code.OUTCOME_UNKNOWN),
        (Effects.INLINE, charged, outage, Code.OUTCOME_UNKNOWN),
        (Effects.INLINE, not_sent, outage, Code.STORE_UNAVAILABLE),
        (Effects.INLINE, charged, restored_backup, Code.OUTCOME_UNKNOWN),
        (Effects.INLINE, not_sent, restored_backup, Code.STORE_UNAVAILABLE),
        (Effects.PHASED, charged_and_failed, restored_backup, Code.OUTCOME_UNKNOWN),
    ],
)
def test_not_accepted_is_returned_only_if_nothing_ran(
    effects: Effects,
    handler: Callable[[Run], Life[Said]],
    settling: Callable[[MemoryDriver], None],
    code: Code,
) -> None:
    """R75, R143: found by the simulator as S4, the first time that it ran phased handlers."""
    answer = heard(effects, handler, settling)

    assert (answer.status, answer.code) == (503, code)
