"""Clauses about the key itself: when it is missing, malformed, doubled or too long, and which spellings are one key."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from oncekey.conformance.carrier import ANY_UUID, KEY, KeyFormat
from oncekey.conformance.clauses import (
    DRAFT,
    EVERY,
    MARKED,
    SAFE,
    Clause,
    Failed,
    Harm,
    Need,
    Passed,
    Profile,
    Severity,
    Undecided,
    UndecidedError,
    Verdict,
)
from oncekey.conformance.judging import BAD_REQUEST, SERVER_ERROR, gets, one_operation, shown, two_operations, worst_of
from oncekey.conformance.probe import Probe
from oncekey.conformance.raw_http import Answer, RawRequest

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
    answer = probe.send_raw(probe.raw_request())
    if answer.ok or probe.since(before):
        return Failed("a request without a key: 400, and nothing happens", f"{shown(answer)}: it was taken")
    return _refused(probe, [], answer, "a request without a key")


def explained(probe: Probe) -> Verdict:
    """The refusal of a missing key links to a description of keys."""
    answer = probe.send_raw(probe.raw_request())
    if answer.ok:
        raise UndecidedError("a request without a key is not refused")
    if answer.header("Link") or b"://" in answer.body or b"urn:" in answer.body:
        return Passed()
    return Failed("a Link header or an address in the body", f"{shown(answer)}: neither")


def empty(probe: Probe) -> Verdict:
    """A key without a character."""
    values = ("", '""')
    taken = "An empty key was accepted as a key: all clients that send one share it"
    cases = (
        _refuses(probe, [value], f"the value {value!r}", taken, as_none=True, wrong_if_taken=EVERY) for value in values
    )
    return worst_of(probe, cases)


def malformed(probe: Probe) -> Verdict:
    """Values that are no String of RFC 9651 and no bare key either."""
    key = probe.fresh()
    values = (f'"{key}', f'"{key[:8]}\\n{key[8:]}"', f'"{key}" x', f'"{key}\xfc"', f"'{key}' '")
    taken = "A key that cannot be parsed was accepted as a key"
    return worst_of(probe, (_refuses(probe, [value], f"the value {value!r}", taken) for value in values))


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
    taken = "A request with two keys was accepted under one of them"
    return worst_of(probe, (_refuses(probe, values, what, taken, as_none=True) for what, values in cases.items()))


def too_long(probe: Probe) -> Verdict:
    """256 characters: the API refuses the key, or compares all of it. 8 KB do not break it."""
    key = probe.written(of_length(8192))
    huge = _refused(probe, [key], probe.send_raw(probe.raw_request(key)), "a key of 8,192 characters", or_taken=True)
    if isinstance(huge, Failed):
        return replace(huge, told=(Harm.WRONG, "A key of 8,192 characters broke the server"))
    probe.trail = []
    key, before = of_length(256), probe.count()
    first = probe.send(key)
    if not first.ok:
        return _refused(probe, [probe.written(key)], first, "a key of 256 characters")
    if probe.blind:
        raise UndecidedError("it is taken, and whether as a whole cannot be seen", Need.COUNT)
    second = probe.send(KeyFormat("{{hex:256}}").near(key)[0])
    what = "two keys of 256 characters that differ in the last one"
    verdict = two_operations(probe, probe.since(before, at_least=1), first, second, what)
    if isinstance(verdict, Failed):
        sentence = "Two keys of 256 characters were taken for one: the second {noun} never happened"
        return replace(verdict, told=(Harm.LOST, sentence))
    value = probe.written(of_length(256))
    return _refuses(probe, [value], "a key of 256 characters", "", as_none=True, wrong_if_taken=frozenset())


def too_short(probe: Probe) -> Verdict:
    """A key so short that other clients will choose it, too."""
    taken = "A key of 4 characters was accepted: two clients may choose the same one"
    return _refuses(probe, [probe.written(uuid.uuid4().hex[:4])], "a key of 4 characters", taken, as_none=True)


def whole(probe: Probe) -> Verdict:
    """Keys that differ in one character only, at either end."""
    before = probe.count()
    key, first = _longest_taken(probe)
    form = KeyFormat(f"{{{{hex:{len(key)}}}}}") if probe.habits.opaque else probe.target.key_format
    for what, near in zip(("last", "first"), form.near(key), strict=True):
        second = probe.send(near)
        effects = probe.since(before)
        pair = f"two keys of {len(key)} characters that differ in the {what} one"
        verdict = two_operations(probe, effects, first, second, pair)
        if isinstance(verdict, Failed):
            return verdict
        before = None if before is None else before + 1
    return Passed()


def tricky(probe: Probe) -> Verdict:
    """Keys with characters that break careless programs."""
    for key in _TRICKY:
        value = f'"{key}{probe.fresh()[:8]}"'
        answer = probe.send_raw(probe.raw_request(value))
        if not answer.status or answer.status >= SERVER_ERROR:
            expected = "a key of odd characters is taken, or refused with 400"
            return _its_own_fault(probe, [value], answer, expected)
    return Passed()


def _refuses(
    probe: Probe,
    values: Sequence[str],
    what: str,
    taken: str,
    *,
    as_none: bool = False,
    wrong_if_taken: frozenset[Profile] = SAFE,
) -> Verdict:
    """Passed if the API refuses the value. If it does not, a second request shows whether the value protects.

    With `as_none`, an API that treats the value as no key breaks nothing here if keys may be left out: `keys.missing`
    reports that they may, and `keys.malformed` that the API drops a key which it cannot read. A value that the API
    takes as a key, and that protects, is wrong only in the profiles that say so; `taken` is the headline then.
    """
    before = probe.count()
    answer = probe.send_raw(probe.raw_request(*values))
    if not answer.ok:
        effects = probe.since(before)
        if effects:
            return Failed(f"{what}: 400, and nothing happens", f"{shown(answer)}; {effects} effects")
        return _refused(probe, values, answer, what)
    if probe.blind:
        return Undecided(f"{what} is taken, and whether it protects cannot be seen", Need.COUNT)
    again = probe.send_raw(probe.raw_request(*values))
    effects = probe.since(before)
    if effects is None and not probe.habits.replays:
        return Undecided(f"{what} is taken, and a plain retry does not get the first answer either", Need.COUNT)
    if not probe.habits.protects:
        return Undecided(f"{what} is taken, and a plain retry is executed again, too")
    protects = probe.same(answer, again) if effects is None else effects <= 1
    if protects and not wrong_if_taken:
        return Passed()
    if protects:
        seen = f"{shown(answer)}, then {shown(again)}: taken as a key"
        return Failed(f"{what}: 400", seen, only=wrong_if_taken, told=(Harm.WRONG, taken))
    if probe.habits.optional and as_none:
        return Undecided(f"{what} is taken for no key, and keys may be left out here")
    return Failed(f"{what}: 400, and nothing happens", f"{shown(answer)}, then {shown(again)}: executed each time")


def _refused(probe: Probe, values: Sequence[str], answer: Answer, what: str, *, or_taken: bool = False) -> Verdict:
    """Passed if the API refused the request with any 4xx; another clause judges which status is right."""
    if BAD_REQUEST <= answer.status < SERVER_ERROR or (or_taken and answer.ok):
        return Passed()
    return _its_own_fault(probe, values, answer, f"{what}: 400")


def _status(probe: Probe, values: Sequence[str], what: str) -> Verdict:
    answer = probe.send_raw(probe.raw_request(*values))
    if BAD_REQUEST <= answer.status < SERVER_ERROR:
        return gets(answer, {BAD_REQUEST}, what)
    return Undecided(f"{what} got {answer.status or answer.reason}, and no refusal")


def _its_own_fault(probe: Probe, values: Sequence[str], answer: Answer, expected: str) -> Verdict:
    """Failed, because the API fails over a key; not if it fails with the same values in an unused header, too."""
    request = probe.request(probe.fresh())
    control = probe.control(replace(request, headers=(*request.headers, *((_MEANINGLESS, value) for value in values))))
    if control.ok:
        return Failed(expected, shown(answer))
    return Undecided(f"such a value gets {control.status or control.reason} in any header, not only as a key")


def _longest_taken(probe: Probe) -> tuple[str, Answer]:
    """The longest key that the API accepts, and its answer."""
    if not probe.habits.opaque:
        key = probe.fresh()
        return key, probe.first(key)
    for length in _LENGTHS:
        key = of_length(length)
        answer = probe.send(key)
        if answer.ok:
            return key, answer
    raise UndecidedError("no long key is taken")


def of_length(length: int) -> str:
    """A key of so many characters."""
    return (uuid.uuid4().hex * (length // 32 + 1))[:length]


_BARE: Final = frozenset({Profile.STRIPE, Profile.CONFLICT})


def quoted(probe: Probe) -> Verdict:
    """Quoted keys, whatever their first character is."""
    name = "A quoted key, as the draft writes it,"
    return worst_of(probe, (_taken(probe, f'"{key}"', f'the quoted key "{key}"', name) for key in _firsts(probe)))


def bare(probe: Probe) -> Verdict:
    """Bare keys, whatever their first character is."""
    name = "A bare key, as most clients send it,"
    return worst_of(probe, (_taken(probe, key, f"the bare key {key}", name) for key in _firsts(probe)))


def two_spellings(probe: Probe) -> Verdict:
    """The same key with and without quotes."""
    return _never_again(probe, '"{}"', "{}", "the key once quoted and once bare")


def parameters(probe: Probe) -> Verdict:
    """A key with a parameter, which is not part of it."""
    return _never_again(probe, '"{}"', '"{}";v=1', "the key once with a parameter and once without")


def case_counts(probe: Probe) -> Verdict:
    """Keys that differ in the case of letters only."""
    if not probe.habits.opaque:
        raise UndecidedError("keys have a fixed form here, in which the case of letters may mean nothing")
    key = probe.fresh_text()
    return _two_operations(probe, key, key.upper(), "two keys that differ in the case of letters")


def not_deduplication(probe: Probe) -> Verdict:
    """Equal bodies under different keys."""
    return _two_operations(probe, probe.fresh(), probe.fresh(), "two keys with equal bodies")


def field_name(probe: Probe) -> Verdict:
    """Names of header fields have no case."""
    key, before = probe.fresh(), probe.count()
    first = probe.first(key)
    request = probe.request(key)
    again = probe.send_raw(replace(request, headers=_renamed(request)))
    return one_operation(probe, probe.since(before), first, again, "the field's name in capitals")


def echoed(probe: Probe) -> Verdict:
    """The answer has the key in a header."""
    key = probe.fresh()
    for answer in (probe.first(key), probe.send(key)):
        if answer.header(KEY) != probe.written(key):
            return Failed(f"{KEY} in the answer, as it was sent", f"{shown(answer)}; {KEY}: {answer.header(KEY)}")
    return Passed()


def longest(probe: Probe) -> Verdict:
    """255 characters."""
    if not probe.habits.opaque:
        raise UndecidedError("keys have a fixed form here")
    return _taken(probe, probe.written(of_length(255)), "a key of 255 characters", "A key of 255 characters")


def _taken(probe: Probe, value: str, what: str, name: str) -> Verdict:
    before = probe.count()
    first = probe.send_raw(probe.raw_request(value))
    if not first.ok:
        return Failed(f"{what}: taken", shown(first), told=(Harm.WRONG, f"{name} was refused"))
    again = probe.send_raw(probe.raw_request(value))
    return one_operation(probe, probe.since(before, at_least=1), first, again, what)


def _never_again(probe: Probe, one: str, two: str, what: str) -> Verdict:
    """Passed if the API refuses the second spelling or takes it as the same key, and never as another operation."""
    key, before = probe.fresh(), probe.count()
    first = probe.send_raw(probe.raw_request(one.format(key)))
    again = probe.send_raw(probe.raw_request(two.format(key)))
    effects = probe.since(before, at_least=int(first.ok))
    if not first.ok or not again.ok:
        return Passed()
    return one_operation(probe, effects, first, again, what)


def _two_operations(probe: Probe, one: str, two: str, what: str) -> Verdict:
    before = probe.count()
    first, second = probe.first(one), probe.send(two)
    return two_operations(probe, probe.since(before), first, second, what)


def _firsts(probe: Probe) -> tuple[str, ...]:
    """A UUID that begins with a digit, and one that begins with a letter; one key, if they have another form."""
    if probe.target.key_format != ANY_UUID:
        return (probe.fresh(),)
    rest = str(uuid.uuid4())[1:]
    return f"5{rest}", f"f{rest}"


def _renamed(request: RawRequest) -> tuple[tuple[str, str], ...]:
    return tuple((name.upper() if name == KEY else name, value) for name, value in request.headers)


CLAUSES: Final = (
    Clause(
        id="keys.missing",
        title="A request without a key is refused",
        why="A client that forgot its key would be executed again with every retry.",
        fix="Reject a request without the header with 400 before the handler runs.",
        severity=Severity.HIGH,
        must=DRAFT,
        requests=3,
        judge=missing,
    ),
    Clause(
        id="keys.explained",
        title="The refusal of a missing key leads to documentation",
        why="Its first reader is a developer who does not know what keys are.",
        fix="Add a Link header (rel=describedby) or a problem type URL to the 400.",
        severity=Severity.LOW,
        must=frozenset(),
        should=DRAFT,
        requests=1,
        judge=explained,
    ),
    Clause(
        id="keys.empty",
        title="An empty key is refused",
        why="Taken as absent it would run unprotected; taken as a key everybody would share it.",
        fix="Treat an empty value as malformed: 400, before the handler runs.",
        severity=Severity.HIGH,
        must=DRAFT,
        requests=6,
        judge=empty,
    ),
    Clause(
        id="keys.malformed",
        title="A key that cannot be parsed is refused, and is never taken for none",
        why="RFC 9651 lets a server ignore such a field, and the request would run unprotected.",
        fix="Parse the value strictly, and answer 400 where parsing fails; never continue without a key.",
        severity=Severity.HIGH,
        must=DRAFT,
        requests=15,
        judge=malformed,
    ),
    Clause(
        id="keys.status",
        title="A missing key, and one that cannot be parsed, is refused with 400",
        why="With 422 a client takes it for a key that was used for another request.",
        fix="Use 400 for a missing or malformed key, and keep 422 for a mismatch.",
        severity=Severity.LOW,
        must=SAFE,
        should=DRAFT - SAFE,
        requests=2,
        judge=status,
    ),
    Clause(
        id="keys.doubled",
        title="Two keys in one request are refused",
        why="Two servers on the way may each choose another one of them.",
        fix="Reject a request with more than one value of the header with 400.",
        severity=Severity.MEDIUM,
        must=DRAFT,
        requests=9,
        judge=doubled,
    ),
    Clause(
        id="keys.too-long",
        title="A key of 256 characters is refused, or compared as a whole",
        why="A key that is cut off to fit a column collides with others.",
        fix="Check the length before the key is stored (400), or store a hash of the whole key.",
        severity=Severity.MEDIUM,
        must=MARKED,
        should=EVERY - MARKED,
        requests=3,
        judge=too_long,
    ),
    Clause(
        id="keys.whole",
        title="Long keys that differ in one character are two operations",
        why="A key that is cut off, or compared in part, drops the second of two operations.",
        fix="Make the column as wide as the longest key that is accepted, and compare all of it.",
        severity=Severity.CRITICAL,
        requests=6,
        judge=whole,
        sight=True,
    ),
    Clause(
        id="keys.too-short",
        title="A key that is easily guessed is refused",
        why="Two operations that share a short key are taken for one, and one of them never happens.",
        fix="Set a minimum length, such as 16 characters, and answer 400 below it.",
        severity=Severity.MEDIUM,
        must=SAFE,
        requests=3,
        judge=too_short,
    ),
    Clause(
        id="keys.tricky",
        title="Keys of odd characters do not break the server",
        why="A key comes from outside and goes into a database, a log and a header.",
        fix="Pass the key as a bound parameter, and answer 400 for characters that are not allowed.",
        severity=Severity.HIGH,
        requests=4,
        judge=tricky,
    ),
    Clause(
        id="keys.longest",
        title="A key of 255 characters is taken",
        why="It is the limit that clients know.",
        fix="Accept keys of up to 255 characters.",
        severity=Severity.LOW,
        must=SAFE,
        should=EVERY - SAFE,
        requests=4,
        judge=longest,
        sight=True,
    ),
    Clause(
        id="keys.quoted",
        title="Quoted keys are taken, whether they begin with a digit or a letter",
        why="The draft's keys are quoted; UUIDs that begin with a digit parse differently from others.",
        fix="Parse the value as an RFC 9651 String: remove the quotes and the escapes.",
        severity=Severity.MEDIUM,
        must=DRAFT,
        requests=8,
        judge=quoted,
        sight=True,
    ),
    Clause(
        id="keys.bare",
        title="Bare keys are taken, whether they begin with a digit or a letter",
        why="Most clients send them so.",
        fix="Accept a value without quotes, too, and use it as the same key.",
        severity=Severity.MEDIUM,
        must=_BARE,
        should=DRAFT,
        requests=8,
        judge=bare,
        sight=True,
    ),
    Clause(
        id="keys.two-spellings",
        title="A key with and without quotes is never two operations",
        why="A client library that is updated between two tries would execute twice.",
        fix="Remove the quotes before the key is looked up, or reject one of the two forms.",
        severity=Severity.CRITICAL,
        must=DRAFT,
        requests=4,
        judge=two_spellings,
        sight=True,
    ),
    Clause(
        id="keys.parameters",
        title="A parameter after the key does not make it another key",
        why="RFC 9651 lets intermediaries and later versions add parameters.",
        fix="Drop RFC 9651 parameters before the key is looked up.",
        severity=Severity.HIGH,
        must=DRAFT,
        requests=4,
        judge=parameters,
        sight=True,
    ),
    Clause(
        id="keys.case",
        title="Keys that differ in case are two operations",
        why="Keys are opaque; a database that compares without case would drop an operation.",
        fix="Use a case-sensitive collation for the key's column.",
        severity=Severity.HIGH,
        requests=4,
        judge=case_counts,
        sight=True,
    ),
    Clause(
        id="keys.not-deduplication",
        title="Equal bodies under different keys are two operations",
        why="Two customers who order the same thing are two customers.",
        fix="Look requests up by their key, not by a hash of the body.",
        severity=Severity.HIGH,
        requests=4,
        judge=not_deduplication,
        sight=True,
    ),
    Clause(
        id="keys.field-name",
        title="The field's name is read in any case",
        why="Proxies change it.",
        fix="Look the header up without regard to case.",
        severity=Severity.HIGH,
        requests=4,
        judge=field_name,
        sight=True,
    ),
    Clause(
        id="keys.echoed",
        title="Answers repeat the key's header",
        why="The client sees that its key was understood.",
        fix="Copy the header of the request into the response.",
        severity=Severity.LOW,
        must=frozenset(),
        should=SAFE,
        requests=2,
        judge=echoed,
    ),
)
