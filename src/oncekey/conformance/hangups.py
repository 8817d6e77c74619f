"""Clauses about clients that hang up, or send slowly: one effect or none, and a retry is answered."""

from __future__ import annotations

import time
from functools import partial
from typing import Final

from oncekey.conformance.clauses import Area, Clause, Failed, Need, Passed, Severity, UndecidedError, Verdict
from oncekey.conformance.judging import needs_replays, one_operation, shown
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
    effects = probe.since(before, at_least=int(answer.ok))
    if not answer.ok:
        return Failed(f"within {probe.target.patience:g} s a retry of the whole request is executed", shown(answer))
    if effects is not None and effects > 1:
        return Failed("1 effect", f"{effects} effects; {shown(answer)}")
    return Passed()


def sent(probe: Probe) -> Verdict:
    """A client that hangs up when everything is sent."""
    before = probe.count()
    shot = _abandoned(probe)
    return _one_effect(probe, shot, before)


def answered(probe: Probe) -> Verdict:
    """A client that hangs up when the answer begins."""
    key, before = probe.fresh(), probe.count()
    shot = probe.shot(key)
    probe.cut_off(shot, len(shot.wire()), listen=True)
    return _one_effect(probe, shot, before)


def retried(probe: Probe) -> Verdict:
    """A client that hung up asks again."""
    needs_replays(probe)
    shot = _abandoned(probe)
    first = probe.until_settled(shot, over_errors=True)
    if not first.ok:
        return Failed(f"within {probe.target.patience:g} s a retry gets the answer", shown(first))
    again = probe.until_settled(shot)
    if not probe.same(first, again):
        return Failed("the same answer for every retry", f"{shown(first)}, then {shown(again)}")
    return Passed()


def slowly(probe: Probe) -> Verdict:
    """A body that comes in slow pieces is the same body."""
    key, before = probe.fresh(), probe.count()
    first = probe.dribble(probe.shot(key))
    if not first.ok:
        raise UndecidedError(f"a body in slow pieces gets {first.status or first.reason} under a fresh key")
    again = probe.send(key)
    return one_operation(probe, probe.since(before, at_least=1), first, again, "the same body in one piece")


def _abandoned(probe: Probe) -> Shot:
    """A request that was sent, and whose client did not wait for its answer."""
    shot = probe.shot(probe.fresh(), slow=True)
    probe.cut_off(shot, len(shot.wire()), stay=probe.lead / 2)
    return shot


def _one_effect(probe: Probe, shot: Shot, before: int | None) -> Verdict:
    first = probe.until_settled(shot, over_errors=True)
    probe.until_settled(shot, over_errors=True)
    effects = probe.since(before, at_least=int(first.ok))
    if effects is not None and effects > 1:
        return Failed("1 effect of the abandoned request and its retries", f"{effects} effects; {shown(first)}")
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
        shots=8,
        judge=partial(unfinished, place=place),
        sight=True,
    )


CLAUSES: Final = (
    *(_unfinished(place, words) for place, words in _PLACES.items()),
    Clause(
        id="hang-ups.sent",
        title="A client that hangs up when all is sent, and retries, has one effect",
        why="It is the case for which keys were invented: the answer is lost, the work is not.",
        area=Area.HANGUPS,
        severity=Severity.CRITICAL,
        needs=(Need.COUNT,),
        shots=14,
        judge=sent,
        sight=True,
    ),
    Clause(
        id="hang-ups.answered",
        title="A client that hangs up during the answer, and retries, has one effect",
        why="A server that forgets what it could not deliver executes the retry.",
        area=Area.HANGUPS,
        severity=Severity.CRITICAL,
        needs=(Need.COUNT,),
        shots=8,
        judge=answered,
        sight=True,
    ),
    Clause(
        id="hang-ups.retried",
        title="A client that hung up gets the answer with its retry",
        why="The work is done, and the client would never learn what came of it.",
        area=Area.HANGUPS,
        severity=Severity.HIGH,
        shots=14,
        judge=retried,
        sight=True,
    ),
    Clause(
        id="hang-ups.slowly",
        title="A body that comes in slow pieces is the same request",
        why="A bad line must not change what a request means.",
        area=Area.HANGUPS,
        severity=Severity.MEDIUM,
        shots=4,
        judge=slowly,
        sight=True,
    ),
)
