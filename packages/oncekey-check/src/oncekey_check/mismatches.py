"""Clauses about a key that a client reuses for another request: the API refuses it, and nothing happens.

Some bodies differ in ways that naive comparisons miss; the API has to refuse them, too. The tester puts such a
difference into an extra member, if the API accepts and compares one, because an unknown member has no other meaning.
Otherwise it changes the members of the body.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import replace
from itertools import islice
from typing import Final, TypeAlias

from oncekey_check import bodies
from oncekey_check.clauses import (
    EVERY,
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
from oncekey_check.judging import (
    BAD_REQUEST,
    CONFLICT,
    MISMATCH,
    SERVER_ERROR,
    differing,
    gets_by_profile,
    needs_comparison,
    needs_replays,
    not_replayed,
    shown,
    unproven,
    worst_of,
)
from oncekey_check.probe import Overlap, Probe
from oncekey_check.raw_http import Answer

_IN_FLIGHT: Final = {
    CheckProfile.IETF: {422, CONFLICT},
    CheckProfile.STRIPE: {400, CONFLICT},
    CheckProfile.CONFLICT: {CONFLICT},
    CheckProfile.STRICT_MONEY: {422},
}


def other_body(probe: Probe) -> Verdict:
    """The status for another body."""
    key = probe.fresh()
    probe.first(key)
    return gets_by_profile(probe.send(key, body=probe.other_body), MISMATCH, "another body under a used key")


def nothing_happens(probe: Probe) -> Verdict:
    """Another body has no effect and receives no success, neither a new one nor the first one."""
    key, before = probe.fresh(), probe.count()
    first, again = probe.first(key), probe.send(key, body=probe.other_body)
    effects = probe.since(before)
    if again.ok:
        how, headline = _accepted(probe, effects, first, again, ("Another body under a used key", ""))
        return Failed(
            "another body under a used key is neither executed nor replayed",
            f"{shown(again)}: {how}",
            headline=headline,
        )
    if effects is not None and effects > 1:
        return Failed("1 effect of both requests", f"{effects} effects")
    return Passed()


def first_one_stays(probe: Probe) -> Verdict:
    """The first request is still replayed."""
    needs_replays(probe)
    key = probe.fresh()
    first = probe.first(key)
    probe.send(key, body=probe.other_body)
    again = probe.send(key)
    if probe.same(first, again):
        return Passed()
    expected = f"after a refused one, the first request receives {shown(first)} again"
    return Failed(expected, differing(probe, first, again))


def while_running(probe: Probe) -> Verdict:
    """Another body during the first request: whatever its status, the API does not execute it."""
    first, other, _, before = _while_running(probe, counted=True)
    effects = probe.since(before, at_least=int(first.ok))
    if other.ok and not probe.busy(other):
        words = "Another body", " while the first request was running"
        how, headline = _accepted(probe, effects, first, other, words)
        seen = f"{shown(first)}, and {shown(other)}: {how}"
        return Failed("another body while the first request is running is refused", seen, headline=headline)
    if effects is not None and effects > 1:
        return Failed("1 effect of both requests", f"{effects} effects; {shown(other)}")
    return Passed()


def running_status(probe: Probe) -> Verdict:
    """The status for another body during the first request."""
    other = _while_running(probe).second
    return gets_by_profile(other, _IN_FLIGHT, "another body while the first request is running")


def other_query(probe: Probe) -> Verdict:
    """The same body with another query."""
    key, before = probe.fresh(), probe.count()
    first, request = probe.first(key), probe.request(key)
    sign = "&" if "?" in request.address.target else "?"
    answer = probe.send_raw(
        replace(request, address=request.address.at(f"{request.address.target}{sign}oncekey-check=1"))
    )
    return not_replayed(probe, probe.since(before), first, answer, "another query under a used key")


def other_endpoint(probe: Probe) -> Verdict:
    """The same body at another endpoint, whose effects the count may not include."""
    key = probe.fresh()
    first, request = probe.first(key), probe.request(key)
    answer = probe.send_raw(replace(request, address=probe.target.other_address or request.address))
    return not_replayed(probe, None, first, answer, "the same key at another endpoint")


def other_method(probe: Probe) -> Verdict:
    """The same body with another method, whose effects the count may not include."""
    key = probe.fresh()
    first, request = probe.first(key), probe.request(key)
    method = "PUT" if request.method != "PUT" else "POST"
    return not_replayed(
        probe, None, first, probe.send_raw(replace(request, method=method)), f"the same key with {method}"
    )


def _accepted(
    probe: Probe, effects: int | None, first: Answer, other: Answer, words: tuple[str, str]
) -> tuple[str, tuple[Harm, str] | None]:
    """What happened to another body that received a success, and the headline if it was not seen to be executed."""
    what, when = words
    same = probe.same(first, other)
    if (effects or 0) > 1 or (effects is None and not same and probe.habits.replays):
        return "executed as well", None
    if same:
        sentence = f"{what} received the first response{when}: the second {{noun}} never happened"
        return "the first response", (Harm.LOST, sentence)
    if effects is None:
        return "accepted", (Harm.WRONG, f"{what} received a success{when}")
    return "accepted, but not executed", (
        Harm.LOST,
        f"{what} received a success{when}, but the second {{noun}} never happened",
    )


def _while_running(probe: Probe, *, counted: bool = False) -> Overlap:
    one = probe.request(probe.fresh(), slow=True)
    overlap = probe.overlapping(one, replace(one, body=probe.other_body), counted=counted)
    if not overlap.first.ok and overlap.second.ok:
        raise InconclusiveError("the second request was faster than the first", "a slower --slow-header")
    return overlap


Pair: TypeAlias = tuple[bodies.Path, bytes, bytes]
"""A place in the body, and two bodies that differ there."""

_MORE: Final = "a --body with more members"
_MOST_PLACES: Final = 3
_MOST_MEMBERS: Final = 8
_FAR: Final = 5000
_DEPTHS: Final = (40, 200)
_LARGE: Final = ("9007199254740992", "9007199254740993")
_LONELY: Final = (("\\ud800", "\\udbff"), ("\\ud800", "\\ufffd"))
_ALIKE: Final = (("1", '"1"'), ("true", '"true"'), ("true", "1"), ("false", "0"), ("null", '"null"'), ("null", '""'))


def every_member(probe: Probe) -> Verdict:
    """Other values, one at a time, in every member that accepts another one."""
    needs_comparison(probe)
    document = bodies.parsed(probe.target.body)
    changed = [(path, bodies.put(document, path, bodies.changed(value))) for path, value in bodies.leaves(document)]
    return worst_of(
        probe, (_member(probe, path, json.dumps(other).encode()) for path, other in changed[:_MOST_MEMBERS])
    )


def large_integers(probe: Probe) -> Verdict:
    """Two integers that are one number in floating point."""
    one, two = _LARGE
    places = [path for path, _ in _numbers(probe)]
    pairs = ((path, _spelt(probe, path, one), _spelt(probe, path, two)) for path in _free(probe) or places)
    return _told_apart(probe, pairs, "integers that differ beyond 2 to the power of 53")


def lonely_surrogates(probe: Probe) -> Verdict:
    """Lone surrogates, which UTF-8 cannot encode and lenient encoders replace with one character."""
    places = dict.fromkeys(_free(probe), "") or _texts(probe)
    texts = ((path, json.dumps(text)[:-1], pair) for path, text in places.items() for pair in _LONELY)
    pairs = (
        (path, _spelt(probe, path, f'{text}{one}"'), _spelt(probe, path, f'{text}{two}"'))
        for path, text, (one, two) in texts
    )
    return _told_apart(probe, pairs, "texts with different lone surrogates")


def types(probe: Probe) -> Verdict:
    """Values that are equal as text, or in a language that converts between them."""
    free = _free(probe)
    if free:
        pairs = ((path, _spelt(probe, path, one), _spelt(probe, path, two)) for path in free for one, two in _ALIKE)
        return _told_apart(probe, pairs, "values of different types")
    numbers = _numbers(probe)
    if not numbers:
        raise _no_place()
    return worst_of(probe, (_as_text(probe, path, json.dumps(value)) for path, value in numbers))


def order_of_arrays(probe: Probe) -> Verdict:
    """The same elements in another order."""
    document = bodies.parsed(probe.target.body)
    arrays = [(path, value) for path, value in bodies.containers(document) if isinstance(value, list)]
    turned = [(path, value[::-1]) for path, value in arrays if value[::-1] != value]
    free = [(path, _spelt(probe, path, "[1, 2]"), _spelt(probe, path, "[2, 1]")) for path in _free(probe)]
    known = [
        (path, probe.target.body, json.dumps(bodies.put(document, path, value)).encode()) for path, value in turned
    ]
    return _told_apart(probe, free or known[:_MOST_PLACES], "arrays in another order")


def depth(probe: Probe) -> Verdict:
    """Bodies that differ only deep inside, and one that is only deep."""
    needs_comparison(probe)
    far = b"[" * _FAR + b"]" * _FAR
    pairs = (
        (path, _spelt(probe, path, _nested(levels, "1")), _spelt(probe, path, _nested(levels, "2")))
        for path in _free(probe)
        for levels in _DEPTHS
    )
    answer = probe.send(probe.fresh(), body=far)
    if not answer.status or answer.status >= SERVER_ERROR:
        return _server_error(probe, far, f"{_FAR} nested arrays")
    return _told_apart(probe, pairs, "bodies that differ deep inside") if _free(probe) else Passed()


def duplicate_names(probe: Probe) -> Verdict:
    """Two members with one name, of which parsers take the first or the last."""
    document = bodies.parsed(probe.target.body)
    if not isinstance(document, dict) or not document:
        raise InconclusiveError("the body has no members", _MORE)
    name = next((name for name, value in document.items() if not isinstance(value, dict | list)), min(document))
    whole, spelt = json.dumps(document)[1:-1], json.dumps(name)
    one, two = _variants(document[name])
    pairs = (
        ((name,), f"{{{spelt}: {one}, {whole}}}".encode(), f"{{{spelt}: {two}, {whole}}}".encode()),
        ((name,), f"{{{whole}, {spelt}: {one}}}".encode(), f"{{{whole}, {spelt}: {two}}}".encode()),
    )
    return _told_apart(probe, pairs, "bodies with two members of one name")


def _told_apart(probe: Probe, pairs: Iterable[Pair], what: str) -> Verdict:
    """Passed if the API never treats the second body of a pair as the first; a refusal is fine."""
    needs_comparison(probe)
    tried = list(pairs)
    if not tried:
        raise _no_place()
    return worst_of(probe, (_pair(probe, pair, what) for pair in tried))


def _pair(probe: Probe, pair: Pair, what: str) -> Verdict:
    path, one, two = pair
    key = probe.fresh()
    first = probe.send(key, body=one)
    if BAD_REQUEST <= first.status < SERVER_ERROR:
        return Passed()
    if not first.ok:
        return _server_error(probe, one, what)
    again = probe.send(key, body=two)
    if not again.ok:
        return Passed()
    if not _is_compared(probe, path):
        return Inconclusive(f"other values of {_named(path)} are not refused either")
    return Failed(
        f"{what}: the second one under a key is refused",
        f"{shown(first)}, then {shown(again)}",
        headline=unproven(probe, first, again),
    )


def _is_compared(probe: Probe, path: bodies.Path) -> bool:
    """Whether another value at a place makes another request; if not, another clause reports it."""
    document = bodies.parsed(probe.target.body)
    value = next((value for known, value in bodies.leaves(document) if known == path), None)
    if value is None:
        return True
    key = probe.fresh()
    probe.control(probe.request(key))
    other = json.dumps(bodies.put(document, path, bodies.changed(value))).encode()
    return not probe.control(probe.request(key, body=other)).ok


def _member(probe: Probe, path: bodies.Path, other: bytes) -> Verdict:
    """The verdict on one member. A value that the API also refuses under a fresh key proves nothing."""
    if not probe.control(probe.request(probe.fresh(), body=other)).ok:
        return Passed()
    key = probe.fresh()
    first, again = probe.first(key), probe.send(key, body=other)
    if not again.ok:
        return Passed()
    return Failed(
        f"another value of {_named(path)}: refused under a used key",
        f"{shown(first)}, then {shown(again)}",
        headline=unproven(probe, first, again),
    )


def _as_text(probe: Probe, path: bodies.Path, number: str) -> Verdict:
    """A number, and its digits as a string. An API that treats both as the same value may treat them as one request."""
    needs_comparison(probe)
    key, body = probe.fresh(), _spelt(probe, path, f'"{number}"')
    first = probe.first(key)
    again = probe.send(key, body=body)
    if not again.ok:
        return Passed()
    if probe.control(probe.request(probe.fresh(), body=body)).ok:
        return Inconclusive(f'this API treats "{number}" as {number}')
    return Failed(
        f'{number} and "{number}": the second one is refused',
        f"{shown(first)}, then {shown(again)}",
        headline=unproven(probe, first, again),
    )


def _server_error(probe: Probe, body: bytes, what: str) -> Verdict:
    """Failed if a body causes a server error only with a key, and succeeds without one."""
    if probe.habits.optional:
        control = probe.control(probe.request(None, body=body))
        if control.status and control.status < SERVER_ERROR:
            headline = Harm.WRONG, f"A key turned {what} into a server error"
            seen = f"a server error with a key, {shown(control)} without"
            return Failed(f"{what}: refused, or distinguished", seen, headline=headline)
    return Inconclusive(f"{what} receive a server error, and nothing shows that the key causes it")


def _no_place() -> InconclusiveError:
    return InconclusiveError("the body has no suitable member, and the API accepts no extra one", _MORE)


def _free(probe: Probe) -> list[bodies.Path]:
    """The extra member, if the API accepts and compares it."""
    return [] if probe.habits.free is None else [probe.habits.free]


def _numbers(probe: Probe) -> list[tuple[bodies.Path, object]]:
    found = bodies.leaves(bodies.parsed(probe.target.body))
    return list(islice(((path, value) for path, value in found if bodies.is_number(value)), _MOST_PLACES))


def _texts(probe: Probe) -> dict[bodies.Path, str]:
    found = bodies.leaves(bodies.parsed(probe.target.body))
    return dict(islice(((path, value) for path, value in found if isinstance(value, str)), _MOST_PLACES))


def _spelt(probe: Probe, path: bodies.Path, text: str) -> bytes:
    return bodies.spelt(bodies.parsed(probe.target.body), path, text)


def _named(path: bodies.Path) -> str:
    return "/".join(map(str, path))


def _nested(levels: int, text: str) -> str:
    return f"{'[' * levels}{text}{']' * levels}"


def _variants(value: object) -> tuple[str, str]:
    """Two other values of the same kind."""
    match value:
        case bool() | None | list() | dict():
            return '"a"', '"b"'
        case int() | float():
            return json.dumps(value + 1), json.dumps(value + 2)
    return json.dumps(f"{value}a"), json.dumps(f"{value}b")


def _clause(
    name: str,
    title: str,
    why: str,
    fix: str,
    judge: Callable[[Probe], Verdict],
    *,
    requests: int,
    severity: Severity = Severity.HIGH,
) -> Clause:
    return Clause(
        id=f"mismatches.{name}",
        title=title,
        why=why,
        fix=fix,
        severity=severity,
        must=SAFE,
        should=EVERY - SAFE,
        needs=(Need.JSON, Need.OTHER_BODY),
        requests=requests,
        judge=judge,
    )


CLAUSES: Final = (
    Clause(
        id="mismatches.status",
        title="Another body under a used key receives 422 (stripe: 400, conflict: 409)",
        why="With 409, deployed clients retry forever; with a success, they assume that it was executed.",
        fix="Return 422 for a mismatch (stripe: 400, conflict: 409).",
        severity=Severity.MEDIUM,
        needs=(Need.OTHER_BODY,),
        requests=3,
        judge=other_body,
    ),
    Clause(
        id="mismatches.nothing-happens",
        title="Another body under a used key is neither executed nor replayed",
        why="A changed amount would be paid, or assumed to be paid.",
        fix="Store a fingerprint of the request with the key, and reject a request whose fingerprint differs.",
        severity=Severity.CRITICAL,
        needs=(Need.OTHER_BODY,),
        requests=4,
        judge=nothing_happens,
        sight=True,
    ),
    Clause(
        id="mismatches.first-stays",
        title="A refused request changes nothing for the first one",
        why="If a mistaken request made the key unusable, the client could not get its response.",
        fix="Reject a mismatch without writing to the key's record.",
        severity=Severity.HIGH,
        needs=(Need.OTHER_BODY,),
        requests=3,
        judge=first_one_stays,
        sight=True,
    ),
    Clause(
        id="mismatches.while-running",
        title="Another body is also refused while the first request is running",
        why="A server that compares only finished requests lets another one replace the first.",
        fix="Write the fingerprint with the claim, so that it can be compared while the first request is running.",
        severity=Severity.HIGH,
        needs=(Need.SLOW, Need.OTHER_BODY),
        requests=4,
        judge=while_running,
        sight=True,
    ),
    Clause(
        id="mismatches.running-status",
        title=(
            "Another body while the first request is running receives 422 or 409 (stripe: 400 or 409; "
            "strict-money: 422)"
        ),
        why="With 409 the client waits for the response to a request that it did not send.",
        fix="Compare fingerprints before returning that a request is in progress.",
        severity=Severity.MEDIUM,
        needs=(Need.SLOW, Need.OTHER_BODY),
        requests=3,
        judge=running_status,
    ),
    Clause(
        id="mismatches.query",
        title="Another query under a used key does not receive the first response",
        why="The query is part of the request.",
        fix="Include the query in the fingerprint.",
        severity=Severity.MEDIUM,
        must=SAFE,
        should=EVERY - SAFE,
        requests=4,
        judge=other_query,
        sight=True,
    ),
    Clause(
        id="mismatches.endpoint",
        title="A key never receives the response of another endpoint",
        why="A refund that receives a payment's success never happens.",
        fix="Include the path in the fingerprint, or in the scope of the key.",
        severity=Severity.HIGH,
        needs=(Need.OTHER_URL,),
        requests=2,
        judge=other_endpoint,
        sight=True,
    ),
    Clause(
        id="mismatches.method",
        title="A key never receives the response of another method",
        why="A key identifies one request, and the method is part of it.",
        fix="Include the method in the fingerprint.",
        severity=Severity.HIGH,
        needs=(Need.UNSAFE,),
        requests=2,
        judge=other_method,
        sight=True,
    ),
    _clause(
        "every-member",
        "Another value of any member is another request",
        "A server that compares the amount but not the currency pays in the wrong one.",
        "Include every member of the body in the fingerprint.",
        every_member,
        requests=6,
    ),
    _clause(
        "large-integers",
        "Integers beyond 2^53 are refused, or distinguished",
        "A server that reads them as floating point treats two amounts as one.",
        "Parse integers exactly, or reject those beyond 2^53 with 400.",
        large_integers,
        requests=2,
    ),
    _clause(
        "types",
        'A number and its digits as a string are distinguished, as are true and 1, null and ""',
        "A comparison as text treats them as one, and another operation receives the first response.",
        "Compare JSON values with their types, not their text.",
        types,
        requests=12,
    ),
    _clause(
        "array-order",
        "The order of an array is part of the request",
        "A transfer from A to B is not a transfer from B to A.",
        "Keep the order of arrays in the fingerprint.",
        order_of_arrays,
        requests=2,
    ),
    _clause(
        "duplicate-names",
        "Bodies with duplicate member names are refused, or distinguished",
        "Parsers differ in which one they use: the compared value may not be the executed one.",
        "Reject a body with duplicate names with 400.",
        duplicate_names,
        requests=2,
    ),
    _clause(
        "surrogates",
        "Lone surrogates are refused, or distinguished",
        "UTF-8 cannot encode them: a server that replaces them treats different texts as one.",
        "Reject lone surrogates with 400.",
        lonely_surrogates,
        requests=4,
        severity=Severity.MEDIUM,
    ),
    _clause(
        "depth",
        "Bodies that differ deep inside are refused, or distinguished",
        "A comparison that stops at some depth misses what is below.",
        "Include every level in the fingerprint, and reject bodies that are too deep with 400.",
        depth,
        requests=5,
        severity=Severity.MEDIUM,
    ),
)
