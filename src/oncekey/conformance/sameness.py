"""Whether two answers tell of the same outcome, and which parts of an answer are new in every one."""

from __future__ import annotations

import json
from typing import Any

from oncekey.conformance.bodies import Path, leaves
from oncekey.conformance.shots import Answer


def is_same(first: Answer, again: Answer, ignored: frozenset[Path] = frozenset()) -> bool:
    """Whether both tell of the same outcome; that status and bytes are equal too has clauses of its own."""
    places = {answer.header("Location") for answer in (first, again)} - {None}
    if first.ok != again.ok or len(places) > 1:
        return False
    return first.body == again.body or _meaning(first, ignored) == _meaning(again, ignored)


def volatile(fresh: Answer, first: Answer, again: Answer) -> frozenset[Path]:
    """The places of an answer that are new in every one, such as the number of a request.

    They are those that differ between an answer and its replay. Where nothing else tells two operations apart, the
    retry was no replay, and nothing is known to be volatile.
    """
    one, two = _leaves(first), _leaves(again)
    found = frozenset(path for path in one if path in two and one[path] != two[path])
    if one.keys() != two.keys() or is_same(fresh, first, found):
        return frozenset()
    return found


def _meaning(answer: Answer, ignored: frozenset[Path]) -> object:
    try:
        document = json.loads(answer.body)
    except (ValueError, RecursionError):
        return answer.body
    if not ignored:
        return document
    return {path: value for path, value in leaves(document) if path not in ignored}


def _leaves(answer: Answer) -> dict[Path, Any]:
    try:
        return dict(leaves(json.loads(answer.body)))
    except (ValueError, RecursionError):
        return {}
