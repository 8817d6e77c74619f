"""Clauses about a store that is down: nothing runs without protection, and all goes on when it is back."""

from __future__ import annotations

import time
from typing import Final

from oncekey.conformance.clauses import (
    EVERY,
    Area,
    Clause,
    Failed,
    Need,
    Passed,
    Severity,
    UndecidedError,
    Verdict,
)
from oncekey.conformance.commands import STORE_UP, ran_before, store_down
from oncekey.conformance.judging import shown
from oncekey.conformance.probe import Probe
from oncekey.conformance.shots import Answer, Shot

_UNAVAILABLE: Final = 503
_POLL: Final = 0.2


def closed(probe: Probe) -> Verdict:
    """A request while the store is down."""
    before = probe.count()
    answer, _ = _during(probe)
    effects = _counted(probe, before)
    if answer.ok or effects:
        counted = "" if effects is None else f"; {effects} effects"
        return Failed("while the store is down: an error, and nothing happens", f"{shown(answer)}{counted}")
    return Passed()


def told(probe: Probe) -> Verdict:
    """What the client is told meanwhile."""
    answer, _ = _during(probe)
    if answer.ok:
        raise UndecidedError("a request is executed while the store is down")
    if answer.status == _UNAVAILABLE and answer.header("Retry-After"):
        return Passed()
    seen = f"{shown(answer)}; Retry-After: {answer.header('Retry-After')}"
    return Failed("while the store is down: 503 with Retry-After", seen)


def recovered(probe: Probe) -> Verdict:
    """The same request when the store is back."""
    before = probe.count()
    _, shot = _during(probe)
    place = len(probe.trail)
    again = probe.until_settled(shot)
    ran_before(probe, place, STORE_UP)
    effects = _counted(probe, before)
    if not again.ok:
        return Failed(f"within {probe.target.patience:g} s after the outage the request is executed", shown(again))
    if effects not in {None, 1}:
        return Failed("1 effect of the request and its retry after the outage", f"{effects} effects")
    return Passed()


def remembered(probe: Probe) -> Verdict:
    """A finished request, an outage, and its retry."""
    key, before = probe.fresh(), probe.count()
    first = probe.first(key)
    place = len(probe.trail)
    with store_down(probe):
        pass
    again = probe.until_settled(probe.shot(key))
    ran_before(probe, place, Need.OUTAGE, STORE_UP)
    effects = _counted(probe, before)
    if effects not in {None, 1}:
        return Failed("1 effect of a request and its retry after the outage", f"{effects} effects; {shown(again)}")
    if not probe.same(first, again):
        return Failed(f"after the outage {shown(first)} again", shown(again))
    return Passed()


def _during(probe: Probe) -> tuple[Answer, Shot]:
    """Send a request while the store is down."""
    shot = probe.shot(probe.fresh())
    with store_down(probe):
        answer = probe.fire(shot)
        ran_before(probe, -1, Need.OUTAGE)
    return answer, shot


def _counted(probe: Probe, before: int | None) -> int | None:
    """The effects, when the API can be asked for them again."""
    ends = time.monotonic() + probe.target.patience
    while True:
        try:
            return probe.since(before)
        except UndecidedError:
            if time.monotonic() > ends:
                raise
            time.sleep(_POLL)


CLAUSES: Final = (
    Clause(
        id="outages.closed",
        title="While the store is down nothing is executed",
        why="Whatever runs without a stored key runs again with its retry.",
        area=Area.CRASHES,
        severity=Severity.CRITICAL,
        needs=(Need.OUTAGE,),
        shots=4,
        judge=closed,
    ),
    Clause(
        id="outages.told",
        title="While the store is down clients get 503 with Retry-After",
        why="A client that knows that nothing happened, and when to come back, does no harm.",
        area=Area.CRASHES,
        severity=Severity.LOW,
        must=frozenset(),
        should=EVERY,
        needs=(Need.OUTAGE,),
        shots=1,
        judge=told,
    ),
    Clause(
        id="outages.recovered",
        title="After an outage of the store the same key is executed, once",
        why="An outage that leaves its keys locked goes on for their clients.",
        area=Area.CRASHES,
        severity=Severity.HIGH,
        needs=(Need.OUTAGE,),
        shots=10,
        judge=recovered,
        sight=True,
    ),
    Clause(
        id="outages.remembered",
        title="An outage of the store does not make the API forget what it has answered",
        why="A cache that is emptied by a restart is no store.",
        area=Area.CRASHES,
        severity=Severity.CRITICAL,
        needs=(Need.OUTAGE,),
        shots=8,
        judge=remembered,
        sight=True,
    ),
)
