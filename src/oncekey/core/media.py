"""What a `Content-Type` says, in one spelling."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache
from typing import Final

_TOKEN: Final = rb"[!#$%&'*+.^_`|~0-9A-Za-z-]+"
_ESSENCE: Final = re.compile(rb"[ \t]*(" + _TOKEN + rb"/" + _TOKEN + rb")[ \t]*")
_PARAMETER: Final = re.compile(
    rb";[ \t]*(?:(" + _TOKEN + rb')=(?:"((?:[^"\\]|\\.)*)"|(' + _TOKEN + rb")))?[ \t]*", re.DOTALL
)
_ESCAPE: Final = re.compile(rb"\\(.)", re.DOTALL)
LONGEST_KEPT: Final = 200
"""A longer value is parsed every time, so that clients cannot fill the cache's memory."""


@dataclass(frozen=True, slots=True)
class MediaType:
    """A media type in lower case and its parameters, sorted by name."""

    essence: bytes
    parameters: tuple[tuple[bytes, bytes], ...] = ()

    def __getitem__(self, name: bytes) -> bytes | None:
        return next((value for other, value in self.parameters if other == name), None)

    def without(self, *names: bytes) -> MediaType:
        """The same without some parameters."""
        return MediaType(self.essence, tuple(pair for pair in self.parameters if pair[0] not in names))

    @property
    def is_json(self) -> bool:
        """`application/json`, `text/json` or anything that ends in `+json`."""
        return self.essence in (b"application/json", b"text/json") or self.essence.endswith(b"+json")

    @property
    def is_form(self) -> bool:
        """What an HTML form sends unless it has files."""
        return self.essence == b"application/x-www-form-urlencoded"

    @property
    def is_multipart(self) -> bool:
        """Any multipart type."""
        return self.essence.startswith(b"multipart/")


def media_type_of(content_type: bytes | None) -> MediaType:
    """The media type of a body. If it cannot be parsed it counts byte for byte, as a nameless parameter."""
    if not content_type:
        return MediaType(b"")
    return _parsed(content_type) if len(content_type) <= LONGEST_KEPT else _parsed.__wrapped__(content_type)


@lru_cache(maxsize=256)
def _parsed(content_type: bytes) -> MediaType:
    essence = _ESSENCE.match(content_type)
    parameters = parameters_of(content_type[essence.end() :]) if essence else None
    if essence is None or parameters is None:
        return MediaType(b"", ((b"", content_type),))
    return MediaType(essence[1].lower(), parameters)


def parameters_of(text: bytes) -> tuple[tuple[bytes, bytes], ...] | None:
    """The parameters in `; name=value; name="value"`; None if that is not what it is."""
    parameters: list[tuple[bytes, bytes]] = []
    position = 0
    while position < len(text):
        found = _PARAMETER.match(text, position)
        if found is None:
            return None
        position = found.end()
        name, quoted, plain = found.groups()
        if name is None:
            continue
        value = plain if quoted is None else _ESCAPE.sub(rb"\1", quoted)
        # A charset is the one value that is known to be the same in either case.
        parameters.append((name.lower(), value.lower() if name.lower() == b"charset" else value))
    return tuple(sorted(parameters))
