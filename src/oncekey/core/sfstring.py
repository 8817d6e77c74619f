"""The part of RFC 9651 (Structured Fields) that an idempotency key needs: an Item that is a String.

Parameters are parsed as strictly as the key itself and then ignored (section 2.2 of the RFC discourages
refusing unknown ones). All that is not a String followed by well-formed parameters is refused.
"""

from __future__ import annotations

import re
from typing import Final
from urllib.parse import unquote_to_bytes

_STRING: Final = re.compile(rb'"((?:[ !#-\[\]-~]|\\["\\])*)"')
_PLAIN: Final = re.compile(rb'"([ !#-\[\]-~]*)"')
"""The common form: no escapes, no parameters, no spaces around it."""
_ESCAPE: Final = re.compile(r"\\(.)")
_PARAMETER: Final = re.compile(rb"; *[a-z*][a-z0-9_.*-]*(=)?")
# No bare item can be followed by a character that would continue it, so a match that stops too early
# (a 16th digit, a fourth decimal place) leaves a rest that the caller refuses.
_BARE_ITEM: Final = re.compile(
    rb"-?[0-9]{1,12}\.[0-9]{1,3}"  # Decimal
    rb"|-?[0-9]{1,15}"  # Integer
    rb'|"(?:[ !#-\[\]-~]|\\["\\])*"'  # String
    rb"|[A-Za-z*][A-Za-z0-9!#$%&'*+.^_`|~:/-]*"  # Token
    rb"|:(?:(?:[A-Za-z0-9+/]{4})+={0,2}|(?:[A-Za-z0-9+/]{4})*[A-Za-z0-9+/]{2,3}={0,2})?:"  # Byte Sequence
    rb"|\?[01]"  # Boolean
    rb"|@-?[0-9]{1,15}"  # Date
    rb'|%"(?P<display>(?:[ !#$&-~]|%[0-9a-f]{2})*)"'  # Display String
)


class NotAStringItemError(ValueError):
    """The field value is not a String item; the message says why, without quoting the value."""


def parse_string_item(field: bytes) -> str:
    """The String that `field` holds, its escapes resolved and its parameters dropped."""
    plain = _PLAIN.fullmatch(field)
    if plain is not None:
        return plain[1].decode("ascii")
    value = field.strip(b" ")
    found = _STRING.match(value)
    if found is None:
        raise NotAStringItemError(
            "it is not a String of RFC 9651: between double quotes only printable ASCII is allowed, "
            'and a backslash only before a double quote or another backslash (\\" or \\\\)'
        )
    end = _skip_parameters(value, found.end())
    if end < len(value):
        if value[end:].lstrip(b" ").startswith(b","):
            raise NotAStringItemError("it is a list, and exactly one value is allowed")
        raise NotAStringItemError("there is more after the closing quote than parameters (;name or ;name=value)")
    return _ESCAPE.sub(r"\1", found[1].decode("ascii"))


def _skip_parameters(value: bytes, position: int) -> int:
    """The position after all the parameters that start at `position`."""
    while name := _PARAMETER.match(value, position):
        position = name.end()
        if name[1] is None:
            continue
        item = _BARE_ITEM.match(value, position)
        if item is None:
            raise NotAStringItemError("a parameter has no valid value after its equals sign")
        if item["display"] is not None:
            _require_utf8(item["display"])
        position = item.end()
    return position


def _require_utf8(display: bytes) -> None:
    try:
        unquote_to_bytes(display).decode("utf-8")
    except UnicodeDecodeError:
        raise NotAStringItemError("a parameter is a Display String that is not UTF-8") from None
