"""Words for a shell in which credentials and fresh keys are variables.

A text holds a variable as its name between two NUL characters; no header, address or printable body has one.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from oncekey.conformance.shots import Header
from oncekey.conformance.target import Target, is_secret

_UUID: Final = re.compile(r"[0-9a-f]{8}-(?:[0-9a-f]{4}-){3}([0-9a-f]{12})", re.IGNORECASE)
_RUN: Final = re.compile(r"[0-9a-f]{8,}", re.IGNORECASE)
_ODD: Final = re.compile(r"[^\x20-\x7e\x00]+")
_ESCAPED: Final = re.compile(r'(["\\$])')
_PART, _WHOLE = 12, 32


def variable(name: str) -> str:
    """A variable inside a text."""
    return f"\0{name}\0"


def quoted(text: str) -> str:
    """A text as one word of a shell."""
    pieces = text.split("\0")
    if len(pieces) == 1:
        return shlex.quote(text)
    literals, names = pieces[::2], pieces[1::2]
    if any(sign in literal for literal in literals for sign in "!`"):
        words = [shlex.quote(literal) if literal else "" for literal in literals]
        return "".join(f'{word}"{_expanded(name)}"' for word, name in zip(words, names, strict=False)) + words[-1]
    escaped = [_ESCAPED.sub(r"\\\1", literal) for literal in literals]
    inside = "".join(f"{word}{_expanded(name)}" for word, name in zip(escaped, names, strict=False)) + escaped[-1]
    return f'"{inside}"'


def octets(text: str) -> str:
    """A header line in which every byte outside ASCII is written by `printf`, whatever the terminal's encoding is."""
    return _ODD.sub(lambda met: variable(f"(printf '{_octal(met[0])}')"), text)


@dataclass(frozen=True, slots=True)
class Secrets:
    """Which variable stands for which credential."""

    target: Target

    def line(self, header: Header) -> str:
        """A header line in which a credential is a variable."""
        name, value = header
        if not is_secret(name):
            return f"{name}: {value}"
        return f"{name}: {variable(self.name(header))}"

    def name(self, header: Header) -> str:
        """The variable of a credential; the other tenant has variables of its own."""
        plain = re.sub(r"[^A-Z0-9]", "_", header[0].upper())
        return f"OTHER_{plain}" if header in self.target.other_tenant else plain


@dataclass(frozen=True, slots=True)
class FreshKeys:
    """The random parts of the keys that were sent, each with the variable that takes its place."""

    parts: dict[str, str]

    @classmethod
    def of(cls, values: Iterable[str]) -> FreshKeys:
        """Find the random parts. A part is enough: the form of the key must stay as it was."""
        found: dict[str, str] = {}
        for value in values:
            runs = [met[1] for met in _UUID.finditer(value)]
            runs += _RUN.findall(_UUID.sub(" ", value))
            for run in runs:
                part = (run[:_WHOLE][-_PART:] if len(run) >= _PART else run[:8]).lower()
                found.setdefault(part, f"K{len(found) + 1}")
        return cls(found)

    def lines(self) -> list[str]:
        """The commands that make the variables."""
        if not self.parts:
            return []
        made = [f"{name}=$(fresh {len(part) // 2})" for part, name in self.parts.items()]
        return ["fresh() { od -An -N\"$1\" -tx1 /dev/urandom | tr -d ' \\n'; }", *made]

    def put_in(self, text: str) -> str:
        """A text with variables instead of the random parts."""
        for part, name in self.parts.items():
            capital = variable(f'(printf %s "${name}" | tr a-f A-F)')
            text = text.replace(part, variable(name))
            text = text.replace(part.upper(), capital)
        return text


def _expanded(name: str) -> str:
    return f"${name}" if name.startswith("(") else f"${{{name}}}"


def _octal(text: str) -> str:
    return "".join(f"\\{byte:03o}" for byte in text.encode("latin-1", "replace"))
