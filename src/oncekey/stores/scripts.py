"""Migrations as SQL to run with other tools: for operators, and for Alembic."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final

from oncekey.core.sqltext import Dialect, split
from oncekey.stores.sql import line_of

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from oncekey.core.flow import Value
    from oncekey.core.migrations import Migration

_PLACEHOLDER: Final = re.compile(r"(?<!:):(\w+)")
_HARMLESS: Final = re.compile(r"[a-z0-9_]+")


def script(migrations: Sequence[Migration], ledger: Mapping[str, str]) -> str:
    """All migrations as one text."""
    parts = [ledger["table"] + ";"]
    for one in migrations:
        record = _filled(ledger["record"], line_of(one))
        parts.append(f"-- {one.label}\nBEGIN;\n\n{one.text.strip()}\n\n{record};\n\nCOMMIT;")
    return "\n\n".join(parts) + "\n"


def statements(migrations: Sequence[Migration], ledger: Mapping[str, str], dialect: Dialect) -> tuple[str, ...]:
    """The statements of the migrations, one by one, with the ledger's lines about them."""
    texts = [ledger["table"]]
    for one in migrations:
        texts += [one.text, _filled(ledger["record"], line_of(one))]
    return tuple(statement for text in texts for statement in split(text, dialect))


def _filled(text: str, values: dict[str, Value]) -> str:
    """The statement as it is printed; only names and numbers from our own files are filled in."""

    def literal(match: re.Match[str]) -> str:
        value = values[match[1]]
        assert isinstance(value, int) or (isinstance(value, str) and _HARMLESS.fullmatch(value))
        return str(value) if isinstance(value, int) else f"'{value}'"

    return _PLACEHOLDER.sub(literal, text)
