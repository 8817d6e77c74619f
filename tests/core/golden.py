"""Inputs for the values that may never change: the same ones on every machine and with every version of Python.

Each family is an endless supply that depends on a seed alone. `Random.random` is the one method of the standard
generator whose sequence is promised to stay, so every choice is made with it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from random import Random
from typing import TypeVar

from oncekey.core.errors import OncekeyError

T = TypeVar("T")

SECRETS = (
    None,
    None,
    b"0123456789abcdef",
    b"s" * 64,
    b"a longer secret than one block of the hash has, by a few bytes",
)
WORDS = (
    "amount", "currency", "EUR", "", "a", "b", ":", '":', "a:b", "c-1001", "naïve", "ключ", "\U0001f600", "\ufb33",
    "tab\t", 'quote"', "back\\slash", "nul\0", "line\n", "leave at the door", "\u20ac", "\x7f", "\u2028", "{", "]",
)  # fmt: skip
NUMBERS = (
    "0", "-0", "1", "-1", "10", "10.00", "1e1", "1E+2", "0.1", "1.5", "-0.0", "123456789012345", "1234567890123456",
    "9007199254740993", "123456789012345678901", "1234567890123456789012", "1e21", "1e400", "0.12345678901234567",
    "1e-7", "5e-324", "01", "+1", ".5", "1.", "NaN", "Infinity", "-Infinity", "2147483648", "-123456789012345",
)  # fmt: skip
SPACES = ("", "", "", " ", "\n", "\t ", "\r\n", "  ")
MEDIA = (
    b"application/json", b"application/json", b"application/json", b"application/json; charset=utf-8",
    b"Application/JSON ;charset=UTF-8", b"application/vnd.api+json; v=2", b"application/json; charset=latin-1",
    b"text/json", b"text/plain", b"text/plain; charset=utf8; format=flowed", b"application/x-www-form-urlencoded",
    b'multipart/form-data; boundary="xx"', b"", None, b"nonsense", b'a/b; x="q\\"z"', b"application/json;",
)  # fmt: skip


class Rng:
    """Choices that depend on the seed alone."""

    def __init__(self, seed: int) -> None:
        self._random = Random(seed)

    def below(self, count: int) -> int:
        """A number from 0 to `count` - 1."""
        return int(self._random.random() * count)

    def one(self, of: Sequence[T]) -> T:
        """One of them."""
        return of[self.below(len(of))]

    def some(self, of: Sequence[str], most: int) -> str:
        """Up to `most` of them in a row."""
        return "".join(self.one(of) for _ in range(self.below(most + 1)))


def json_text(rng: Rng, depth: int = 4) -> str:
    """A text that is JSON most of the time: with odd spaces, escapes, numbers, and sometimes a name twice."""
    space = rng.one(SPACES)
    kind = rng.below(8) if depth else rng.below(4)
    if kind == 0:
        return f"{space}{rng.one(NUMBERS)}{rng.one(SPACES)}"
    if kind in (1, 2):
        return f"{space}{string(rng)}{rng.one(SPACES)}"
    if kind == 3:
        return space + rng.one(("true", "false", "null", "12", "7"))
    count = rng.below(5)
    if kind == 4:
        return f"{space}[{','.join(json_text(rng, depth - 1) for _ in range(count))}]{rng.one(SPACES)}"
    members = [f"{rng.one(SPACES)}{string(rng)}{rng.one(SPACES)}:{json_text(rng, depth - 1)}" for _ in range(count)]
    if members and not rng.below(6):
        members.append(rng.one(members))
    return f"{space}{{{','.join(members)}}}{rng.one(SPACES)}"


def string(rng: Rng) -> str:
    """A JSON string: plain, with escapes, or with every character escaped."""
    word = rng.some(WORDS, 2) if rng.below(4) else rng.one(("a", "b", "c", "a", "é")) + str(rng.below(30))
    match rng.below(5):
        case 0:
            return json.dumps(word)
        case 1:
            return '"' + "".join(f"\\u{ord(one):04x}" for one in word if ord(one) < 0x10000) + '"'
        case _:
            return json.dumps(word, ensure_ascii=False)


def mutated(rng: Rng, text: bytes) -> bytes:
    """The text with a few bytes changed, dropped, doubled or moved: seldom JSON, and then not the same one."""
    for _ in range(1 + rng.below(2)):
        at, other = rng.below(len(text) + 1), rng.below(len(text) + 1)
        match rng.below(5):
            case 0:
                text = text[:at] + text[at + 1 :]
            case 1:
                text = text[:at] + rng.one((b":", b'"', b",", b"\\", b" ", b"}", b"]", b"0", b"\xff", b"-")) + text[at:]
            case 2:
                text = text[:at] + text[min(at, other) : other] + text[at:]
            case 3:
                text = text[: min(at, other)] + text[max(at, other) :]
            case _:
                text = text[:at] + bytes([rng.below(256)]) + text[at + 1 :]
    return text


def bodies(seed: int) -> Iterator[bytes]:
    """JSON texts and texts that nearly are."""
    rng = Rng(seed)
    while True:
        text = json_text(rng).encode("utf-8", "surrogatepass")
        yield mutated(rng, text) if not rng.below(3) else text


def keys(seed: int) -> Iterator[bytes]:
    """Field values: keys in every spelling, and near misses."""
    rng = Rng(seed)
    hexadecimal = "0123456789abcdef"
    signs = (
        "a",
        "Z",
        "0",
        "12",
        "-",
        "_",
        ".",
        "~",
        ":",
        "/",
        "+",
        "=",
        "@",
        " ",
        ",",
        '"',
        "\\",
        "(",
        ")",
        "%40",
        "é",
    )
    while True:
        digits = "".join(rng.one(hexadecimal) for _ in range(32))
        match rng.below(8):
            case 0 | 1:
                key = f"{digits[:8]}-{digits[8:12]}-{digits[12:16]}-{digits[16:20]}-{digits[20:]}"
            case 2:
                key = digits
            case 3:
                key = rng.one(
                    (
                        "bob@example.com", "order bob%40a.example.org x", "+49 171 1234567 call", "(555) 123-4567 home",
                        "555-123-4567", "123-45-6789", "ssn_123-45-6789_x", "ssn:123-45-6789:x", "a+491711234567",
                        "+4917112345678", "key=+49.171.12345678", "123-45-67890", "0123-45-6789", "call.555.123.4567",
                    )
                )  # fmt: skip
                key = rng.one(("", "order-", "x:", digits[:9])) + key + rng.one(("", "-order", ":x", digits[:5]))
            case 4:
                key = rng.some(signs, 40)
            case 5:
                key = digits[: rng.below(20)] + rng.one(signs) + digits
            case 6:
                key = str(rng.below(10**9)) + "-" + str(rng.below(10**6)) + "-" + str(rng.below(10**6))
            case _:
                key = (digits * 9)[: 240 + rng.below(30)]
        line = key.encode()
        match rng.below(6):
            case 0 | 1:
                line = b'"' + line + b'"'
            case 2:
                line = (
                    b'"' + line + b'"' + rng.one((b";a", b"; a=1", b';a="x"', b';a=%"%ff"', b" ", b",x", b";A", b"x"))
                )
            case 3:
                line = b" " + line + b" "
            case _:
                pass
        yield line


def header_lines(rng: Rng) -> tuple[tuple[bytes, bytes], ...]:
    """A response's header fields."""
    names = (
        b"Content-Type", b"content-type", b"Location", b"ETag", b"Set-Cookie", b"connection", b"Connection", b"x-own",
        b"content-language", b"date", b"content-length", b"cache-control", b"Idempotency-Key", b"content-encoding",
        b"idempotent-replayed", b"Idempotency-Key-Expires",
    )  # fmt: skip
    values = (b"application/json", b"/orders/7", b"ETag, close", b"location", b"x", b"", b"Content-Type ,x-own")
    return tuple((rng.one(names), rng.one(values)) for _ in range(rng.below(7)))


def tried(compute: Callable[[], object]) -> str:
    """What comes of it; a refusal by its type, because its sentence may be rewritten."""
    try:
        return repr(compute())
    except OncekeyError as error:
        return type(error).__name__
