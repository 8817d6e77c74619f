"""Clauses about the key itself: when it is missing, malformed, doubled, too long, or spelt in another way."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from typing import Final

from oncekey.conformance.clauses import (
    DRAFT,
    EVERY,
    SAFE,
    Area,
    Clause,
    Failed,
    Passed,
    Profile,
    Severity,
    UndecidedError,
    Verdict,
)
from oncekey.conformance.judging import BAD_REQUEST, SERVER_ERROR, gets, is_marked, is_same, shown, worst
from oncekey.conformance.probe import KEY, Probe
from oncekey.conformance.shots import Answer, Shot

_STRIPE: Final = frozenset({Profile.STRIPE})
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
    return _refuses(probe, [probe.written(_long(256))], "a key of 256 characters")


def longest(probe: Probe) -> Verdict:
    """255 characters."""
    return _taken(probe, probe.written(_long(255)), "a key of 255 characters")


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


def quoted(probe: Probe) -> Verdict:
    """Quoted keys, whatever their first character is."""
    return worst(*(_taken(probe, f'"{key}"', f'the quoted key "{key}"') for key in _firsts()))


def bare(probe: Probe) -> Verdict:
    """Bare keys, whatever their first character is."""
    return worst(*(_taken(probe, key, f"the bare key {key}") for key in _firsts()))


def two_spellings(probe: Probe) -> Verdict:
    """The same key with and without quotes."""
    return _never_again(probe, '"{}"', "{}", "the key once quoted and once bare")


def parameters(probe: Probe) -> Verdict:
    """A key with a parameter, which is not part of it."""
    return _never_again(probe, '"{}"', '"{}";v=1', "the key once with a parameter and once without")


def case_counts(probe: Probe) -> Verdict:
    """Keys that differ in the case of letters only."""
    key = f"a{uuid.uuid4().hex[1:8]}-{str(uuid.uuid4())[9:]}"
    return _two_operations(probe, key, key.upper(), "two keys that differ in the case of letters")


def not_deduplication(probe: Probe) -> Verdict:
    """Equal bodies under different keys."""
    return _two_operations(probe, probe.fresh(), probe.fresh(), "two keys with equal bodies")


def field_name(probe: Probe) -> Verdict:
    """Names of header fields have no case."""
    key = probe.fresh()
    first = probe.first(key)
    shot = probe.shot(key)
    shouted = Shot(shot.method, shot.address, _renamed(shot), shot.body)
    return _replays(first, probe.fire(shouted), "the field's name in capitals")


def echoed(probe: Probe) -> Verdict:
    """The key comes back."""
    key = probe.fresh()
    for answer in (probe.first(key), probe.send(key)):
        if answer.header(KEY) != probe.written(key):
            return Failed(f"{KEY} in the answer, as it was sent", f"{shown(answer)}; {KEY}: {answer.header(KEY)}")
    return Passed()


def _refuses(probe: Probe, values: Sequence[str], what: str) -> Verdict:
    before = probe.count()
    answer = probe.fire(probe.raw_shot(*values))
    effects = probe.since(before)
    if effects:
        return Failed(f"{what}: 400, and nothing happens", f"{shown(answer)}; {effects} effects")
    return gets(answer, {BAD_REQUEST}, what)


def _taken(probe: Probe, value: str, what: str) -> Verdict:
    first = probe.fire(probe.raw_shot(value))
    if not first.ok:
        return Failed(f"{what}: taken", shown(first))
    return _replays(first, probe.fire(probe.raw_shot(value)), what)


def _replays(first: Answer, again: Answer, what: str) -> Verdict:
    return Passed() if is_same(first, again) else Failed(f"{what}: {shown(first)} again", shown(again))


def _never_again(probe: Probe, one: str, two: str, what: str) -> Verdict:
    """The second spelling is refused, or is the same key; it is never another operation."""
    key, before = probe.fresh(), probe.count()
    first = probe.fire(probe.raw_shot(one.format(key)))
    again = probe.fire(probe.raw_shot(two.format(key)))
    effects = probe.since(before)
    if (effects or 0) > 1 or (first.ok and again.ok and not is_same(first, again)):
        return Failed(
            f"{what}: one operation", f"{shown(first)}, then {shown(again)}; effects: {effects or 'not counted'}"
        )
    return Passed()


def _two_operations(probe: Probe, one: str, two: str, what: str) -> Verdict:
    before = probe.count()
    first, second = probe.first(one), probe.send(two)
    effects = probe.since(before)
    if not second.ok or is_marked(second) or effects == 1 or (effects is None and is_same(first, second)):
        seen = f"{shown(first)}, then {shown(second)}{', the same body' if is_same(first, second) else ''}"
        return Failed(f"{what}: two operations", seen)
    return Passed()


def _firsts() -> tuple[str, str]:
    """A UUID that begins with a digit, and one that begins with a letter."""
    rest = str(uuid.uuid4())[1:]
    return f"5{rest}", f"f{rest}"


def _long(length: int) -> str:
    return (uuid.uuid4().hex * 8)[:length]


def _renamed(shot: Shot) -> tuple[tuple[str, str], ...]:
    return tuple((name.upper() if name == KEY else name, value) for name, value in shot.headers)


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
        shots=1,
        judge=too_long,
    ),
    Clause(
        id="keys.longest",
        title="A key of 255 characters is taken",
        why="It is the limit that clients know.",
        area=Area.KEYS,
        severity=Severity.LOW,
        requirements=("R8",),
        must=SAFE,
        should=EVERY - SAFE,
        shots=2,
        judge=longest,
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
    Clause(
        id="keys.quoted",
        title="Quoted keys are taken, whether they begin with a digit or a letter",
        why="The draft's keys are quoted; UUIDs that begin with a digit parse differently from others.",
        area=Area.KEYS,
        severity=Severity.MEDIUM,
        requirements=("R5", "R6"),
        must=DRAFT,
        shots=4,
        judge=quoted,
    ),
    Clause(
        id="keys.bare",
        title="Bare keys are taken, whether they begin with a digit or a letter",
        why="Most clients send them so.",
        area=Area.KEYS,
        severity=Severity.MEDIUM,
        requirements=("R5",),
        must=_STRIPE,
        should=DRAFT,
        shots=4,
        judge=bare,
    ),
    Clause(
        id="keys.two-spellings",
        title="A key with and without quotes is never two operations",
        why="A client library that is updated between two tries would execute twice.",
        area=Area.KEYS,
        severity=Severity.CRITICAL,
        requirements=("R5",),
        must=DRAFT,
        shots=2,
        judge=two_spellings,
    ),
    Clause(
        id="keys.parameters",
        title="A parameter after the key does not make it another key",
        why="RFC 9651 lets intermediaries and later versions add parameters.",
        area=Area.KEYS,
        severity=Severity.HIGH,
        requirements=("R6",),
        must=DRAFT,
        shots=2,
        judge=parameters,
    ),
    Clause(
        id="keys.case",
        title="Keys that differ in case are two operations",
        why="Keys are opaque; a database that compares without case would drop an operation.",
        area=Area.KEYS,
        severity=Severity.HIGH,
        requirements=("R3",),
        shots=2,
        judge=case_counts,
    ),
    Clause(
        id="keys.not-deduplication",
        title="Equal bodies under different keys are two operations",
        why="Two customers who order the same thing are two customers.",
        area=Area.KEYS,
        severity=Severity.HIGH,
        requirements=("R21", "R22"),
        shots=2,
        judge=not_deduplication,
    ),
    Clause(
        id="keys.field-name",
        title="The field's name is read in any case",
        why="Proxies change it.",
        area=Area.KEYS,
        severity=Severity.HIGH,
        requirements=("R1",),
        shots=2,
        judge=field_name,
    ),
    Clause(
        id="keys.echoed",
        title="Answers repeat the key's header",
        why="The client sees that its key was understood.",
        area=Area.KEYS,
        severity=Severity.LOW,
        requirements=("R17",),
        must=frozenset(),
        should=SAFE,
        shots=2,
        judge=echoed,
    ),
)
