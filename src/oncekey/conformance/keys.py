"""Clauses about the key itself: when it is missing, malformed, doubled, too long, or spelt in another way."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from dataclasses import replace
from typing import Final

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
    Profile,
    Severity,
    Undecided,
    UndecidedError,
    Verdict,
)
from oncekey.conformance.judging import BAD_REQUEST, SERVER_ERROR, gets, shown, two_operations, worst_of
from oncekey.conformance.probe import Probe
from oncekey.conformance.shots import Answer

_MEANINGLESS: Final = "X-Oncekey-Check"
_LENGTHS: Final = (255, 200, 128, 100, 64, 48, 36)

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
    before = probe.count()
    answer = probe.fire(probe.raw_shot())
    if answer.ok or probe.since(before):
        return Failed("a request without a key: 400, and nothing happens", f"{shown(answer)}: it was taken")
    return _refused(probe, [], answer, "a request without a key")


def explained(probe: Probe) -> Verdict:
    """Where it is written what a key is."""
    answer = probe.fire(probe.raw_shot())
    if answer.ok:
        raise UndecidedError("a request without a key is not refused")
    if answer.header("Link") or b"://" in answer.body or b"urn:" in answer.body:
        return Passed()
    return Failed("a Link header or an address in the body", f"{shown(answer)}: neither")


def empty(probe: Probe) -> Verdict:
    """A key without a character."""
    values = ("", '""')
    cases = (_refuses(probe, [value], f"the value {value!r}", as_none=True, wrong_if_taken=EVERY) for value in values)
    return worst_of(probe, cases)


def malformed(probe: Probe) -> Verdict:
    """Values that are no String of RFC 9651 and no bare key either."""
    key = probe.fresh()
    values = (f'"{key}', f'"{key[:8]}\\n{key[8:]}"', f'"{key}" x', f'"{key}\xfc"', f"'{key}' '")
    return worst_of(probe, (_refuses(probe, [value], f"the value {value!r}") for value in values))


def status(probe: Probe) -> Verdict:
    """The status of refusals."""
    cases = {"a key that cannot be parsed": [f'"{probe.fresh()}']}
    if not probe.habits.optional:
        cases["a request without a key"] = []
    return worst_of(probe, (_status(probe, values, what) for what, values in cases.items()))


def doubled(probe: Probe) -> Verdict:
    """Two header lines, and a list on one."""
    one, two = probe.written(probe.fresh()), probe.written(probe.fresh())
    cases = {
        "two lines with different keys": [one, two],
        "two lines with one key": [one, one],
        "a list of two keys": [f"{one}, {two}"],
    }
    return worst_of(probe, (_refuses(probe, values, what, as_none=True) for what, values in cases.items()))


def too_long(probe: Probe) -> Verdict:
    """256 characters: refused, or taken with the last one."""
    key, before = of_length(256), probe.count()
    first = probe.send(key)
    if not first.ok:
        return _refused(probe, [probe.written(key)], first, "a key of 256 characters")
    if probe.blind:
        raise UndecidedError("it is taken, and whether as a whole cannot be seen", Need.COUNT)
    second = probe.send(f"{key[:-1]}{_another(key[-1])}")
    what = "two keys of 256 characters that differ in the last one"
    verdict = two_operations(probe, probe.since(before, at_least=1), first, second, what)
    if isinstance(verdict, Failed):
        return verdict
    value = probe.written(of_length(256))
    return _refuses(probe, [value], "a key of 256 characters", as_none=True, wrong_if_taken=frozenset())


def too_short(probe: Probe) -> Verdict:
    """A key that others will choose too."""
    return _refuses(probe, [probe.written(uuid.uuid4().hex[:4])], "a key of 4 characters", as_none=True)


def whole(probe: Probe) -> Verdict:
    """Keys that differ in one character only, at either end."""
    before = probe.count()
    key, first = _longest_taken(probe)
    for what, near in (
        ("last", f"{key[:-1]}{_another(key[-1])}"),
        ("first", f"{_another(key[0])}{key[1:]}"),
    ):
        second = probe.send(near)
        effects = probe.since(before)
        pair = f"two keys of {len(key)} characters that differ in the {what} one"
        verdict = two_operations(probe, effects, first, second, pair)
        if isinstance(verdict, Failed):
            return verdict
        before = None if before is None else before + 1
    return Passed()


def tricky(probe: Probe) -> Verdict:
    """Keys that are written to hurt."""
    for key in _TRICKY:
        value = f'"{key}{probe.fresh()[:8]}"'
        answer = probe.fire(probe.raw_shot(value))
        if not answer.status or answer.status >= SERVER_ERROR:
            expected = "a key of odd characters is taken, or refused with 400"
            return _its_own_fault(probe, [value], answer, expected)
    return Passed()


def _refuses(
    probe: Probe,
    values: Sequence[str],
    what: str,
    *,
    as_none: bool = False,
    wrong_if_taken: frozenset[Profile] = SAFE,
) -> Verdict:
    """The value is refused. Where it is not, what matters is whether it protects: whether a second one is executed.

    With `as_none`, a value that is taken for none is no finding of its own where keys may be left out: `keys.missing`
    says that they may, and `keys.malformed` that a key which cannot be read is dropped. A value that is taken as a key
    and protects is wrong only in the profiles that say so.
    """
    before = probe.count()
    answer = probe.fire(probe.raw_shot(*values))
    if not answer.ok:
        effects = probe.since(before)
        if effects:
            return Failed(f"{what}: 400, and nothing happens", f"{shown(answer)}; {effects} effects")
        return _refused(probe, values, answer, what)
    if probe.blind:
        return Undecided(f"{what} is taken, and whether it protects cannot be seen", Need.COUNT)
    again = probe.fire(probe.raw_shot(*values))
    effects = probe.since(before)
    if effects is None and not probe.habits.replays:
        return Undecided(f"{what} is taken, and a plain retry does not get the first answer either", Need.COUNT)
    if not probe.habits.protects:
        return Undecided(f"{what} is taken, and a plain retry is executed again, too")
    protects = probe.same(answer, again) if effects is None else effects <= 1
    if protects and not wrong_if_taken:
        return Passed()
    if protects:
        return Failed(f"{what}: 400", f"{shown(answer)}, then {shown(again)}: taken as a key", only=wrong_if_taken)
    if probe.habits.optional and as_none:
        return Undecided(f"{what} is taken for no key, and keys may be left out here")
    return Failed(f"{what}: 400, and nothing happens", f"{shown(answer)}, then {shown(again)}: executed each time")


def _refused(probe: Probe, values: Sequence[str], answer: Answer, what: str) -> Verdict:
    """It was refused, by any status that says so; which one is right has a clause of its own."""
    if BAD_REQUEST <= answer.status < SERVER_ERROR:
        return Passed()
    return _its_own_fault(probe, values, answer, f"{what}: 400")


def _status(probe: Probe, values: Sequence[str], what: str) -> Verdict:
    answer = probe.fire(probe.raw_shot(*values))
    if BAD_REQUEST <= answer.status < SERVER_ERROR:
        return gets(answer, {BAD_REQUEST}, what)
    return Undecided(f"{what} got {answer.status or answer.reason}, and no refusal")


def _its_own_fault(probe: Probe, values: Sequence[str], answer: Answer, expected: str) -> Verdict:
    """A failure over a key, unless the same values fail in a header that means nothing, too."""
    shot = probe.shot(probe.fresh())
    control = probe.control(replace(shot, headers=(*shot.headers, *((_MEANINGLESS, value) for value in values))))
    if control.ok:
        return Failed(expected, shown(answer))
    return Undecided(f"such a value gets {control.status or control.reason} in any header, not only as a key")


def _longest_taken(probe: Probe) -> tuple[str, Answer]:
    """The longest key that is taken, and its answer."""
    if not probe.habits.opaque:
        key = probe.fresh()
        return key, probe.first(key)
    for length in _LENGTHS:
        key = of_length(length)
        answer = probe.send(key)
        if answer.ok:
            return key, answer
    raise UndecidedError("no long key is taken")


def _another(digit: str) -> str:
    """Another hexadecimal digit."""
    return "0" if digit != "0" else "1"


def of_length(length: int) -> str:
    """A key of so many characters."""
    return (uuid.uuid4().hex * 8)[:length]


CLAUSES: Final = (
    Clause(
        id="keys.missing",
        title="A request without a key is refused",
        why="A client that forgot its key would be executed again with every retry.",
        area=Area.KEYS,
        severity=Severity.HIGH,
        must=DRAFT,
        shots=3,
        judge=missing,
    ),
    Clause(
        id="keys.explained",
        title="The refusal of a missing key leads to documentation",
        why="Whoever reads it first is a developer who has never heard of keys.",
        area=Area.KEYS,
        severity=Severity.LOW,
        must=frozenset(),
        should=DRAFT,
        shots=1,
        judge=explained,
    ),
    Clause(
        id="keys.empty",
        title="An empty key is refused",
        why="Taken as absent it would run unprotected; taken as a key everybody would share it.",
        area=Area.KEYS,
        severity=Severity.HIGH,
        must=DRAFT,
        shots=6,
        judge=empty,
    ),
    Clause(
        id="keys.malformed",
        title="A key that cannot be parsed is refused, and is never taken for none",
        why="RFC 9651 lets a server ignore such a field, and the request would run unprotected.",
        area=Area.KEYS,
        severity=Severity.HIGH,
        must=DRAFT,
        shots=15,
        judge=malformed,
    ),
    Clause(
        id="keys.status",
        title="A missing key, and one that cannot be parsed, is refused with 400",
        why="With 422 a client takes it for a key that was used for another request.",
        area=Area.KEYS,
        severity=Severity.LOW,
        must=SAFE,
        should=DRAFT - SAFE,
        shots=2,
        judge=status,
    ),
    Clause(
        id="keys.doubled",
        title="Two keys in one request are refused",
        why="Two servers on the way may each choose another one of them.",
        area=Area.KEYS,
        severity=Severity.MEDIUM,
        must=DRAFT,
        shots=9,
        judge=doubled,
    ),
    Clause(
        id="keys.too-long",
        title="A key of 256 characters is refused, or compared as a whole",
        why="A key that is cut off to fit a column collides with others.",
        area=Area.KEYS,
        severity=Severity.MEDIUM,
        must=MARKED,
        should=EVERY - MARKED,
        shots=2,
        judge=too_long,
    ),
    Clause(
        id="keys.whole",
        title="Long keys that differ in one character are two operations",
        why="A key that is cut off, or compared in part, drops the second of two operations.",
        area=Area.KEYS,
        severity=Severity.CRITICAL,
        shots=7,
        judge=whole,
        sight=True,
    ),
    Clause(
        id="keys.too-short",
        title="A key that is easily guessed is refused",
        why="Two operations that share a short key are taken for one, and one of them never happens.",
        area=Area.KEYS,
        severity=Severity.MEDIUM,
        must=SAFE,
        shots=3,
        judge=too_short,
    ),
    Clause(
        id="keys.tricky",
        title="Keys of odd characters do not break the server",
        why="A key comes from outside and goes into a database, a log and a header.",
        area=Area.KEYS,
        severity=Severity.HIGH,
        shots=5,
        judge=tricky,
    ),
)
