"""MariaDB and MySQL: tables `oncekey_*` in the application's own database, one row per record.

LOCAL in one commit: the lock of a key is a row that is inserted first, without waiting. A request that finds the row
locked is refused at once. InnoDB releases it with the transaction, even if the process dies. A named lock (GET_LOCK)
would not work: it belongs to the session, survives a COMMIT, and a proxy may give the session to another client.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Final

from oncekey.core.flow import Body, Flow, Fold, Mode, Transaction, Value
from oncekey.core.model import Claim, Completed, Deferred, Instant
from oncekey.core.onecommit import Holder, Lock, Locked, Stored, WriteTarget
from oncekey.core.sqltext import Dialect
from oncekey.stores.locks import WRITTEN, LockStore
from oncekey.stores.rows import snapshot_of
from oncekey.stores.sql import ONE_ROW, SHARED, SqlSchema, SqlStore
from oncekey.stores.statements import execute, load

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping


DIAGNOSTICS: Final[Mapping[str, tuple[str, ...]]] = MappingProxyType(
    {
        "diagnostic_clock": ("now",),
        "diagnostic_indexes": ("name", "on_table"),
        "diagnostic_server": ("Variable_name", "Value"),
        "diagnostic_cluster": ("Variable_name", "Value"),
        "diagnostic_ttl": ("shortest_ttl", "longest_call"),
    }
)
"""The statements of `oncekey doctor`, with their columns."""


def tables() -> SqlSchema:
    """The tables and their migrations."""
    return SqlSchema(__package__, Dialect.MARIADB)


class MariadbStore(SqlStore):
    """Records in MariaDB or MySQL."""

    def __init__(self, *, clock: Callable[[], Instant] | None = None) -> None:
        commands = load(__package__, *ONE_ROW, shared=SHARED)
        super().__init__({**commands, **sealed(commands)}, tables(), DIAGNOSTICS, clock=clock)
        self.locks = MariadbLocks(self._statements, self.parcels)


def sealed(statements: Mapping[str, str]) -> dict[str, str]:
    """Each final statement, joined with the release of the lock: one message in the common case."""
    return {f"sealed_{name}": f"{statements['unlock']};\n{statements[name]}" for name in WRITTEN}


class MariadbLocks(LockStore):
    """Locks and write-once records in MariaDB."""

    asked = ("lock", "refused", "unlock", "holder", "left_over")

    def locking(self, lock: Lock, claim: Claim) -> Body[Locked]:
        """Insert the lock's row, then read the record; a refused request first reads the lock's holder (L1)."""
        where: dict[str, Value] = {
            "lock": lock.number,
            "mark": lock.mark,
            "scope": claim.id.scope,
            "key": claim.id.key,
        }
        rows = yield self._statements.statement("lock", where, at_once=True)
        if rows:
            return Locked(got=True, snapshot=snapshot_of(rows[0], self._statements.content), begun=lock.number)
        [row] = yield self._statements.statement("refused", where)
        other = row["mark"] is not None and int(row["mark"]) != lock.mark
        return Locked(got=False, snapshot=snapshot_of(row, self._statements.content), begun=lock.number, other=other)

    def completing(
        self, claim: Claim, target: WriteTarget, settlement: Completed | Deferred, begun: int | None
    ) -> Body[Stored | None]:
        """Write the finished record and release the lock, as the last statement before the commit (L3)."""
        last = self._finished(claim, target, settlement)
        rows = yield self._statements.statement(
            last.name, {**last.params, "lock": begun or 0}, form=f"sealed_{last.name}"
        )
        if not rows:
            return None
        yield from self._deferred(settlement)
        return Stored(expires_at=int(rows[0]["expires_at"]))

    def completing_at_commit(
        self,
        claim: Claim,  # noqa: ARG002
        target: WriteTarget,  # noqa: ARG002
        settlement: Completed | Deferred,  # noqa: ARG002
        begun: int,  # noqa: ARG002
    ) -> Fold[Stored] | None:
        """None: the driver sends the COMMIT separately, with a check that the transaction is its own."""
        return None

    def held(self, number: int) -> Flow[bool]:
        return (yield from self._mark(number)) is not None

    def holder(self, lock: Lock) -> Flow[Holder]:
        """The request that holds the lock; reading it does not take the lock (L8)."""
        mark = yield from self._mark(lock.number)
        if mark is None:
            return Holder.NOBODY
        return Holder.UNKNOWN_HOLDER if mark == lock.mark else Holder.OTHER

    def _mark(self, number: int) -> Flow[int | None]:
        """The mark of the lock's holder, read before its commit; an unlocked row does not count."""

        def body() -> Body[int | None]:
            rows = yield self._statements.statement("holder", {"lock": number})
            if not rows or (yield self._statements.statement("left_over", {"lock": number})):
                return None
            return int(rows[0]["mark"])

        return (yield from execute(Transaction("holder", Mode.READ, body)))
