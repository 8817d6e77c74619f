"""Statements in the message of a BEGIN or a COMMIT, where such a message can only be text.

A message of several statements has no parameters, so the values are written into it. Only safe characters are: a number
in quotes, bytes in hexadecimal, `true`, `false` and `NULL`. No value has a quote or a backslash of its own, so none can
end its literal, whatever `standard_conforming_strings` and `client_encoding` are; texts are bytes here, and the
statement's own function decodes them. asyncpg shows no rows of such a message, so the statement sends its row in a
notice.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, Final

from oncekey.drivers.placeholders import parted

if TYPE_CHECKING:
    from collections.abc import Mapping

    from oncekey.flow import Statement

_DECODED: Final = json.JSONDecoder().decode  # what `json.loads` calls after it has checked its argument

TOLD: Final = "OK001"
"""The SQLSTATE of a notice that contains a row."""

FOUND: Final = "SELECT 1"
"""The command tag of a message whose last statement has a row."""

TAKEN: Final = "23505"
"""The SQLSTATE of a record that finds its place taken."""

NOT_OURS: Final = "OK002"
"""The SQLSTATE of a step whose record has another owner."""

RECORD: Final = ("oncekey", "record")
"""The table of the record: a business row that violates a constraint of its own is something else."""


def folds_as_text(statement: Statement) -> bool:
    """Whether it can be sent in a message that is text."""
    return statement.folds and statement.told is not None


def as_text(statement: Statement) -> str:
    """The statement with its values in it."""
    assert statement.told is not None
    params = statement.params
    text, rest = parted(statement.told)
    pieces = [text]
    for name, after in rest:  # two dozen values for a record, so no call for each
        value = params[name]
        if type(value) is bytes:
            # E, because a backslash means the same in it under every setting of the server.
            pieces += ("E'\\\\x", value.hex(), "'", after)
        elif value is None:
            pieces += ("NULL", after)
        elif type(value) is int:
            pieces += (f"'{value:d}'", after)
        elif type(value) is bool:
            pieces += ("true" if value else "false", after)
        elif isinstance(value, int):  # a member of an enumeration, as a status may be
            pieces += (f"'{int(value):d}'", after)
        else:
            raise TypeError("a text does not travel in a message of several statements: its bytes do")
    return "".join(pieces)


def row_told(text: str) -> Mapping[str, Any]:
    """The row in a notice."""
    row: dict[str, Any] = _DECODED(text)
    return row
