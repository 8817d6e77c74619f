"""The requests before the first clause: whether the API can be checked, which keys it accepts, and how fast it is."""

from __future__ import annotations

import time
from dataclasses import replace

from oncekey.conformance import bodies, shots
from oncekey.conformance.bodies import is_same, volatile
from oncekey.conformance.clauses import Profile, UndecidedError
from oncekey.conformance.probe import Habits, Probe
from oncekey.conformance.shots import Answer
from oncekey.conformance.target import Target
from oncekey.core.errors import OncekeyError

_SHOWN = 300
_MEMBER = "oncekey_check"
_TEXTS = ('"a"', '"b"')
_MOST_OBJECTS = 3


class CannotCheckError(OncekeyError):
    """The API cannot be checked with these options; the message says what the tester saw."""


def take_aim(target: Target, profile: Profile, most: int) -> Probe:
    """A probe for this API, after a few requests that must succeed."""
    try:
        return _aimed(target, profile, most)
    except UndecidedError as error:
        raise CannotCheckError(f"before the first clause, {error}") from None


def _aimed(target: Target, profile: Profile, most: int) -> Probe:
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
    probe.habits = _habits(probe, answer)
    _find_other_body(probe)
    if probe.target.is_json and probe.target.other_body is not None:
        _find_what_is_compared(probe, probe.target.other_body)
    return probe


def _habits(probe: Probe, first: Answer) -> Habits:
    """Find out what the API does in general, and check that one request raises the count by one."""
    key = probe.fresh()
    before = probe.count()
    second = probe.first(key)
    after = probe.count()
    effects = None if before is None or after is None else after - before
    if effects not in {None, 1}:
        raise CannotCheckError(
            f"one request with a fresh key moved the count at {probe.target.count_address} by {effects}, not by 1: "
            "choose a --count-url and --count-pointer that count the effects of this operation, all of them, "
            "and an API that has no other client meanwhile"
        )
    again = probe.send(key)
    together = probe.since(before)
    new = volatile(first, second, again)
    return Habits(
        distinct=not is_same(first, second, new),
        replays=is_same(second, again, new),
        protects=together in {None, 1},
        volatile=new,
        optional=probe.target.key_optional or probe.fire(probe.raw_shot()).ok,
        opaque=probe.send(probe.fresh_text()).ok,
    )


def _find_other_body(probe: Probe) -> None:
    """Find another body that the API accepts under a key of its own, so that a later refusal is about the key."""
    target = probe.target
    given = target.other_body is not None
    body = target.other_body if given or not target.is_json else bodies.other(target.body)
    if body is None:
        return
    answer = shots.fire(probe.shot(probe.fresh(), body=body), target.timeout)
    probe.sent += 1
    if given and not answer.ok:
        raise CannotCheckError(f"--other-body was not taken under a fresh key: {_shown(answer)}")
    probe.target = replace(target, other_body=body if answer.ok else None)


def _find_what_is_compared(probe: Probe, other: bytes) -> None:
    """Find out whether another body is refused, and where the API accepts and compares an extra member."""
    compares = _refused(probe, probe.target.body, other)
    document = bodies.parsed(probe.target.body)
    objects = [path for path, value in bodies.containers(document) if isinstance(value, dict)]
    places = [(*path, _MEMBER) for path in objects[:_MOST_OBJECTS]] if compares else []
    taken = (path for path in places if _refused(probe, *(bodies.spelt(document, path, text) for text in _TEXTS)))
    probe.habits = replace(probe.habits, compares=compares, free=next(taken, None))


def _refused(probe: Probe, one: bytes, two: bytes) -> bool:
    """Whether the API accepts the first body, and refuses the second under the same key."""
    key = probe.fresh()
    return probe.send(key, body=one).ok and not probe.send(key, body=two).ok


def _refusal(target: Target, answer: Answer) -> str:
    return (
        f"{target.method} {target.address} with a fresh key must succeed before anything can be checked, "
        f"and got {_shown(answer)}"
    )


def _shown(answer: Answer) -> str:
    text = " ".join(answer.body.decode("utf-8", "replace").split())
    shown = text if len(text) <= _SHOWN else f"{text[:_SHOWN]}…"
    return f"{answer.status} {answer.reason}".strip() + (f": {shown}" if shown else "")
