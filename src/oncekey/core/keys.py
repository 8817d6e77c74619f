"""The `Idempotency-Key` field: parses its lines to the key, or to a sentence that describes the mistake.

A field that cannot be parsed is always an error and never treated as absent: RFC 9651 would allow that, and
the request would run unprotected. No message contains the key, which is why the parser's positions
and characters are not reported either.

Of RFC 9651 (Structured Fields) a key needs an Item that is a String. Parameters are parsed as strictly as the key
itself and then ignored (section 2.2 of the RFC discourages refusing unknown ones). Anything but a String followed by
well-formed parameters is rejected.
"""

from __future__ import annotations

import re
from enum import StrEnum
from hashlib import sha256
from typing import TYPE_CHECKING, Final
from urllib.parse import unquote_to_bytes

from oncekey.canonical.digests import raw
from oncekey.core.errors import KeyMalformedError

if TYPE_CHECKING:
    from collections.abc import Sequence


_STRING: Final = re.compile(rb'"((?:[ !#-\[\]-~]|\\["\\])*)"')
_PLAIN: Final = re.compile(rb'"([ !#-\[\]-~]*)"')
"""The common form: no escapes, no parameters, no spaces around it."""
_ESCAPE: Final = re.compile(r"\\(.)")
_PARAMETER: Final = re.compile(rb"; *[a-z*][a-z0-9_.*-]*(=)?")
# No bare item can be followed by a character that would continue it, so a match that stops too early
# (a 16th digit, a fourth decimal place) leaves a rest that the caller rejects.
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


_BARE: Final = re.compile(rb"[A-Za-z0-9._~/+=-][A-Za-z0-9._~:/+=@-]*")
_QUOTED: Final = re.compile(rb'"([!#-\[\]-~]+)"')
"""A key in quotes without escapes, parameters and spaces: the form of nearly all quoted keys."""
_UUID: Final = re.compile(r"[0-9A-Fa-f]{8}(?:-[0-9A-Fa-f]{4}){3}-[0-9A-Fa-f]{12}")
_EMAIL: Final = re.compile(r"[A-Za-z0-9._+-]+(?:@|%40)[A-Za-z0-9-]+(?:\.[A-Za-z0-9-]+)*\.[A-Za-z]{2,}")
_PHONE: Final = re.compile(
    r"(?<![0-9A-Za-z+/=])\+[1-9](?:[ ./()-]{0,2}[0-9]){7,14}(?![0-9A-Za-z])"  # international
    r"|(?<![0-9A-Za-z-])(?:\([0-9]{3}\) ?|[0-9]{3}[ .-])[0-9]{3}[ .-][0-9]{4}(?![0-9A-Za-z-])"
)
_SOCIAL_SECURITY: Final = re.compile(r"(?<![0-9A-Za-z-])[0-9]{3}-[0-9]{2}-[0-9]{4}(?![0-9A-Za-z-])")
_GROUPS: Final = re.compile(r"[0-9][ .-][0-9]{4}")
"""The end of every number that is not international: no other key needs a closer check."""
_LONGEST_ALONE: Final = len("555-123-4567")
_DIGEST_LENGTH: Final = 16
_FEW_CHARACTERS: Final = 4
_UUID_LENGTH: Final = 36
_COUNTER: Final = re.compile(r"(?:(?:[a-z]+|[A-Z]+)[-_.:#/])+[0-9]{1,20}|0{4,}[0-9]*")
"""Words and a number, or a number that is filled up with zeros: `order-000042`, `ACME:ORDER:42`, `0000000000000042`."""
_ROW: Final = "0123456789" * 8 + "abcdefghijklmnopqrstuvwxyz0123456789"
_ROWS: Final = f"{_ROW}\n{_ROW[::-1]}"
"""Characters in the order of the alphabet, forwards and backwards."""


class HeaderSyntax(StrEnum):
    """Which forms of the field are accepted."""

    STRICT = "strict"
    """Only the quoted String of RFC 9651, as in the IETF draft."""
    COMPAT = "compat"
    """Quoted or bare; both forms of one value are one key."""
    BARE = "bare"
    """Only the bare value, as most vendors document it."""


class KeyFormat(StrEnum):
    """What a key must look like."""

    OPAQUE = "opaque"
    UUID = "uuid"
    """Any 8-4-4-4-12 hexadecimal digits: real clients generate some without version bits."""


def parse_key(
    lines: Sequence[bytes],
    *,
    syntax: HeaderSyntax = HeaderSyntax.COMPAT,
    key_format: KeyFormat = KeyFormat.OPAQUE,
    min_length: int = 16,
    max_length: int = 255,
) -> str | None:
    """The key in the values of all `Idempotency-Key` field lines; None if there is no such line.

    The lower bound is a heuristic against keys that collide by accident, not a proof of entropy. The key
    is opaque: it is compared byte for byte, and a UUID keeps the case it came in.

    Raises:
        KeyMalformedError: There is a field, and it is not exactly one acceptable key.
    """
    if not lines:
        return None
    if len(lines) > 1:
        raise KeyMalformedError(
            "The Idempotency-Key field was sent more than once; send it exactly once, with one key."
        )
    line = lines[0]
    if syntax is not HeaderSyntax.STRICT and _BARE.fullmatch(line):
        key = line.decode("ascii")
    elif syntax is not HeaderSyntax.BARE and (quoted := _QUOTED.fullmatch(line)):
        key = quoted[1].decode("ascii")
    else:
        key = _decode(line, syntax)
        _check(key, key_format, min_length, max_length)
        return key
    # Neither of the two has a space, so its length is all that there is to check.
    if key_format is not KeyFormat.OPAQUE or not min_length <= len(key) <= max_length:
        _check(key, key_format, min_length, max_length)
    return key


def looks_personal(key: str) -> bool:
    """Whether the key has an obvious e-mail address, telephone or social security number in it.

    The patterns take several microseconds, and nearly no key can match them. In a key of letters, digits and hyphens
    only, such as a UUID, a match cannot begin or end inside the key: it can only be the whole key, and a short one.
    """
    if len(key) > _LONGEST_ALONE and key.isascii() and key.replace("-", "").isalnum():
        return False
    if ("@" in key or "%40" in key) and _EMAIL.search(key):
        return True
    if "+" not in key and not _GROUPS.search(key):
        return False
    return _PHONE.search(key) is not None or _SOCIAL_SECURITY.search(key) is not None


def looks_guessable(key: str) -> bool:
    """Whether the key is obviously not random: a repeated unit, consecutive characters, or a counter.

    False does not prove that the key is random. A random key of 16 characters or more matches once in a
    billion.
    """
    if len(key) == _UUID_LENGTH and key[8] == "-" and len(set(key[:8])) > _FEW_CHARACTERS:
        return False  # as nearly all are
    distinct = len(set(key))
    if distinct <= _FEW_CHARACTERS or _COUNTER.fullmatch(key):
        return True
    if key[:_FEW_CHARACTERS] in key[1:] and key in (key + key)[1:-1]:
        return True  # a unit that is repeated
    plain = key.replace("-", "")
    return (distinct >= len(plain) or plain.isdigit()) and plain.lower() in _ROWS


def key_digest(key: str) -> str:
    """The start of the key's SHA-256 in hex, which logs and metrics show in place of the key."""
    return sha256(raw(key)).hexdigest()[:_DIGEST_LENGTH]


def _decode(line: bytes, syntax: HeaderSyntax) -> str:
    value = line.strip(b" ")
    if not value:
        raise KeyMalformedError("The Idempotency-Key field is empty; send a key, or leave the field out.")
    if value.startswith(b'"'):
        if syntax is HeaderSyntax.BARE:
            raise KeyMalformedError("The Idempotency-Key is quoted; this API takes it without quotes.")
        try:
            return parse_string_item(value)
        except NotAStringItemError as error:
            raise KeyMalformedError(f"The Idempotency-Key cannot be parsed: {error}.") from None
    if syntax is HeaderSyntax.STRICT:
        raise KeyMalformedError(
            "The Idempotency-Key is not a String of RFC 9651; this API takes the key between double quotes."
        )
    if b"," in value:
        raise KeyMalformedError("The Idempotency-Key field holds a list; send exactly one key, without a comma.")
    # A leading ":" or "@" would make it a Byte Sequence or a Date of RFC 9651, which are not keys.
    if not _BARE.fullmatch(value):
        raise KeyMalformedError(
            "The Idempotency-Key has a character that is not allowed without quotes; allowed are the letters "
            "A-Z and a-z, the digits and . _ ~ : / + = @ - where the first one is neither : nor @."
        )
    return value.decode("ascii")


def _check(key: str, key_format: KeyFormat, min_length: int, max_length: int) -> None:
    core = key.strip(" ")
    if not core:
        raise KeyMalformedError("The Idempotency-Key is empty; send a key, or leave the field out.")
    if len(core) < min_length:
        raise KeyMalformedError(
            f"The Idempotency-Key is too short; it must have at least {min_length} characters, "
            "spaces around it not counted. A random UUID is a good key."
        )
    if len(key) > max_length:
        raise KeyMalformedError(f"The Idempotency-Key is too long; it may have at most {max_length} characters.")
    if key_format is KeyFormat.UUID and not _UUID.fullmatch(key):
        raise KeyMalformedError(
            "The Idempotency-Key is not a UUID; it must be hexadecimal digits in groups of 8-4-4-4-12."
        )
