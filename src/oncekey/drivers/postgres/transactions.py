"""What transactions on PostgreSQL have in common, through whichever library: time-outs, reading, and folded statements.

A statement may be folded into the message of a BEGIN or a COMMIT, which can only be text: a message of several
statements has no parameters, so the values are written into it. Only safe characters are: a number in quotes, bytes in
hexadecimal, `true`, `false` and `NULL`. No value has a quote or a backslash of its own, so none can end its literal,
whatever `standard_conforming_strings` and `client_encoding` are; texts are bytes here, and the statement's own function
decodes them. asyncpg shows no rows of such a message, so the statement sends its row in a notice.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, Final, Protocol, TypeVar

from oncekey.drivers.placeholders import parted
from oncekey.flow import Statement

if TYPE_CHECKING:
    from collections.abc import Mapping

    from oncekey.flow import Steps

POOL_SIZE: Final = 10
TIMEOUT: Final = 2.0
"""Seconds to wait for a connection."""

STATEMENT_TIMEOUT: Final = 10.0
"""Seconds that one of oncekey's own statements may take: a row may be locked by a commit that hangs."""

IDLE_TIMEOUT: Final = 300.0
"""Seconds of silence after which the server ends a business transaction whose process or host is gone (L4)."""

WHAT: Final = "the business transaction"
BEGIN: Final = "BEGIN ISOLATION LEVEL READ COMMITTED"

_DECODED: Final = json.JSONDecoder().decode  # what `json.loads` calls after it has checked its argument

NOTICE: Final = "OK001"
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
    return statement.folds and statement.text is not None


def as_text(statement: Statement) -> str:
    """The statement with its values in it."""
    assert statement.text is not None
    params = statement.params
    text, rest = parted(statement.text)
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


def row_from_notice(text: str) -> Mapping[str, Any]:
    """The row in a notice."""
    row: dict[str, Any] = _DECODED(text)
    return row


def idle_limit(seconds: float) -> str:
    """The setting with which the server ends a transaction that is silent for so long."""
    return f"SET LOCAL idle_in_transaction_session_timeout = {int(seconds * 1000):d}"


class Begun(Protocol):
    """A transaction that was begun."""

    async def step(self, steps: Steps[Any]) -> Any:  # noqa: ANN401  (what the statements come to)
        """Run statements inside it."""

    async def rollback(self) -> None:
        """Roll back."""


Tx = TypeVar("Tx", bound=Begun)


async def only_reading(tx: Tx) -> Tx:
    """The transaction; from now on the server refuses writes in it."""
    try:
        await tx.step(_read_only())
    except BaseException:
        await tx.rollback()
        raise
    return tx


def _read_only() -> Steps[None]:
    yield Statement("read_only", "SET LOCAL transaction_read_only = on")
