"""What a transaction that only reads lets through: it is lent before a claim, and between the steps of a handler.

They are always rolled back, so nothing that is written through one could ever commit. That it is refused at once, and
with a sentence, is for whoever writes there by mistake.
"""

from __future__ import annotations

import re
from typing import Final

from oncekey.core.errors import TransactionControlError

ONLY_READS: Final = (
    "this transaction only reads: what is written here would not commit with the key. A PHASED handler writes inside "
    "of op.phase(name, fn), where once.session and once.connection are the phase's own transaction, and changes only "
    "objects that the same phase has read or added; a LOCAL handler writes after it was entered"
)

_READ_ONLY_TRANSACTION: Final = "25006"
_READ_ONLY_FILE: Final = "SQLITE_READONLY"
_READ_ONLY_MARIADB: Final = 1792
_READS: Final = re.compile(
    r"\s*(?:SELECT|VALUES|SHOW)\b(?!.*\b(?:FOR\s+(?:UPDATE|NO|KEY|SHARE)|INTO|set_config|pg_\w*advisory\w*)\b)",
    re.IGNORECASE | re.DOTALL,
)
_CHANGES: Final = re.compile(
    r"\s*(?:(?:INSERT|UPDATE|DELETE|MERGE|REPLACE|TRUNCATE|CREATE|ALTER|DROP|COPY)\b"
    r"|WITH\b.*\)\s*(?:INSERT|UPDATE|DELETE|REPLACE|MERGE)\b)",
    re.IGNORECASE | re.DOTALL,
)


def plainly_reads(sql: str) -> bool:
    """Whether a statement leaves nothing behind, neither a lock nor a setting: its transaction may end at any time.

    A function that does so without saying it in its name is not recognised.
    """
    return _READS.match(sql) is not None


def refuse_changes(sql: str) -> None:
    """Raise `TransactionControlError` for a statement that certainly writes."""
    if _CHANGES.match(sql) is not None:
        raise TransactionControlError(ONLY_READS)


def refused_to_write(error: BaseException) -> bool:
    """Whether a database said that its transaction only reads."""
    origin = getattr(error, "orig", None) or error
    name = str(getattr(origin, "sqlite_errorname", None) or "")
    if name.startswith(_READ_ONLY_FILE) or origin.args[:1] == (_READ_ONLY_MARIADB,):
        return True
    return getattr(origin, "sqlstate", None) == _READ_ONLY_TRANSACTION
