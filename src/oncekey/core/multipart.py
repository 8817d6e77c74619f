"""Multipart bodies as their parts: another boundary is not another request.

This takes only what RFC 2046 says exactly. A body that a lenient parser might read in some other way has no
parts here, and then its bytes count as they are.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

from oncekey.core.media import parameters_of

_PADDED_LINE_END: Final = re.compile(rb"[ \t]*\r\n")
_CLOSING: Final = re.compile(rb"--[ \t]*(?:\r\n)?")
_FIELD_NAME: Final = re.compile(rb"[!#$%&'*+.^_`|~0-9A-Za-z-]+")


@dataclass(frozen=True, slots=True)
class Part:
    """One part: its header fields, names in lower case and sorted, and its bytes."""

    headers: tuple[tuple[bytes, bytes], ...]
    content: bytes

    @property
    def name(self) -> str:
        """The form field it fills; empty if it has none."""
        disposition = dict(self.headers).get(b"content-disposition", b"")
        _, semicolon, rest = disposition.partition(b";")
        return dict(parameters_of(semicolon + rest) or ()).get(b"name", b"").decode("utf-8", "surrogateescape")


def parts_of(body: bytes, boundary: bytes) -> tuple[Part, ...] | None:
    """The parts of `body`; None if it is not exactly parts, each between delimiters."""
    preamble, *chunks = (b"\r\n" + body).split(b"\r\n--" + boundary)
    if preamble or not boundary or not chunks or not _CLOSING.fullmatch(chunks[-1]):
        return None
    parts = [_part(chunk) for chunk in chunks[:-1]]
    found = tuple(part for part in parts if part is not None)
    return found if len(found) == len(parts) else None


def _part(chunk: bytes) -> Part | None:
    line_end = _PADDED_LINE_END.match(chunk)
    if line_end is None:
        return None
    # With the line end kept in front, a part without header fields looks like any other.
    head, blank_line, content = chunk[line_end.end() - 2 :].partition(b"\r\n\r\n")
    fields = [line.partition(b":") for line in head.split(b"\r\n")[1:]]
    if not blank_line or not all(colon and _FIELD_NAME.fullmatch(name) for name, colon, _ in fields):
        return None
    return Part(tuple(sorted((name.lower(), value.strip(b" \t")) for name, _, value in fields)), content)
