"""Clauses about the key itself: missing, malformed, duplicate or too long keys, and spellings of one key."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from oncekey_check.carrier import ANY_UUID, KEY, KeyFormat
from oncekey_check.clauses import (
    DRAFT,
    EVERY,
    MARKED,
    SAFE,
    CheckProfile,
    Clause,
    Failed,
    Harm,
    Inconclusive,
    InconclusiveError,
    Need,
    Passed,
    Severity,
    Verdict,
)
from oncekey_check.judging import BAD_REQUEST, SERVER_ERROR, gets, one_operation, shown, two_operations, worst_of
from oncekey_check.probe import Probe
from oncekey_check.raw_http import Answer, RawRequest

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
        raise InconclusiveError("keys are optional here (--key-optional)")
    before = probe.count()
    answer = probe.send_raw(probe.raw_request())
    if answer.ok or probe.since(before):
        return Failed("a request without a key: 400, and nothing happens", f"{shown(answer)}: it was accepted")
    return _refused(probe, [], answer, "a request without a key")


def explained(probe: Probe) -> Verdict:
    """The refusal of a missing key links to documentation."""
    answer = probe.send_raw(probe.raw_request())
    if answer.ok:
        raise InconclusiveError("a request without a key is not refused")
    if answer.header("Link") or b"://" in answer.body or b"urn:" in answer.body:
        return Passed()
    return Failed("a Link header or a URL in the body", f"{shown(answer)}: neither")


def empty(probe: Probe) -> Verdict:
    """An empty key."""
    values = ("", '""')
    taken = "An empty key was accepted: all clients that send one share it"
    cases = (
        _refuses(probe, [value], f"the value {value!r}", taken, as_none=True, wrong_if_taken=EVERY) for value in values
    )
    return worst_of(probe, cases)


def malformed(probe: Probe) -> Verdict:
    """Values that are neither an RFC 9651 String nor a bare key."""
    key = probe.fresh()
    values = (f'"{key}', f'"{key[:8]}\\n{key[8:]}"', f'"{key}" x', f'"{key}\xfc"', f"'{key}' '")
    taken = "A key that cannot be parsed was accepted"
    return worst_of(probe, (_refuses(probe, [value], f"the value {value!r}", taken) for value in values))


def status(probe: Probe) -> Verdict:
    """The status of refusals."""
    cases = {"a key that cannot be parsed": [f'"{probe.fresh()}']}
    if not probe.habits.optional:
        cases["a request without a key"] = []
    return worst_of(probe, (_status(probe, values, what) for what, values in cases.items()))


def doubled(probe: Probe) -> Verdict:
    """Two header lines, and a list on one line."""
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
        return replace(huge, headline=(Harm.WRONG, "A key of 8,192 characters broke the server"))
    probe.trail = []
    key, before = of_length(256), probe.count()
    first = probe.send(key)
    if not first.ok:
        return _refused(probe, [probe.written(key)], first, "a key of 256 characters")
    if probe.blind:
        raise InconclusiveError("it is accepted, but whether all of it is compared cannot be observed", Need.COUNT)
    second = probe.send(KeyFormat("{{hex:256}}").near(key)[0])
    what = "two keys of 256 characters that differ in the last one"
    verdict = two_operations(probe, probe.since(before, at_least=1), first, second, what)
    if isinstance(verdict, Failed):
        sentence = "Two keys of 256 characters were treated as one: the second {noun} never happened"
        return replace(verdict, headline=(Harm.LOST, sentence))
    value = probe.written(of_length(256))
    return _refuses(probe, [value], "a key of 256 characters", "", as_none=True, wrong_if_taken=frozenset())


def too_short(probe: Probe) -> Verdict:
    """A key so short that other clients are likely to choose it."""
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
    """Keys with characters that break programs that do not escape them."""
    for key in _TRICKY:
        value = f'"{key}{probe.fresh()[:8]}"'
        answer = probe.send_raw(probe.raw_request(value))
        if not answer.status or answer.status >= SERVER_ERROR:
            expected = "a key with unusual characters is accepted, or refused with 400"
            return _its_own_fault(probe, [value], answer, expected)
    return Passed()


def _refuses(
    probe: Probe,
    values: Sequence[str],
    what: str,
    taken: str,
    *,
    as_none: bool = False,
    wrong_if_taken: frozenset[CheckProfile] = SAFE,
) -> Verdict:
    """Passed if the API refuses the value. If it does not, a second request shows whether the value protects.

    With `as_none`, an API that treats the value as no key passes if keys are optional: `keys.missing` reports that they
    are, and `keys.malformed` that the API drops a key that it cannot read. A value that the API accepts as a key, and
    that protects, fails only in the profiles of `wrong_if_taken`; the headline is `taken` then.
    """
    before = probe.count()
    answer = probe.send_raw(probe.raw_request(*values))
    if not answer.ok:
        effects = probe.since(before)
        if effects:
            return Failed(f"{what}: 400, and nothing happens", f"{shown(answer)}; {effects} effects")
        return _refused(probe, values, answer, what)
    if probe.blind:
        return Inconclusive(f"{what} is accepted, but whether it protects cannot be observed", Need.COUNT)
    again = probe.send_raw(probe.raw_request(*values))
    effects = probe.since(before)
    if effects is None and not probe.habits.replays:
        return Inconclusive(
            f"{what} is accepted, and a plain retry does not receive the first response either", Need.COUNT
        )
    if not probe.habits.protects:
        return Inconclusive(f"{what} is accepted, and a plain retry is also executed again")
    protects = probe.same(answer, again) if effects is None else effects <= 1
    if protects and not wrong_if_taken:
        return Passed()
    if protects:
        seen = f"{shown(answer)}, then {shown(again)}: accepted as a key"
        return Failed(f"{what}: 400", seen, only=wrong_if_taken, headline=(Harm.WRONG, taken))
    if probe.habits.optional and as_none:
        return Inconclusive(f"{what} is treated as no key, and keys are optional here")
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
    return Inconclusive(f"{what} received {answer.status or answer.reason}, not a refusal")


def _its_own_fault(probe: Probe, values: Sequence[str], answer: Answer, expected: str) -> Verdict:
    """Failed for a server error, unless the same values in an unused header cause it, too."""
    request = probe.request(probe.fresh())
    control = probe.control(replace(request, headers=(*request.headers, *((_MEANINGLESS, value) for value in values))))
    if control.ok:
        return Failed(expected, shown(answer))
    return Inconclusive(f"such a value receives {control.status or control.reason} in any header, not only as a key")


def _longest_taken(probe: Probe) -> tuple[str, Answer]:
    """The longest key that the API accepts, and its response."""
    if not probe.habits.opaque:
        key = probe.fresh()
        return key, probe.first(key)
    for length in _LENGTHS:
        key = of_length(length)
        answer = probe.send(key)
        if answer.ok:
            return key, answer
    raise InconclusiveError("no long key is accepted")


def of_length(length: int) -> str:
    """A key of that many characters."""
    return (uuid.uuid4().hex * (length // 32 + 1))[:length]


_BARE: Final = frozenset({CheckProfile.STRIPE, CheckProfile.CONFLICT})


def quoted(probe: Probe) -> Verdict:
    """Quoted keys, whatever their first character."""
    name = "A quoted key, as the draft writes it,"
    return worst_of(probe, (_taken(probe, f'"{key}"', f'the quoted key "{key}"', name) for key in _firsts(probe)))


def bare(probe: Probe) -> Verdict:
    """Bare keys, whatever their first character."""
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
        raise InconclusiveError("keys have a fixed format here, in which case may not matter")
    key = probe.fresh_text()
    return _two_operations(probe, key, key.upper(), "two keys that differ in the case of letters")


def not_deduplication(probe: Probe) -> Verdict:
    """Equal bodies under different keys."""
    return _two_operations(probe, probe.fresh(), probe.fresh(), "two keys with equal bodies")


def field_name(probe: Probe) -> Verdict:
    """Header names are case-insensitive."""
    key, before = probe.fresh(), probe.count()
    first = probe.first(key)
    request = probe.request(key)
    again = probe.send_raw(replace(request, headers=_renamed(request)))
    return one_operation(probe, probe.since(before), first, again, "the field's name in capitals")


def echoed(probe: Probe) -> Verdict:
    """The response has the key in a header."""
    key = probe.fresh()
    for answer in (probe.first(key), probe.send(key)):
        if answer.header(KEY) != probe.written(key):
            return Failed(f"{KEY} in the response, as it was sent", f"{shown(answer)}; {KEY}: {answer.header(KEY)}")
    return Passed()


def longest(probe: Probe) -> Verdict:
    """255 characters."""
    if not probe.habits.opaque:
        raise InconclusiveError("keys have a fixed format here")
    return _taken(probe, probe.written(of_length(255)), "a key of 255 characters", "A key of 255 characters")


def _taken(probe: Probe, value: str, what: str, name: str) -> Verdict:
    before = probe.count()
    first = probe.send_raw(probe.raw_request(value))
    if not first.ok:
        return Failed(f"{what}: accepted", shown(first), headline=(Harm.WRONG, f"{name} was refused"))
    again = probe.send_raw(probe.raw_request(value))
    return one_operation(probe, probe.since(before, at_least=1), first, again, what)


def _never_again(probe: Probe, one: str, two: str, what: str) -> Verdict:
    """Passed if the API refuses the second spelling or treats it as the same key, never as another operation."""
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
    """A UUID that begins with a digit, and one that begins with a letter; one key, if they have another format."""
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
        why="A client that omits its key would execute again with every retry.",
        fix="Reject a request without the header with 400 before the handler runs.",
        severity=Severity.HIGH,
        must=DRAFT,
        requests=3,
        judge=missing,
    ),
    Clause(
        id="keys.explained",
        title="The refusal of a missing key links to documentation",
        why="Its readers are developers who have not used idempotency keys yet.",
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
        why="Treated as absent, the request runs unprotected; treated as a key, all clients share it.",
        fix="Treat an empty value as malformed: 400, before the handler runs.",
        severity=Severity.HIGH,
        must=DRAFT,
        requests=6,
        judge=empty,
    ),
    Clause(
        id="keys.malformed",
        title="A key that cannot be parsed is refused, never ignored",
        why="RFC 9651 lets a server ignore such a header, and the request would run unprotected.",
        fix="Parse the value strictly, and return 400 if parsing fails; never continue without a key.",
        severity=Severity.HIGH,
        must=DRAFT,
        requests=15,
        judge=malformed,
    ),
    Clause(
        id="keys.status",
        title="A missing key, or one that cannot be parsed, is refused with 400",
        why="With 422 a client assumes that the key was used for another request.",
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
        why="Two servers on the path may choose different keys.",
        fix="Reject a request with more than one value of the header with 400.",
        severity=Severity.MEDIUM,
        must=DRAFT,
        requests=9,
        judge=doubled,
    ),
    Clause(
        id="keys.too-long",
        title="A key of 256 characters is refused, or compared as a whole",
        why="A key that is truncated to fit a column collides with others.",
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
        why="A key that is truncated, or compared in part, drops the second of two operations.",
        fix="Make the column as wide as the longest key that is accepted, and compare all of it.",
        severity=Severity.CRITICAL,
        requests=6,
        judge=whole,
        sight=True,
    ),
    Clause(
        id="keys.too-short",
        title="A key that is easy to guess is refused",
        why="Two operations that share a short key are treated as one, and one of them never happens.",
        fix="Set a minimum length, such as 16 characters, and return 400 below it.",
        severity=Severity.MEDIUM,
        must=SAFE,
        requests=3,
        judge=too_short,
    ),
    Clause(
        id="keys.tricky",
        title="Keys with unusual characters do not break the server",
        why="A key is external input, and reaches a database, a log and a header.",
        fix="Pass the key as a bound parameter, and return 400 for characters that are not allowed.",
        severity=Severity.HIGH,
        requests=4,
        judge=tricky,
    ),
    Clause(
        id="keys.longest",
        title="A key of 255 characters is accepted",
        why="Clients rely on this limit.",
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
        title="Quoted keys are accepted, whether they begin with a digit or a letter",
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
        title="Bare keys are accepted, whether they begin with a digit or a letter",
        why="Most clients send them this way.",
        fix="Also accept a value without quotes, and treat it as the same key.",
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
        why="A client library that is updated between two attempts would execute twice.",
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
        why="Keys are opaque; a case-insensitive database would drop an operation.",
        fix="Use a case-sensitive collation for the key's column.",
        severity=Severity.HIGH,
        requests=4,
        judge=case_counts,
        sight=True,
    ),
    Clause(
        id="keys.not-deduplication",
        title="Equal bodies under different keys are two operations",
        why="Two customers may order the same thing.",
        fix="Look requests up by their key, not by a hash of the body.",
        severity=Severity.HIGH,
        requests=4,
        judge=not_deduplication,
        sight=True,
    ),
    Clause(
        id="keys.field-name",
        title="The header's name is case-insensitive",
        why="Proxies change the case.",
        fix="Look up the header case-insensitively.",
        severity=Severity.HIGH,
        requests=4,
        judge=field_name,
        sight=True,
    ),
    Clause(
        id="keys.echoed",
        title="Responses repeat the key's header",
        why="The client can check that its key was read correctly.",
        fix="Copy the header of the request into the response.",
        severity=Severity.LOW,
        must=frozenset(),
        should=SAFE,
        requests=2,
        judge=echoed,
    ),
)
