"""SQLite: tables `oncekey_*` in the application's own file."""

from __future__ import annotations

from typing import TYPE_CHECKING

from oncekey.core.sqltext import Dialect
from oncekey.stores.audit import AuditStore
from oncekey.stores.keystore import KeyStore
from oncekey.stores.migrations import SqlSchema
from oncekey.stores.operate import OperateStore
from oncekey.stores.outbox import OutboxStore
from oncekey.stores.reconcile import ReconcileStore
from oncekey.stores.reseal import ResealStore
from oncekey.stores.sqlite.locks import SqliteLocks
from oncekey.stores.statements import load
from oncekey.stores.survey import SQLITE, SurveyStore
from oncekey.stores.upkeep import UpkeepStore

if TYPE_CHECKING:
    from collections.abc import Callable

    from oncekey.core.model import Claim, Instant, Snapshot
    from oncekey.flow import Flow
    from oncekey.stores.sqlite.locks import Writer


FILES = (
    "spelling.sql",
    "queries.sql",
    "locks.sql",
    "phases.sql",
    "outbox.sql",
    "upkeep.sql",
    "operate.sql",
    "console.sql",
    "reconcile.sql",
    "doctor.sql",
    "reseal.sql",
)


def tables() -> SqlSchema:
    """The tables and their migrations."""
    return SqlSchema(__package__, Dialect.SQLITE)


class SqliteStore(KeyStore):
    """Records in SQLite.

    `writer` comes from the driver, and knows which request may write; without it LOCAL claims first.
    """

    def __init__(self, *, writer: Writer | None = None, clock: Callable[[], Instant] | None = None) -> None:
        super().__init__(load(__package__, *FILES, shared="oncekey.stores.onerow"), schema=tables(), clock=clock)
        self.audit = AuditStore(self._statements)
        self.outbox = OutboxStore(self._statements, self.audit)
        if writer is not None:
            self.locks = SqliteLocks(self._statements, writer, lambda: self.outbox)
        self.upkeep = UpkeepStore(self._statements, self.audit)
        self.reconcile = ReconcileStore(self._statements, self.audit)
        self.operate = OperateStore(self._statements, self.audit, diagnostics=SQLITE)
        self.survey = SurveyStore(self._statements)
        self.reseal = ResealStore(self._statements)

    def claim(self, claim: Claim) -> Flow[Snapshot]:
        """Read before inserting: a reader never waits for the one writer, and most duplicates only read."""
        snapshot = yield from self.find(claim.id)
        if snapshot.record is not None:
            return snapshot
        return (yield from super().claim(claim))
