"""JSON pointers (RFC 6901), as far as counting needs them."""

from __future__ import annotations


def amount_at(document: object, pointer: str) -> int:
    """The number at a place, or the length of the list there; `ValueError` says what is there instead."""
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
