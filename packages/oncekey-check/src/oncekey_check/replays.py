"""Clauses about the response to a retry: it equals the first one, after any number of retries, and it is marked."""

from __future__ import annotations

import gzip
import re
import zlib
from dataclasses import replace
from typing import Final

from oncekey_check import bodies
from oncekey_check.carrier import MARKER
from oncekey_check.clauses import (
    DRAFT,
    EVERY,
    MARKED,
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
from oncekey_check.judging import (
    difference,
    differing,
    is_marked,
    needs_comparison,
    needs_replays,
    one_operation,
    shown,
    tally,
    unproven,
)
from oncekey_check.probe import Probe
from oncekey_check.raw_http import Answer, RawRequest

_KEPT: Final = ("Location", "Content-Type", "ETag", "Content-Language", "Link")
_OF_ONE_MESSAGE: Final = re.compile(
    r"^(date|age|allow|via|connection|keep-alive|transfer-encoding|content-length|content-encoding|vary|set-cookie|expires"
    r"|server-timing|cache-control|strict-transport-security|alt-svc|nel|report-to|.*cache.*|.*(rate-?limit|request-?id"
    r"|trace|span|correlation|cf-|amz|nonce|time|duration|runtime|idempoten).*)$",
    re.IGNORECASE,
)
"""Headers that describe one message, or are added by an intermediary."""
_EXPIRY: Final = re.compile(r"idempoten.*(expir|ttl|until|retention)", re.IGNORECASE)
_MANY: Final = 10


def same_status(probe: Probe) -> Verdict:
    """The status of a retry."""
    key = probe.fresh()
    first, again = probe.first(key), probe.send(key)
    if first.status == again.status:
        return Passed()
    if again.ok and probe.same(first, again):
        headline = Harm.UNTOLD, f"A retry received {again.status} where the first request received {first.status}"
        return Failed(f"{first.status} again", shown(again), mild=EVERY, headline=headline)
    return Failed(f"{first.status} again", shown(again))


def same_bytes(probe: Probe) -> Verdict:
    """The body of a retry."""
    needs_replays(probe)
    first, again = _replay(probe)
    if first.body == again.body:
        return Passed()
    if bodies.body_markers(first, again) and probe.same(first, again):
        headline = Harm.UNTOLD, "A retry received the first body with a marker added to it"
        return Failed(
            "the same body, and the marker in a header", shown(again), only=SAFE, mild=SAFE, headline=headline
        )
    return Failed(f"the same {len(first.body)} bytes", f"{shown(again)}, {difference(first, again)}")


def same_headers(probe: Probe) -> Verdict:
    """The headers that belong to the body."""
    first, again = _replay(probe)
    for name in _KEPT:
        if first.values(name) != again.values(name):
            return Failed(f"{name}: {first.values(name)}", f"{name}: {again.values(name)}")
    control = probe.control(probe.request(probe.fresh()))
    for name in dict.fromkeys(name.lower() for name, _ in first.headers):
        if _OF_ONE_MESSAGE.search(name) or not control.values(name):
            continue
        changed = first.values(name) == control.values(name) != again.values(name)
        if not again.values(name) or changed:
            headline = Harm.WRONG, f"A retry did not receive the header {name} of the first response"
            seen = again.values(name) or "none"
            return Failed(f"{name}: {first.values(name)}", f"{name}: {seen}", mild=EVERY - SAFE, headline=headline)
    return Passed()


def many_times(probe: Probe) -> Verdict:
    """Consecutive retries."""
    key, before = probe.fresh(), probe.count()
    first = probe.first(key)
    answers = [probe.send(key) for _ in range(_MANY)]
    others = [(number, again) for number, again in enumerate(answers, 1) if not probe.same(first, again)]
    if not others:
        return Passed()
    done = [(number, again) for number, again in others if again.ok and not probe.busy(again)]
    number, other = (done or others)[0]
    effects = probe.since(before)
    counted = "" if effects is None else f"; effects: {effects}"
    seen = f"{tally(answers)}; retry {number}: {differing(probe, first, other)}{counted}"
    headline = _other_success(first, other, effects) if done and effects in {None, 1} else None
    return Failed(f"{_MANY} times {first.status} with the first body", seen, headline=headline)


def _other_success(first: Answer, other: Answer, effects: int | None) -> tuple[Harm, str]:
    """The harm and the headline of a retry that received another success, but was not seen to be executed."""
    what = f"A retry received another {'Location' if first.body == other.body else 'body'}"
    if effects is None:
        return Harm.WRONG, f"{what}: without --count-url it is not known whether the effect happened again"
    return Harm.WRONG, f"{what}, although the effect happened once"


def no_effect(probe: Probe) -> Verdict:
    """A retry has no effect."""
    key, before = probe.fresh(), probe.count()
    answers = [probe.first(key), probe.send(key), probe.send(key)]
    effects = probe.since(before)
    return Passed() if effects == 1 else Failed("1 effect of 3 requests", f"{effects} effects; {tally(answers)}")


def marked(probe: Probe) -> Verdict:
    """The marker, on replays only."""
    first, again = _replay(probe)
    if is_marked(first):
        return Failed(f"no {MARKER}: true on the first response", shown(first))
    if not is_marked(again) and not bodies.body_markers(first, again):
        return Failed(f"{MARKER}: true on a replay", f"{shown(again)}; {MARKER}: {again.header(MARKER)}")
    return Passed()


def expiry_told(probe: Probe) -> Verdict:
    """How long the key is valid."""
    answer = probe.first(probe.fresh())
    if any(_EXPIRY.search(name) for name, _ in answer.headers):
        return Passed()
    return Failed("a header that states how long the key is valid", ", ".join(name for name, _ in answer.headers))


def other_white_space(probe: Probe) -> Verdict:
    """Another order of members and other white space."""
    return _equal(probe, bodies.spaced(probe.target.body), "other white space and order of members")


def other_escapes(probe: Probe) -> Verdict:
    """The same texts, spelt with escapes."""
    return _equal(probe, bodies.escaped(probe.target.body), "the same texts with escapes")


def chunked(probe: Probe) -> Verdict:
    """A chunked body is the same body."""
    _takes_chunks(probe, probe.target.body)
    key, before = probe.fresh(), probe.count()
    first = probe.first(key)
    again = probe.send_raw(replace(probe.request(key), chunked=True))
    return one_operation(probe, probe.since(before), first, again, "the same body in chunks")


def chunked_other(probe: Probe) -> Verdict:
    """Another chunked body is another body."""
    needs_comparison(probe)
    _takes_chunks(probe, probe.other_body)
    key = probe.fresh()
    first = probe.first(key)
    again = probe.send_raw(replace(probe.request(key, body=probe.other_body), chunked=True))
    if again.ok:
        how = "the first response" if probe.same(first, again) else "a separate response"
        return Failed(
            "another body in chunks under a used key is refused",
            f"{shown(again)}, {how}",
            headline=unproven(probe, first, again),
        )
    return Passed()


def encoding(probe: Probe) -> Verdict:
    """A retry that does not accept the encoding of the first response."""
    key, before = probe.fresh(), probe.count()
    plain = _without_encoding(probe.request(key))
    first = probe.send_raw(replace(plain, headers=(*plain.headers, ("Accept-Encoding", "gzip"))))
    again = probe.send_raw(plain)
    if not first.ok:
        raise InconclusiveError(
            f"a request that accepts gzip receives {first.status or first.reason} under a fresh key"
        )
    effects = probe.since(before, at_least=1)
    if again.values("Content-Encoding"):
        if probe.control(_without_encoding(probe.request(probe.fresh()))).values("Content-Encoding"):
            raise InconclusiveError("responses have an encoding that no request accepts")
        return Failed(
            "a body without an encoding, as requested", f"Content-Encoding: {again.values('Content-Encoding')}"
        )
    try:
        content = gzip.decompress(first.body) if first.values("Content-Encoding") == "gzip" else first.body
    except (OSError, EOFError, zlib.error):
        raise InconclusiveError("the first response does not match its Content-Encoding") from None
    return one_operation(probe, effects, replace(first, body=content), again, "a retry without Accept-Encoding")


def _without_encoding(request: RawRequest) -> RawRequest:
    return replace(request, headers=tuple(line for line in request.headers if line[0].lower() != "accept-encoding"))


def _replay(probe: Probe) -> tuple[Answer, Answer]:
    """A success and its retry. Only the clause about the status reports a retry that is refused."""
    key = probe.fresh()
    first, again = probe.first(key), probe.send(key)
    if not again.ok:
        raise InconclusiveError(f"a retry receives {again.status or again.reason}, not a success")
    return first, again


def _takes_chunks(probe: Probe, body: bytes) -> None:
    """Raise if the server also refuses chunked bodies under a fresh key: then it proves nothing about keys."""
    control = probe.control(replace(probe.request(probe.fresh(), body=body), chunked=True))
    if not control.ok:
        raise InconclusiveError(f"a chunked body receives {control.status or control.reason} under a fresh key, too")


def _equal(probe: Probe, body: bytes, what: str) -> Verdict:
    control = probe.control(probe.request(probe.fresh(), body=body))
    if not control.ok:
        raise InconclusiveError(f"{what}: it receives {control.status or control.reason} under a fresh key, too")
    key, before = probe.fresh(), probe.count()
    first, again = probe.first(key), probe.send(key, body=body)
    return one_operation(probe, probe.since(before), first, again, what)


CLAUSES: Final = (
    Clause(
        id="replays.status",
        title="A retry receives the first status",
        why="A client that receives 200 instead of 201 takes another branch.",
        fix="Store the status with the response, and send it again.",
        severity=Severity.HIGH,
        requests=2,
        judge=same_status,
        sight=True,
    ),
    Clause(
        id="replays.bytes",
        title="A retry receives the first body, byte for byte",
        why="Signatures and hashes of responses stay valid, and no second id appears.",
        fix="Store the bytes of the body, and send them again without serialising.",
        severity=Severity.HIGH,
        must=MARKED,
        should=EVERY - MARKED,
        requests=2,
        judge=same_bytes,
        sight=True,
    ),
    Clause(
        id="replays.headers",
        title="A retry receives Location, Content-Type and ETag of the first response",
        why="A client whose first response was lost would never learn where its resource is.",
        fix="Store the response's headers, all values of each, and send them again.",
        severity=Severity.MEDIUM,
        must=DRAFT,
        should=EVERY - DRAFT,
        requests=3,
        judge=same_headers,
        sight=True,
    ),
    Clause(
        id="replays.many",
        title="Ten consecutive retries receive the same response",
        why="Some servers lock a finished key again with every retry, or build a new response.",
        fix="Store the response with the key, and send it for every retry without locking the key again.",
        severity=Severity.HIGH,
        requests=11,
        judge=many_times,
        sight=True,
    ),
    Clause(
        id="replays.one-effect",
        title="Three requests with one key have one effect",
        why="This is the purpose of a key.",
        fix=(
            "Insert the key under a unique constraint before the effect, and replay the stored response to duplicates."
        ),
        severity=Severity.CRITICAL,
        needs=(Need.COUNT,),
        requests=5,
        judge=no_effect,
        sight=True,
    ),
    Clause(
        id="replays.marked",
        title=f"Replays have {MARKER}: true, first responses do not",
        why="Without it a client cannot tell an old error from a new one.",
        fix="Add Idempotent-Replayed: true to every stored response that is sent again, and to no other.",
        severity=Severity.LOW,
        must=MARKED,
        should=EVERY - MARKED,
        requests=2,
        judge=marked,
        sight=True,
    ),
    Clause(
        id="replays.expiry",
        title="Responses state how long the key is valid",
        why="A client that retries later executes again.",
        fix="Add a header such as Idempotency-Expires with the key's expiry date.",
        severity=Severity.LOW,
        must=SAFE,
        requests=1,
        judge=expiry_told,
    ),
    Clause(
        id="replays.white-space",
        title="White space and the order of members do not matter",
        why="A client that serialises the body again for its retry may write them differently.",
        fix="Compare canonical JSON (RFC 8785) instead of bytes.",
        severity=Severity.MEDIUM,
        must=MARKED,
        should=EVERY - MARKED,
        needs=(Need.JSON,),
        requests=5,
        judge=other_white_space,
        sight=True,
    ),
    Clause(
        id="replays.escapes",
        title="Texts that differ only in JSON escapes are equal",
        why="JSON libraries differ in what they escape.",
        fix="Compare the parsed text (RFC 8785) instead of bytes.",
        severity=Severity.MEDIUM,
        must=MARKED,
        should=EVERY - MARKED,
        needs=(Need.JSON,),
        requests=5,
        judge=other_escapes,
        sight=True,
    ),
    Clause(
        id="replays.encoding",
        title="A retry that accepts no content encoding receives an unencoded body",
        why="A stored body that was compressed for the first client may be unreadable for the second.",
        fix="Store the response before compression, and negotiate the encoding for each request.",
        severity=Severity.MEDIUM,
        requests=4,
        judge=encoding,
        sight=True,
    ),
    Clause(
        id="replays.chunked",
        title="The same body in chunks is the same request",
        why="A proxy may forward a body in chunks that arrived in one piece.",
        fix="Compute the fingerprint from the decoded body, after the last chunk.",
        severity=Severity.MEDIUM,
        requests=5,
        judge=chunked,
        sight=True,
    ),
    Clause(
        id="replays.chunked-other",
        title="Another body in chunks is another request",
        why="Servers that hash only bodies with a Content-Length compare nothing here.",
        fix="Compute the fingerprint from the decoded body, also without a Content-Length.",
        severity=Severity.HIGH,
        needs=(Need.OTHER_BODY,),
        requests=3,
        judge=chunked_other,
        sight=True,
    ),
)
