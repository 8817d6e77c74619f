"""Clauses about a key that comes back with another request: it is refused, and nothing happens."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from oncekey.conformance.clauses import (
    EVERY,
    SAFE,
    Area,
    Clause,
    Failed,
    Need,
    Passed,
    Profile,
    Severity,
    UndecidedError,
    Verdict,
)
from oncekey.conformance.judging import CONFLICT, MISMATCH, gets_by_profile, is_marked, is_same, shown
from oncekey.conformance.probe import Probe
from oncekey.conformance.shots import Answer

_IN_FLIGHT: Final = {
    Profile.IETF: {422, CONFLICT},
    Profile.STRIPE: {400, CONFLICT},
    Profile.CONFLICT: {CONFLICT},
    Profile.STRICT_MONEY: {422},
}


def other_body(probe: Probe) -> Verdict:
    """The status for another body."""
    key = probe.fresh()
    probe.first(key)
    return gets_by_profile(probe.send(key, body=probe.other_body), MISMATCH, "another body under a used key")


def nothing_happens(probe: Probe) -> Verdict:
    """Another body has no effect and gets nobody's success."""
    key, before = probe.fresh(), probe.count()
    first, again = probe.first(key), probe.send(key, body=probe.other_body)
    effects = probe.since(before)
    if again.ok:
        how = "the first one's answer" if is_same(first, again) else "executed as well"
        return Failed("another body under a used key is not executed and not answered", f"{shown(again)}: {how}")
    if effects not in {None, 1}:
        return Failed("1 effect of both requests", f"{effects} effects")
    return Passed()


def first_one_stays(probe: Probe) -> Verdict:
    """The first request is still answered."""
    key = probe.fresh()
    first = probe.first(key)
    probe.send(key, body=probe.other_body)
    again = probe.send(key)
    if is_same(first, again):
        return Passed()
    return Failed(f"after a refused one, the first request gets {shown(first)} again", shown(again))


def while_running(probe: Probe) -> Verdict:
    """Another body while the first request runs."""
    key = probe.fresh()
    one = probe.shot(key, slow=True)
    first, other = probe.overlapping(one, replace(one, body=probe.other_body))
    if not first.ok and other.ok:
        raise UndecidedError("the second request was faster than the first", "a slower --slow-header")
    return gets_by_profile(other, _IN_FLIGHT, "another body while the first request runs")


def other_query(probe: Probe) -> Verdict:
    """The same body with another query."""
    key = probe.fresh()
    first, shot = probe.first(key), probe.shot(key)
    sign = "&" if "?" in shot.address.target else "?"
    answer = probe.fire(replace(shot, address=shot.address.at(f"{shot.address.target}{sign}oncekey-check=1")))
    return _not_replayed(first, answer, "another query under a used key")


def other_endpoint(probe: Probe) -> Verdict:
    """The same body at another endpoint."""
    key = probe.fresh()
    first, shot = probe.first(key), probe.shot(key)
    answer = probe.fire(replace(shot, address=probe.target.other_address or shot.address))
    return _not_replayed(first, answer, "the same key at another endpoint")


def other_method(probe: Probe) -> Verdict:
    """The same body with another method."""
    key = probe.fresh()
    first, shot = probe.first(key), probe.shot(key)
    method = "PUT" if shot.method != "PUT" else "POST"
    return _not_replayed(first, probe.fire(replace(shot, method=method)), f"the same key with {method}")


def _not_replayed(first: Answer, answer: Answer, what: str) -> Verdict:
    if is_same(first, answer) or (answer.ok and is_marked(answer)):
        return Failed(f"{what}: not the first one's answer", f"{shown(answer)}, the first one's answer")
    return Passed()


CLAUSES: Final = (
    Clause(
        id="mismatches.status",
        title="Another body under a used key gets 422 (stripe: 400, conflict: 409)",
        why="With 409 deployed clients retry for ever; with a success they believe that it was done.",
        area=Area.MISMATCHES,
        severity=Severity.MEDIUM,
        requirements=("R37", "R242"),
        needs=(Need.OTHER_BODY,),
        shots=2,
        judge=other_body,
    ),
    Clause(
        id="mismatches.nothing-happens",
        title="Another body under a used key is neither executed nor answered",
        why="A changed amount would be paid, or believed to be paid.",
        area=Area.MISMATCHES,
        severity=Severity.CRITICAL,
        requirements=("R32", "R37"),
        needs=(Need.OTHER_BODY,),
        shots=4,
        judge=nothing_happens,
    ),
    Clause(
        id="mismatches.first-stays",
        title="A refused request changes nothing for the first one",
        why="A key that is spoilt by a mistake leaves the client without its answer.",
        area=Area.MISMATCHES,
        severity=Severity.HIGH,
        requirements=("R37",),
        needs=(Need.OTHER_BODY,),
        shots=3,
        judge=first_one_stays,
    ),
    Clause(
        id="mismatches.while-running",
        title="Another body is refused also while the first request runs",
        why="A server that compares only finished requests lets another one take its place.",
        area=Area.MISMATCHES,
        severity=Severity.HIGH,
        requirements=("R38",),
        needs=(Need.SLOW, Need.OTHER_BODY),
        shots=6,
        judge=while_running,
    ),
    Clause(
        id="mismatches.query",
        title="Another query under a used key is not answered with the first one's answer",
        why="What is in the query is part of what was asked.",
        area=Area.MISMATCHES,
        severity=Severity.MEDIUM,
        requirements=("R39",),
        must=SAFE,
        should=EVERY - SAFE,
        shots=2,
        judge=other_query,
    ),
    Clause(
        id="mismatches.endpoint",
        title="A key is never answered with another endpoint's answer",
        why="A refund that is answered with a payment's success never happens.",
        area=Area.MISMATCHES,
        severity=Severity.HIGH,
        requirements=("R26",),
        needs=(Need.OTHER_URL,),
        shots=2,
        judge=other_endpoint,
    ),
    Clause(
        id="mismatches.method",
        title="A key is never answered with another method's answer",
        why="A key stands for one request, and the method is part of it.",
        area=Area.MISMATCHES,
        severity=Severity.HIGH,
        requirements=("R14", "R26"),
        needs=(Need.UNSAFE,),
        shots=2,
        judge=other_method,
    ),
)
