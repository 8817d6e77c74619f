"""Bodies made from the one that was given: other ones that an API would take too, and other spellings of the same."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any


def parsed(body: bytes) -> object:
    """The body as JSON; `ValueError` if it is none."""
    return json.loads(body.decode("utf-8"))


def other(body: bytes) -> bytes | None:
    """The same body with one value changed: a number if there is one, else a text; None where neither is."""
    document = parsed(body)
    for change in (_next_number, _longer_text):
        changed, done = _change_first(document, change)
        if done:
            return json.dumps(changed).encode()
    return None


def spaced(body: bytes) -> bytes:
    """Other white space, and members in the opposite order."""
    return json.dumps(_reversed(parsed(body)), indent=3, separators=(" ,", " : ")).encode()


def escaped(body: bytes) -> bytes:
    """Every letter of every text as an escape; names of members stay, so that nobody has to look twice."""
    return _escaped(parsed(body)).encode()


def broken(body: bytes) -> bytes:
    """No JSON any more."""
    return body.rstrip()[:-1]


def texts(document: object) -> Iterator[str]:
    """Every text value in a document."""
    match document:
        case dict():
            for value in document.values():
                yield from texts(value)
        case list():
            for value in document:
                yield from texts(value)
        case str():
            yield document


def _next_number(value: object) -> object:
    return value + 1 if isinstance(value, int | float) and not isinstance(value, bool) else None


def _longer_text(value: object) -> object:
    return f"{value}x" if isinstance(value, str) else None


def _change_first(document: Any, change: Any) -> tuple[Any, bool]:  # noqa: ANN401  (JSON is anything)
    if isinstance(document, dict | list):
        pairs = document.items() if isinstance(document, dict) else enumerate(document)
        for place, value in pairs:
            changed, done = _change_first(value, change)
            if done:
                copy = document.copy()
                copy[place] = changed
                return copy, True
        return document, False
    changed = change(document)
    return (document, False) if changed is None else (changed, True)


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
        case str():
            units = document.encode("utf-16-be").hex()
            escapes = [f"\\u{units[at : at + 4]}" for at in range(0, len(units), 4)]
            return f'"{"".join(escapes)}"'
    return json.dumps(document)
