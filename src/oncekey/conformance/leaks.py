"""Clauses about what refusals give away."""

from __future__ import annotations

import json
import re
from typing import Final

from oncekey.conformance import bodies
from oncekey.conformance.clauses import (
    DRAFT,
    EVERY,
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
from oncekey.conformance.judging import BAD_REQUEST, shown
from oncekey.conformance.probe import Probe
from oncekey.conformance.shots import Answer

_SHORTEST: Final = 6
_DIGEST: Final = re.compile(rb"(?<![0-9A-Fa-f])(?:[0-9A-Fa-f]{64}|[0-9A-Fa-f]{40})(?![0-9A-Fa-f])")
_SCRIPT: Final = "<script>alert(1)</script>"


def mismatch_is_mute(probe: Probe) -> Verdict:
    """A refused request learns nothing about the first one."""
    key = probe.fresh()
    first = probe.first(key)
    refused = probe.send(key, body=probe.other_body)
    if refused.ok:
        raise UndecidedError("another body under a used key is not refused")
    for secret in _secrets(probe, first):
        if secret.encode() in refused.body or any(secret in value for _, value in refused.headers):
            return Failed("nothing of the first request or its answer", f"{shown(refused)}, with {secret!r} in it")
    return Passed()


def no_fingerprint(probe: Probe) -> Verdict:
    """Hashes of bodies stay inside."""
    key = probe.fresh()
    answers = (probe.first(key), probe.send(key, body=probe.other_body))
    for answer in answers[1:]:
        texts = (answer.body, *(value.encode("latin-1") for _, value in answer.headers))
        if any(_DIGEST.search(text) for text in texts):
            return Failed("no hash of a request", f"{shown(answer)}, with a hash in it")
    return Passed()


def no_cookie(probe: Probe) -> Verdict:
    """A session is not replayed."""
    key = probe.fresh()
    first, again = probe.first(key), probe.send(key)
    if first.header("Set-Cookie") is not None and first.header("Set-Cookie") == again.header("Set-Cookie"):
        return Failed(
            "no stored cookie in a replay", f"Set-Cookie of {len(again.header('Set-Cookie') or '')} characters"
        )
    return Passed()


def no_reflection(probe: Probe) -> Verdict:
    """A key is no page."""
    answer = probe.fire(probe.raw_shot(f'"{_SCRIPT}{probe.fresh()}' + "x" * 256 + '"'))
    media = (answer.header("Content-Type") or "").lower()
    if _SCRIPT.encode() in answer.body and "html" in media:
        return Failed("a refusal that is no page with the key in it", f"{shown(answer)} as {media}")
    return Passed()


def told_apart(probe: Probe) -> Verdict:
    """A client can tell a missing key from a mismatch by more than the status."""
    key = probe.fresh()
    probe.first(key)
    refused, missing = probe.send(key, body=probe.other_body), probe.fire(probe.raw_shot())
    for answer in (refused, missing):
        if answer.status < BAD_REQUEST:
            raise UndecidedError(f"there was no refusal to look at, but {shown(answer)}")
        if not _names(answer):
            return Failed("a body with type, code or error", f"{shown(answer)} without")
    if _names(refused) == _names(missing):
        return Failed("another type or code for each kind of refusal", f"the same for both: {_names(refused)}")
    return Passed()


def _secrets(probe: Probe, first: Answer) -> list[str]:
    """Texts that only the first request and its answer have."""
    found = [first.header("Location") or ""]
    sent = probe.other_body.decode("utf-8", "replace")
    for body in (first.body, probe.target.body if probe.target.is_json else b"null"):
        try:
            found += bodies.texts(json.loads(body))
        except ValueError:
            continue
    return [text for text in found if len(text) >= _SHORTEST and text not in sent]


def _names(answer: Answer) -> list[str]:
    try:
        document = json.loads(answer.body)
    except ValueError:
        return []
    inner = document.get("error") if isinstance(document, dict) else None
    places = [place for place in (document, inner) if isinstance(place, dict)]
    return [
        str(place[name]) for place in places for name in ("type", "code", "title") if isinstance(place.get(name), str)
    ]


CLAUSES: Final = (
    Clause(
        id="leaks.mismatch",
        title="The refusal of another body says nothing about the first one",
        why="Whoever guesses a key would read what was bought, and by whom.",
        area=Area.LEAKS,
        severity=Severity.CRITICAL,
        requirements=("R20", "R42"),
        needs=(Need.OTHER_BODY,),
        shots=2,
        judge=mismatch_is_mute,
    ),
    Clause(
        id="leaks.fingerprint",
        title="Refusals show no hash of the request",
        why="Bodies are easy to guess, and a hash says when the guess was right.",
        area=Area.LEAKS,
        severity=Severity.MEDIUM,
        requirements=("R42",),
        must=SAFE,
        should=EVERY - SAFE,
        needs=(Need.OTHER_BODY,),
        shots=2,
        judge=no_fingerprint,
    ),
    Clause(
        id="leaks.cookie",
        title="Replays do not hand out the first answer's cookie",
        why="A stored session would be given to every retry.",
        area=Area.LEAKS,
        severity=Severity.HIGH,
        requirements=("R90",),
        must=SAFE,
        should=EVERY - SAFE,
        shots=2,
        judge=no_cookie,
    ),
    Clause(
        id="leaks.reflection",
        title="A key is not repeated in a page",
        why="A key with a script in it would run in a browser.",
        area=Area.LEAKS,
        severity=Severity.HIGH,
        requirements=("R195",),
        shots=1,
        judge=no_reflection,
    ),
    Clause(
        id="leaks.told-apart",
        title="Each kind of refusal has its own type or code",
        why="Statuses are shared with the application's own refusals, so clients cannot decide by them.",
        area=Area.LEAKS,
        severity=Severity.LOW,
        requirements=("R99", "R229"),
        must=SAFE,
        should=DRAFT - SAFE,
        needs=(Need.OTHER_BODY,),
        shots=3,
        judge=told_apart,
    ),
)
