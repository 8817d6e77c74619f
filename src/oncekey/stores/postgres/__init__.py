"""PostgreSQL: schema `oncekey`, one statement per operation."""

from __future__ import annotations

from typing import TYPE_CHECKING

from oncekey.core.sqltext import Dialect
from oncekey.stores.audit import AuditStore
from oncekey.stores.keystore import KeyStore
from oncekey.stores.locks import LockStore
from oncekey.stores.migrations import SqlSchema
from oncekey.stores.operate import OperateStore
from oncekey.stores.outbox import OutboxStore
from oncekey.stores.reconcile import ReconcileStore
from oncekey.stores.reseal import ResealStore
from oncekey.stores.statements import load
from oncekey.stores.survey import POSTGRES, SurveyStore
from oncekey.stores.upkeep import NotingUpkeepStore

if TYPE_CHECKING:
    from collections.abc import Callable

    from oncekey.core.model import Instant


FILES = (
    "queries.sql",
    "phases.sql",
    "outbox.sql",
    "upkeep.sql",
    "operate.sql",
    "console.sql",
    "reconcile.sql",
    "doctor.sql",
    "reseal.sql",
    "locks.sql",
)


def tables() -> SqlSchema:
    """The tables and their migrations."""
    return SqlSchema(__package__, Dialect.POSTGRES)


class PostgresStore(KeyStore):
    """Records in PostgreSQL."""

    def __init__(self, *, clock: Callable[[], Instant] | None = None) -> None:
        super().__init__(load(__package__, *FILES), schema=tables(), clock=clock)
        self.audit = AuditStore(self._statements)
        self.outbox = OutboxStore(self._statements, self.audit)
        self.upkeep = NotingUpkeepStore(self._statements, self.audit)
        self.reconcile = ReconcileStore(self._statements, self.audit)
        self.operate = OperateStore(self._statements, self.audit, diagnostics=POSTGRES)
        self.survey = SurveyStore(self._statements)
        self.reseal = ResealStore(self._statements)
        self.locks = LockStore(self._statements, lambda: self.outbox)
