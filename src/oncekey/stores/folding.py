"""What a statement is given that travels in the message of a COMMIT: one value, which is cheaper to read than many."""

from __future__ import annotations

from typing import Final

LONGEST_FOLDED: Final = 32 * 1024
"""Bytes of an answer that may travel as text in the message of a COMMIT; a longer one is cheaper in one of its own."""

HALF_A_PAIR: Final = "half of a surrogate pair cannot be stored"


def row_text(*values: str | bytes | int | None) -> str:
    """A row as PostgreSQL reads one that is written as text: what a text has of its own marks is doubled."""
    pieces = []
    for value in values:
        if isinstance(value, str):
            pieces.append('"' + value.replace("\\", "\\\\").replace('"', '""') + '"')
        elif isinstance(value, bytes):
            pieces.append('"\\\\x' + value.hex() + '"')
        elif value is None:
            pieces.append("")
        else:  # or a boolean, whose name in Python PostgreSQL reads, too
            pieces.append(f"{value:d}" if type(value) is int else str(bool(value)))
    return "(" + ",".join(pieces) + ")"
