"""Clauses about a server that is killed: what it had answered stays, and what it was doing happens once."""

from __future__ import annotations

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
from oncekey.conformance.commands import crash, meanwhile, note, ran_before
from oncekey.conformance.judging import shown
from oncekey.conformance.manner import Manner, Way
from oncekey.conformance.probe import Probe
from oncekey.conformance.shots import Answer


def remembered(probe: Probe) -> Verdict:
    """A finished request, a crash, and its retry."""
    key, before = probe.fresh(), probe.count()
    first = probe.first(key)
    place = len(probe.trail)
    crash(probe)
    again = probe.until_settled(probe.shot(key))
    ran_before(probe, place, Need.CRASH)
    effects = probe.since(before)
    if effects not in {None, 1}:
        return Failed("1 effect of a request and its retry after the crash", f"{effects} effects; {shown(again)}")
    if not probe.same(first, again):
        return Failed(f"after the crash {shown(first)} again", shown(again))
    return Passed()


def one_effect(probe: Probe) -> Verdict:
    """A crash in the middle of a request, and its retries: however they end, it happened once at most."""
    before = probe.count()
    final = _killed(probe)
    effects = probe.since(before)
    if effects is not None and effects > 1:
        return Failed("at most 1 effect of a request that was killed, and its retry", f"{effects} effects")
    if final.ok and not probe.busy(final) and effects == 0:
        return Failed("1 effect, as the answer says", f"no effect; {shown(final)}")
    return Passed()


def answered(probe: Probe) -> Verdict:
    """The retry of a request that was killed does not wait for ever."""
    final = _killed(probe)
    if probe.busy(final) or not final.status:
        return Failed(f"within {probe.target.patience:g} s a retry is not told to wait any more", shown(final))
    return Passed()


def _killed(probe: Probe) -> Answer:
    """The last word on a request whose server was killed while it ran."""
    shot = probe.shot(probe.fresh(), slow=True)
    answer, running = meanwhile(probe, shot, probe.lead, lambda: crash(probe))
    manner = Manner(Way.INTERRUPTED, seconds=probe.lead, after=(Need.CRASH,))
    note(probe, len(probe.trail), Exchange(shot, answer, f"{Need.CRASH} while it ran", manner))
    if not running:
        raise UndecidedError("the request was over before the crash", "a slower --slow-header")
    return probe.until_settled(shot)


CLAUSES: Final = (
    Clause(
        id="crashes.remembered",
        title="A crash does not make the API forget what it has answered",
        why="Keys that are kept in memory only protect nobody from the retry after a restart.",
        area=Area.CRASHES,
        severity=Severity.CRITICAL,
        needs=(Need.CRASH,),
        shots=6,
        judge=remembered,
        sight=True,
    ),
    Clause(
        id="crashes.one-effect",
        title="A request that is killed in the middle has one effect at most, retries included",
        why="It is the moment in which effect and answer come apart.",
        area=Area.CRASHES,
        severity=Severity.CRITICAL,
        needs=(Need.CRASH, Need.SLOW, Need.COUNT),
        shots=12,
        judge=one_effect,
        sight=True,
    ),
    Clause(
        id="crashes.answered",
        title="A request that is killed in the middle lets go of its key",
        why="A lock of a dead server answers 409 until the key expires.",
        area=Area.CRASHES,
        severity=Severity.HIGH,
        needs=(Need.CRASH, Need.SLOW),
        shots=12,
        judge=answered,
    ),
)
