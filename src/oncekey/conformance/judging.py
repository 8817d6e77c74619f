"""What several clauses ask of answers, and how they say what they saw."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping
from typing import Final

from oncekey.conformance.clauses import Failed, Passed, Profile, Skipped, Verdict
from oncekey.conformance.probe import MARKER
from oncekey.conformance.shots import Answer

MISMATCH: Final[Mapping[Profile, Collection[int]]] = {
    Profile.IETF: {422},
    Profile.STRIPE: {400},
    Profile.CONFLICT: {409},
    Profile.STRICT_MONEY: {422},
}
"""What another request under a used key gets, by profile."""

BAD_REQUEST, CONFLICT, SERVER_ERROR = 400, 409, 500


def shown(answer: Answer) -> str:
    """An answer in a few words."""
    if not answer.status:
        return f"no answer ({answer.reason})"
    marked = ", marked as a replay" if is_marked(answer) else ""
    return f"{answer.status}{marked}, {len(answer.body)} bytes"


def tally(answers: Iterable[Answer]) -> str:
    """Many answers in a few words."""
    counts: dict[str, int] = {}
    for answer in answers:
        word = str(answer.status or "no answer")
        counts[word] = counts.get(word, 0) + 1
    return ", ".join(f"{number} times {word}" for word, number in sorted(counts.items()))


def is_marked(answer: Answer) -> bool:
    """Whether it says that it is a replay."""
    return (answer.header(MARKER) or "").lower() == "true"


def is_same(first: Answer, again: Answer) -> bool:
    """Whether both tell of the same outcome; that status and bytes are equal too has clauses of its own."""
    return first.ok == again.ok and (first.body == again.body or _meaning(first) == _meaning(again))


def _meaning(answer: Answer) -> object:
    try:
        return json.loads(answer.body)
    except (ValueError, RecursionError):
        return answer.body


def gets(answer: Answer, statuses: Collection[int], when: str) -> Verdict:
    """The answer has one of these statuses, in every profile."""
    if answer.status in statuses:
        return Passed()
    return Failed(f"{when}: {wanted(statuses)}", shown(answer))


def gets_by_profile(answer: Answer, statuses: Mapping[Profile, Collection[int]], when: str) -> Verdict:
    """The answer has one of the statuses that a profile allows; it fails in the others."""
    wrong = frozenset(profile for profile, allowed in statuses.items() if answer.status not in allowed)
    if not wrong:
        return Passed()
    told = "; ".join(f"{wanted(allowed)} in {profile}" for profile, allowed in statuses.items() if profile in wrong)
    return Failed(f"{when}: {told}", shown(answer), only=wrong)


def once(effects: int | None, answers: str, when: str) -> Verdict:
    """There was one effect, if effects can be counted."""
    if effects in {None, 1}:
        return Passed()
    return Failed(f"{when}: 1 effect", f"{effects} effects; answers: {answers}")


def wanted(statuses: Collection[int]) -> str:
    """Statuses as a person lists them."""
    return " or ".join(map(str, sorted(statuses)))


def worst(*verdicts: Verdict) -> Verdict:
    """The first failure, else the first that could not be judged, else `Passed`."""
    failed = [verdict for verdict in verdicts if isinstance(verdict, Failed)]
    skipped = [verdict for verdict in verdicts if isinstance(verdict, Skipped)]
    return failed[0] if failed else skipped[0] if skipped else Passed()
