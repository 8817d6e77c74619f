"""Sighting shots: whether the API can be checked at all, which keys it takes, and how fast it is."""

from __future__ import annotations

import time
from dataclasses import replace

from oncekey.conformance import bodies, shots
from oncekey.conformance.clauses import Profile, UndecidedError
from oncekey.conformance.probe import Probe
from oncekey.conformance.shots import Answer
from oncekey.conformance.target import Target
from oncekey.core.errors import OncekeyError

_SHOWN = 300


class CannotCheckError(OncekeyError):
    """The API cannot be checked as it was described; the message says what was seen."""


def take_aim(target: Target, profile: Profile, most: int) -> Probe:
    """A probe for this API, after a few requests that must go well."""
    probe = None
    seen: list[Answer] = []
    bare = profile in {Profile.STRIPE, Profile.CONFLICT}
    for quoted in (not bare, bare):
        trial = Probe(target, quoted=quoted, usual=0, latency=0.0, most=most)
        began = time.monotonic()
        answer = trial.send(trial.fresh())
        if not answer.status:
            raise CannotCheckError(f"{target.address} does not answer: {answer.reason}")
        if answer.ok:
            latency = time.monotonic() - began
            probe = Probe(target, quoted=quoted, usual=answer.status, latency=latency, most=most)
            probe.sent = trial.sent + len(seen)
            break
        seen.append(answer)
    if probe is None:
        raise CannotCheckError(_refusal(target, seen[0]))
    _count_works(probe)
    _find_other_body(probe)
    return probe


def _count_works(probe: Probe) -> None:
    """One request moves the count by one, or counting would prove nothing."""
    try:
        before = probe.count()
        if before is None:
            return
        probe.first(probe.fresh())
        effects = probe.since(before)
    except UndecidedError as error:
        raise CannotCheckError(str(error)) from None
    if effects != 1:
        raise CannotCheckError(
            f"one request with a fresh key moved the count at {probe.target.count_address} by {effects}, not by 1: "
            "choose a --count-url and --count-pointer that count the effects of this operation, all of them, "
            "and an API that nobody else uses meanwhile"
        )


def _find_other_body(probe: Probe) -> None:
    """A body that differs and is taken under a key of its own, so that a refusal is about the key."""
    target = probe.target
    given = target.other_body is not None
    body = target.other_body if given or not target.is_json else bodies.other(target.body)
    if body is None:
        return
    answer = shots.fire(probe.shot(probe.fresh(), body=body), target.timeout)
    probe.sent += 1
    if given and not answer.ok:
        raise CannotCheckError(f"--other-body was not taken under a fresh key: {_told(answer)}")
    probe.target = replace(target, other_body=body if answer.ok else None)


def _refusal(target: Target, answer: Answer) -> str:
    return (
        f"{target.method} {target.address} with a fresh key must succeed before anything can be checked, "
        f"and got {_told(answer)}"
    )


def _told(answer: Answer) -> str:
    text = " ".join(answer.body.decode("utf-8", "replace").split())
    shown = text if len(text) <= _SHOWN else f"{text[:_SHOWN]}…"
    return f"{answer.status} {answer.reason}".strip() + (f": {shown}" if shown else "")
