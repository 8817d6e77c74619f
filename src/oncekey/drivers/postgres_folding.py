"""A statement that travels in the message of a BEGIN or a COMMIT, where such a message can only be text.

A message of several statements has no parameters, so the values are written into it. Nothing but digits is: a number
in quotes, bytes in hexadecimal, `true`, `false` and `NULL`. No value has a quote or a backslash of its own, so none can
end its literal, whatever `standard_conforming_strings` and `client_encoding` say; texts are bytes here, and the
statement's own function reads them. asyncpg shows no rows of such a message, so the statement tells its row.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, Final

from oncekey.drivers.placeholders import parted

if TYPE_CHECKING:
    from collections.abc import Mapping

    from oncekey.flow import Statement, Value

TOLD: Final = "OK001"
"""The SQLSTATE of a notice that tells a row."""

TAKEN: Final = "23505"
"""The SQLSTATE of a record that finds its place taken."""

RECORD: Final = ("oncekey", "record")
"""The table that this is about: a business row that violates a constraint of its own is something else."""


def folds_as_text(statement: Statement) -> bool:
    """Whether it can travel in a message that is text."""
    return statement.folds and statement.told is not None


def as_text(statement: Statement) -> str:
    """The statement with its values in it."""
    assert statement.told is not None
    params = statement.params
    text, rest = parted(statement.told)
    pieces = [text]
    for name, after in rest:
        pieces += (literal(params[name]), after)
    return "".join(pieces)


def literal(value: Value) -> str:
    """A value as it is written into a message: digits and nothing else of its own."""
    if isinstance(value, bytes):
        # E, because a backslash means the same in it under every setting of the server.
        return f"E'\\\\x{value.hex()}'"
    if value is None:
        return "NULL"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int):
        return f"'{value:d}'"
    raise TypeError("a text does not travel in a message of several statements: its bytes do")


def row_told(text: str) -> Mapping[str, Any]:
    """The row in a notice."""
    row: dict[str, Any] = json.loads(text)
    return row
