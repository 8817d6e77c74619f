"""Clauses about servers: a second instance, a request that outlives its lease, a killed server, a store that is down.

The owner of an API provides the commands that kill a server, or stop and start its store. The clauses test that
responses survive a killed server, that a killed request happens once, that nothing runs unprotected without the store,
and that requests work again when the store is back. The tester runs a command without a shell, in its own session, and
for a limited time.
"""

from __future__ import annotations

import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from threading import Thread
from typing import Final

from oncekey_check import raw_http
from oncekey_check.clauses import (
    EVERY,
    Clause,
    Exchange,
    Failed,
    InconclusiveError,
    Need,
    Passed,
    SendMode,
    Severity,
    Verdict,
    Way,
)
from oncekey_check.judging import differing, shown, tally
from oncekey_check.probe import CannotCheckError, Probe
from oncekey_check.raw_http import Answer, RawRequest
from oncekey_check.target import replaced

STORE_UP: Final = "--store-up-command"

_POLL: Final = 0.1
_ONE_ANSWER: Final = 2.0
_GATEWAY: Final = (502, 503, 504)
_SHOWN: Final = 300


def crash(probe: Probe) -> None:
    """Kill the server, and return when it responds again."""
    _run(Need.CRASH, probe.target.crash_command, probe.target.command_limit)
    _wait_until_back(probe)


@contextmanager
def store_down(probe: Probe) -> Iterator[None]:
    """Stop the store for the duration of the block, and start it again however the block ends."""
    target = probe.target
    _run(Need.OUTAGE, target.store_down_command, target.command_limit)
    try:
        yield
    finally:
        try:
            _run(STORE_UP, target.store_up_command, target.command_limit)
        except InconclusiveError as error:
            raise CannotCheckError(f"the store is down, and nothing more can be checked: {error}") from None


def meanwhile(probe: Probe, request: RawRequest, delay: float, act: Callable[[], None]) -> tuple[Answer, bool]:
    """Send a request, and call `act` while it runs; returns the response, and whether it came after that call."""
    answers = [raw_http.silence("it received no response")]

    def send() -> None:
        answers[0] = raw_http.send_raw(request, probe.target.timeout)

    thread = Thread(target=send, daemon=True)
    thread.start()
    thread.join(delay)
    running = thread.is_alive()
    act()
    thread.join(probe.target.timeout)
    probe.sent += 1
    return replace(answers[0], headers=probe.target.carrier.read(answers[0].headers)), running


def note(probe: Probe, place: int, exchange: Exchange) -> None:
    """Add an exchange to the trail of the current clause."""
    probe.trail.insert(place, exchange)


def ran_before(probe: Probe, place: int, *options: str) -> None:
    """Record in the trail that these commands were run before an exchange."""
    exchange = probe.trail[place]
    mode = SendMode(exchange.mode.way, exchange.mode.many, exchange.mode.seconds, after=options)
    probe.trail[place] = replace(exchange, how=f"after {' and '.join(options)}", mode=mode)


def _run(option: str, words: tuple[str, ...], limit: float) -> None:
    # A file, not a pipe: a server that the command starts keeps its output open for as long as it runs.
    with tempfile.TemporaryFile() as output:
        try:
            process = subprocess.Popen(  # noqa: S603  (the owner of the API gave the command for this)
                words, stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True
            )
        except OSError as error:
            raise InconclusiveError(f"{option} cannot be run ({error.strerror})", option) from None
        try:
            code = process.wait(limit)
        except subprocess.TimeoutExpired:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            raise InconclusiveError(f"{option} took longer than {limit:g} s", "--command-limit") from None
        if code:
            output.seek(0)
            said = " ".join(output.read().decode("utf-8", "replace").split())[-_SHOWN:]
            raise InconclusiveError(f"{option} ended with code {code}{f': {said}' if said else ''}", option)


def _wait_until_back(probe: Probe) -> None:
    ends = time.monotonic() + probe.target.command_limit
    request = RawRequest("OPTIONS", probe.target.address)
    while time.monotonic() < ends:
        status = raw_http.send_raw(request, _ONE_ANSWER).status
        if status and status not in _GATEWAY:
            return
        time.sleep(_POLL)
    raise InconclusiveError(
        f"the server did not respond within {probe.target.command_limit:g} s after {Need.CRASH}", "--command-limit"
    )


_PAIRS: Final = 5
_RETRY_AFTER, _RUNS_FOR = 1.2, 1.7
"""When the retry is sent, and how long the first request runs, in leases."""


def replayed(probe: Probe) -> Verdict:
    """A retry at the second instance."""
    key, before = probe.fresh(), probe.count()
    first = probe.first(key)
    again = probe.until_settled(_elsewhere(probe, probe.request(key)))
    effects = probe.since(before)
    if effects not in {None, 1}:
        return Failed("1 effect of a request and its retry at the second instance", f"{effects} effects")
    if not probe.same(first, again):
        return Failed(f"at the second instance {shown(first)} again", differing(probe, first, again))
    return Passed()


def race(probe: Probe) -> Verdict:
    """Identical requests at both instances at the same moment."""
    key, before = probe.fresh(), probe.count()
    request = probe.request(key, slow=True)
    answers = probe.volley([request, _elsewhere(probe, request)] * _PAIRS)
    final = probe.until_settled(request)
    effects = probe.since(before)
    done = [answer for answer in (*answers, final) if answer.ok and not probe.busy(answer)]
    if effects not in {None, 1}:
        return Failed(f"{len(answers)} requests at two instances: 1 effect", f"{effects} effects; {tally(answers)}")
    if any(not probe.same(done[0], answer) for answer in done[1:]):
        return Failed("one success, or the same one for all", f"{tally(answers)} with different bodies")
    if not final.ok or any(not answer.ok and not probe.busy(answer) for answer in answers):
        return Failed("each receives the success, or 'wait'", f"{tally(answers)}; in the end {shown(final)}")
    return Passed()


def outlived(probe: Probe) -> Verdict:
    """A request that runs longer than its lease, and a retry after the lease."""
    lease = probe.target.lease or 0.0
    slow = probe.target.slower_than(_RUNS_FOR * lease)
    if slow is None:
        raise InconclusiveError("--slow-header has no number that could be increased", "another --slow-header")
    before = probe.count()
    request = probe.request(probe.fresh())
    request = replace(request, headers=replaced(request.headers, (slow,)))
    place = len(probe.trail)
    first, running = meanwhile(probe, request, _RETRY_AFTER * lease, lambda: _retry(probe, request))
    mode = SendMode(Way.OVERLAPPING, 2, seconds=_RETRY_AFTER * lease)
    second = probe.trail[place]
    probe.trail[place] = replace(second, how="after the lease of the first", mode=mode)
    note(probe, place, Exchange(request, first, "slower than its lease", mode))
    if not running:
        raise InconclusiveError("the request was over before its lease", "another --slow-header, or a shorter --lease")
    final = probe.until_settled(request)
    effects = probe.since(before)
    done = [answer for answer in (first, second.answer, final) if answer.ok and not probe.busy(answer)]
    if effects not in {None, 1}:
        return Failed("1 effect of a slow request and its retry", f"{effects} effects; in the end {shown(final)}")
    other = next((answer for answer in done if not probe.same(answer, final)), final)
    if not final.ok or other is not final:
        seen = f"{tally((first, second.answer))}; in the end {differing(probe, other, final)}"
        return Failed("the same success for both", seen)
    return Passed()


def _retry(probe: Probe, request: RawRequest) -> None:
    probe.send_raw(request)


def _elsewhere(probe: Probe, request: RawRequest) -> RawRequest:
    return replace(request, address=probe.target.also_address or request.address)


def remembered(probe: Probe) -> Verdict:
    """A finished request, a crash, and its retry."""
    key, before = probe.fresh(), probe.count()
    first = probe.first(key)
    place = len(probe.trail)
    crash(probe)
    again = probe.until_settled(probe.request(key))
    ran_before(probe, place, Need.CRASH)
    effects = probe.since(before)
    if effects not in {None, 1}:
        return Failed("1 effect of a request and its retry after the crash", f"{effects} effects; {shown(again)}")
    if not probe.same(first, again):
        return Failed(f"after the crash {shown(first)} again", differing(probe, first, again))
    return Passed()


def one_effect(probe: Probe) -> Verdict:
    """A crash in the middle of a request, and its retries: however they end, there is at most one effect."""
    before = probe.count()
    final = _killed(probe)
    effects = probe.since(before)
    if effects is not None and effects > 1:
        return Failed("at most 1 effect of a request that was killed, and its retry", f"{effects} effects")
    if final.ok and not probe.busy(final) and effects == 0:
        return Failed("1 effect, as the response says", f"no effect; {shown(final)}")
    return Passed()


def answered(probe: Probe) -> Verdict:
    """The retry of a request that was killed does not wait forever."""
    final = _killed(probe)
    if probe.busy(final) or not final.status:
        return Failed(f"within {probe.target.patience:g} s a retry no longer receives 'wait'", shown(final))
    return Passed()


def _killed(probe: Probe) -> Answer:
    """The final response to a request whose server was killed while it was running."""
    request = probe.request(probe.fresh(), slow=True)
    answer, running = meanwhile(probe, request, probe.lead, lambda: crash(probe))
    mode = SendMode(Way.INTERRUPTED, seconds=probe.lead, after=(Need.CRASH,))
    note(probe, len(probe.trail), Exchange(request, answer, f"{Need.CRASH} while it ran", mode))
    if not running:
        raise InconclusiveError("the request was over before the crash", "a slower --slow-header")
    return probe.until_settled(request)


_UNAVAILABLE: Final = 503
_BACK_POLL: Final = 0.2


def closed(probe: Probe) -> Verdict:
    """A request while the store is down."""
    before = probe.count()
    answer, _ = _during(probe)
    effects = _counted(probe, before)
    if answer.ok or effects:
        counted = "" if effects is None else f"; {effects} effects"
        return Failed("while the store is down: an error, and nothing happens", f"{shown(answer)}{counted}")
    return Passed()


def headline(probe: Probe) -> Verdict:
    """The client's response during the outage."""
    answer, _ = _during(probe)
    if answer.ok:
        raise InconclusiveError("a request is executed while the store is down")
    if answer.status == _UNAVAILABLE and answer.header("Retry-After"):
        return Passed()
    seen = f"{shown(answer)}; Retry-After: {answer.header('Retry-After')}"
    return Failed("while the store is down: 503 with Retry-After", seen)


def recovered(probe: Probe) -> Verdict:
    """The same request when the store is back."""
    before = probe.count()
    _, request = _during(probe)
    place = len(probe.trail)
    again = probe.until_settled(request)
    ran_before(probe, place, STORE_UP)
    effects = _counted(probe, before)
    if not again.ok:
        return Failed(f"within {probe.target.patience:g} s after the outage the request is executed", shown(again))
    if effects not in {None, 1}:
        return Failed("1 effect of the request and its retry after the outage", f"{effects} effects")
    return Passed()


def remembered_through_outage(probe: Probe) -> Verdict:
    """A finished request, an outage, and its retry."""
    key, before = probe.fresh(), probe.count()
    first = probe.first(key)
    place = len(probe.trail)
    with store_down(probe):
        pass
    again = probe.until_settled(probe.request(key))
    ran_before(probe, place, Need.OUTAGE, STORE_UP)
    effects = _counted(probe, before)
    if effects not in {None, 1}:
        return Failed("1 effect of a request and its retry after the outage", f"{effects} effects; {shown(again)}")
    if not probe.same(first, again):
        return Failed(f"after the outage {shown(first)} again", differing(probe, first, again))
    return Passed()


def _during(probe: Probe) -> tuple[Answer, RawRequest]:
    """Send a request while the store is down."""
    request = probe.request(probe.fresh())
    with store_down(probe):
        answer = probe.send_raw(request)
        ran_before(probe, -1, Need.OUTAGE)
    return answer, request


def _counted(probe: Probe, before: int | None) -> int | None:
    """The effects, once the API can be queried again."""
    ends = time.monotonic() + probe.target.patience
    while True:
        try:
            return probe.since(before)
        except InconclusiveError:
            if time.monotonic() > ends:
                raise
            time.sleep(_BACK_POLL)


CLAUSES: Final = (
    Clause(
        id="instances.replayed",
        title="A second instance replays a key that the first one has finished",
        why="A load balancer may send the retry to any instance.",
        fix="Keep keys in a store that all instances share.",
        severity=Severity.CRITICAL,
        needs=(Need.ALSO,),
        requests=4,
        judge=replayed,
        sight=True,
    ),
    Clause(
        id="instances.race",
        title=f"{2 * _PAIRS} identical requests at two instances at the same moment have one effect",
        why="A lock in the memory of one process does not block another one.",
        fix="Claim keys in a store that all instances share, with one atomic statement.",
        severity=Severity.CRITICAL,
        needs=(Need.ALSO,),
        requests=2 * _PAIRS + 3,
        judge=race,
        sight=True,
    ),
    Clause(
        id="leases.one-effect",
        title="A request that is slower than its lease has one effect, and one response",
        why="A retry that treats the slow request as dead runs concurrently with it.",
        fix="Extend the lease while the request runs, and fence its writes.",
        severity=Severity.CRITICAL,
        needs=(Need.LEASE, Need.SLOW, Need.COUNT),
        requests=6,
        judge=outlived,
        sight=True,
    ),
    Clause(
        id="crashes.remembered",
        title="A crash does not lose the responses of finished requests",
        why="Keys in memory do not protect against the retry after a restart.",
        fix="Store keys in durable storage.",
        severity=Severity.CRITICAL,
        needs=(Need.CRASH,),
        requests=5,
        judge=remembered,
        sight=True,
    ),
    Clause(
        id="crashes.one-effect",
        title="A request that is killed in the middle has at most one effect, retries included",
        why="At this moment the effect may exist without a stored response.",
        fix="Commit the effect and the key in one transaction, or pass a key to the service that performs the effect.",
        severity=Severity.CRITICAL,
        needs=(Need.CRASH, Need.SLOW, Need.COUNT),
        requests=6,
        judge=one_effect,
        sight=True,
    ),
    Clause(
        id="crashes.answered",
        title="A request that is killed in the middle releases its key",
        why="The lock of a dead server returns 409 until the key expires.",
        fix="Give locks a lease, and take over a key whose lease has expired.",
        severity=Severity.HIGH,
        needs=(Need.CRASH, Need.SLOW),
        requests=4,
        judge=answered,
    ),
    Clause(
        id="outages.closed",
        title="Nothing is executed while the store is down",
        why="A request that runs without a stored key runs again with its retry.",
        fix="Return 503 while the store is down; do not run the handler without a claim.",
        severity=Severity.CRITICAL,
        needs=(Need.OUTAGE,),
        requests=3,
        judge=closed,
    ),
    Clause(
        id="outages.reported",
        title="Clients receive 503 with Retry-After while the store is down",
        why="The client needs to know that nothing happened, and when to retry.",
        fix="Return 503 with Retry-After while the store is down.",
        severity=Severity.LOW,
        must=frozenset(),
        should=EVERY,
        needs=(Need.OUTAGE,),
        requests=1,
        judge=headline,
    ),
    Clause(
        id="outages.recovered",
        title="After an outage of the store the same key is executed, once",
        why="If keys stay locked, the outage continues for their clients.",
        fix="Claim keys in the store itself, so that an outage leaves no lock behind.",
        severity=Severity.HIGH,
        needs=(Need.OUTAGE,),
        requests=5,
        judge=recovered,
        sight=True,
    ),
    Clause(
        id="outages.remembered",
        title="An outage of the store does not lose the responses of finished requests",
        why="A cache that loses its content in a restart cannot protect retries.",
        fix="Store keys in durable storage, not in a cache.",
        severity=Severity.CRITICAL,
        needs=(Need.OUTAGE,),
        requests=6,
        judge=remembered_through_outage,
        sight=True,
    ),
)
