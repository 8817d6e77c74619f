"""PostgreSQL: schema `oncekey`, one statement per operation."""

from __future__ import annotations

from typing import TYPE_CHECKING

from oncekey.core.sqltext import Dialect
from oncekey.stores.audit import AuditStore
from oncekey.stores.keystore import KeyStore
from oncekey.stores.locks import LockStore
from oncekey.stores.migrations import SqlSchema
from oncekey.stores.outbox import OutboxStore
from oncekey.stores.queries import load
from oncekey.stores.upkeep import UpkeepStore

if TYPE_CHECKING:
    from collections.abc import Callable

    from oncekey.core.model import Instant


def tables() -> SqlSchema:
    """The tables and their migrations."""
    return SqlSchema(__package__, Dialect.POSTGRES)


class PostgresStore(KeyStore):
    """Records in PostgreSQL."""

    def __init__(self, *, clock: Callable[[], Instant] | None = None) -> None:
        commands = load(__package__, "queries.sql", "phases.sql", "outbox.sql", "upkeep.sql", "locks.sql")
        super().__init__(commands, schema=tables(), clock=clock)
        self.outbox = OutboxStore(self._statements)
        self.audit = AuditStore(self._statements)
        self.upkeep = UpkeepStore(self._statements, self.audit)
        self.locks = LockStore(self._statements, lambda: self.outbox)
