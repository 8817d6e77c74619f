"""JSON numbers in the layout of RFC 8785, without ever making two different amounts one.

RFC 8785 reads every number as a double. That is right for spelling (`10`, `10.0` and `1e1` are one value) and
wrong for a fingerprint where the double rounds: `9007199254740993` would become `9007199254740992`, and
`0.12345678901234567` would become `0.12345678901234568`, so that a retry with another amount would be answered from
the first one's record. So a number is read as the exact decimal value of its literal, and written in the layout of
RFC 8785: a number that equals the shortest text of its double looks the same either way, and any other keeps the
digits that the client sent. What lies beyond the range of a double (`1e400`, an integer of 400 digits) is refused.
"""

from __future__ import annotations

import math
import re
from enum import StrEnum
from typing import Final

from oncekey.core.errors import BodyInvalidError

MAX_LITERAL_LENGTH: Final = 2_000
MAX_SAFE_INTEGER: Final = 2**53 - 1
_PLAIN_INTEGER_DIGITS: Final = 21
_LEADING_ZEROS: Final = 6
_LITERAL: Final = re.compile(r"-?([0-9]+)(?:\.([0-9]+))?(?:[eE]([+-]?[0-9]+))?")


class BigInts(StrEnum):
    """What happens to a number that a double cannot hold."""

    EXACT = "exact"
    """It keeps its exact value in the canonical form."""
    REJECT = "reject"
    """It is refused, and so is an integer outside of +-(2**53 - 1): the rule of I-JSON (RFC 7493).

    A double holds a fraction if the shortest text of the double has the same value: `0.1` is taken and
    `0.10000000000000001` is not.
    """


def canonical_number(literal: str, big_ints: BigInts = BigInts.EXACT) -> str:
    """The canonical text of a JSON number; equal values give equal texts.

    Raises:
        BodyInvalidError: The number is too long, too large for a double, or one that `big_ints` refuses.
    """
    if len(literal) > MAX_LITERAL_LENGTH:
        raise BodyInvalidError(
            f"The JSON has a number of more than {MAX_LITERAL_LENGTH} characters; send it as a string."
        )
    double = float(literal)
    if math.isinf(double):
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
    """Whether it is not an integer literal outside of the range that I-JSON allows."""
    return not literal.removeprefix("-").isdigit() or abs(int(literal)) <= MAX_SAFE_INTEGER


def _exact(literal: str) -> tuple[str, int]:
    """The significant digits and where the point is: the value is 0.DIGITS times ten to the POINT."""
    found = _LITERAL.fullmatch(literal)
    assert found is not None, "the caller hands in JSON numbers and the repr of doubles"
    whole, fraction, exponent = found.groups(default="")
    digits = (whole + fraction).lstrip("0")
    point = len(digits) - len(fraction) + int(exponent or 0)
    return digits.rstrip("0"), point if digits else 0


def _layout(digits: str, point: int) -> str:
    """ECMAScript's Number::toString, from the digits on."""
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
