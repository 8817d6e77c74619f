"""Clauses about requests that do not end well: failures, clients that hang up or send slowly, and unusual answers.

They test which failures the API stores, that no failure blocks a key for ever, that a request whose client hung up has
at most one effect, and that a final refusal and a very large answer are replayed.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from itertools import islice
from typing import Final

from oncekey_check import bodies
from oncekey_check.clauses import DRAFT, EVERY, MARKED, Clause, Failed, Need, Passed, Severity, UndecidedError, Verdict
from oncekey_check.judging import BAD_REQUEST, SERVER_ERROR, is_marked, needs_replays, one_operation, shown
from oncekey_check.probe import Probe
from oncekey_check.raw_http import Answer, RawRequest
from oncekey_check.target import replaced

_MOST_LACKING: Final = 3


def server_error_forgotten(probe: Probe) -> Verdict:
    """A 500 is not the key's answer."""
    failed, again = _after_failure(probe)
    if probe.same(failed, again):
        return Failed("a retry after a server error is executed, or held", f"{shown(again)}, the stored error")
    return Passed()


def server_error_no_wedge(probe: Probe) -> Verdict:
    """A failed request releases its key."""
    _, again = _after_failure(probe)
    if probe.busy(again):
        return Failed(f"within {probe.target.patience:g} s a retry is not told to wait any more", shown(again))
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
        raise UndecidedError("no body is known that this API refuses", "--invalid-body")
    return Passed()


def _invalid(probe: Probe) -> Iterator[tuple[str, bytes]]:
    """Bodies that an API may refuse, at different depths: no JSON, no members at all, one member less."""
    target = probe.target
    if target.invalid_body is not None:
        yield "an invalid body", target.invalid_body
    elif target.is_json:
        yield "half a body", bodies.broken(target.body)
        yield "an empty object", b"{}"
        for body in islice(bodies.lacking(target.body), _MOST_LACKING):
            yield "a body less one member", body


def _after_failure(probe: Probe) -> tuple[Answer, Answer]:
    key = probe.fresh()
    request = probe.request(key)
    fail = probe.target.fail
    failed = probe.send_raw(replace(request, headers=replaced(request.headers, () if fail is None else (fail,))))
    if failed.status < SERVER_ERROR:
        raise UndecidedError(f"with --fail-header the answer was {failed.status or failed.reason}, not 5xx", Need.FAIL)
    return failed, probe.until_settled(request)


_PLACES: Final = {
    "head": "in the head",
    "body": "in the middle of the body",
    "last-byte": "before the last byte",
}


def unfinished(probe: Probe, place: str) -> Verdict:
    """A client that hangs up before its request is complete."""
    key, before = probe.fresh(), probe.count()
    request = probe.request(key)
    probe.cut_off(request, _position(request, place))
    time.sleep(probe.lead)  # the server must have seen that the client left, or there is nothing to see
    answer = probe.until_settled(request)
    effects = probe.since(before, at_least=int(answer.ok))
    if not answer.ok:
        return Failed(f"within {probe.target.patience:g} s a retry of the whole request is executed", shown(answer))
    if effects is not None and effects > 1:
        return Failed("1 effect", f"{effects} effects; {shown(answer)}")
    return Passed()


def sent(probe: Probe) -> Verdict:
    """A client that hangs up when everything is sent."""
    before = probe.count()
    request = _abandoned(probe)
    return _one_effect(probe, request, before)


def answered(probe: Probe) -> Verdict:
    """A client that hangs up when the answer begins."""
    key, before = probe.fresh(), probe.count()
    request = probe.request(key)
    probe.cut_off(request, len(request.wire()), listen=True)
    return _one_effect(probe, request, before)


def retried(probe: Probe) -> Verdict:
    """A client that hung up asks again."""
    needs_replays(probe)
    request = _abandoned(probe)
    first = probe.until_settled(request, over_errors=True)
    if not first.ok:
        return Failed(f"within {probe.target.patience:g} s a retry gets the answer", shown(first))
    again = probe.until_settled(request)
    if not probe.same(first, again):
        return Failed("the same answer for every retry", f"{shown(first)}, then {shown(again)}")
    return Passed()


def slowly(probe: Probe) -> Verdict:
    """A body that comes in slow pieces is the same body."""
    key, before = probe.fresh(), probe.count()
    first = probe.dribble(probe.request(key))
    if not first.ok:
        raise UndecidedError(f"a body in slow pieces gets {first.status or first.reason} under a fresh key")
    again = probe.send(key)
    return one_operation(probe, probe.since(before, at_least=1), first, again, "the same body in one piece")


def _abandoned(probe: Probe) -> RawRequest:
    """A request that was sent, and whose client did not wait for its answer."""
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
        title=f"A client that hangs up {words} has done nothing, and may retry",
        why="Half a request must not be executed, and must not keep its key.",
        fix="Claim the key only after the whole request was received.",
        severity=Severity.HIGH,
        requests=4,
        judge=partial(unfinished, place=place),
        sight=True,
    )


LARGE: Final = 64 * 1024
"""Bytes from which an answer counts as large."""


def declined(probe: Probe) -> Verdict:
    """A request that was refused for good gets the same refusal again."""
    key, body = probe.fresh(), probe.target.declined_body
    first = probe.send(key, body=body)
    if not BAD_REQUEST <= first.status < SERVER_ERROR or probe.busy(first):
        raise UndecidedError(f"--declined-body got {first.status or first.reason} and no final 4xx", Need.DECLINED)
    again = probe.send(key, body=body)
    if first.status != again.status or not probe.same(first, again):
        return Failed(f"{shown(first)} again", f"{shown(again)}, another answer")
    if is_marked(again):
        return Passed()
    # Equal answers prove something only if two decisions would give different ones.
    if probe.same(first, probe.send(probe.fresh(), body=body)):
        raise UndecidedError("a refusal that is decided anew looks the same as a stored one")
    return Passed()


def large(probe: Probe) -> Verdict:
    """The API replays a large answer, or answers that it is not kept; it executes nothing again."""
    request, header = probe.request(probe.fresh()), probe.target.large
    request = replace(request, headers=replaced(request.headers, () if header is None else (header,)))
    before = probe.count()
    first = probe.send_raw(request)
    if not first.ok or len(first.body) < LARGE:
        raise UndecidedError(f"with --large-header the answer was {shown(first)}, and not {LARGE} bytes", Need.LARGE)
    again = probe.send_raw(request)
    effects = probe.since(before)
    if effects not in {None, 1}:
        return Failed("1 effect of a request with a large answer and its retry", f"{effects} effects; {shown(again)}")
    if again.ok and not probe.same(first, again):
        return Failed(f"{shown(first)} again, or a refusal that says why not", f"{shown(again)}, another answer")
    if not again.ok and not BAD_REQUEST <= again.status < SERVER_ERROR:
        return Failed(f"{shown(first)} again, or a refusal that says why not", shown(again))
    return Passed()


CLAUSES: Final = (
    Clause(
        id="failures.5xx-forgotten",
        title="A server error is not stored as the key's answer",
        why="A client that retries an outage would get the outage for as long as the key lives.",
        fix="Do not store a 5xx that is known to have had no effect.",
        severity=Severity.MEDIUM,
        must=DRAFT,
        needs=(Need.FAIL,),
        requests=2,
        judge=server_error_forgotten,
    ),
    Clause(
        id="failures.no-wedge",
        title="A failed request lets go of its key",
        why="A lock that is never released answers 409 until the key expires.",
        fix="Release the key when the handler fails, and expire the lock of a request that died.",
        severity=Severity.HIGH,
        needs=(Need.FAIL,),
        requests=2,
        judge=server_error_no_wedge,
    ),
    Clause(
        id="failures.one-effect",
        title="A failed request and its retry have one effect at most",
        why="An error after the effect, and a retry that runs again: paid twice.",
        fix="Commit the effect and the key in one transaction, or record each step before the next one.",
        severity=Severity.CRITICAL,
        needs=(Need.FAIL, Need.COUNT),
        requests=4,
        judge=server_error_no_effect,
    ),
    Clause(
        id="failures.corrected",
        title="A request that was refused as invalid does not use up its key",
        why="A corrected request with the same key would be refused, or answered with the old error.",
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
        title="A client that hangs up when all is sent, and retries, has one effect",
        why="It is the case for which keys were invented: the answer is lost, the work is not.",
        fix="Finish and store the request even if the client has disconnected.",
        severity=Severity.CRITICAL,
        needs=(Need.COUNT,),
        requests=9,
        judge=sent,
        sight=True,
    ),
    Clause(
        id="hang-ups.answered",
        title="A client that hangs up during the answer, and retries, has one effect",
        why="A server that forgets what it could not deliver executes the retry.",
        fix="Store the response before the first byte of it is sent.",
        severity=Severity.CRITICAL,
        needs=(Need.COUNT,),
        requests=5,
        judge=answered,
        sight=True,
    ),
    Clause(
        id="hang-ups.retried",
        title="A client that hung up gets the answer with its retry",
        why="The work is done, and the client would never learn what came of it.",
        fix="Finish and store the request even if the client has disconnected.",
        severity=Severity.HIGH,
        requests=7,
        judge=retried,
        sight=True,
    ),
    Clause(
        id="hang-ups.slowly",
        title="A body that comes in slow pieces is the same request",
        why="A bad line must not change what a request means.",
        fix="Compute the fingerprint from the whole body, however many pieces it came in.",
        severity=Severity.MEDIUM,
        requests=4,
        judge=slowly,
        sight=True,
    ),
    Clause(
        id="finals.declined",
        title="A final refusal is replayed",
        why="A card that is declined and charged at the second try was not declined.",
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
        title="A request with a large answer is not executed again",
        why="What does not fit into the store is easily not stored at all, and then forgotten.",
        fix="Store a large response elsewhere, or store that it is not kept; never run the request again.",
        severity=Severity.HIGH,
        needs=(Need.LARGE,),
        requests=4,
        judge=large,
        sight=True,
    ),
)
