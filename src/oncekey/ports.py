"""The protocols between the engine, the stores and the drivers, split by who calls them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol, TypeVar, runtime_checkable

from oncekey.upkeep_ports import Audit, Operate, Reconcile, Reseal, Survey, Upkeep

if TYPE_CHECKING:
    from uuid import UUID

    from oncekey.core.audit import Note
    from oncekey.core.deferred import Kept, Orphaned, Parked, Postponed, TakenUp
    from oncekey.core.locks import Lock
    from oncekey.core.migrations import Applied, Migration
    from oncekey.core.model import (
        Announcement,
        Claim,
        Completed,
        DeadLetter,
        Deferred,
        Duration,
        Glimpse,
        HeldParcel,
        Instant,
        Lease,
        MemoEntry,
        Parcel,
        Record,
        RecordId,
        Settled,
        Settlement,
        Snapshot,
    )
    from oncekey.core.onecommit import Ground, Holder, Locked, Sealed
    from oncekey.core.transitions import Trigger
    from oncekey.flow import Flow, Fold, Rows, Statement, Steps, Transaction

__all__ = [
    "AsyncDriver",
    "AsyncFlushes",
    "AsyncFolds",
    "AsyncOpenTransaction",
    "AsyncReads",
    "AsyncRoom",
    "AsyncSessions",
    "AsyncShares",
    "Audit",
    "Crowds",
    "Driver",
    "FoldingTransaction",
    "Folds",
    "Inspect",
    "LentSession",
    "Locks",
    "OpenTransaction",
    "Operate",
    "Outbox",
    "Phases",
    "Recalls",
    "Reconcile",
    "Records",
    "Reseal",
    "Schema",
    "SessionTransaction",
    "Shares",
    "SteppingSession",
    "Store",
    "Survey",
    "SyncFoldingTransaction",
    "Upkeep",
]

T = TypeVar("T")


class Records(Protocol):
    """The request path. Every write is a compare-and-swap; which one to make is the core's decision.

    `note` is the line of the audit about a move that is no ordinary claim or settlement; it is written with it.
    """

    def claim(self, claim: Claim) -> Flow[Snapshot]:
        """Insert the claim if there is no row (N); the record is ours if it names our owner."""

    def take_over(self, claim: Claim, seen: Record, note: Note | None = None) -> Flow[Snapshot | None]:
        """Go on with `seen` as its next owner (V): fence and attempts up, fingerprint kept. None: lost."""

    def supersede(self, claim: Claim, seen: Record, note: Note | None = None) -> Flow[Snapshot | None]:
        """Start the expired `seen` anew in the claim's incarnation (V): fence up, all else cleared."""

    def doubt(self, seen: Record, last_error: str, note: Note | None = None) -> Flow[Snapshot | None]:
        """Turn a stale record that nobody may run again into UNKNOWN (V). None: lost."""

    def renew(self, lease: Lease, span: Duration) -> Flow[Instant | None]:
        """Move the lease's end (O), never past the deadline. None: not ours any more."""

    def settle(self, lease: Lease, settlement: Settlement) -> Flow[Settled]:
        """Write what became of the operation (O); repeating the same settlement changes nothing."""

    def settling(self, lease: Lease, settlement: Settlement) -> Steps[Settled]:
        """`settle` as statements of a transaction that is already open (L4: the last before its commit)."""


class Phases(Protocol):
    """What the owner of a phased record writes between its claim and its settlement (O)."""

    def checkpointing(
        self, lease: Lease, seen: tuple[MemoEntry, ...], memo: tuple[MemoEntry, ...], span: Duration
    ) -> Steps[Snapshot | None]:
        """A finished phase, as the last statement of its own transaction. None: not ours any more."""

    def keeping(
        self, lease: Lease, seen: tuple[MemoEntry, ...], memo: tuple[MemoEntry, ...], span: Duration
    ) -> Fold[None] | None:
        """`checkpointing` as one statement that fails where the record is not ours, for the message of the COMMIT.

        None: this one has to be written by `checkpointing`.
        """

    def announce(
        self, lease: Lease, seen: tuple[MemoEntry, ...], memo: tuple[MemoEntry, ...], call: Announcement
    ) -> Flow[Snapshot | None]:
        """The intent, before the call is made. None: not ours, or not to be repeated."""

    def result(
        self, lease: Lease, seen: tuple[MemoEntry, ...], memo: tuple[MemoEntry, ...], span: Duration
    ) -> Flow[Snapshot | None]:
        """The result of an open call, also of a record that was only swept. None: not ours any more."""

    def withdraw(self, lease: Lease) -> Flow[Snapshot | None]:
        """Take an announcement back that was provably never followed by a call."""

    def after_lost_commit(self, lease: Lease, memo: tuple[MemoEntry, ...], span: Duration) -> Flow[bool | None]:
        """Whether a phase whose COMMIT got no reply was committed. None: not ours any more."""

    def resumable(self, limit: int, after: Record | None = None) -> Flow[tuple[Snapshot, ...]]:
        """Records that a completer may go on with, from the oldest, after the one that was looked at last."""


class Outbox(Protocol):
    """Parcels, in stores that share the application's transactions."""

    def putting(self, parcels: tuple[Parcel, ...]) -> Steps[None]:
        """Write parcels as part of an open transaction."""

    def due(
        self, owner: str, topics: tuple[str, ...], limit: int, lease: Duration, *, careful: int | None = None
    ) -> Flow[tuple[HeldParcel, ...]]:
        """Claim what is due, longest waiting first, at most `careful` of it deferred or tried before.

        `owner` names this very call.
        """

    def sent(self, *held: HeldParcel) -> Flow[frozenset[UUID]]:
        """Acknowledge delivered messages; what another worker has taken since is left out."""

    def again(self, held: HeldParcel, after: Duration, error: str, *, counted: bool = True) -> Flow[bool]:
        """Give a message back to be tried later. False: not ours any more."""

    def bury(self, held: HeldParcel, error: str) -> Flow[bool]:
        """Move a message to the dead letters. False: not ours any more."""

    def hand_back(self, *held: HeldParcel) -> Flow[frozenset[UUID]]:
        """Give back what was claimed and not begun; the attempt does not count."""

    def take_up(
        self, held: HeldParcel, owner: str, call: Announcement, lease: Duration
    ) -> Flow[TakenUp | Parked | Orphaned | None]:
        """Own the record of a deferred call and announce it, or park both (rows 24, 25). None: the parcel is lost."""

    def result(self, lease: Lease, held: HeldParcel, entry: MemoEntry, span: Duration) -> Flow[Kept | None]:
        """Store what the call returned (row 6). None: not ours any more."""

    def try_again(
        self,
        lease: Lease,
        held: HeldParcel,
        after: Duration,
        error: str,
        digest: str,
        *,
        never_sent: bool = False,
        counted: bool = True,
    ) -> Flow[Postponed | Parked | None]:
        """Wait for the next attempt, or park what must not be sent again (rows 26, 27). None: not ours any more."""

    def park(self, lease: Lease, held: HeldParcel, trigger: Trigger, code: str, error: str) -> Flow[Parked | None]:
        """Nobody tries any more (row 27). None: not ours any more."""

    def deliver(self, lease: Lease, held: HeldParcel, settlement: Completed) -> Flow[Settled]:
        """The answer, and the parcel's end (row 7)."""

    def dead_letters(self, limit: int, after: DeadLetter | None = None) -> Flow[tuple[DeadLetter, ...]]:
        """The dead letters, oldest first."""

    def find_dead_letter(self, parcel_id: UUID) -> Flow[DeadLetter | None]:
        """One dead letter."""


class Locks(Protocol):
    """LOCAL in one commit, in stores with a lock that ends with its transaction (L1)."""

    @property
    def one_writer(self) -> bool:
        """Whether the lock keeps everybody from writing: then what only reads must not take it, nor wait for it."""

    def locking(self, lock: Lock, claim: Claim) -> Steps[Locked]:
        """Try the lock, then look: the first statement of the transaction, whose time-outs it sets (L4). It folds."""

    def completing(
        self, claim: Claim, ground: Ground, settlement: Completed | Deferred, begun: int
    ) -> Steps[Sealed | None]:
        """The finished record, as the last statement before the commit (L3). None: the key is not ours."""

    def sealing(
        self, claim: Claim, ground: Ground, settlement: Completed | Deferred, begun: int
    ) -> Fold[Sealed] | None:
        """`completing` as one statement that fails where the key is taken, so that it may travel with the COMMIT.

        None: this one has to be written by `completing`.
        """

    def held(self, number: int) -> Flow[bool]:
        """Whether the lock of a key is held, by whatever request; asking takes none (L8)."""

    def holder(self, lock: Lock) -> Flow[Holder]:
        """Which request holds the lock; asking takes none. A record that is read before does not count (L8)."""


class Inspect(Protocol):
    """Read only."""

    def find(self, record_id: RecordId) -> Flow[Snapshot]:
        """The record as it stands, and the store's clock."""


class Recalls(Protocol):
    """What a repeat of a finished request reads, before anything else is asked."""

    def recall(self, record_id: RecordId) -> Flow[Glimpse | None]:
        """The answer of a completed record, whether or not it has expired. None: `find` says what there is."""

    def recall_all(self, record_ids: tuple[RecordId, ...]) -> Flow[dict[RecordId, Glimpse]]:
        """The same for many in one read. What cannot be read is left out, so that it keeps nobody else waiting."""


class Schema(Protocol):
    """The store's tables."""

    @property
    def migrations(self) -> tuple[Migration, ...]:
        """What this version of oncekey knows, in order."""

    def applied(self) -> Flow[tuple[Applied, ...]]:
        """What the store has."""

    def migrate(self, migration: Migration) -> Flow[bool]:
        """Run one migration and remember it, together or not at all; False if it was there already."""


class Store(Records, Inspect, Recalls, Protocol):
    """What a store for requests can do."""

    @property
    def schema(self) -> Schema:
        """Its tables."""

    @property
    def resolution(self) -> Duration:
        """The step of its clock."""

    @property
    def phases(self) -> Phases:
        """Steps of phased records."""

    @property
    def outbox(self) -> Outbox | None:
        """Its outbox, if it shares the application's transactions."""

    @property
    def locks(self) -> Locks | None:
        """Its locks, if it has such; without them LOCAL claims first."""

    @property
    def audit(self) -> Audit | None:
        """Its audit, if it keeps one."""

    @property
    def upkeep(self) -> Upkeep | None:
        """What sweepers and reapers need of it, if it has that."""

    @property
    def operate(self) -> Operate | None:
        """What operators need of it, if it has that."""

    @property
    def survey(self) -> Survey | None:
        """What operators look through, if it has that."""

    @property
    def reconcile(self) -> Reconcile | None:
        """What resolvers and webhooks need of it, if it has that."""

    @property
    def reseal(self) -> Reseal | None:
        """What gives its content another key, if it has that."""


class OpenTransaction(Protocol):
    """A business transaction that a handler writes through and that we end (blocking)."""

    @property
    def connection(self) -> Any:  # noqa: ANN401  (whatever the driver's users know: psycopg, asyncpg, sqlite3)
        """What the handler gets; it refuses to end the transaction (L5)."""

    def step(self, steps: Steps[T]) -> T:
        """Run statements inside it."""

    def commit(self) -> None:
        """Commit; `CommitAmbiguousError` when nobody can know."""

    def rollback(self) -> None:
        """Undo everything and give the connection back."""


class AsyncOpenTransaction(Protocol):
    """A business transaction that a handler writes through and that we end (asyncio)."""

    @property
    def connection(self) -> Any:  # noqa: ANN401  (whatever the driver's users know: psycopg, asyncpg, sqlite3)
        """What the handler gets; it refuses to end the transaction (L5)."""

    async def step(self, steps: Steps[T]) -> T:
        """Run statements inside it."""

    async def commit(self) -> None:
        """Commit; `CommitAmbiguousError` when nobody can know."""

    async def rollback(self) -> None:
        """Undo everything and give the connection back."""


class Driver(Protocol):
    """All blocking I/O with a store."""

    def run(self, transaction: Transaction[T]) -> T:
        """Run one transaction; raises only `StoreError`s for what the store did or did not do."""

    def close(self) -> None:
        """Give everything back."""


class AsyncDriver(Protocol):
    """All asyncio I/O with a store."""

    async def run(self, transaction: Transaction[T]) -> T:
        """Run one transaction; raises only `StoreError`s for what the store did or did not do."""

    async def close(self) -> None:
        """Give everything back."""


@runtime_checkable
class Shares(Protocol):
    """A blocking driver whose store shares the application's transactions: LOCAL is possible."""

    def begin(self) -> OpenTransaction:
        """Open a business transaction (its first statement begins it where a store locks writers)."""


@runtime_checkable
class AsyncShares(Protocol):
    """An asyncio driver whose store shares the application's transactions: LOCAL is possible."""

    async def begin(self) -> AsyncOpenTransaction:
        """Open a business transaction (its first statement begins it where a store locks writers)."""


class Borrows(Driver, Shares, Protocol):
    """A blocking driver on the connections of the application's framework."""


@runtime_checkable
class Borrowed(Protocol):
    """A database that the application's framework connects to; its keys are kept there, on the framework's connections.

    `Once` takes one in the place of a URL. The framework opens, lends and closes the connections.
    """

    @property
    def dialect(self) -> str | None:
        """Which database it is: `postgresql`, `sqlite` or `mysql`. None: that is not known before there is an app."""

    @property
    def title(self) -> str:
        """Its name in sentences and logs, without a password."""

    def driver(self) -> Borrows:
        """A new driver on the connections of this process; making it does no I/O."""


@runtime_checkable
class Folds(Protocol):
    """A blocking driver that sends the first statement of a business transaction in the message of its BEGIN."""

    def begin_with(self, first: Steps[T]) -> tuple[SyncFoldingTransaction, T]:
        """Open a business transaction and run `first` in it; if that fails, nothing stays open."""


class SyncFoldingTransaction(OpenTransaction, Protocol):
    """A business transaction of blocking code whose last statement can travel in the message of its COMMIT."""

    def commit_with(self, last: Statement) -> Rows | None:
        """Run `last` and commit. None: the record's place was taken, and everything is rolled back."""


@runtime_checkable
class AsyncFolds(Protocol):
    """An asyncio driver that sends the first statement of a business transaction in the message of its BEGIN."""

    async def begin_with(self, first: Steps[T]) -> tuple[FoldingTransaction, T]:
        """Open a business transaction and run `first` in it; if that fails, nothing stays open."""


class FoldingTransaction(AsyncOpenTransaction, Protocol):
    """A business transaction whose last statement can travel in the message of its COMMIT."""

    async def commit_with(self, last: Statement) -> Rows | None:
        """Run `last` and commit. None: the record's place was taken, and everything is rolled back."""


@runtime_checkable
class AsyncReads(Protocol):
    """An asyncio driver with transactions that only read, and for which no writer has to wait."""

    async def read(self) -> AsyncOpenTransaction:
        """Open one. Writing through it is refused, and it is always rolled back."""


@runtime_checkable
class Crowds(Protocol):
    """A driver that knows when its business transactions leave no place for another one."""

    @property
    def crowded(self) -> bool:
        """Whether the next one would have to wait for another one's end."""


@runtime_checkable
class AsyncRoom(Protocol):
    """An asyncio driver that tells when a place comes free."""

    async def room(self, seconds: float) -> bool:
        """Wait so long for one, without taking it: whether there is one."""


class SessionTransaction(AsyncOpenTransaction, Protocol):
    """A business transaction that can be written through a session of an object-relational mapper."""

    @property
    def session(self) -> Any:  # noqa: ANN401  (SQLAlchemy's AsyncSession)
        """The session; its `commit()` only flushes."""

    def adopt(self, session: Any) -> None:  # noqa: ANN401  (SQLAlchemy's AsyncSession)
        """Write through a session that was there before the transaction; it is closed with it."""

    async def flush(self) -> None:
        """Write what the session holds back; the database's errors are raised as they are."""


class LentSession(Protocol):
    """A session that is lent to the application: it is SQLAlchemy's `AsyncSession`, and these are our words to it."""

    async def rest(self) -> None:
        """Give the connection back, unless something would be lost by it; objects stay as they are."""

    async def close(self) -> None:
        """Give the connection back."""


class SteppingSession(LentSession, Protocol):
    """A session that reads by itself, and writes only through the transactions that it is joined to."""

    def join(self, tx: SessionTransaction, *, afresh: bool) -> None:
        """Write through a transaction; `afresh` lets it know no object that was read before."""

    def done(self) -> None:
        """What is written is all that the transaction gets."""

    def part(self) -> None:
        """The transaction is over: from now on it reads again."""

    def check(self) -> None:
        """Refuse to lose what was changed and is not part of any transaction."""


@runtime_checkable
class AsyncFlushes(Protocol):
    """A business transaction that may hold rows back until it is told to write them."""

    async def flush(self) -> None:
        """Write what is held back; the database's errors are raised as they are."""


@runtime_checkable
class AsyncSessions(Protocol):
    """An asyncio driver whose transactions are `SessionTransaction`s."""

    def session(self) -> LentSession:
        """An ordinary session, which the application commits and the caller closes."""

    def stepping_session(self) -> SteppingSession:
        """A session that only reads until it is joined to a transaction."""
