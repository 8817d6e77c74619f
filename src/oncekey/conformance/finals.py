"""Clauses about answers that are final and unusual: a refusal for good, and an answer that is very large."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from oncekey.conformance.clauses import (
    EVERY,
    MARKED,
    Area,
    Clause,
    Failed,
    Need,
    Passed,
    Severity,
    UndecidedError,
    Verdict,
)
from oncekey.conformance.judging import BAD_REQUEST, SERVER_ERROR, is_marked, shown
from oncekey.conformance.probe import Probe
from oncekey.conformance.target import replaced

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
    # Equal answers prove something only where two decisions would differ.
    if probe.same(first, probe.send(probe.fresh(), body=body)):
        raise UndecidedError("a refusal that is decided anew looks the same as a stored one")
    return Passed()


def large(probe: Probe) -> Verdict:
    """A large answer is given again, or the client is told that it is not kept; nothing is executed again."""
    shot, header = probe.shot(probe.fresh()), probe.target.large
    shot = replace(shot, headers=replaced(shot.headers, () if header is None else (header,)))
    before = probe.count()
    first = probe.fire(shot)
    if not first.ok or len(first.body) < LARGE:
        raise UndecidedError(f"with --large-header the answer was {shown(first)}, and not {LARGE} bytes", Need.LARGE)
    again = probe.fire(shot)
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
        id="finals.declined",
        title="A final refusal is replayed",
        why="A card that is declined and charged at the second try was not declined.",
        area=Area.FINALS,
        severity=Severity.MEDIUM,
        must=MARKED,
        should=EVERY - MARKED,
        needs=(Need.DECLINED,),
        shots=3,
        judge=declined,
    ),
    Clause(
        id="finals.large",
        title="A request with a large answer is not executed again",
        why="What does not fit into the store is easily not stored at all, and then forgotten.",
        area=Area.FINALS,
        severity=Severity.HIGH,
        needs=(Need.LARGE,),
        shots=4,
        judge=large,
        sight=True,
    ),
)
