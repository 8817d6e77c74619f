"""Creates variants of a request body, and compares response bodies.

It supports JSON pointers (RFC 6901) as far as counting needs them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any, Final, TypeAlias

from oncekey_check.raw_http import Answer


def amount_at(document: object, pointer: str) -> int:
    """The number at a pointer, or the length of the list there; raises `ValueError` otherwise."""
    if pointer and not pointer.startswith("/"):
        raise ValueError(f"the pointer {pointer!r} must begin with a slash, or be empty for the whole document")
    place = document
    for step in pointer.split("/")[1:]:
        place = _inside(place, step.replace("~1", "/").replace("~0", "~"), pointer)
    match place:
        case bool():
            pass
        case int():
            return place
        case float() if place.is_integer():
            return int(place)
        case list():
            return len(place)
    raise ValueError(f"there is neither a whole number nor a list at {pointer!r}")


def _inside(place: object, step: str, pointer: str) -> object:
    match place:
        case dict() if step in place:
            return place[step]
        case list() if step.isdecimal() and int(step) < len(place):
            return place[int(step)]
    raise ValueError(f"there is no {step!r} on the way to {pointer!r}")


Path: TypeAlias = tuple[str | int, ...]
"""The names and indexes that lead to a place in a document."""

_MARKS: Final = re.compile(r"replay|idempot|duplicat|cached|repeat", re.IGNORECASE)
_HERE: Final = "oncekey-check-puts-it-here"


def parsed(body: bytes) -> object:
    """The body as JSON; raises `ValueError` if it is not JSON."""
    return json.loads(body.decode("utf-8"))


def others(body: bytes) -> Iterator[bytes]:
    """The same body with one value changed: each number in turn, then each string, then each boolean."""
    document = parsed(body)
    found = list(leaves(document))
    for kind in (is_number, lambda value: isinstance(value, str), lambda value: isinstance(value, bool)):
        for path, value in found:
            if kind(value):
                yield json.dumps(put(document, path, changed(value))).encode()


def changed(value: Any) -> object:  # noqa: ANN401  (JSON is anything)
    """Another value of the same type."""
    match value:
        case bool():
            return not value
        case int() | float():
            return value + 1
        case str():
            return f"{value}x"
    return "x"


def spaced(body: bytes) -> bytes:
    """The same body with other white space, and with its members in the opposite order."""
    return json.dumps(_reversed(parsed(body)), indent=3, separators=(" ,", " : ")).encode()


def escaped(body: bytes) -> bytes:
    """The same body with every letter of every text as an escape; the names of members stay readable."""
    return _escaped(parsed(body)).encode()


def broken(body: bytes) -> bytes:
    """The body, changed so that it is no longer JSON."""
    return body.rstrip()[:-1]


def lacking(body: bytes) -> Iterator[bytes]:
    """The same object without one member, for every member."""
    document = parsed(body)
    if isinstance(document, dict):
        for name in document:
            yield json.dumps({known: value for known, value in document.items() if known != name}).encode()


def leaves(document: Any, path: Path = ()) -> Iterator[tuple[Path, Any]]:  # noqa: ANN401  (JSON is anything)
    """Every value that is neither an object nor an array, with its path."""
    match document:
        case dict():
            for name, value in document.items():
                yield from leaves(value, (*path, name))
        case list():
            for place, value in enumerate(document):
                yield from leaves(value, (*path, place))
        case _:
            yield path, document


def containers(document: Any, path: Path = ()) -> Iterator[tuple[Path, Any]]:  # noqa: ANN401  (JSON is anything)
    """Every object and every array, with its path, the outermost first."""
    if not isinstance(document, dict | list):
        return
    yield path, document
    for place, value in document.items() if isinstance(document, dict) else enumerate(document):
        yield from containers(value, (*path, place))


def put(document: Any, path: Path, value: object) -> Any:  # noqa: ANN401  (JSON is anything)
    """The document with another value at a place; a missing member is added."""
    if not path:
        return value
    copy = document.copy()
    place = path[0]
    copy[place] = put(document[place], path[1:], value) if path[1:] else value
    return copy


def spelt(document: object, path: Path, text: str) -> bytes:
    """The document with a literal JSON text at a place, which no Python value is serialised to."""
    return json.dumps(put(document, path, _HERE)).replace(json.dumps(_HERE), text).encode()


def is_number(value: object) -> bool:
    """Whether a value is a JSON number, and not a boolean."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def _reversed(document: Any) -> Any:  # noqa: ANN401  (JSON is anything)
    match document:
        case dict():
            return {name: _reversed(value) for name, value in reversed(document.items())}
        case list():
            return [_reversed(value) for value in document]
    return document


def _escaped(document: Any) -> str:  # noqa: ANN401  (JSON is anything)
    match document:
        case dict():
            members = [f"{json.dumps(name)}:{_escaped(value)}" for name, value in document.items()]
            return f"{{{','.join(members)}}}"
        case list():
            return f"[{','.join(map(_escaped, document))}]"
        case str() if "{{" in document:
            return json.dumps(document)  # a placeholder must stay readable
        case str():
            units = document.encode("utf-16-be").hex()
            escapes = [f"\\u{units[at : at + 4]}" for at in range(0, len(units), 4)]
            return f'"{"".join(escapes)}"'
    return json.dumps(document)


def is_same(first: Answer, again: Answer, ignored: frozenset[Path] = frozenset()) -> bool:
    """Whether both responses report the same outcome. Other clauses judge whether status and bytes are equal, too."""
    places = {answer.header("Location") for answer in (first, again)} - {None}
    if first.ok != again.ok or len(places) > 1:
        return False
    return first.body == again.body or _meaning(first, ignored) == _meaning(again, ignored)


def volatile(fresh: Answer, first: Answer, again: Answer) -> frozenset[Path]:
    """The places of a response whose values are new in every response, such as a request id.

    They are those that differ between a response and its replay. If the responses of two operations differ in no other
    place, the retry may not have been a replay, and no place counts as volatile. A member that only marks the replay
    is volatile, too.
    """
    one, two, marks = _leaves(first), _leaves(again), body_markers(first, again)
    found = frozenset(path for path in one if path in two and one[path] != two[path]) | marks
    if one.keys() != two.keys() - marks | (one.keys() & marks) or is_same(fresh, first, found):
        return frozenset()
    return found


def body_markers(first: Answer, again: Answer) -> frozenset[Path]:
    """The members that mark a replay inside the body, such as `"replayed": true`: true there, and not in the first."""
    one, two = _leaves(first), _leaves(again)
    return frozenset(
        path
        for path, value in two.items()
        if value is True and one.get(path, False) is False and path and _MARKS.search(str(path[-1]))
    )


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
