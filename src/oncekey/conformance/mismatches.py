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
from oncekey.conformance.judging import (
    CONFLICT,
    MISMATCH,
    gets_by_profile,
    needs_replays,
    not_replayed,
    shown,
)
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
    """Another body has no effect and gets no success, neither one of its own nor the first one's."""
    key, before = probe.fresh(), probe.count()
    first, again = probe.first(key), probe.send(key, body=probe.other_body)
    effects = probe.since(before)
    if again.ok:
        executed = effects > 1 if effects is not None else not probe.same(first, again)
        how = "executed as well" if executed else "the first one's answer"
        return Failed("another body under a used key is not executed and not answered", f"{shown(again)}: {how}")
    if effects is not None and effects > 1:
        return Failed("1 effect of both requests", f"{effects} effects")
    return Passed()


def first_one_stays(probe: Probe) -> Verdict:
    """The first request is still answered."""
    needs_replays(probe)
    key = probe.fresh()
    first = probe.first(key)
    probe.send(key, body=probe.other_body)
    again = probe.send(key)
    if probe.same(first, again):
        return Passed()
    return Failed(f"after a refused one, the first request gets {shown(first)} again", shown(again))


def while_running(probe: Probe) -> Verdict:
    """Another body while the first request runs: whatever its status, it is not done."""
    before = probe.count()
    first, other = _while_running(probe)
    effects = probe.since(before, at_least=int(first.ok))
    # A pair that did not meet is sent again with another key, and each first request of those has its effect.
    rounds = len(probe.trail) // 2
    if other.ok and not probe.busy(other):
        return Failed("another body while the first request runs is refused", f"{shown(first)}, and {shown(other)}")
    if effects is not None and effects > rounds:
        return Failed("1 effect of both requests", f"{effects - rounds + 1} effects; {shown(other)}")
    return Passed()


def running_status(probe: Probe) -> Verdict:
    """The status for another body while the first request runs."""
    _, other = _while_running(probe)
    return gets_by_profile(other, _IN_FLIGHT, "another body while the first request runs")


def other_query(probe: Probe) -> Verdict:
    """The same body with another query."""
    key, before = probe.fresh(), probe.count()
    first, shot = probe.first(key), probe.shot(key)
    sign = "&" if "?" in shot.address.target else "?"
    answer = probe.fire(replace(shot, address=shot.address.at(f"{shot.address.target}{sign}oncekey-check=1")))
    return not_replayed(probe, probe.since(before), first, answer, "another query under a used key")


def other_endpoint(probe: Probe) -> Verdict:
    """The same body at another endpoint, whose effects the count may not show."""
    key = probe.fresh()
    first, shot = probe.first(key), probe.shot(key)
    answer = probe.fire(replace(shot, address=probe.target.other_address or shot.address))
    return not_replayed(probe, None, first, answer, "the same key at another endpoint")


def other_method(probe: Probe) -> Verdict:
    """The same body with another method, whose effects the count may not show."""
    key = probe.fresh()
    first, shot = probe.first(key), probe.shot(key)
    method = "PUT" if shot.method != "PUT" else "POST"
    return not_replayed(probe, None, first, probe.fire(replace(shot, method=method)), f"the same key with {method}")


def _while_running(probe: Probe) -> tuple[Answer, Answer]:
    one = probe.shot(probe.fresh(), slow=True)
    first, other = probe.overlapping(one, replace(one, body=probe.other_body))
    if not first.ok and other.ok:
        raise UndecidedError("the second request was faster than the first", "a slower --slow-header")
    return first, other


CLAUSES: Final = (
    Clause(
        id="mismatches.status",
        title="Another body under a used key gets 422 (stripe: 400, conflict: 409)",
        why="With 409 deployed clients retry for ever; with a success they believe that it was done.",
        area=Area.MISMATCHES,
        severity=Severity.MEDIUM,
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
        needs=(Need.OTHER_BODY,),
        shots=4,
        judge=nothing_happens,
        sight=True,
    ),
    Clause(
        id="mismatches.first-stays",
        title="A refused request changes nothing for the first one",
        why="A key that is spoilt by a mistake leaves the client without its answer.",
        area=Area.MISMATCHES,
        severity=Severity.HIGH,
        needs=(Need.OTHER_BODY,),
        shots=3,
        judge=first_one_stays,
        sight=True,
    ),
    Clause(
        id="mismatches.while-running",
        title="Another body is refused also while the first request runs",
        why="A server that compares only finished requests lets another one take its place.",
        area=Area.MISMATCHES,
        severity=Severity.HIGH,
        needs=(Need.SLOW, Need.OTHER_BODY),
        shots=8,
        judge=while_running,
        sight=True,
    ),
    Clause(
        id="mismatches.running-status",
        title="Another body while the first request runs gets 422 or 409 (stripe: 400 or 409; strict-money: 422)",
        why="With 409 the client waits for the answer to a request that it did not send.",
        area=Area.MISMATCHES,
        severity=Severity.MEDIUM,
        needs=(Need.SLOW, Need.OTHER_BODY),
        shots=6,
        judge=running_status,
    ),
    Clause(
        id="mismatches.query",
        title="Another query under a used key is not answered with the first one's answer",
        why="What is in the query is part of what was asked.",
        area=Area.MISMATCHES,
        severity=Severity.MEDIUM,
        must=SAFE,
        should=EVERY - SAFE,
        shots=4,
        judge=other_query,
        sight=True,
    ),
    Clause(
        id="mismatches.endpoint",
        title="A key is never answered with another endpoint's answer",
        why="A refund that is answered with a payment's success never happens.",
        area=Area.MISMATCHES,
        severity=Severity.HIGH,
        needs=(Need.OTHER_URL,),
        shots=2,
        judge=other_endpoint,
        sight=True,
    ),
    Clause(
        id="mismatches.method",
        title="A key is never answered with another method's answer",
        why="A key stands for one request, and the method is part of it.",
        area=Area.MISMATCHES,
        severity=Severity.HIGH,
        needs=(Need.UNSAFE,),
        shots=2,
        judge=other_method,
        sight=True,
    ),
)
