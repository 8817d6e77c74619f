"""PostgreSQL: schema `oncekey`, one statement per operation."""

from __future__ import annotations

from typing import TYPE_CHECKING

from oncekey.core.sqltext import Dialect
from oncekey.stores.locks import LockStore
from oncekey.stores.sql import FILES, SqlSchema, SqlStore
from oncekey.stores.statements import load
from oncekey.stores.survey import POSTGRES
from oncekey.stores.upkeep import NotingUpkeepStore

if TYPE_CHECKING:
    from collections.abc import Callable

    from oncekey.core.model import Instant


def tables() -> SqlSchema:
    """The tables and their migrations."""
    return SqlSchema(__package__, Dialect.POSTGRES)


class PostgresStore(SqlStore):
    """Records in PostgreSQL."""

    def __init__(self, *, clock: Callable[[], Instant] | None = None) -> None:
        super().__init__(load(__package__, *FILES), tables(), POSTGRES, upkeep=NotingUpkeepStore, clock=clock)
        self.locks = LockStore(self._statements, lambda: self.outbox)
