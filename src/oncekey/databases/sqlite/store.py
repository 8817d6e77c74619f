"""SQLite: tables `oncekey_*` in the application's own file.

LOCAL in one commit needs no separate lock: the right to write to the file is the lock of the key that is written. A
file has one writer at a time, so a transaction that has begun to write has the lock. Within the process, the driver's
`Writer` records its key for requests that would have to wait.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING, Final, Protocol

from oncekey.core.flow import Body, Flow, Fold, Row, Value
from oncekey.core.model import Claim, Completed, Deferred, Instant, Snapshot
from oncekey.core.onecommit import Holder, Lock, Locked, Stored, WriteTarget
from oncekey.core.rulings import Situation, situate
from oncekey.core.sqltext import Dialect
from oncekey.stores.locks import LockStore
from oncekey.stores.rows import snapshot_of
from oncekey.stores.sql import ONE_ROW, SHARED, SqlSchema, SqlStore
from oncekey.stores.statements import Statements, load

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from oncekey.ports.store import ParcelWriter


DIAGNOSTICS: Final[Mapping[str, tuple[str, ...]]] = MappingProxyType(
    {
        "diagnostic_clock": ("now",),
        "diagnostic_indexes": ("name", "on_table"),
        "diagnostic_file": ("version", "path"),
        "diagnostic_journal": ("journal_mode",),
        "diagnostic_ttl": ("shortest_ttl", "longest_call"),
    }
)
"""The statements of `oncekey doctor`, with their columns."""


def tables() -> SqlSchema:
    """The tables and their migrations."""
    return SqlSchema(__package__, Dialect.SQLITE)


class SqliteStore(SqlStore):
    """Records in SQLite.

    `writer` comes from the driver and records which request may write; without it LOCAL claims first.
    """

    def __init__(self, *, writer: Writer | None = None, clock: Callable[[], Instant] | None = None) -> None:
        super().__init__(load(__package__, *ONE_ROW, shared=SHARED), tables(), DIAGNOSTICS, clock=clock)
        if writer is not None:
            self.locks = SqliteLocks(self._statements, writer, self.parcels)

    def claim(self, claim: Claim) -> Flow[Snapshot]:
        """Read before inserting: a reader never waits for the one writer, and most duplicates only read."""
        snapshot = yield from self.find(claim.id)
        if snapshot.record is not None:
            return snapshot
        return (yield from super().claim(claim))


class Writer(Protocol):
    """The request that writes to the file, if it is in this process."""

    def asks(self, lock: Lock) -> object:
        """Note that a request queues to write under a key."""

    def asked(self, asker: object) -> None:
        """Note that it no longer queues."""

    def lock(self, lock: Lock) -> None:
        """Note the key of the writer's transaction."""

    def holder(self, lock: Lock) -> Holder:
        """Which request writes under a key, or queues for it."""

    def holds(self, number: int) -> bool:
        """Whether any request does."""


class SqliteLocks(LockStore):
    """Locks, and records that are written once, in a SQLite file."""

    one_writer = True
    asked = ("find", "lock_file")

    def __init__(self, statements: Statements, writer: Writer, parcels: ParcelWriter | None) -> None:
        super().__init__(statements, parcels)
        self._writer = writer

    def locking(self, lock: Lock, claim: Claim) -> Body[Locked]:
        """Become the writer, and read (L1). If that takes long, look for a stored response first.

        A stored response is final, so it needs no lock, and reading it does not wait. While a request queues for the
        lock, its key is noted in this process.
        """
        where: dict[str, Value] = {"scope": claim.id.scope, "key": claim.id.key}
        writer = self._writer
        asker = writer.asks(lock)
        try:
            rows = yield self._statements.statement("lock_file", where, at_once=True)
            if not rows:
                snapshot = snapshot_of(
                    (yield self._statements.statement("find", where, reads=True))[0], self._statements.content
                )
                if situate(snapshot.record, snapshot.now) is Situation.COMPLETED:
                    return Locked(got=False, snapshot=snapshot, begun=lock.number)
                rows = yield self._statements.statement("lock_file", where)
            writer.lock(lock)
        finally:
            writer.asked(asker)
        return Locked(got=True, snapshot=snapshot_of(rows[0], self._statements.content), begun=lock.number)

    def completing_at_commit(
        self, claim: Claim, target: WriteTarget, settlement: Completed | Deferred, begun: int
    ) -> Fold[Stored] | None:
        """`completing` as one statement, to be executed in one job of the thread together with the COMMIT.

        Not for a deferred response, whose parcel is another statement.
        """
        if isinstance(settlement, Deferred):
            return None
        return Fold(self._finished(claim, target, settlement), lambda rows: self._stored(rows[0], begun))

    def held(self, number: int) -> Flow[bool]:
        """Whether a request of this process holds the lock of a key, or waits for it (L8)."""
        yield from ()
        return self._writer.holds(number)

    def holder(self, lock: Lock) -> Flow[Holder]:
        """Which request of this process holds the lock, or waits for it (L8)."""
        yield from ()
        return self._writer.holder(lock)

    def _stored(self, row: Row, begun: int | None) -> Stored:  # noqa: ARG002  (no statement of SQLite returns it: the driver checks)
        return Stored(expires_at=int(row["expires_at"]))
