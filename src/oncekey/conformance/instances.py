"""Clauses about more than one server: a second instance, and a request that outlives its lease."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from oncekey.conformance.clauses import (
    Area,
    Clause,
    Exchange,
    Failed,
    Need,
    Passed,
    Severity,
    UndecidedError,
    Verdict,
)
from oncekey.conformance.commands import meanwhile, note
from oncekey.conformance.judging import shown, tally
from oncekey.conformance.manner import Manner, Way
from oncekey.conformance.probe import Probe
from oncekey.conformance.shots import Shot
from oncekey.conformance.target import replaced

_PAIRS: Final = 5
_RETRY_AFTER, _RUNS_FOR = 1.2, 1.7
"""When the retry comes, and how long the first request runs, in leases."""


def replayed(probe: Probe) -> Verdict:
    """A retry that reaches the second instance."""
    key, before = probe.fresh(), probe.count()
    first = probe.first(key)
    again = probe.until_settled(_elsewhere(probe, probe.shot(key)))
    effects = probe.since(before)
    if effects not in {None, 1}:
        return Failed("1 effect of a request and its retry at the second instance", f"{effects} effects")
    if not probe.same(first, again):
        return Failed(f"at the second instance {shown(first)} again", shown(again))
    return Passed()


def race(probe: Probe) -> Verdict:
    """Identical requests at both instances at the same moment."""
    key, before = probe.fresh(), probe.count()
    shot = probe.shot(key, slow=True)
    answers = probe.volley([shot, _elsewhere(probe, shot)] * _PAIRS)
    final = probe.until_settled(shot)
    effects = probe.since(before)
    done = [answer for answer in (*answers, final) if answer.ok and not probe.busy(answer)]
    if effects not in {None, 1}:
        return Failed(f"{len(answers)} requests at two instances: 1 effect", f"{effects} effects; {tally(answers)}")
    if any(not probe.same(done[0], answer) for answer in done[1:]):
        return Failed("one success, or the same one for all", f"{tally(answers)} with different bodies")
    if not final.ok or any(not answer.ok and not probe.busy(answer) for answer in answers):
        return Failed("each gets the success, or is told to wait", f"{tally(answers)}; in the end {shown(final)}")
    return Passed()


def outlived(probe: Probe) -> Verdict:
    """A request that runs longer than its lease, and a retry after the lease."""
    lease = probe.target.lease or 0.0
    slow = probe.target.slower_than(_RUNS_FOR * lease)
    if slow is None:
        raise UndecidedError("--slow-header has no number in it that could be made larger", "another --slow-header")
    before = probe.count()
    shot = probe.shot(probe.fresh())
    shot = replace(shot, headers=replaced(shot.headers, (slow,)))
    place = len(probe.trail)
    first, running = meanwhile(probe, shot, _RETRY_AFTER * lease, lambda: _retry(probe, shot))
    manner = Manner(Way.OVERLAPPING, 2, seconds=_RETRY_AFTER * lease)
    second = probe.trail[place]
    probe.trail[place] = replace(second, how="after the lease of the first", manner=manner)
    note(probe, place, Exchange(shot, first, "slower than its lease", manner))
    if not running:
        raise UndecidedError("the request was over before its lease", "another --slow-header, or a shorter --lease")
    final = probe.until_settled(shot)
    effects = probe.since(before)
    done = [answer for answer in (first, second.answer, final) if answer.ok and not probe.busy(answer)]
    if effects not in {None, 1}:
        return Failed("1 effect of a slow request and its retry", f"{effects} effects; in the end {shown(final)}")
    if not final.ok or any(not probe.same(final, answer) for answer in done):
        return Failed("the same success for both", f"{tally((first, second.answer))}; in the end {shown(final)}")
    return Passed()


def _retry(probe: Probe, shot: Shot) -> None:
    probe.fire(shot)


def _elsewhere(probe: Probe, shot: Shot) -> Shot:
    return replace(shot, address=probe.target.also_address or shot.address)


CLAUSES: Final = (
    Clause(
        id="instances.replayed",
        title="A second instance answers a key that the first one has finished",
        why="A load balancer sends the retry wherever it likes.",
        area=Area.INSTANCES,
        severity=Severity.CRITICAL,
        needs=(Need.ALSO,),
        shots=4,
        judge=replayed,
        sight=True,
    ),
    Clause(
        id="instances.race",
        title=f"{2 * _PAIRS} identical requests at two instances at the same moment have one effect",
        why="A lock in the memory of one process does not hold the other one.",
        area=Area.INSTANCES,
        severity=Severity.CRITICAL,
        needs=(Need.ALSO,),
        shots=2 * _PAIRS + 12,
        judge=race,
        sight=True,
    ),
    Clause(
        id="leases.one-effect",
        title="A request that is slower than its lease has one effect, and one answer",
        why="A retry that takes the slow request for a dead one runs beside it.",
        area=Area.INSTANCES,
        severity=Severity.CRITICAL,
        needs=(Need.LEASE, Need.SLOW, Need.COUNT),
        shots=12,
        judge=outlived,
        sight=True,
    ),
)
