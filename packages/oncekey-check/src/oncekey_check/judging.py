"""Judgements on responses that several clauses share, and short descriptions of responses."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from typing import Final

from oncekey_check.bodies import Path, leaves
from oncekey_check.carrier import MARKER
from oncekey_check.clauses import (
    EVERY,
    SAFE,
    CheckProfile,
    Failed,
    Harm,
    InconclusiveError,
    Need,
    Passed,
    Skipped,
    Verdict,
)
from oncekey_check.probe import Probe
from oncekey_check.raw_http import Answer

MISMATCH: Final[Mapping[CheckProfile, Collection[int]]] = {
    CheckProfile.IETF: {422},
    CheckProfile.STRIPE: {400},
    CheckProfile.CONFLICT: {409},
    CheckProfile.STRICT_MONEY: {422},
}
"""The status for another request under a used key, by profile."""

BAD_REQUEST, CONFLICT, SERVER_ERROR = 400, 409, 500
_LOCKED, _TOO_EARLY = 423, 425
_SHOWN: Final = 40
_PLAIN_NAME: Final = re.compile(r"[\w.-]+", re.ASCII)


def shown(answer: Answer) -> str:
    """A response in a few words."""
    if not answer.status:
        return f"no response ({answer.reason})"
    marked = ", marked as a replay" if is_marked(answer) else ""
    return f"{answer.status}{marked}, {len(answer.body)} bytes"


def differing(probe: Probe, first: Answer, again: Answer) -> str:
    """A response in a few words, and where it differs from the first one, which it should have equalled."""
    found = difference(first, again, probe.habits.volatile) if first.ok == again.ok else ""
    return f"{shown(again)}, {found}" if found else shown(again)


def difference(first: Answer, again: Answer, volatile: frozenset[Path] = frozenset()) -> str:
    """The first difference of two responses: in the body, if possible outside the volatile places, or in Location."""
    if first.body != again.body:
        return _difference_of_bodies(first.body, again.body, volatile)
    one, two = first.header("Location"), again.header("Location")
    return "" if one == two else f"Location: {_clipped(two)} instead of {_clipped(one)}"


def _difference_of_bodies(one: bytes, two: bytes, volatile: frozenset[Path]) -> str:
    try:
        first, again = json.loads(one), json.loads(two)
        if first == again:
            return "the same JSON in another spelling"
        known, new = dict(leaves(first)), dict(leaves(again))
    except (ValueError, RecursionError):
        return _difference_of_bytes(one, two)
    changed = [path for path in {**known, **new} if path not in known or path not in new or known[path] != new[path]]
    if not changed:
        return "another body"
    path = min(changed, key=lambda path: path in volatile)
    if path not in new:
        return f"another body: without {_named(path)}"
    if path not in known:
        return f"another body: with {_named(path)}"
    member = f"{_named(path)} " if path else ""
    return f"another body: {member}{_clipped(new[path])} instead of {_clipped(known[path])}"


def _difference_of_bytes(one: bytes, two: bytes) -> str:
    shorter = min(len(one), len(two))
    place = next((at for at in range(shorter) if one[at] != two[at]), shorter)
    was, now = (body[place : place + _SHOWN].decode("utf-8", "replace") for body in (one, two))
    return f"another body: from byte {place} {_clipped(now)} instead of {_clipped(was)}"


def _named(path: Path) -> str:
    """A place in a document, such as `items.0.id`."""
    text = ".".join(map(str, path))
    return text if _PLAIN_NAME.fullmatch(text) else _clipped(text)


def _clipped(value: object) -> str:
    """A value as JSON, which escapes control characters; a long one is cut."""
    text = json.dumps(value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}…"


def tally(answers: Iterable[Answer]) -> str:
    """Several responses in a few words."""
    counts: dict[str, int] = {}
    for answer in answers:
        word = str(answer.status or "no response")
        counts[word] = counts.get(word, 0) + 1
    return ", ".join(f"{number} times {word}" for word, number in sorted(counts.items()))


def is_marked(answer: Answer) -> bool:
    """Whether the response has the marker of a replay."""
    return (answer.header(MARKER) or "").lower() == "true"


def gets(answer: Answer, statuses: Collection[int], when: str) -> Verdict:
    """Passed if the response has one of these statuses, in every profile."""
    if answer.status in statuses:
        return Passed()
    return Failed(f"{when}: {wanted(statuses)}", shown(answer))


def gets_by_profile(answer: Answer, statuses: Mapping[CheckProfile, Collection[int]], when: str) -> Verdict:
    """Passed in the profiles that allow the response's status; failed in the others.

    423 and 425 with Retry-After also mean 'wait'; profiles that are not strict only advise against them.
    """
    wrong = frozenset(profile for profile, allowed in statuses.items() if answer.status not in allowed)
    if not wrong:
        return Passed()
    expected = {profile: f"{when}: {wanted(statuses[profile])}" for profile in statuses if profile in wrong}
    every = "; ".join(f"{wanted(statuses[profile])} in {profile}" for profile in expected)
    waits = answer.status in {_LOCKED, _TOO_EARLY} and answer.header("Retry-After")
    return Failed(
        f"{when}: {every}",
        shown(answer),
        only=wrong,
        mild=EVERY - SAFE if waits else frozenset(),
        expected_in=expected,
        headline=(Harm.UNTOLD, f"{when.capitalize()} received {answer.status} instead of 409") if waits else None,
    )


def one_operation(probe: Probe, effects: int | None, first: Answer, again: Answer, what: str) -> Verdict:
    """Passed if both requests were one operation: by the count if there is one, and by the responses if they show it.

    The clauses about replays report an API that executes plain retries, or responds to them differently; a clause that
    only happens to use a retry does not report it again.
    """
    if effects is not None and effects > 1 and not probe.habits.protects:
        raise InconclusiveError("a plain retry is also executed again")
    if effects is not None and effects > 1:
        return Failed(f"{what}: one operation", f"{effects} effects; {shown(first)}, then {shown(again)}")
    if probe.same(first, again):
        return Passed()
    if probe.habits.replays:
        return Failed(f"{what}: {shown(first)} again", differing(probe, first, again))
    if effects is None:
        raise InconclusiveError("a plain retry does not receive the first response either", Need.COUNT)
    return Passed()


def needs_replays(probe: Probe) -> None:
    """Raise unless a plain retry receives the first response; other clauses report an API where it does not."""
    if not probe.habits.replays:
        raise InconclusiveError("a plain retry does not receive the first response either")


def needs_comparison(probe: Probe) -> None:
    """Raise unless another body under a used key is refused; other clauses report an API that accepts it."""
    if not probe.habits.compares:
        raise InconclusiveError("another body under a used key is not refused at all")


def two_operations(probe: Probe, effects: int | None, first: Answer, second: Answer, what: str) -> Verdict:
    """Passed if both requests were executed."""
    same = probe.same(first, second)
    executed = not same if effects is None else effects > 1
    if second.ok and executed and not is_marked(second):
        return Passed()
    probe.recount()
    seen = f"{shown(first)}, then {shown(second)}{', the same body' if same else ''}"
    return Failed(f"{what}: two operations", seen if effects is None else f"{seen}; effects: {effects}")


def not_replayed(probe: Probe, effects: int | None, first: Answer, again: Answer, what: str) -> Verdict:
    """Passed if the second request did not receive the first response. It may be refused or executed.

    Some APIs mark every replay with a status such as 409: a refusal whose body is the first one is not a refusal.
    """
    if not again.ok and probe.habits.distinct and first.body and first.body == again.body:
        return Failed(f"{what}: not the first response", f"{shown(again)}, the body of the first response")
    if not again.ok:
        return Passed()
    same = probe.same(first, again)
    if same and effects is None and not probe.habits.distinct and not is_marked(again):
        raise InconclusiveError("all responses are equal, and effects are not counted", Need.COUNT)
    if is_marked(again) or (same if effects is None else effects <= 1):
        probe.recount()
        other = not same and not is_marked(again)
        headline = (Harm.WRONG, f"{what.capitalize()} received a success, but was not executed") if other else None
        return Failed(f"{what}: not the first response", f"{shown(again)}, and it was not executed", headline=headline)
    return Passed()


def unproven(probe: Probe, first: Answer, again: Answer) -> tuple[Harm, str] | None:
    """The headline for another body that received a success, if the response does not show whether it was executed.

    If plain retries receive other responses too, another response is neither the first one nor proof of an execution.
    """
    if probe.habits.replays or probe.same(first, again):
        return None
    return Harm.WRONG, "Another body under a used key received a success"


def wanted(statuses: Collection[int]) -> str:
    """Statuses as a list in words."""
    return " or ".join(map(str, sorted(statuses)))


def worst_of(probe: Probe, cases: Iterable[Verdict]) -> Verdict:
    """The failure in most profiles, otherwise the first case that could not be judged, otherwise `Passed`.

    `cases` is lazy: cases are tried one by one, so that a failure has only the requests of its own case.
    """
    failed: list[Failed] = []
    skipped: list[Skipped] = []
    probe.trail = []
    try:
        for verdict in cases:
            match verdict:
                case Failed():
                    failed.append(replace(verdict, exchange=tuple(probe.trail)))
                case Skipped():
                    skipped.append(verdict)
                case Passed():
                    pass
            probe.trail = []
    except InconclusiveError as error:
        skipped.append(error.verdict)
    failed.sort(key=lambda verdict: -len(verdict.only))
    return failed[0] if failed else skipped[0] if skipped else Passed()
