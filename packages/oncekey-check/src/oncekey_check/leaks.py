"""Clauses about confidentiality: the keys and responses of other callers, and the content of refusals.

A key belongs to one caller; other callers who know the key must receive nothing.
"""

from __future__ import annotations

import base64
import json
import re
import uuid
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Final, TypeAlias

from oncekey_check import bodies
from oncekey_check.clauses import (
    DRAFT,
    EVERY,
    SAFE,
    Clause,
    Failed,
    Harm,
    InconclusiveError,
    Need,
    Passed,
    Severity,
    Verdict,
)
from oncekey_check.judging import BAD_REQUEST, is_marked, one_operation, shown
from oncekey_check.probe import Probe
from oncekey_check.raw_http import Answer


def independent(probe: Probe) -> Verdict:
    """The same key and body from another tenant."""
    _other_tenant_is_known(probe)
    key = probe.fresh()
    first = probe.first(key)
    before = probe.count(other_tenant=True)
    answer = probe.send_raw(probe.as_other_tenant(probe.request(key)))
    if not answer.ok:
        headline = Harm.LOST, "Tenant B's {noun} was refused under a key that tenant A had used"
        return Failed("the other tenant's request is executed as its own", shown(answer), headline=headline)
    if is_marked(answer):
        return Failed("a separate response for the other tenant", shown(answer))
    if not probe.same(first, answer):
        return Passed()
    if before is None and not probe.habits.distinct:
        raise InconclusiveError("both tenants receive equal responses", Need.COUNT)
    after = probe.count(other_tenant=True)
    if before is not None and after is not None and after > before:
        return Passed()
    return Failed("the other tenant's request is executed as its own", f"{shown(answer)}, the first tenant's response")


def unseen(probe: Probe) -> Verdict:
    """Another tenant cannot find out that a key is used."""
    _other_tenant_is_known(probe)
    key = probe.fresh()
    first = probe.first(key)
    answer = probe.send_raw(probe.as_other_tenant(probe.request(key, body=probe.other_body)))
    expected = "for another tenant the key is unused"
    if not answer.ok:
        return Failed(expected, shown(answer))
    if is_marked(answer) or (probe.habits.distinct and probe.same(first, answer)):
        headline = Harm.LEAKED, "Tenant B received tenant A's {noun} for a different body"
        return Failed(expected, f"{shown(answer)}, the first tenant's response", headline=headline)
    if not probe.habits.distinct:
        raise InconclusiveError("both tenants receive equal responses", Need.COUNT)
    return Passed()


def same_caller(probe: Probe) -> Verdict:
    """A retry with other credentials of the same caller."""
    control = probe.control(probe.as_same_caller(probe.request(probe.fresh())))
    if not control.ok:
        got = control.status or control.reason
        raise InconclusiveError(f"the renewed credentials with a fresh key received {got}", Need.SAME_CALLER)
    key, before = probe.fresh(), probe.count()
    first = probe.first(key)
    again = probe.send_raw(probe.as_same_caller(probe.request(key)))
    return one_operation(probe, probe.since(before), first, again, "a retry with renewed credentials")


def no_pass(probe: Probe) -> Verdict:
    """A key without credentials."""
    _credentials_are_needed(probe)
    key = probe.fresh()
    first = probe.first(key)
    answer = probe.send_raw(probe.as_nobody(probe.request(key)))
    if not answer.status:
        raise InconclusiveError(f"without credentials there was no response ({answer.reason})")
    if answer.ok or (first.body and first.body in answer.body):
        return Failed("without credentials a refusal, and nothing of the response", shown(answer))
    return Passed()


def not_spoilt(probe: Probe) -> Verdict:
    """A request without credentials does not use up the key."""
    _credentials_are_needed(probe)
    key = probe.fresh()
    probe.send_raw(probe.as_nobody(probe.request(key)))
    answer = probe.until_settled(probe.request(key))
    return Passed() if answer.ok else Failed("with credentials the same key is executed", shown(answer))


def _other_tenant_is_known(probe: Probe) -> None:
    """Raise unless the other tenant's request succeeds under its own key: otherwise a refusal proves nothing."""
    control = probe.control(probe.as_other_tenant(probe.request(probe.fresh())))
    if not control.ok:
        got = control.status or control.reason
        raise InconclusiveError(f"the other tenant's request with a fresh key received {got}", Need.OTHER_TENANT)


def _credentials_are_needed(probe: Probe) -> None:
    """Raise if the API accepts requests without credentials: then it has nothing to protect."""
    control = probe.control(probe.as_nobody(probe.request(probe.fresh())))
    if control.ok:
        raise InconclusiveError("a fresh key is accepted without credentials, too")


TENANTS: Final = (
    Clause(
        id="tenants.independent",
        title="The same key of two tenants is two operations",
        why="One tenant would receive the other's response, and its own request would not happen.",
        fix="Include the tenant in the unique constraint of the key.",
        severity=Severity.CRITICAL,
        needs=(Need.OTHER_TENANT,),
        requests=4,
        judge=independent,
        sight=True,
    ),
    Clause(
        id="tenants.unseen",
        title="A tenant cannot find out which keys another one uses",
        why="A refusal that is sent only for used keys reveals who does business with whom.",
        fix="Include the tenant in the unique constraint of the key.",
        severity=Severity.HIGH,
        needs=(Need.OTHER_TENANT, Need.OTHER_BODY),
        requests=3,
        judge=unseen,
    ),
    Clause(
        id="tenants.same-caller",
        title="A retry with a renewed token of the same caller is the same request",
        why="Tokens expire between a request and its retry.",
        fix="Scope keys by the account behind the credentials, not by the token itself.",
        severity=Severity.CRITICAL,
        needs=(Need.SAME_CALLER,),
        requests=5,
        judge=same_caller,
        sight=True,
    ),
    Clause(
        id="tenants.no-pass",
        title="A used key gives no access without credentials",
        why="Keys appear in logs; a replay to anyone who knows a key is a leak.",
        fix="Authenticate before looking the key up.",
        severity=Severity.CRITICAL,
        needs=(Need.CREDENTIALS,),
        requests=3,
        judge=no_pass,
    ),
    Clause(
        id="tenants.not-spoilt",
        title="A request that was refused for its credentials does not use up the key",
        why="An expired token would make a key unusable.",
        fix="Authenticate before claiming the key.",
        severity=Severity.MEDIUM,
        needs=(Need.CREDENTIALS,),
        requests=3,
        judge=not_spoilt,
    ),
)


_SHORTEST: Final = 6
_DIGITS: Final = (9, 6, 4)
_MOST_MARKED: Final = 6
_SHORT_TEXT: Final = 200
_BETWEEN: Final = re.compile(r"(?<=[0-9])[.,_' ](?=[0-9])")
_DIGESTS: Final = {"etag", "digest", "content-digest", "repr-digest", "content-md5"}
_INSTANT: Final = re.compile(
    r"\d{4}-\d\d-\d\d|1[6-9]\d{8}(\d{3})?([.]\d+)?$|(Mon|Tue|Wed|Thu|Fri|Sat|Sun), \d\d [A-Z][a-z]{2} \d{4} "
)
_DATED: Final = {"date", "expires", "last-modified"}
"""Headers that contain the time of a response, which other responses of the same moment share."""
_DIGEST: Final = re.compile(rb"(?<![0-9A-Fa-f])(?:[0-9A-Fa-f]{64}|[0-9A-Fa-f]{40})(?![0-9A-Fa-f])")
_SCRIPT: Final = "<script>alert(1)</script>"


def mismatch_is_mute(probe: Probe) -> Verdict:
    """A refusal reveals nothing about the first response."""
    key, another = probe.fresh(), probe.fresh()
    control, first = probe.control(probe.request(another)), probe.first(key)
    refused = _refused(probe, key, probe.other_body)
    known = {text.replace(another, "") for text in _values(control)}
    sent = probe.trail[-1].request.wire().decode("latin-1")
    for secret in _values(first):
        if secret.replace(key, "") not in known and secret not in sent and _shows(refused, secret):
            return Failed("nothing of the first response", f"{shown(refused)}, with {secret!r} in it")
    return Passed()


def first_body_is_mute(probe: Probe) -> Verdict:
    """A refusal reveals nothing about the first body: markers in it are not returned."""
    tried = False
    for marked in (_marked_texts, _marked_numbers) if probe.target.is_json else (_other_bodies,):
        place = _taken(probe, marked)
        if place is None:
            continue
        tried = True
        # One marker may appear in a refusal by chance, but not two.
        seen = [_leak(probe, number, marked, place) for number in range(2)]
        if all(seen):
            return Failed("nothing of the first request", f"{seen[0]} of the first body in the refusal of another")
    if not tried:
        raise InconclusiveError(
            "no body with a marker in it is accepted, and treated as a different one", Need.OTHER_BODY
        )
    return Passed()


def no_fingerprint(probe: Probe) -> Verdict:
    """No response contains a hash of a body. A hash that is in every response, or new in each, is not one of a body."""
    key = probe.fresh()
    control = probe.control(probe.request(probe.fresh(), body=probe.other_body))
    probe.first(key)
    refused, again = (_refused(probe, key, probe.other_body) for _ in range(2))
    if (_hashes(refused) & _hashes(again)) - _hashes(control):
        return Failed("no hash of a request", f"{shown(refused)}, with a hash in it")
    return Passed()


def no_cookie(probe: Probe) -> Verdict:
    """A session is not replayed. A cookie that every response sets is not a session."""
    key = probe.fresh()
    control = probe.control(probe.request(probe.fresh()))
    first, again = probe.first(key), probe.send(key)
    replayed = (_cookies(first) & _cookies(again)) - _cookies(control)
    if replayed:
        return Failed("no stored cookie in a replay", f"Set-Cookie of {len(min(replayed))} characters")
    return Passed()


def no_reflection(probe: Probe) -> Verdict:
    """A key with HTML in it is not reflected as HTML."""
    answer = probe.send_raw(probe.raw_request(f'"{_SCRIPT}{probe.fresh()}' + "x" * 256 + '"'))
    media = (answer.header("Content-Type") or "").lower()
    if _SCRIPT.encode() in answer.body and "html" in media:
        return Failed("a refusal that is not a page with the key in it", f"{shown(answer)} as {media}")
    return Passed()


def told_apart(probe: Probe) -> Verdict:
    """A client can tell a missing key from a mismatch by more than the status."""
    key = probe.fresh()
    probe.first(key)
    refused, missing = probe.send(key, body=probe.other_body), probe.send_raw(probe.raw_request())
    for answer in (refused, missing):
        if answer.status < BAD_REQUEST:
            raise InconclusiveError(f"there was no refusal to inspect, but {shown(answer)}")
        if not _names(answer):
            return Failed("a body with type, code or error", f"{shown(answer)} without")
    if _names(refused) == _names(missing):
        return Failed("a different type or code for each kind of refusal", f"the same for both: {_names(refused)}")
    return Passed()


def _refused(probe: Probe, key: str, body: bytes) -> Answer:
    answer = probe.send(key, body=body)
    if answer.ok:
        raise InconclusiveError("another body under a used key is not refused")
    return answer


def _values(answer: Answer) -> list[str]:
    """The texts and long numbers of a response, without timestamps, which other responses of the same moment share."""
    try:
        values = [str(value) for _, value in bodies.leaves(json.loads(answer.body)) if not isinstance(value, bool)]
    except (ValueError, RecursionError):
        values = [answer.body.decode("utf-8", "replace")]
    found = [answer.header("Location") or "", *values]
    return [text for text in found if len(text) >= _SHORTEST and not _INSTANT.match(text)]


def _shows(answer: Answer, secret: str) -> bool:
    """Whether a text is anywhere in a response; a number may have separators between its digits, as amounts have."""
    texts = (answer.body.decode("latin-1"), *(value for name, value in answer.headers if name.lower() not in _DATED))
    plain = secret.encode().decode("latin-1")
    return any(plain in text or (plain.isdecimal() and plain in _BETWEEN.sub("", text)) for text in texts)


_Marks: TypeAlias = Callable[[Probe, int], Iterator[tuple[bytes, str]]]
"""Bodies with a marker in them, each with the marker, in an order that is the same for every number."""


def _marked_texts(probe: Probe, number: int) -> Iterator[tuple[bytes, str]]:
    document = bodies.parsed(probe.target.body)
    mark = f"canary{number}{probe.fresh()[:8]}"
    for path, value in bodies.leaves(document):
        if isinstance(value, str):
            yield json.dumps(bodies.put(document, path, f"{value}{mark}")).encode(), mark


def _marked_numbers(probe: Probe, number: int) -> Iterator[tuple[bytes, str]]:
    document = bodies.parsed(probe.target.body)
    for path, value in bodies.leaves(document):
        if bodies.is_number(value):
            for digits in _DIGITS:
                mark = str(10 ** (digits - 1) + (uuid.uuid4().int + number) % (8 * 10 ** (digits - 1)))
                yield json.dumps(bodies.put(document, path, int(mark))).encode(), mark


def _other_bodies(probe: Probe, _: int) -> Iterator[tuple[bytes, str]]:
    yield probe.other_body, probe.other_body.decode("latin-1")


def _taken(probe: Probe, marks: _Marks) -> int | None:
    """The number of the first marked body that the API accepts and does not confuse with the plain body."""
    for place, (body, _) in enumerate(islice(marks(probe, 0), _MOST_MARKED)):
        key = probe.fresh()
        if probe.control(probe.request(key, body=body)).ok and not probe.control(probe.request(key)).ok:
            return place
    return None


def _leak(probe: Probe, number: int, marks: _Marks, place: int) -> str:
    """The parts of the first body that the refusal of another one contains."""
    key = probe.fresh()
    body, mark = next(islice(marks(probe, number), place, None))
    probe.first(key, body=body)
    refused = _refused(probe, key, probe.target.body)
    if _shows(refused, mark):
        return repr(mark)
    whole = (base64.b64encode(body).decode(), body.hex())
    return "an encoding" if any(_shows(refused, text) for text in whole) else ""


def _hashes(answer: Answer) -> set[bytes]:
    """Possible hashes in a response, without headers that contain a hash of the response itself."""
    values = [value.encode("latin-1") for name, value in answer.headers if name.lower() not in _DIGESTS]
    return {found for text in (answer.body, *values) for found in _DIGEST.findall(text)}


def _cookies(answer: Answer) -> set[str]:
    return {value for name, value in answer.headers if name.lower() == "set-cookie"}


def _names(answer: Answer) -> list[str]:
    try:
        document = json.loads(answer.body)
    except ValueError:
        text = answer.body.decode("utf-8", "replace").strip()
        return [text] if 0 < len(text) <= _SHORT_TEXT and "<" not in text else []
    inner = document.get("error") if isinstance(document, dict) else None
    places = [place for place in (document, inner) if isinstance(place, dict)]
    return [
        str(place[name]) for place in places for name in ("type", "code", "title") if isinstance(place.get(name), str)
    ]


CLAUSES: Final = (
    Clause(
        id="leaks.mismatch",
        title="The refusal of another body reveals nothing about the first response",
        why="An attacker who guesses a key would read what was bought, and by whom.",
        fix="Return a constant text for a mismatch.",
        severity=Severity.CRITICAL,
        needs=(Need.OTHER_BODY,),
        requests=3,
        judge=mismatch_is_mute,
    ),
    Clause(
        id="leaks.first-body",
        title="The refusal of another body reveals nothing about the first one",
        why="Amounts and names of the first request would be shown to anyone who guesses its key.",
        fix="Return a constant text for a mismatch.",
        severity=Severity.CRITICAL,
        requests=12,
        judge=first_body_is_mute,
    ),
    Clause(
        id="leaks.fingerprint",
        title="Refusals contain no hash of the request",
        why="Bodies are easy to guess, and a hash confirms a guess.",
        fix="Keep fingerprints out of responses, or key them with a secret (HMAC).",
        severity=Severity.MEDIUM,
        must=SAFE,
        should=EVERY - SAFE,
        needs=(Need.OTHER_BODY,),
        requests=4,
        judge=no_fingerprint,
    ),
    Clause(
        id="leaks.cookie",
        title="Replays do not contain the cookie of the first response",
        why="A stored session would be sent to every retry.",
        fix="Do not store Set-Cookie.",
        severity=Severity.HIGH,
        must=SAFE,
        should=EVERY - SAFE,
        requests=3,
        judge=no_cookie,
        sight=True,
    ),
    Clause(
        id="leaks.reflection",
        title="A key is not reflected in a page",
        why="A script in a key would run in a browser.",
        fix="Do not reflect the key in an HTML page; return errors as application/problem+json.",
        severity=Severity.HIGH,
        requests=1,
        judge=no_reflection,
    ),
    Clause(
        id="leaks.distinguished",
        title="Each kind of refusal has its own type or code",
        why="The application's own refusals use the same statuses, so clients cannot tell them apart by status.",
        fix="Give each refusal its own problem type or error code.",
        severity=Severity.LOW,
        must=SAFE,
        should=DRAFT - SAFE,
        needs=(Need.OTHER_BODY,),
        requests=3,
        judge=told_apart,
    ),
)
