"""Clauses about failures: which ones are remembered, and that none of them holds a key for ever."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import islice
from typing import Final

from oncekey.conformance import bodies
from oncekey.conformance.clauses import (
    DRAFT,
    EVERY,
    Area,
    Clause,
    Failed,
    Need,
    Passed,
    Severity,
    UndecidedError,
    Verdict,
)
from oncekey.conformance.judging import BAD_REQUEST, SERVER_ERROR, shown
from oncekey.conformance.probe import Probe
from oncekey.conformance.shots import Answer
from oncekey.conformance.target import replaced

_MOST_LACKING: Final = 3


def server_error_forgotten(probe: Probe) -> Verdict:
    """A 500 is not the key's answer."""
    failed, again = _after_failure(probe)
    if probe.same(failed, again):
        return Failed("a retry after a server error is executed, or held", f"{shown(again)}, the stored error")
    return Passed()


def server_error_no_wedge(probe: Probe) -> Verdict:
    """A failed request lets go of its key."""
    _, again = _after_failure(probe)
    if probe.busy(again):
        return Failed(f"within {probe.target.patience:g} s a retry is not told to wait any more", shown(again))
    return Passed()


def server_error_no_effect(probe: Probe) -> Verdict:
    """A failure and its retry are one effect together."""
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
        answer = probe.until_settled(probe.shot(key))
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
    shot = probe.shot(key)
    fail = probe.target.fail
    failed = probe.fire(replace(shot, headers=replaced(shot.headers, () if fail is None else (fail,))))
    if failed.status < SERVER_ERROR:
        raise UndecidedError(f"with --fail-header the answer was {failed.status or failed.reason}, not 5xx", Need.FAIL)
    return failed, probe.until_settled(shot)


CLAUSES: Final = (
    Clause(
        id="failures.5xx-forgotten",
        title="A server error is not stored as the key's answer",
        why="A client that retries an outage would get the outage for as long as the key lives.",
        area=Area.FAILURES,
        severity=Severity.MEDIUM,
        must=DRAFT,
        needs=(Need.FAIL,),
        shots=4,
        judge=server_error_forgotten,
    ),
    Clause(
        id="failures.no-wedge",
        title="A failed request lets go of its key",
        why="A lock that nobody releases answers 409 until the key expires.",
        area=Area.FAILURES,
        severity=Severity.HIGH,
        needs=(Need.FAIL,),
        shots=12,
        judge=server_error_no_wedge,
    ),
    Clause(
        id="failures.one-effect",
        title="A failed request and its retry have one effect at most",
        why="An error after the effect, and a retry that runs again: paid twice.",
        area=Area.FAILURES,
        severity=Severity.CRITICAL,
        needs=(Need.FAIL, Need.COUNT),
        shots=6,
        judge=server_error_no_effect,
    ),
    Clause(
        id="failures.corrected",
        title="A request that was refused as invalid does not use up its key",
        why="A corrected request with the same key would be refused, or answered with the old error.",
        area=Area.FAILURES,
        severity=Severity.LOW,
        must=frozenset(),
        should=EVERY,
        shots=12,
        judge=corrected,
    ),
)
