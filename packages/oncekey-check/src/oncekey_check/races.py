"""Clauses about concurrent requests: the API executes one, and finally all of them receive its response."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta
from email.utils import parsedate_to_datetime
from functools import partial
from typing import Final

from oncekey_check.clauses import (
    EVERY,
    SAFE,
    CheckProfile,
    Clause,
    Failed,
    Harm,
    InconclusiveError,
    Need,
    Passed,
    Severity,
    Verdict,
)
from oncekey_check.judging import CONFLICT, differing, gets_by_profile, needs_replays, shown, tally
from oncekey_check.probe import Overlap, Probe

_ACCEPTED: Final = 202
_LOSERS: Final = 10
_LONGEST_WAIT: Final = 3600
"""A longer Retry-After than a client would wait for a running request."""
_RUNNING: Final = {
    CheckProfile.IETF: {CONFLICT},
    CheckProfile.STRIPE: {CONFLICT},
    CheckProfile.CONFLICT: {CONFLICT},
    CheckProfile.STRICT_MONEY: {CONFLICT, _ACCEPTED},
}


def race(probe: Probe, many: int) -> Verdict:
    """Identical requests at the same moment, judged by effects; by responses only if effects are not counted."""
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
        raise InconclusiveError(f"none of them succeeded: {tally(answers)}", Need.COUNT)
    if any(not probe.same(done[0], answer) for answer in done[1:]):
        return Failed(
            f"{many} at once: one success, or the same one for all", f"{tally(answers)} with different bodies"
        )
    return Passed()


def losers(probe: Probe) -> Verdict:
    """The responses to the requests that were not executed."""
    key = probe.fresh()
    answers = probe.volley([probe.request(key, slow=True)] * _LOSERS)
    final = probe.until_settled(probe.request(key, slow=True))
    if any(not answer.ok and not probe.busy(answer) for answer in answers):
        return Failed(f"{_LOSERS} at once: each receives the success, or 'wait'", tally(answers))
    if probe.habits.replays and not final.ok:
        return Failed("a retry after the race receives the success", f"{shown(final)}; before: {tally(answers)}")
    return Passed()


def while_running(probe: Probe) -> Verdict:
    """A duplicate of a running request."""
    first, second, *_ = _overlapping(probe)
    if first.ok and second.ok:
        if probe.same(first, second):
            return Passed()  # it waited for the first one
        needs_replays(probe)
    refused = second if first.ok and not probe.busy(first) else first
    return gets_by_profile(refused, _RUNNING, "the same request while the first one is running")


def told_to_wait(probe: Probe) -> Verdict:
    """A refusal has a Retry-After."""
    first, second, *_ = _overlapping(probe)
    busy = next((answer for answer in (second, first) if probe.busy(answer)), None)
    if busy is None and probe.blind:
        raise InconclusiveError("neither received 'wait', and whether one waited cannot be observed", Need.COUNT)
    if busy is None and not probe.same(first, second):
        raise InconclusiveError("neither received 'wait', and they received different responses")
    if busy is None:
        return Passed()  # the server itself waited, so it need not send a delay
    advice = busy.header("Retry-After")
    if _is_wait(advice):
        return Passed()
    headline = None if advice is None else (Harm.UNTOLD, f"A client that must wait received Retry-After: {advice}")
    seen = f"{shown(busy)}; Retry-After: {advice}"
    return Failed("Retry-After: a number of seconds, or a date, within an hour", seen, headline=headline)


def soon_answered(probe: Probe) -> Verdict:
    """The client that waited receives the response in the end."""
    needs_replays(probe)
    first, second, request, _ = _overlapping(probe)
    final = probe.until_settled(request)
    winner = first if first.ok and not probe.busy(first) else second
    if probe.same(winner, final):
        return Passed()
    return Failed(f"after the first request, its response: {shown(winner)}", differing(probe, winner, final))


def pipelined(probe: Probe) -> Verdict:
    """Duplicates in one packet."""
    key, before = probe.fresh(), probe.count()
    request = probe.request(key)
    answers = probe.pipelined([replace(request, keep_open=True), request])
    if not answers[0].status:
        raise InconclusiveError("this server does not accept a second request on a connection")
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
        why="Servers that check first and insert afterwards execute twice in this case only.",
        fix=(
            "Claim the key with one INSERT under a unique constraint (or SET NX) before the effect; do not check first."
        ),
        severity=Severity.CRITICAL,
        requests=many + 3,
        judge=partial(race, many=many),
        sight=True,
    )


CLAUSES: Final = (
    *map(_race, (2, 10, 50)),
    Clause(
        id="races.losers",
        title="Concurrent identical requests each receive the success, or 'wait'",
        why="A client cannot decide what to do after a server error for a request that is executed.",
        fix="Return 409 with Retry-After to a duplicate that lost the race, or let it wait for the response.",
        severity=Severity.MEDIUM,
        requests=_LOSERS + 1,
        judge=losers,
    ),
    Clause(
        id="races.while-running",
        title="The same request while the first one is running receives 409, or waits for the response",
        why="The client takes any other response for the outcome.",
        fix="Return 409 with Retry-After while the first request is running, or wait for its response.",
        severity=Severity.HIGH,
        needs=(Need.SLOW,),
        requests=2,
        judge=while_running,
        sight=True,
    ),
    Clause(
        id="races.retry-after",
        title="A client that must wait receives Retry-After",
        why="Without Retry-After clients choose their own delay, and all retry at once.",
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
        title="A client that waited receives the first response",
        why="A lock that outlives its request blocks the client that needs the response.",
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
        why="Some clients retry on the connection on which they are still waiting.",
        fix="Look up the key for each request, not for each connection.",
        severity=Severity.HIGH,
        requests=5,
        judge=pipelined,
        sight=True,
    ),
)
