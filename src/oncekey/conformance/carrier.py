"""How one API carries the key, and how it marks a replay: what the clauses say is translated into its own names.

Clauses use one header for keys and one for the marker. The carrier writes the key where this API reads it: under
another name, or into the JSON body. It translates answers back, and it puts the API's own names into reports.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final, TypeAlias

KEY: Final = "Idempotency-Key"
MARKER: Final = "Idempotent-Replayed"

Header: TypeAlias = tuple[str, str]


@dataclass(frozen=True, slots=True)
class Carrier:
    """The API's own names. With `member` the key is a member of the JSON body and no header at all."""

    header: str = KEY
    member: str | None = None
    marker: str = MARKER
    marked_by: str = "true"

    @property
    def name(self) -> str:
        """The name of the header or member, which a description of the API must have."""
        return self.member or self.header

    def for_api(self, headers: tuple[Header, ...], body: bytes) -> tuple[tuple[Header, ...], bytes]:
        """The header lines and the body as this API wants them."""
        if self.member is None:
            return tuple((self._renamed(name), value) for name, value in headers), body
        values = [value for name, value in headers if name.lower() == KEY.lower()]
        rest = tuple(line for line in headers if line[0].lower() != KEY.lower())
        return rest, self._inserted(values[0], body) if values else body

    def read(self, headers: Iterable[Header]) -> tuple[Header, ...]:
        """The header lines of an answer under the names that clauses know."""
        return tuple(self._read(name, value) for name, value in headers)

    def as_received(self, headers: Iterable[Header]) -> tuple[Header, ...]:
        """The header lines of an answer as they came."""
        own = {MARKER.lower(): self.marker, KEY.lower(): self.header}
        return tuple((own.get(name.lower(), name), self._as_received(name, value)) for name, value in headers)

    def in_api_words(self, text: str) -> str:
        """A sentence with the API's own names in it."""
        key = self.header if self.member is None else f"the member {self.member}"
        marker = text.replace(f"{MARKER}: true", f"{self.marker}: {self.marked_by}").replace(MARKER, self.marker)
        return marker.replace(KEY, key)

    def _renamed(self, name: str) -> str:
        """The API's name of a header, in the case that the clause has chosen."""
        if name.lower() != KEY.lower() or self.header == KEY:
            return name
        if name == KEY:
            return self.header
        return self.header.upper() if name.isupper() else self.header.lower()

    def _inserted(self, value: str, body: bytes) -> bytes:
        """The body with the key as its first member. The rest of its text stays as it is, also where it is broken."""
        start = body.find(b"{")
        if start < 0 or body[:start].strip():
            return body
        member = f"{json.dumps(self.member)}: {json.dumps(_content(value))}".encode()
        rest = body[start + 1 :]
        comma = b"" if rest.lstrip()[:1] in {b"}", b""} else b", "
        return body[: start + 1] + member + comma + rest

    def _read(self, name: str, value: str) -> Header:
        if name.lower() == self.marker.lower():
            return MARKER, "true" if value.lower() == self.marked_by.lower() else value
        if name.lower() == self.header.lower() and self.member is None:
            return KEY, value
        return name, value

    def _as_received(self, name: str, value: str) -> str:
        return self.marked_by if name.lower() == MARKER.lower() and value == "true" else value


def _content(value: str) -> str:
    """The text inside the quotes of a header's value: JSON has quotes of its own."""
    if len(value) > 1 and value[0] == value[-1] == '"':
        return value[1:-1].replace('\\"', '"').replace("\\\\", "\\")
    return value
