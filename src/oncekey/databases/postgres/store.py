"""PostgreSQL: schema `oncekey`, one statement per operation."""

from __future__ import annotations

from functools import cached_property
from types import MappingProxyType
from typing import TYPE_CHECKING, Final

from oncekey.core.lazy import Lazy
from oncekey.core.sqltext import Dialect
from oncekey.stores.locks import LockStore
from oncekey.stores.sql import FILES, SqlSchema, SqlStore
from oncekey.stores.statements import load

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from oncekey.core.model import Instant
    from oncekey.stores import upkeep as upkeeping
else:
    upkeeping = Lazy("oncekey.stores.upkeep")


DIAGNOSTICS: Final[Mapping[str, tuple[str, ...]]] = MappingProxyType(
    {
        "diagnostic_clock": ("now",),
        "diagnostic_indexes": ("name", "on_table", "valid", "scans", "rows"),
        "diagnostic_tables": ("name", "live", "dead", "bytes", "last_autovacuum"),
        "diagnostic_sessions": ("idle", "longest_idle", "oldest_transaction", "oldest_xmin", "hidden"),
        "diagnostic_holders": ("prepared", "slot_xmin"),
        "diagnostic_settings": ("name", "value"),
        "diagnostic_ttl": ("shortest_ttl", "longest_call"),
        "diagnostic_rows": ("name", "records"),
    }
)
"""The statements of `oncekey doctor`, with their columns."""


def tables() -> SqlSchema:
    """The tables and their migrations."""
    return SqlSchema(__package__, Dialect.POSTGRES)


class PostgresStore(SqlStore):
    """Records in PostgreSQL."""

    upkeep = cached_property(lambda self: upkeeping.NotingUpkeepStore(self._statements, self.audit))

    def __init__(self, *, clock: Callable[[], Instant] | None = None) -> None:
        super().__init__(load(__package__, *FILES), tables(), DIAGNOSTICS, clock=clock)
        self.locks = LockStore(self._statements, self.parcels)
