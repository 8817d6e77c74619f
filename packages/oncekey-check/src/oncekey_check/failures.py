"""Clauses about failed requests, clients that disconnect or send slowly, and unusual responses.

They test which failures the API stores, that no failure blocks a key permanently, that a request whose client
disconnected has at most one effect, and that a final refusal and a very large response are replayed.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from itertools import islice
from typing import Final

from oncekey_check import bodies
from oncekey_check.clauses import (
    DRAFT,
    EVERY,
    MARKED,
    Clause,
    Failed,
    InconclusiveError,
    Need,
    Passed,
    Severity,
    Verdict,
)
from oncekey_check.judging import BAD_REQUEST, SERVER_ERROR, differing, is_marked, needs_replays, one_operation, shown
from oncekey_check.probe import Probe
from oncekey_check.raw_http import Answer, RawRequest
from oncekey_check.target import replaced

_MOST_LACKING: Final = 3


def server_error_forgotten(probe: Probe) -> Verdict:
    """A 500 is not stored as the key's response."""
    failed, again = _after_failure(probe)
    if probe.same(failed, again):
        return Failed("a retry after a server error is executed, or held", f"{shown(again)}, the stored error")
    return Passed()


def server_error_no_wedge(probe: Probe) -> Verdict:
    """A failed request releases its key."""
    _, again = _after_failure(probe)
    if probe.busy(again):
        return Failed(f"within {probe.target.patience:g} s a retry no longer receives 'wait'", shown(again))
    return Passed()


def server_error_no_effect(probe: Probe) -> Verdict:
    """A failure and its retry have one effect together."""
    before = probe.count()
    _, again = _after_failure(probe)
    effects = probe.since(before)
    if effects is not None and effects > 1:
        return Failed("at most 1 effect of a failed request and its retry", f"{effects} effects; {shown(again)}")
    return Passed()


def corrected(probe: Probe) -> Verdict:
    """A request that was refused before anything ran does not use up its key."""
    tried = False
    for what, body in _invalid(probe):
        key = probe.fresh()
        refused = probe.send(key, body=body)
        if not BAD_REQUEST <= refused.status < SERVER_ERROR:
            continue
        tried = True
        answer = probe.until_settled(probe.request(key))
        if not answer.ok:
            return Failed(f"after {what} the corrected request with the same key is executed", shown(answer))
    if not tried:
        raise InconclusiveError("no body is known that this API refuses", "--invalid-body")
    return Passed()


def _invalid(probe: Probe) -> Iterator[tuple[str, bytes]]:
    """Bodies that an API may refuse, at different depths: not JSON, no members at all, one member missing."""
    target = probe.target
    if target.invalid_body is not None:
        yield "an invalid body", target.invalid_body
    elif target.is_json:
        yield "half a body", bodies.broken(target.body)
        yield "an empty object", b"{}"
        for body in islice(bodies.lacking(target.body), _MOST_LACKING):
            yield "a body without one member", body


def _after_failure(probe: Probe) -> tuple[Answer, Answer]:
    key = probe.fresh()
    request = probe.request(key)
    fail = probe.target.fail
    failed = probe.send_raw(replace(request, headers=replaced(request.headers, () if fail is None else (fail,))))
    if failed.status < SERVER_ERROR:
        raise InconclusiveError(
            f"with --fail-header the response was {failed.status or failed.reason}, not 5xx", Need.FAIL
        )
    return failed, probe.until_settled(request)


_PLACES: Final = {
    "head": "in the head",
    "body": "in the middle of the body",
    "last-byte": "before the last byte",
}


def unfinished(probe: Probe, place: str) -> Verdict:
    """A client that disconnects before its request is complete."""
    key, before = probe.fresh(), probe.count()
    request = probe.request(key)
    probe.cut_off(request, _position(request, place))
    time.sleep(probe.lead)  # the server must have noticed the disconnect, or there is nothing to observe
    answer = probe.until_settled(request)
    effects = probe.since(before, at_least=int(answer.ok))
    if not answer.ok:
        return Failed(f"within {probe.target.patience:g} s a retry of the whole request is executed", shown(answer))
    if effects is not None and effects > 1:
        return Failed("1 effect", f"{effects} effects; {shown(answer)}")
    return Passed()


def sent(probe: Probe) -> Verdict:
    """A client that disconnects when everything is sent."""
    before = probe.count()
    request = _abandoned(probe)
    return _one_effect(probe, request, before)


def answered(probe: Probe) -> Verdict:
    """A client that disconnects when the response begins."""
    key, before = probe.fresh(), probe.count()
    request = probe.request(key)
    probe.cut_off(request, len(request.wire()), listen=True)
    return _one_effect(probe, request, before)


def retried(probe: Probe) -> Verdict:
    """A client that disconnected retries."""
    needs_replays(probe)
    request = _abandoned(probe)
    first = probe.until_settled(request, over_errors=True)
    if not first.ok:
        return Failed(f"within {probe.target.patience:g} s a retry receives the response", shown(first))
    again = probe.until_settled(request)
    if not probe.same(first, again):
        return Failed("the same response for every retry", f"{shown(first)}, then {differing(probe, first, again)}")
    return Passed()


def slowly(probe: Probe) -> Verdict:
    """A body that arrives in slow pieces is the same body."""
    key, before = probe.fresh(), probe.count()
    first = probe.dribble(probe.request(key))
    if not first.ok:
        raise InconclusiveError(f"a body in slow pieces receives {first.status or first.reason} under a fresh key")
    again = probe.send(key)
    return one_operation(probe, probe.since(before, at_least=1), first, again, "the same body in one piece")


def _abandoned(probe: Probe) -> RawRequest:
    """A request that was sent, and whose client did not wait for the response."""
    request = probe.request(probe.fresh(), slow=True)
    probe.cut_off(request, len(request.wire()), stay=probe.lead / 2)
    return request


def _one_effect(probe: Probe, request: RawRequest, before: int | None) -> Verdict:
    first = probe.until_settled(request, over_errors=True)
    probe.until_settled(request, over_errors=True)
    effects = probe.since(before, at_least=int(first.ok))
    if effects is not None and effects > 1:
        return Failed("1 effect of the abandoned request and its retries", f"{effects} effects; {shown(first)}")
    return Passed()


def _position(request: RawRequest, place: str) -> int:
    head = len(request.head())
    return {"head": head // 2, "body": head + len(request.body) // 2}.get(place, head + len(request.body) - 1)


def _unfinished(place: str, words: str) -> Clause:
    return Clause(
        id=f"hang-ups.{place}",
        title=f"A request whose client disconnects {words} has no effect, and can be retried",
        why="An incomplete request must not be executed, and must not keep its key.",
        fix="Claim the key only after the whole request was received.",
        severity=Severity.HIGH,
        requests=4,
        judge=partial(unfinished, place=place),
        sight=True,
    )


LARGE: Final = 64 * 1024
"""The minimum size in bytes of a large response."""


def declined(probe: Probe) -> Verdict:
    """A request that was refused permanently receives the same refusal again."""
    key, body = probe.fresh(), probe.target.declined_body
    first = probe.send(key, body=body)
    if not BAD_REQUEST <= first.status < SERVER_ERROR or probe.busy(first):
        raise InconclusiveError(
            f"--declined-body received {first.status or first.reason}, not a final 4xx", Need.DECLINED
        )
    again = probe.send(key, body=body)
    if first.status != again.status or not probe.same(first, again):
        return Failed(f"{shown(first)} again", differing(probe, first, again))
    if is_marked(again):
        return Passed()
    # Equal responses prove something only if two decisions would give different ones.
    if probe.same(first, probe.send(probe.fresh(), body=body)):
        raise InconclusiveError("a new refusal looks the same as a stored one")
    return Passed()


def large(probe: Probe) -> Verdict:
    """The API replays a large response, or reports that it is not stored; it executes nothing again."""
    request, header = probe.request(probe.fresh()), probe.target.large
    request = replace(request, headers=replaced(request.headers, () if header is None else (header,)))
    before = probe.count()
    first = probe.send_raw(request)
    if not first.ok or len(first.body) < LARGE:
        raise InconclusiveError(
            f"with --large-header the response was {shown(first)}, smaller than {LARGE} bytes", Need.LARGE
        )
    again = probe.send_raw(request)
    effects = probe.since(before)
    if effects not in {None, 1}:
        return Failed("1 effect of a request with a large response and its retry", f"{effects} effects; {shown(again)}")
    if again.ok and not probe.same(first, again):
        return Failed(f"{shown(first)} again, or a refusal that says why not", differing(probe, first, again))
    if not again.ok and not BAD_REQUEST <= again.status < SERVER_ERROR:
        return Failed(f"{shown(first)} again, or a refusal with the reason", shown(again))
    return Passed()


CLAUSES: Final = (
    Clause(
        id="failures.5xx-forgotten",
        title="A server error is not stored as the key's response",
        why="A client that retries after an outage would receive the old error until the key expires.",
        fix="Do not store a 5xx that is known to have had no effect.",
        severity=Severity.MEDIUM,
        must=DRAFT,
        needs=(Need.FAIL,),
        requests=2,
        judge=server_error_forgotten,
    ),
    Clause(
        id="failures.no-wedge",
        title="A failed request releases its key",
        why="A lock that is never released returns 409 until the key expires.",
        fix="Release the key when the handler fails, and expire the lock of a request that died.",
        severity=Severity.HIGH,
        needs=(Need.FAIL,),
        requests=2,
        judge=server_error_no_wedge,
    ),
    Clause(
        id="failures.one-effect",
        title="A failed request and its retry have at most one effect",
        why="If a request fails after its effect and the retry runs again, the customer pays twice.",
        fix="Commit the effect and the key in one transaction, or record each step before the next one.",
        severity=Severity.CRITICAL,
        needs=(Need.FAIL, Need.COUNT),
        requests=4,
        judge=server_error_no_effect,
    ),
    Clause(
        id="failures.corrected",
        title="A request that was refused as invalid does not use up its key",
        why="A corrected request with the same key would be refused, or receive the old error.",
        fix="Validate the request before claiming the key, or release the key after a validation error.",
        severity=Severity.LOW,
        must=frozenset(),
        should=EVERY,
        requests=8,
        judge=corrected,
    ),
    *(_unfinished(place, words) for place, words in _PLACES.items()),
    Clause(
        id="hang-ups.sent",
        title="A request whose client disconnects after sending it, and its retry, have one effect",
        why="This is the main purpose of keys: the work is done, and only the response is lost.",
        fix="Claim the key before the effect, because the retry may arrive while the first request is still running; "
        "finish and store the request even if the client has disconnected.",
        severity=Severity.CRITICAL,
        needs=(Need.COUNT,),
        requests=9,
        judge=sent,
        sight=True,
    ),
    Clause(
        id="hang-ups.answered",
        title="A request whose client disconnects during the response, and its retry, have one effect",
        why="A server that discards a response it could not deliver executes the retry.",
        fix="Store the response before the first byte of it is sent.",
        severity=Severity.CRITICAL,
        needs=(Need.COUNT,),
        requests=5,
        judge=answered,
        sight=True,
    ),
    Clause(
        id="hang-ups.retried",
        title="A client that disconnected receives the response with its retry",
        why="The work is done, but the client would never learn its outcome.",
        fix="Claim the key before the effect, because the retry may arrive while the first request is still running; "
        "finish and store the request even if the client has disconnected.",
        severity=Severity.HIGH,
        requests=7,
        judge=retried,
        sight=True,
    ),
    Clause(
        id="hang-ups.slowly",
        title="A body that arrives in slow pieces is the same request",
        why="A bad connection must not change the meaning of a request.",
        fix="Compute the fingerprint from the whole body, however many pieces it arrived in.",
        severity=Severity.MEDIUM,
        requests=4,
        judge=slowly,
        sight=True,
    ),
    Clause(
        id="finals.declined",
        title="A final refusal is replayed",
        why="A retry must not charge a card that was declined the first time.",
        fix="Store a final 4xx and replay it.",
        severity=Severity.MEDIUM,
        must=MARKED,
        should=EVERY - MARKED,
        needs=(Need.DECLINED,),
        requests=3,
        judge=declined,
    ),
    Clause(
        id="finals.large",
        title="A request with a large response is not executed again",
        why="A server may not store a response that is too large, and then executes the retry.",
        fix="Store a large response elsewhere, or store a note that it was too large; never run the request again.",
        severity=Severity.HIGH,
        needs=(Need.LARGE,),
        requests=4,
        judge=large,
        sight=True,
    ),
)
