"""Clauses about clients that hang up, or send slowly: one effect or none, and a retry is answered."""

from __future__ import annotations

import time
from functools import partial
from typing import Final

from oncekey.conformance.clauses import Area, Clause, Failed, Need, Passed, Severity, Verdict
from oncekey.conformance.judging import is_same, shown
from oncekey.conformance.probe import Probe
from oncekey.conformance.shots import Shot

_PLACES: Final = {
    "head": "in the head",
    "body": "in the middle of the body",
    "last-byte": "before the last byte",
}


def unfinished(probe: Probe, place: str) -> Verdict:
    """A client that hangs up before its request is complete."""
    key, before = probe.fresh(), probe.count()
    shot = probe.shot(key)
    probe.cut_off(shot, _position(shot, place))
    time.sleep(probe.lead)  # the server must have seen that the client left, or there is nothing to see
    answer = probe.until_settled(shot)
    effects = probe.since(before)
    if not answer.ok:
        return Failed(f"within {probe.target.patience:g} s a retry of the whole request is executed", shown(answer))
    if effects not in {None, 1}:
        return Failed("1 effect", f"{effects} effects; {shown(answer)}")
    return Passed()


def sent(probe: Probe) -> Verdict:
    """A client that hangs up when everything is sent."""
    key, before = probe.fresh(), probe.count()
    shot = probe.shot(key, slow=True)
    probe.cut_off(shot, len(shot.wire()), stay=probe.lead / 2)
    return _one_effect(probe, shot, before)


def answered(probe: Probe) -> Verdict:
    """A client that hangs up when the answer begins."""
    key, before = probe.fresh(), probe.count()
    shot = probe.shot(key)
    probe.cut_off(shot, len(shot.wire()), listen=True)
    return _one_effect(probe, shot, before)


def slowly(probe: Probe) -> Verdict:
    """A body that comes in slow pieces is the same body."""
    key = probe.fresh()
    first = probe.dribble(probe.shot(key))
    if not first.ok:
        return Failed("a body in slow pieces is taken", shown(first))
    again = probe.send(key)
    return Passed() if is_same(first, again) else Failed(f"{shown(first)} again", shown(again))


def _one_effect(probe: Probe, shot: Shot, before: int | None) -> Verdict:
    first = probe.until_settled(shot)
    again = probe.until_settled(shot)
    effects = probe.since(before)
    if not first.ok:
        return Failed(f"within {probe.target.patience:g} s a retry gets the answer", shown(first))
    if effects not in {None, 1}:
        return Failed("1 effect of the abandoned request and its retries", f"{effects} effects; {shown(first)}")
    if not is_same(first, again):
        return Failed("the same answer for every retry", f"{shown(first)}, then {shown(again)}")
    return Passed()


def _position(shot: Shot, place: str) -> int:
    head = len(shot.head())
    return {"head": head // 2, "body": head + len(shot.body) // 2}.get(place, head + len(shot.body) - 1)


def _unfinished(place: str, words: str) -> Clause:
    return Clause(
        id=f"hang-ups.{place}",
        title=f"A client that hangs up {words} has done nothing, and may retry",
        why="Half a request must not be executed, and must not keep its key.",
        area=Area.HANGUPS,
        severity=Severity.HIGH,
        requirements=("R72", "R264"),
        shots=8,
        judge=partial(unfinished, place=place),
    )


CLAUSES: Final = (
    *(_unfinished(place, words) for place, words in _PLACES.items()),
    Clause(
        id="hang-ups.sent",
        title="A client that hangs up when all is sent has one effect, and its retry gets the answer",
        why="It is the case for which keys were invented: the answer is lost, the work is not.",
        area=Area.HANGUPS,
        severity=Severity.CRITICAL,
        requirements=("R264",),
        needs=(Need.COUNT,),
        shots=14,
        judge=sent,
    ),
    Clause(
        id="hang-ups.answered",
        title="A client that hangs up during the answer gets it again",
        why="A server that forgets what it could not deliver executes the retry.",
        area=Area.HANGUPS,
        severity=Severity.CRITICAL,
        requirements=("R87", "R264"),
        needs=(Need.COUNT,),
        shots=8,
        judge=answered,
    ),
    Clause(
        id="hang-ups.slowly",
        title="A body that comes in slow pieces is the same request",
        why="A bad line must not change what a request means.",
        area=Area.HANGUPS,
        severity=Severity.MEDIUM,
        requirements=("R32", "R87"),
        shots=2,
        judge=slowly,
    ),
)
