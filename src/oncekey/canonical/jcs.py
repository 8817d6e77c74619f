r"""RFC 8785 (JCS): the canonical form of a JSON text, from bytes to bytes.

Where the standard library is lenient, this is strict: UTF-8 only and no byte order mark, no duplicate name in
one object, no NaN or Infinity, no lone surrogate, no nesting deeper than `max_depth`. Strings are not
normalised: two Unicode encodings of one word are two values. Numbers deviate from RFC 8785 where a double would
round them: `canonical_number` never maps two different amounts to one.

The C parser and the C writer of the standard library do the work. They agree with RFC 8785 on everything except
some numbers, which are rewritten in between, and the order of names with characters beyond U+FFFF (RFC 8785 sorts
UTF-16 code units), for which names are sorted first. A number that no double can hold is rewritten digit by digit,
which takes many times longer than parsing it: a body may have one of them for each 16 bytes.

Nearly every body takes a fast path. There the parser creates its objects itself, without a call of ours for each, and
so silently keeps only the last of two members with one name. The number of colons reveals that: outside of strings a
JSON text has one for each member, and the canonical text has the same strings as the body, so with no `\u` in the body
(which could encode a colon) only a lost member can reduce it. If the numbers differ, if the fast path raises
anything, or if something in the text might be too long or too deep, the exact path starts from the beginning: only it
rejects a body, with the reason.
"""

from __future__ import annotations

import json
import json.encoder
import re
import secrets
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache, partial
from itertools import accumulate
from json.encoder import encode_basestring
from math import isfinite
from typing import Final

from oncekey.core.errors import BodyInvalidError, ConfigurationError


class BigInts(StrEnum):
    """What happens to a number that a double cannot hold."""

    EXACT = "exact"
    """The number keeps its exact value in the canonical form."""
    REJECT = "reject"
    """The number is rejected, and so is an integer outside of +-(2**53 - 1): the rule of I-JSON (RFC 7493).

    A double holds a fraction if the shortest text of the double has the same value: `0.1` is accepted and
    `0.10000000000000001` is not.
    """


MAX_DEPTH: Final = 100
MAX_LITERAL_LENGTH: Final = 2_000
MAX_SAFE_INTEGER: Final = 2**53 - 1
_PLAIN_INTEGER_DIGITS: Final = 21
_LEADING_ZEROS: Final = 6
_LITERAL: Final = re.compile(r"-?([0-9]+)(?:\.([0-9]+))?(?:[eE]([+-]?[0-9]+))?")
_ASTRAL: Final = re.compile("[\U00010000-\U0010ffff]")
_BRACKETS: Final = b"[]{}"
_NOT_BRACKETS: Final = bytes(set(range(256)) - set(_BRACKETS))
_UP_OR_DOWN: Final = bytes.maketrans(_BRACKETS, b"\x01\xff\x01\xff")
_DIGITS_AS_ZERO: Final = bytes(0x30 if byte in b"0123456789" else 0x20 for byte in range(256))
# 15 digits always fit a double, and up to 21 an integer is written without an exponent.
_FITS_A_DOUBLE: Final = 15
_PLAIN_DIGITS: Final = {BigInts.EXACT: 21, BigInts.REJECT: _FITS_A_DOUBLE}
_LONG_DIGITS: Final = {big_ints: b"0" * (limit + 1) for big_ints, limit in _PLAIN_DIGITS.items()}
_BLANKS: Final = " \t\n\r"
_SMALLEST: Final = sys.float_info.min
_LARGEST: Final = sys.float_info.max
_LONGEST_REPR: Final = 24
BYTES_FOR_EACH_EXACT_NUMBER: Final = 16
"""A body may have one number that is rewritten digit by digit per so many bytes: with 17 digits all numbers may be."""
_FEW_NUMBERS: Final = 1_000
# The writer escapes its first character, and the others are secret.
_MARK: Final = "\x00" + secrets.token_hex(8)
_OPENING: Final = f'"\\u0000{_MARK[1:]}'
_CLOSING: Final = f'\\u0000{_MARK[1:]}"'


@dataclass(frozen=True, slots=True)
class Number:
    """A parsed number whose canonical text neither `int` nor `float` would print."""

    text: str


class _NotParsedError(Exception):
    """The C writer found a value that no JSON text has."""


def canonical_json(body: bytes, *, big_ints: BigInts = BigInts.EXACT, max_depth: int = MAX_DEPTH) -> bytes:
    """The canonical form of the JSON text in `body`; equal values give equal bytes.

    Raises:
        BodyInvalidError: It is not JSON, or has no canonical form; the message says why.
    """
    scan, long_digits = _SCAN_EXACT if big_ints is BigInts.EXACT else _SCAN_REJECT
    if (
        b"\\u" not in body
        and not _may_be_costly(body)
        and body.count(b"[") + body.count(b"{") <= max_depth  # so few brackets cannot be nested deeper
        and long_digits not in body.translate(_DIGITS_AS_ZERO)
    ):
        try:
            text = body.decode("utf-8").strip(_BLANKS)
            value, end = scan(text, 0)
            astral = not text.isascii() and _ASTRAL.search(text) is not None
            written = _written(_pieces_in_order, _in_order(value)) if astral else _written(_pieces, value)
        except (ValueError, StopIteration, RecursionError):
            pass
        else:
            if end == len(text) and written.count(":") == body.count(b":"):
                return written.encode("utf-8")
    return serialize_parsed(parse_json(body, big_ints=big_ints, max_depth=max_depth))


def parse_json(body: bytes, *, big_ints: BigInts = BigInts.EXACT, max_depth: int = MAX_DEPTH) -> object:
    """The value of the JSON text in `body`; some numbers are returned as `Number`."""
    try:
        text = body.decode("utf-8")
    except UnicodeDecodeError as error:
        raise BodyInvalidError(f"The JSON is not UTF-8: byte {error.start} is wrong.") from None
    if text.startswith("\ufeff"):
        raise BodyInvalidError("The JSON begins with a byte order mark; send it without.")
    _require_shallow(body, max_depth)
    try:
        return _decoder_for(body, big_ints).decode(text)
    except json.JSONDecodeError as error:
        raise BodyInvalidError(
            f"The body is not valid JSON: there is an error at line {error.lineno}, column {error.colno}."
        ) from None
    except RecursionError:
        raise _too_deep(max_depth) from None


def serialize_parsed(value: object) -> bytes:
    """The canonical form of what `parse_json` returned, or of a selection from it."""
    try:
        text = _written(_pieces, value)
        if not text.isascii() and _ASTRAL.search(text):
            text = _written(_pieces_in_order, _in_order(value))
    except _NotParsedError:
        return serialize(value)
    except RecursionError:
        raise _too_deep(None) from None
    return _utf8(text)


def _in_order(value: object) -> object:
    """The value with the names of every object in the order of RFC 8785."""
    if isinstance(value, dict):
        try:
            return {name: _in_order(value[name]) for name in sorted(value, key=_utf16)}
        except UnicodeEncodeError:
            raise _lone_surrogate() from None
    if isinstance(value, list):
        return [_in_order(item) if isinstance(item, dict | list) else item for item in value]
    return value


def serialize(value: object, *, big_ints: BigInts = BigInts.EXACT, max_depth: int | None = None) -> bytes:
    """The canonical form of a value made of None, bool, int, float, str, lists, tuples and mappings.

    Raises:
        BodyInvalidError: A part has no canonical form: NaN, a lone surrogate, too deep.
        ConfigurationError: A part is not JSON at all, such as a `Decimal` or a name that is not a `str`.
    """
    pieces: list[str] = []
    try:
        _write(value, pieces, big_ints, max_depth, 0)
    except UnicodeEncodeError:
        raise _lone_surrogate() from None
    except RecursionError:
        raise _too_deep(max_depth) from None
    return _utf8("".join(pieces))


def _write(value: object, pieces: list[str], big_ints: BigInts, max_depth: int | None, depth: int) -> None:
    if max_depth is not None and depth >= max_depth and isinstance(value, (list, tuple, Mapping)):
        raise _too_deep(max_depth)
    match value:
        case str():
            pieces.append(encode_basestring(value))
        case None:
            pieces.append("null")
        case bool():
            pieces.append("true" if value else "false")
        case int():
            pieces.append(_integer(value, big_ints))
        case float():
            pieces.append(_double(value, big_ints))
        case Number():
            pieces.append(value.text)
        case list() | tuple():
            opener = "["
            for item in value:
                pieces.append(opener)
                _write(item, pieces, big_ints, max_depth, depth + 1)
                opener = ","
            pieces.append("]" if value else "[]")
        case Mapping():
            opener = "{"
            for name in sorted(value, key=_utf16):
                pieces.append(f"{opener}{encode_basestring(name)}:")
                _write(value[name], pieces, big_ints, max_depth, depth + 1)
                opener = ","
            pieces.append("}" if value else "{}")
        case _:
            raise ConfigurationError(
                f"A fingerprint was requested for a value of type {type(value).__name__}, which JSON does not "
                "have; turn it into a str, an int, a list or a dict first."
            )


def _integer(value: int, big_ints: BigInts) -> str:
    # Converting a huge int to text is slow and limited, so its size is checked first.
    if value.bit_length() > 1024:  # noqa: PLR2004  (the first integer beyond all doubles)
        raise BodyInvalidError("The JSON has a number beyond the range of a double; send it as a string.")
    return canonical_number(int.__repr__(value), big_ints)


def _double(value: float, big_ints: BigInts) -> str:
    if not isfinite(value):
        raise _not_a_number()
    return canonical_number(float.__repr__(value), big_ints)


def _utf16(name: object) -> bytes:
    if not isinstance(name, str):
        raise ConfigurationError(
            f"A fingerprint was requested for an object with a {type(name).__name__} as name; JSON has only str names."
        )
    return name.encode("utf-16-be")


def _utf8(text: str) -> bytes:
    try:
        return text.encode("utf-8")
    except UnicodeEncodeError:
        raise _lone_surrogate() from None


def _require_shallow(body: bytes, max_depth: int) -> None:
    """Refuse deep nesting before a recursive parser sees it, and at the same depth on every stack."""
    if body.count(b"[") + body.count(b"{") <= max_depth:
        return
    if b"\\" in body:
        # Pairs of backslashes first: then a backslash before a quote is one that escapes it.
        body = body.replace(b"\\\\", b"").replace(b'\\"', b"")
    outside_strings = b"".join(body.split(b'"')[::2])
    steps = outside_strings.translate(_UP_OR_DOWN, _NOT_BRACKETS)
    for depth in accumulate(memoryview(steps).cast("b")):
        if depth > max_depth:
            raise _too_deep(max_depth)


def _members(pairs: list[tuple[str, object]]) -> dict[str, object]:
    members = dict(pairs)
    if len(members) != len(pairs):
        (name, _), *_ = Counter(name for name, _ in pairs).most_common(1)
        raise BodyInvalidError(f"The JSON has an object with the same name twice: {name[:40]!a}.")
    return members


def _fraction(literal: str, big_ints: BigInts) -> int | float | Number:
    found = _rewritten(literal, big_ints)
    return Number(found) if type(found) is str else found  # type: ignore[return-value]  # a str has just been excluded


def _marked_fraction(literal: str, big_ints: BigInts) -> int | float | str:
    """`_fraction` for the fast path, whose strings have no control characters: a marked string needs no `Number`."""
    found = _rewritten(literal, big_ints)
    return f"{_MARK}{found}{_MARK}" if type(found) is str else found


def _rewritten(literal: str, big_ints: BigInts) -> int | float | str:
    """A fraction that the C writer writes canonically, else its canonical text."""
    size = len(literal)
    if size <= _FITS_A_DOUBLE + 1:  # the point or the exponent takes at least one character
        double = float(literal)
        # In this range, repr and ECMAScript agree; a zero that is written with other digits is an underflow.
        if 1e-4 <= double < 1e16 or -1e16 < double <= -1e-4 or not literal.strip("-0."):  # noqa: PLR2004
            return int(double) if double.is_integer() else double
        if _SMALLEST <= double <= _LARGEST or -_LARGEST <= double <= -_SMALLEST:
            return _text_of(double)  # so few digits are the same in the double's own text
    elif size <= _LONGEST_REPR:
        double = float(literal)
        if 1e-4 <= abs(double) < 1e16 and float.__repr__(double) == literal and not double.is_integer():  # noqa: PLR2004
            return double
    return canonical_number(literal, big_ints)


@lru_cache(maxsize=16_384)
def _text_of(double: float) -> str:
    """A double as ECMAScript writes it, where Python writes it with an exponent."""
    mantissa, _, exponent = float.__repr__(abs(double)).partition("e")
    text = _layout(mantissa.replace(".", ""), int(exponent) + 1)
    return f"-{text}" if double < 0 else text


def _big_integer(literal: str, big_ints: BigInts) -> int | Number:
    if len(literal) <= _PLAIN_DIGITS[big_ints]:
        return int(literal)
    return Number(canonical_number(literal, big_ints))


def _not_a_number() -> BodyInvalidError:
    return BodyInvalidError("The JSON has NaN or Infinity, which are not JSON; send null or a string.")


def _refuse_constant(_constant: str) -> object:
    raise _not_a_number()


def _marked(value: object) -> str:
    """A `Number` as a string that no body has, so that the C writer accepts it."""
    if type(value) is not Number:
        raise _NotParsedError
    return f"{_MARK}{value.text}{_MARK}"


def _written(pieces: Callable[[object, int], Iterable[str]], value: object) -> str:
    """The text of a value, with the canonical text of every `Number` in it."""
    text = "".join(pieces(value, 0))
    return text.replace(_OPENING, "").replace(_CLOSING, "") if _OPENING in text else text


def _lone_surrogate() -> BodyInvalidError:
    return BodyInvalidError("The JSON has a string with half of a surrogate pair, which is not Unicode.")


def _too_deep(max_depth: int | None) -> BodyInvalidError:
    limit = "" if max_depth is None else f"; at most {max_depth} levels are allowed"
    return BodyInvalidError(f"The JSON is nested too deeply{limit}.")


def _decoder(
    big_ints: BigInts,
    *,
    long_digits: bool = False,
    checks_members: bool = True,
    fraction: Callable[[str], object] | None = None,
) -> json.JSONDecoder:
    return json.JSONDecoder(
        object_pairs_hook=_members if checks_members else None,
        parse_float=fraction or partial(_fraction, big_ints=big_ints),
        parse_int=partial(_big_integer, big_ints=big_ints) if long_digits else None,
        parse_constant=_refuse_constant,
    )


_QUICK: Final = {big_ints: _decoder(big_ints) for big_ints in BigInts}
_CAREFUL: Final = {big_ints: _decoder(big_ints, long_digits=True) for big_ints in BigInts}


def _scanner(big_ints: BigInts) -> tuple[Callable[[str, int], tuple[object, int]], bytes]:
    """The parser of the fast path, and the run of digits that excludes a text from it."""
    decoder = _decoder(big_ints, checks_members=False, fraction=partial(_marked_fraction, big_ints=big_ints))
    scan = vars(decoder)["scan_once"]  # it is documented only in the source, so type checkers reject it
    return scan, _LONG_DIGITS[big_ints]


_SCAN_EXACT: Final = _scanner(BigInts.EXACT)
_SCAN_REJECT: Final = _scanner(BigInts.REJECT)


def _writer(*, sort_keys: bool) -> Callable[[object, int], Iterable[str]]:
    """A function for the pieces of a value's text: the C writer, which an encoder creates for every call."""
    make = getattr(json.encoder, "c_make_encoder", None)
    if make is None:
        encoder = json.JSONEncoder(
            ensure_ascii=False,
            check_circular=False,
            allow_nan=False,
            sort_keys=sort_keys,
            separators=(",", ":"),
            default=_marked,
        )
        return lambda value, _: (encoder.encode(value),)
    pieces: Callable[[object, int], Iterable[str]] = make(
        markers=None,
        default=_marked,
        encoder=encode_basestring,
        indent=None,
        key_separator=":",
        item_separator=",",
        sort_keys=sort_keys,
        skipkeys=False,
        allow_nan=False,
    )
    return pieces


_pieces: Final = _writer(sort_keys=True)
_pieces_in_order: Final = _writer(sort_keys=False)


def _decoder_for(body: bytes, big_ints: BigInts) -> json.JSONDecoder:
    """The decoder with the C integer parser, unless a run of digits is too long for it."""
    long_digits = _LONG_DIGITS[big_ints] in body.translate(_DIGITS_AS_ZERO)
    if _may_be_costly(body):
        return _decoder(big_ints, long_digits=long_digits, fraction=_Counted(_most_exact(body), big_ints))
    return (_CAREFUL if long_digits else _QUICK)[big_ints]


def _most_exact(body: bytes) -> int:
    return max(_FEW_NUMBERS, len(body) // BYTES_FOR_EACH_EXACT_NUMBER)


def _may_be_costly(body: bytes) -> bool:
    """Whether there may be too many numbers that no double can hold; a short one has a negative exponent."""
    return len(body) > 2 * _FEW_NUMBERS and body.count(b"e-") + body.count(b"E-") > _most_exact(body)


class _Counted:
    """Parses fractions, and rejects a body with too many that have to be rewritten digit by digit."""

    def __init__(self, most: int, big_ints: BigInts) -> None:
        self._left, self._big_ints = most, big_ints

    def __call__(self, literal: str) -> object:
        if len(literal) <= _FITS_A_DOUBLE + 1 and 0.0 <= abs(float(literal)) < _SMALLEST:
            self._left -= 1
            if self._left < 0:
                raise BodyInvalidError(
                    "The JSON has too many numbers that are too close to zero for a double; send them as strings."
                )
        return _fraction(literal, self._big_ints)


def canonical_number(literal: str, big_ints: BigInts = BigInts.EXACT) -> str:
    """The canonical text of a JSON number; equal values give equal texts.

    Raises:
        BodyInvalidError: The number is too long, too large for a double, or one that `big_ints` rejects.
    """
    if len(literal) > MAX_LITERAL_LENGTH:
        raise BodyInvalidError(
            f"The JSON has a number of more than {MAX_LITERAL_LENGTH} characters; send it as a string."
        )
    double = float(literal)
    if not isfinite(double):
        raise BodyInvalidError("The JSON has a number beyond the range of a double; send it as a string.")
    digits, point = _exact(literal)
    if big_ints is BigInts.REJECT and not (_is_safe(literal) and (digits, point) == _exact(repr(double))):
        raise BodyInvalidError(
            "The JSON has a number that a double cannot hold exactly, such as an integer outside of "
            f"+-{MAX_SAFE_INTEGER}; send it as a string."
        )
    text = _layout(digits, point)
    return f"-{text}" if literal.startswith("-") and digits else text


def _is_safe(literal: str) -> bool:
    """False for an integer literal outside of the range of I-JSON."""
    return not literal.removeprefix("-").isdigit() or abs(int(literal)) <= MAX_SAFE_INTEGER


def _exact(literal: str) -> tuple[str, int]:
    """The significant digits and the position of the point: the value is 0.DIGITS times ten to the power of POINT."""
    found = _LITERAL.fullmatch(literal)
    assert found is not None, "the caller hands in JSON numbers and the repr of doubles"
    whole, fraction, exponent = found.groups(default="")
    digits = (whole + fraction).lstrip("0")
    point = len(digits) - len(fraction) + int(exponent or 0)
    return digits.rstrip("0"), point if digits else 0


def _layout(digits: str, point: int) -> str:
    """ECMAScript's Number::toString, given the digits."""
    if not digits:
        return "0"
    if len(digits) <= point <= _PLAIN_INTEGER_DIGITS:
        return digits.ljust(point, "0")
    if 0 < point <= _PLAIN_INTEGER_DIGITS:
        return f"{digits[:point]}.{digits[point:]}"
    if -_LEADING_ZEROS < point <= 0:
        return f"0.{'0' * -point}{digits}"
    mantissa = f"{digits[0]}.{digits[1:]}" if len(digits) > 1 else digits
    return f"{mantissa}e{point - 1:+d}"
