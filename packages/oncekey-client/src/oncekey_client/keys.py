"""How the client parses and judges keys: Strings of RFC 9651, and keys that look like personal data.

The library has the same rules for servers, and neither package imports the other: `tests/client/test_agreement.py`
compares them.
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
    """The String in `field`, with its escapes resolved and its parameters dropped."""
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
            raise NotAStringItemError("it is a list, but exactly one value is allowed")
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


_EMAIL: Final = re.compile(r"[A-Za-z0-9._+-]+(?:@|%40)[A-Za-z0-9-]+(?:\.[A-Za-z0-9-]+)*\.[A-Za-z]{2,}")
_PHONE: Final = re.compile(
    r"(?<![0-9A-Za-z+/=])\+[1-9](?:[ ./()-]{0,2}[0-9]){7,14}(?![0-9A-Za-z])"  # international
    r"|(?<![0-9A-Za-z-])(?:\([0-9]{3}\) ?|[0-9]{3}[ .-])[0-9]{3}[ .-][0-9]{4}(?![0-9A-Za-z-])"
)
_SOCIAL_SECURITY: Final = re.compile(r"(?<![0-9A-Za-z-])[0-9]{3}-[0-9]{2}-[0-9]{4}(?![0-9A-Za-z-])")
_GROUPS: Final = re.compile(r"[0-9][ .-][0-9]{4}")
"""The end of every number that is not international: only such keys need a closer look."""
_LONGEST_ALONE: Final = len("555-123-4567")


def looks_personal(key: str) -> bool:
    """Whether the key contains an obvious e-mail address, telephone or social security number.

    The patterns take several microseconds, and nearly no key can match them. In a key of letters, digits and hyphens
    only, such as a UUID, a match has no border inside the key: it can only be the whole key, and a short one.
    """
    if len(key) > _LONGEST_ALONE and key.isascii() and key.replace("-", "").isalnum():
        return False
    if ("@" in key or "%40" in key) and _EMAIL.search(key):
        return True
    if "+" not in key and not _GROUPS.search(key):
        return False
    return _PHONE.search(key) is not None or _SOCIAL_SECURITY.search(key) is not None
