"""How an API carries the key and marks a replay: translates between the clauses and the API's own names.

Clauses use one header for keys and one for the marker. The carrier writes the key where this API reads it: in another
header, in the JSON body, or in the URL. It translates responses back, and uses the names of the API in reports. It also
fills in values that must differ from key to key: `{{key}}`, `{{uuid}}` and `{{n}}` in a body.
"""

from __future__ import annotations

import hashlib
import json
import re
import secrets
import uuid
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from typing import Final, TypeAlias
from urllib.parse import quote

KEY: Final = "Idempotency-Key"
MARKER: Final = "Idempotent-Replayed"

Header: TypeAlias = tuple[str, str]

IN_URL: Final = "{{key}}"
"""A URL with this placeholder carries the key, instead of a header."""
_PARAMETER: Final = re.compile(r"[?&][^?&=]*=\{\{key\}\}")
_CONTENT: Final = re.compile(r'"((?:[^"\\]|\\.)*)"(?:;.*)?')
_RANDOM_END: Final = re.compile(r"[0-9a-f]{12}$")
_RANDOM: Final = re.compile(r"\{\{(uuid|hex|digits)(?::([0-9]{1,3}))?\}\}")
_LEAST_RANDOM: Final = 6


class Place(StrEnum):
    """Where an API reads the key."""

    HEADER = "header"
    BODY = "body"
    QUERY = "query"
    PATH = "path"


@dataclass(frozen=True, slots=True)
class Carrier:
    """The API's own names. With `member` the key is a member of the JSON body, not a header."""

    header: str = KEY
    member: str | None = None
    marker: str = MARKER
    marked_by: str = "true"
    url: Place | None = None
    """Where the URL carries the key, if it does."""

    @property
    def place(self) -> Place:
        """Where the key is."""
        return self.url or (Place.HEADER if self.member is None else Place.BODY)

    @property
    def name(self) -> str:
        """The name of the header or member, which the API's description must contain."""
        return self.member or self.header

    def for_api(
        self, headers: tuple[Header, ...], body: bytes, target: str, *, nonce: str, salt: str
    ) -> tuple[tuple[Header, ...], bytes, str]:
        """The headers, the body and the target as this API expects them; `nonce` seeds a body without a key."""
        values = [value for name, value in headers if name.lower() == KEY.lower()]
        body = filled(body, content_of(values[0]) if values else nonce, salt)
        if self.place is Place.HEADER:
            return tuple((self._renamed(name), value) for name, value in headers), body, target
        rest = tuple(line for line in headers if line[0].lower() != KEY.lower())
        if self.place is Place.BODY:
            return rest, self._inserted(values[0], body) if values else body, target
        if not values:
            return rest, body, _PARAMETER.sub("", target).replace(IN_URL, "")
        return rest, body, target.replace(IN_URL, quote(content_of(values[0]), safe=""))

    def read(self, headers: Iterable[Header]) -> tuple[Header, ...]:
        """The headers of a response under the names that clauses use."""
        return tuple(self._read(name, value) for name, value in headers)

    def as_received(self, headers: Iterable[Header]) -> tuple[Header, ...]:
        """The headers of a response as they were received."""
        own = {MARKER.lower(): self.marker, KEY.lower(): self.header}
        return tuple((own.get(name.lower(), name), self._as_received(name, value)) for name, value in headers)

    def in_api_words(self, text: str) -> str:
        """A sentence, with the API's own names."""
        named = {
            Place.HEADER: self.header,
            Place.BODY: f"the member {self.member}",
            Place.QUERY: "the key in the query",
            Place.PATH: "the key in the path",
        }
        key = named[self.place]
        marker = text.replace(f"{MARKER}: true", f"{self.marker}: {self.marked_by}").replace(MARKER, self.marker)
        return marker.replace(KEY, key)

    def _renamed(self, name: str) -> str:
        """The API's name of a header, in upper or lower case as in the clause."""
        if name.lower() != KEY.lower() or self.header == KEY:
            return name
        if name == KEY:
            return self.header
        return self.header.upper() if name.isupper() else self.header.lower()

    def _inserted(self, value: str, body: bytes) -> bytes:
        """The body with the key as its first member. The rest of its text is unchanged, even if it is broken JSON."""
        start = body.find(b"{")
        if start < 0 or body[:start].strip():
            return body
        member = f"{json.dumps(self.member)}: {json.dumps(content_of(value))}".encode()
        rest = body[start + 1 :]
        comma = b"" if rest.lstrip()[:1] in {b"}", b""} else b", "
        return body[: start + 1] + member + comma + rest

    def _read(self, name: str, value: str) -> Header:
        if name.lower() == self.marker.lower():
            return MARKER, "true" if value.lower() == self.marked_by.lower() else value
        if name.lower() == self.header.lower() and self.place is Place.HEADER:
            return KEY, value
        return name, value

    def _as_received(self, name: str, value: str) -> str:
        return self.marked_by if name.lower() == MARKER.lower() and value == "true" else value


def content_of(value: str) -> str:
    """The text inside the quotes of a header's value: JSON and URLs have their own quoting."""
    met = _CONTENT.fullmatch(value)
    return value if met is None else met[1].replace('\\"', '"').replace("\\\\", "\\")


def filled(body: bytes, seed: str, salt: str = "") -> bytes:
    """The body with its placeholders filled in; the same seed and salt always give the same values.

    A UUID ends with the random end of the seed, so that a script that replaces a key also replaces the UUID.
    """
    if b"{{" not in body:
        return body
    digest = hashlib.sha256(f"{salt}{seed}".encode()).hexdigest()
    end = _RANDOM_END.search(seed)
    tail = digest[20:32] if end is None else end[0]
    number = str(int(digest[:10], 16)).encode()
    return (
        body.replace(b"{{uuid}}", f"{digest[:8]}-{digest[8:12]}-4{digest[13:16]}-8{digest[17:20]}-{tail}".encode())
        .replace(b"{{key}}", json.dumps(seed)[1:-1].encode())
        .replace(b'"{{n}}"', number)
        .replace(b"{{n}}", number)
    )


class BadKeyFormatError(ValueError):
    """The text is not a valid key format; the message says why."""


@dataclass(frozen=True, slots=True)
class KeyFormat:
    """The format of the keys that an API accepts, such as `order-{{hex:16}}`."""

    text: str

    @classmethod
    def parse(cls, text: str) -> KeyFormat:
        """The format, validated: it must have enough random characters that no two keys are equal."""
        placeholders = _RANDOM.findall(text)
        if "{{" in _RANDOM.sub("", text):
            raise BadKeyFormatError("it may contain {{uuid}}, {{hex:N}} and {{digits:N}}, and no other placeholder")
        if any(kind != "uuid" and not length for kind, length in placeholders):
            raise BadKeyFormatError("{{hex:N}} and {{digits:N}} need a number of characters")
        if sum(32 if kind == "uuid" else int(length) for kind, length in placeholders) < _LEAST_RANDOM:
            raise BadKeyFormatError(f"it needs at least {_LEAST_RANDOM} random characters, such as {{{{hex:16}}}}")
        return cls(text)

    def fresh(self) -> str:
        """A new key."""
        return _RANDOM.sub(_random, self.text)

    def near(self, key: str) -> tuple[str, str]:
        """Two keys that differ from this one in its last and in its first random character."""
        parts = _RANDOM.split(self.text)
        before, behind = len(parts[0]), len(parts[-1])
        last = len(key) - behind - 1
        return (
            f"{key[:last]}{_another(key[last])}{key[last + 1 :]}",
            f"{key[:before]}{_another(key[before])}{key[before + 1 :]}",
        )


ANY_UUID: Final = KeyFormat("{{uuid}}")
"""The format that most APIs accept."""


def _random(placeholder: re.Match[str]) -> str:
    kind, length = placeholder[1], int(placeholder[2] or 0)
    if kind == "uuid":
        return str(uuid.uuid4())
    if kind == "hex":
        return secrets.token_hex(length)[:length]
    return "".join(secrets.choice("0123456789") for _ in range(length))


def _another(digit: str) -> str:
    """Another digit, valid as decimal and as hexadecimal."""
    return "0" if digit != "0" else "1"
