"""MariaDB and MySQL: tables `oncekey_*` in the application's own database, a record in one row."""

from __future__ import annotations

from typing import TYPE_CHECKING

from oncekey.core.sqltext import Dialect
from oncekey.stores.audit import AuditStore
from oncekey.stores.keystore import KeyStore
from oncekey.stores.mariadb.locks import MariadbLocks, sealed
from oncekey.stores.migrations import SqlSchema
from oncekey.stores.operate import OperateStore
from oncekey.stores.outbox import OutboxStore
from oncekey.stores.reconcile import ReconcileStore
from oncekey.stores.reseal import ResealStore
from oncekey.stores.statements import load
from oncekey.stores.survey import MARIADB, SurveyStore
from oncekey.stores.upkeep import UpkeepStore

if TYPE_CHECKING:
    from collections.abc import Callable

    from oncekey.core.model import Instant


FILES = (
    "spelling.sql",
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
    return SqlSchema(__package__, Dialect.MARIADB)


class MariadbStore(KeyStore):
    """Records in MariaDB or MySQL."""

    def __init__(self, *, clock: Callable[[], Instant] | None = None) -> None:
        commands = load(__package__, *FILES, shared="oncekey.stores.onerow")
        super().__init__({**commands, **sealed(commands)}, schema=tables(), clock=clock)
        self.audit = AuditStore(self._statements)
        self.outbox = OutboxStore(self._statements, self.audit)
        self.upkeep = UpkeepStore(self._statements, self.audit)
        self.reconcile = ReconcileStore(self._statements, self.audit)
        self.operate = OperateStore(self._statements, self.audit, diagnostics=MARIADB)
        self.survey = SurveyStore(self._statements)
        self.reseal = ResealStore(self._statements)
        self.locks = MariadbLocks(self._statements, lambda: self.outbox)
