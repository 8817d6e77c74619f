"""Clauses about the answer to a retry: the same one, as often as it is asked for, and marked."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from typing import Final

from oncekey.conformance import bodies
from oncekey.conformance.clauses import (
    DRAFT,
    EVERY,
    MARKED,
    SAFE,
    Area,
    Clause,
    Failed,
    Need,
    Passed,
    Severity,
    UndecidedError,
    Verdict,
)
from oncekey.conformance.judging import is_marked, is_same, shown, tally, worst
from oncekey.conformance.probe import MARKER, Probe

_KEPT: Final = ("Location", "Content-Type", "ETag", "Content-Language")
_EXPIRY: Final = re.compile(r"idempoten.*(expir|ttl|until|retention)", re.IGNORECASE)
_MANY: Final = 10
_NO_CHUNKS: Final = {411, 501}


def same_status(probe: Probe) -> Verdict:
    """The status of a retry."""
    key = probe.fresh()
    first, again = probe.first(key), probe.send(key)
    if first.status == again.status:
        return Passed()
    return Failed(f"{first.status} again", shown(again))


def same_bytes(probe: Probe) -> Verdict:
    """The body of a retry."""
    key = probe.fresh()
    first, again = probe.first(key), probe.send(key)
    if first.body == again.body:
        return Passed()
    return Failed(f"the same {len(first.body)} bytes", f"{shown(again)}: {_difference(first.body, again.body)}")


def same_headers(probe: Probe) -> Verdict:
    """The headers that belong to the body."""
    key = probe.fresh()
    first, again = probe.first(key), probe.send(key)
    for name in _KEPT:
        if first.header(name) != again.header(name):
            return Failed(f"{name}: {first.header(name)}", f"{name}: {again.header(name)}")
    return Passed()


def many_times(probe: Probe) -> Verdict:
    """Retries one after the other."""
    key = probe.fresh()
    first = probe.first(key)
    answers = [probe.send(key) for _ in range(_MANY)]
    if all(is_same(first, again) for again in answers):
        return Passed()
    return Failed(f"{_MANY} times {first.status} with the first body", tally(answers))


def no_effect(probe: Probe) -> Verdict:
    """A retry does nothing."""
    key, before = probe.fresh(), probe.count()
    answers = [probe.first(key), probe.send(key), probe.send(key)]
    effects = probe.since(before)
    return Passed() if effects == 1 else Failed("1 effect of 3 requests", f"{effects} effects; {tally(answers)}")


def marked(probe: Probe) -> Verdict:
    """The marker, on replays only."""
    key = probe.fresh()
    first, again = probe.first(key), probe.send(key)
    if is_marked(first):
        return Failed(f"no {MARKER}: true on the first answer", shown(first))
    if not is_marked(again):
        return Failed(f"{MARKER}: true on a replay", f"{shown(again)}; {MARKER}: {again.header(MARKER)}")
    return Passed()


def expiry_told(probe: Probe) -> Verdict:
    """How long the key is kept."""
    answer = probe.first(probe.fresh())
    if any(_EXPIRY.search(name) for name, _ in answer.headers):
        return Passed()
    return Failed("a header that says how long the key is kept", ", ".join(name for name, _ in answer.headers))


def other_white_space(probe: Probe) -> Verdict:
    """Another order of members and other white space."""
    return _equal(probe, bodies.spaced(probe.target.body), "other white space and order of members")


def other_escapes(probe: Probe) -> Verdict:
    """The same texts, spelt with escapes."""
    return _equal(probe, bodies.escaped(probe.target.body), "the same texts with escapes")


def chunked(probe: Probe) -> Verdict:
    """A body in chunks is the body, also when it is another one."""
    key = probe.fresh()
    first = probe.first(key)
    shot = probe.shot(key)
    again = probe.fire(replace(shot, chunked=True))
    if again.status in _NO_CHUNKS:
        raise UndecidedError("this server does not take bodies in chunks")
    if not is_same(first, again):
        return Failed(f"{shown(first)} again for the same body in chunks", shown(again))
    return Passed()


def chunked_other(probe: Probe) -> Verdict:
    """Another body in chunks is another body."""
    key = probe.fresh()
    first = probe.first(key)
    shot = probe.shot(key, body=probe.other_body)
    again = probe.fire(replace(shot, chunked=True))
    if again.ok:
        how = "the first one's answer" if is_same(first, again) else "an answer of its own"
        return Failed("another body in chunks under a used key is refused", f"{shown(again)}, {how}")
    return Passed()


def _equal(probe: Probe, body: bytes, what: str) -> Verdict:
    key, before = probe.fresh(), probe.count()
    first, again = probe.first(key), probe.send(key, body=body)
    effects = probe.since(before)
    verdicts: list[Verdict] = []
    if not is_same(first, again):
        verdicts.append(Failed(f"{what}: the first answer again", shown(again)))
    if effects not in {None, 1}:
        verdicts.append(Failed(f"{what}: 1 effect", f"{effects} effects"))
    return worst(*verdicts)


def _difference(one: bytes, two: bytes) -> str:
    try:
        if json.loads(one) == json.loads(two):
            return "the same JSON in another spelling"
    except ValueError:
        pass
    return "another body"


CLAUSES: Final = (
    Clause(
        id="replays.status",
        title="A retry gets the first status",
        why="A client that sees 200 where there was 201 takes another branch.",
        area=Area.REPLAYS,
        severity=Severity.HIGH,
        requirements=("R87", "R88"),
        shots=2,
        judge=same_status,
    ),
    Clause(
        id="replays.bytes",
        title="A retry gets the first body, byte for byte",
        why="Signatures and hashes of answers stay valid, and no second id appears.",
        area=Area.REPLAYS,
        severity=Severity.HIGH,
        requirements=("R89", "R95", "R258"),
        must=MARKED,
        should=EVERY - MARKED,
        shots=2,
        judge=same_bytes,
    ),
    Clause(
        id="replays.headers",
        title="A retry gets Location, Content-Type and ETag of the first answer",
        why="A client whose first answer was lost would never learn where its resource is.",
        area=Area.REPLAYS,
        severity=Severity.MEDIUM,
        requirements=("R90",),
        must=DRAFT,
        should=EVERY - DRAFT,
        shots=2,
        judge=same_headers,
    ),
    Clause(
        id="replays.many",
        title="Ten retries in a row get the same answer",
        why="Some servers lock a finished key again with every retry.",
        area=Area.REPLAYS,
        severity=Severity.HIGH,
        requirements=("R96",),
        shots=11,
        judge=many_times,
    ),
    Clause(
        id="replays.one-effect",
        title="Three requests with one key have one effect",
        why="It is what a key is for.",
        area=Area.REPLAYS,
        severity=Severity.CRITICAL,
        requirements=("R87", "R241"),
        needs=(Need.COUNT,),
        shots=5,
        judge=no_effect,
    ),
    Clause(
        id="replays.marked",
        title=f"Replays carry {MARKER}: true, first answers do not",
        why="Without it a client cannot tell an old error from a new one.",
        area=Area.REPLAYS,
        severity=Severity.LOW,
        requirements=("R98",),
        must=MARKED,
        should=EVERY - MARKED,
        shots=2,
        judge=marked,
    ),
    Clause(
        id="replays.expiry",
        title="Answers say how long the key is kept",
        why="A client that retries after that executes again.",
        area=Area.REPLAYS,
        severity=Severity.LOW,
        requirements=("R164",),
        must=SAFE,
        shots=1,
        judge=expiry_told,
    ),
    Clause(
        id="replays.white-space",
        title="White space and the order of members do not matter",
        why="A client that serialises again for its retry may write them differently.",
        area=Area.REPLAYS,
        severity=Severity.MEDIUM,
        requirements=("R34",),
        must=MARKED,
        should=EVERY - MARKED,
        needs=(Need.JSON,),
        shots=4,
        judge=other_white_space,
    ),
    Clause(
        id="replays.escapes",
        title="The same text with escapes is the same text",
        why="JSON libraries differ in what they escape.",
        area=Area.REPLAYS,
        severity=Severity.MEDIUM,
        requirements=("R34", "R35"),
        must=MARKED,
        should=EVERY - MARKED,
        needs=(Need.JSON,),
        shots=4,
        judge=other_escapes,
    ),
    Clause(
        id="replays.chunked",
        title="The same body in chunks is the same request",
        why="A proxy may send on in chunks what came in one piece.",
        area=Area.REPLAYS,
        severity=Severity.MEDIUM,
        requirements=("R32", "R87"),
        shots=2,
        judge=chunked,
    ),
    Clause(
        id="replays.chunked-other",
        title="Another body in chunks is another request",
        why="Servers that hash only what has a Content-Length compare nothing here.",
        area=Area.REPLAYS,
        severity=Severity.HIGH,
        requirements=("R32", "R37"),
        needs=(Need.OTHER_BODY,),
        shots=2,
        judge=chunked_other,
    ),
)
