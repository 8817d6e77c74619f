"""Clauses about the key itself: when it is missing, malformed, doubled, too long, or spelt in another way."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from typing import Final

from oncekey.conformance.clauses import (
    DRAFT,
    EVERY,
    MARKED,
    SAFE,
    Area,
    Clause,
    Failed,
    Passed,
    Severity,
    UndecidedError,
    Verdict,
)
from oncekey.conformance.judging import BAD_REQUEST, SERVER_ERROR, gets, shown, worst
from oncekey.conformance.probe import Probe

_TRICKY: Final = (
    "x' OR '1'='1'; DROP TABLE keys; --",
    "../../../../../etc/passwd-0000",
    "%00%0a%0d%27%22%3c%3e-000000",
    "{{7*7}}${jndi:none}#{7*7}-000",
)


def missing(probe: Probe) -> Verdict:
    """No key at all."""
    if probe.target.key_optional:
        raise UndecidedError("keys may be left out here (--key-optional)")
    return _refuses(probe, [], "a request without a key")


def explained(probe: Probe) -> Verdict:
    """Where it is written what a key is."""
    answer = probe.fire(probe.raw_shot())
    if answer.ok:
        return Failed("a refusal that leads to documentation", shown(answer))
    if answer.header("Link") or b"://" in answer.body or b"urn:" in answer.body:
        return Passed()
    return Failed("a Link header or an address in the body", f"{shown(answer)}: neither")


def empty(probe: Probe) -> Verdict:
    """A key without a character."""
    return worst(*(_refuses(probe, [value], f"the value {value!r}") for value in ("", '""')))


def malformed(probe: Probe) -> Verdict:
    """Values that are no String of RFC 9651 and no bare key either."""
    key = probe.fresh()
    values = (f'"{key}', f'"{key[:8]}\\n{key[8:]}"', f'"{key}" x', f'"{key}\xfc"', f"'{key}' '")
    return worst(*(_refuses(probe, [value], f"the value {value!r}") for value in values))


def doubled(probe: Probe) -> Verdict:
    """Two header lines, and a list on one."""
    one, two = probe.written(probe.fresh()), probe.written(probe.fresh())
    return worst(
        _refuses(probe, [one, two], "two lines with different keys"),
        _refuses(probe, [one, one], "two lines with one key"),
        _refuses(probe, [f"{one}, {two}"], "a list of two keys"),
    )


def too_long(probe: Probe) -> Verdict:
    """256 characters."""
    return _refuses(probe, [probe.written(of_length(256))], "a key of 256 characters")


def too_short(probe: Probe) -> Verdict:
    """A key that others will choose too."""
    return _refuses(probe, [probe.written(uuid.uuid4().hex[:4])], "a key of 4 characters")


def tricky(probe: Probe) -> Verdict:
    """Keys that are written to hurt."""
    for key in _TRICKY:
        answer = probe.fire(probe.raw_shot(f'"{key}{probe.fresh()[:8]}"'))
        if not answer.status or answer.status >= SERVER_ERROR:
            return Failed("a key of odd characters is taken, or refused with 400", shown(answer))
    return Passed()


def _refuses(probe: Probe, values: Sequence[str], what: str) -> Verdict:
    before = probe.count()
    answer = probe.fire(probe.raw_shot(*values))
    effects = probe.since(before)
    if effects:
        return Failed(f"{what}: 400, and nothing happens", f"{shown(answer)}; {effects} effects")
    return gets(answer, {BAD_REQUEST}, what)


def of_length(length: int) -> str:
    """A key of so many characters."""
    return (uuid.uuid4().hex * 8)[:length]


CLAUSES: Final = (
    Clause(
        id="keys.missing",
        title="A request without a key is refused with 400",
        why="A client that forgot its key would be executed again with every retry.",
        area=Area.KEYS,
        severity=Severity.HIGH,
        requirements=("R11", "R248"),
        must=DRAFT,
        shots=1,
        judge=missing,
    ),
    Clause(
        id="keys.explained",
        title="The refusal of a missing key leads to documentation",
        why="Whoever reads it first is a developer who has never heard of keys.",
        area=Area.KEYS,
        severity=Severity.LOW,
        requirements=("R11",),
        must=frozenset(),
        should=DRAFT,
        shots=1,
        judge=explained,
    ),
    Clause(
        id="keys.empty",
        title="An empty key is refused with 400",
        why="Taken as absent it would run unprotected; taken as a key everybody would share it.",
        area=Area.KEYS,
        severity=Severity.HIGH,
        requirements=("R10",),
        must=DRAFT,
        shots=2,
        judge=empty,
    ),
    Clause(
        id="keys.malformed",
        title="A key that cannot be parsed is refused with 400",
        why="RFC 9651 lets a server ignore such a field, and the request would run unprotected.",
        area=Area.KEYS,
        severity=Severity.HIGH,
        requirements=("R6",),
        must=DRAFT,
        shots=5,
        judge=malformed,
    ),
    Clause(
        id="keys.doubled",
        title="Two keys in one request are refused with 400",
        why="Two servers on the way may each choose another one of them.",
        area=Area.KEYS,
        severity=Severity.MEDIUM,
        requirements=("R7",),
        must=DRAFT,
        shots=3,
        judge=doubled,
    ),
    Clause(
        id="keys.too-long",
        title="A key of 256 characters is refused with 400",
        why="A key that is cut off to fit a column collides with others.",
        area=Area.KEYS,
        severity=Severity.MEDIUM,
        requirements=("R8",),
        must=MARKED,
        should=EVERY - MARKED,
        shots=1,
        judge=too_long,
    ),
    Clause(
        id="keys.too-short",
        title="A key that is easily guessed is refused with 400",
        why="Two operations that share a short key are taken for one, and one of them never happens.",
        area=Area.KEYS,
        severity=Severity.MEDIUM,
        requirements=("R9",),
        must=SAFE,
        shots=1,
        judge=too_short,
    ),
    Clause(
        id="keys.tricky",
        title="Keys of odd characters do not break the server",
        why="A key comes from outside and goes into a database, a log and a header.",
        area=Area.KEYS,
        severity=Severity.HIGH,
        requirements=("R3", "R6"),
        shots=4,
        judge=tricky,
    ),
)
