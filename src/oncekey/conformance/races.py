"""Clauses about requests at the same moment: the API executes one, and all get its answer in the end."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta
from email.utils import parsedate_to_datetime
from functools import partial
from typing import Final

from oncekey.conformance.clauses import (
    EVERY,
    SAFE,
    Clause,
    Failed,
    Harm,
    Need,
    Passed,
    Profile,
    Severity,
    UndecidedError,
    Verdict,
)
from oncekey.conformance.judging import CONFLICT, gets_by_profile, needs_replays, shown, tally
from oncekey.conformance.probe import Overlap, Probe

_ACCEPTED: Final = 202
_LOSERS: Final = 10
_LONGEST_WAIT: Final = 3600
"""A client that is told to wait longer for a request that runs has given up before."""
_RUNNING: Final = {
    Profile.IETF: {CONFLICT},
    Profile.STRIPE: {CONFLICT},
    Profile.CONFLICT: {CONFLICT},
    Profile.STRICT_MONEY: {CONFLICT, _ACCEPTED},
}


def race(probe: Probe, many: int) -> Verdict:
    """Identical requests at the same moment, judged by effects; by answers only where these are not counted."""
    key, before = probe.fresh(), probe.count()
    answers = probe.volley([probe.request(key, slow=True)] * many)
    final = probe.until_settled(probe.request(key, slow=True), over_errors=True)
    effects = probe.since(before, at_least=int(final.ok))
    if effects is not None:
        if effects > 1:
            return Failed(f"{many} at once, and a retry: 1 effect", f"{effects} effects; {tally(answers)}")
        return Passed()
    needs_replays(probe)
    done = [answer for answer in (*answers, final) if answer.ok and not probe.busy(answer)]
    if not done:
        raise UndecidedError(f"none of them succeeded: {tally(answers)}", Need.COUNT)
    if any(not probe.same(done[0], answer) for answer in done[1:]):
        return Failed(
            f"{many} at once: one success, or the same one for all", f"{tally(answers)} with different bodies"
        )
    return Passed()


def losers(probe: Probe) -> Verdict:
    """The answers to the requests that were not executed."""
    key = probe.fresh()
    answers = probe.volley([probe.request(key, slow=True)] * _LOSERS)
    final = probe.until_settled(probe.request(key, slow=True))
    if any(not answer.ok and not probe.busy(answer) for answer in answers):
        return Failed(f"{_LOSERS} at once: each gets the success, or is told to wait", tally(answers))
    if probe.habits.replays and not final.ok:
        return Failed("a retry after the race gets the success", f"{shown(final)}; before: {tally(answers)}")
    return Passed()


def while_running(probe: Probe) -> Verdict:
    """A duplicate of a request that runs."""
    first, second, *_ = _overlapping(probe)
    if first.ok and second.ok:
        if probe.same(first, second):
            return Passed()  # it waited for the first one
        needs_replays(probe)
    refused = second if first.ok and not probe.busy(first) else first
    return gets_by_profile(refused, _RUNNING, "the same request while the first one runs")


def told_to_wait(probe: Probe) -> Verdict:
    """A refusal says how long the client should wait."""
    first, second, *_ = _overlapping(probe)
    busy = next((answer for answer in (second, first) if probe.busy(answer)), None)
    if busy is None and probe.blind:
        raise UndecidedError("neither was told to wait, and whether one did cannot be seen", Need.COUNT)
    if busy is None and not probe.same(first, second):
        raise UndecidedError("neither was told to wait, and they got different answers")
    if busy is None:
        return Passed()  # the server waited itself, so it need not say how long
    advice = busy.header("Retry-After")
    if _is_wait(advice):
        return Passed()
    told = None if advice is None else (Harm.UNTOLD, f"A client that has to wait got Retry-After: {advice}")
    seen = f"{shown(busy)}; Retry-After: {advice}"
    return Failed("Retry-After: a number of seconds, or a date, within an hour", seen, told=told)


def soon_answered(probe: Probe) -> Verdict:
    """The client that waited gets the answer in the end."""
    needs_replays(probe)
    first, second, request, _ = _overlapping(probe)
    final = probe.until_settled(request)
    winner = first if first.ok and not probe.busy(first) else second
    if probe.same(winner, final):
        return Passed()
    return Failed(f"after the first request, its answer: {shown(winner)}", shown(final))


def pipelined(probe: Probe) -> Verdict:
    """Duplicates in one packet."""
    key, before = probe.fresh(), probe.count()
    request = probe.request(key)
    answers = probe.pipelined([replace(request, keep_open=True), request])
    if not answers[0].status:
        raise UndecidedError("this server does not take a second request on a connection")
    final = probe.until_settled(request, over_errors=True)
    effects = probe.since(before)
    if effects is not None:
        return (
            Passed() if effects <= 1 else Failed("1 effect, also with a retry", f"{effects} effects; {tally(answers)}")
        )
    needs_replays(probe)
    done = [answer for answer in (*answers, final) if answer.ok and not probe.busy(answer)]
    if any(not probe.same(done[0], answer) for answer in done[1:]):
        return Failed("one success for both", f"{tally(answers)} with different bodies")
    return Passed()


def _overlapping(probe: Probe) -> Overlap:
    request = probe.request(probe.fresh(), slow=True)
    return probe.overlapping(request, request)


def _is_wait(advice: str | None) -> bool:
    if advice is None:
        return False
    if advice.isdecimal():
        return 1 <= int(advice) <= _LONGEST_WAIT
    try:
        return parsedate_to_datetime(advice) <= datetime.now(UTC) + timedelta(seconds=_LONGEST_WAIT)
    except (ValueError, TypeError):
        return False


def _race(many: int) -> Clause:
    return Clause(
        id=f"races.{many}",
        title=f"{many} identical requests at the same moment have one effect",
        why="Servers that look first and insert afterwards execute twice here, and only here.",
        fix="Claim the key with one INSERT under a unique constraint (or SET NX) before the effect; do not look first.",
        severity=Severity.CRITICAL,
        requests=many + 3,
        judge=partial(race, many=many),
        sight=True,
    )


CLAUSES: Final = (
    *map(_race, (2, 10, 50)),
    Clause(
        id="races.losers",
        title="Of requests at the same moment each gets the success, or is told to wait",
        why="A client that gets a server error for a request that is executed does not know what to do.",
        fix="Answer a duplicate that lost the race with 409 and Retry-After, or let it wait for the response.",
        severity=Severity.MEDIUM,
        requests=_LOSERS + 1,
        judge=losers,
    ),
    Clause(
        id="races.while-running",
        title="The same request while the first one runs gets 409, or waits for its answer",
        why="Whatever else it gets, the client takes it for the outcome.",
        fix="Answer 409 with Retry-After while the first request runs, or wait for its response.",
        severity=Severity.HIGH,
        needs=(Need.SLOW,),
        requests=2,
        judge=while_running,
        sight=True,
    ),
    Clause(
        id="races.retry-after",
        title="Who has to wait is told how long",
        why="Without Retry-After clients choose for themselves, and all choose at once.",
        fix="Add Retry-After, in seconds, to the response that asks the client to wait.",
        severity=Severity.MEDIUM,
        must=SAFE,
        should=EVERY - SAFE,
        needs=(Need.SLOW,),
        requests=2,
        judge=told_to_wait,
    ),
    Clause(
        id="races.answered",
        title="Who waited gets the first one's answer",
        why="A lock that outlives its request blocks the client that needs the answer.",
        fix="Release the lock with the response, and give it a time limit.",
        severity=Severity.HIGH,
        needs=(Need.SLOW,),
        requests=3,
        judge=soon_answered,
        sight=True,
    ),
    Clause(
        id="races.pipelined",
        title="Duplicates on one connection have one effect",
        why="Some clients retry on the connection on which they still wait.",
        fix="Look the key up for each request, not for each connection.",
        severity=Severity.HIGH,
        requests=5,
        judge=pipelined,
        sight=True,
    ),
)
