"""The protocols between the engine, the stores and the drivers, split by their callers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from oncekey.ports.driver import (
    AsyncFolds,
    AsyncReads,
    AsyncSessions,
    AsyncShares,
    AsyncWaits,
    Borrowed,
    Shares,
)
from oncekey.ports.upkeep import Audit, Operate, Reconcile, Reseal, Survey, Upkeep

if TYPE_CHECKING:
    from uuid import UUID

    from oncekey.core.deferred import Kept, Orphaned, Parked, Postponed, TakenUp
    from oncekey.core.flow import Body, Flow, Fold, Rows, Statement, Transaction
    from oncekey.core.fronts import Command
    from oncekey.core.migrations import Applied, Migration
    from oncekey.core.model import (
        Announcement,
        Claim,
        Completed,
        DeadLetter,
        Deferred,
        Duration,
        Glimpse,
        Headers,
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
    from oncekey.core.onecommit import Holder, Lock, Locked, Stored, WriteTarget
    from oncekey.core.transitions import Note, Trigger

__all__ = [
    "AsyncDriver",
    "AsyncFolds",
    "AsyncOpenTransaction",
    "AsyncReads",
    "AsyncSessions",
    "AsyncShares",
    "AsyncWaits",
    "Audit",
    "Borrowed",
    "Borrows",
    "Bounded",
    "Driver",
    "FoldingTransaction",
    "Inspect",
    "Locks",
    "OpenTransaction",
    "Operate",
    "Outbox",
    "ParcelWriter",
    "Phases",
    "Recalls",
    "Reconcile",
    "Records",
    "RequestSession",
    "Reseal",
    "Schema",
    "SessionTransaction",
    "Shares",
    "SteppingSession",
    "Store",
    "Survey",
    "Upkeep",
]

T = TypeVar("T")


class Records(Protocol):
    """The request path. Every write is a compare-and-swap; the core decides which one to make.

    `note` is the audit line about a move other than an ordinary claim or settlement; it is written with the move.
    """

    def claim(self, claim: Claim) -> Flow[Snapshot]:
        """Insert the claim if there is no row; the record is ours if it has our owner."""

    def take_over(self, claim: Claim, seen: Record, note: Note | None = None) -> Flow[Snapshot | None]:
        """Become the next owner of `seen`: raises fence and attempts, keeps the fingerprint. None: it has moved."""

    def supersede(self, claim: Claim, seen: Record, note: Note | None = None) -> Flow[Snapshot | None]:
        """Begin a new incarnation in the row of the expired `seen`: raises the fence, clears the rest. None: moved."""

    def mark_unknown(self, seen: Record, last_error: str, note: Note | None = None) -> Flow[Snapshot | None]:
        """Make a stale record that must not run again UNKNOWN. None: it has moved."""

    def renew(self, lease: Lease, span: Duration) -> Flow[Instant | None]:
        """Extend the owner's lease, never past the deadline. None: not ours any more."""

    def settle(self, lease: Lease, settlement: Settlement) -> Flow[Settled]:
        """Write the outcome of the operation as its owner; repeating the same settlement changes nothing."""

    def settling(self, lease: Lease, settlement: Settlement) -> Body[Settled]:
        """`settle` as statements of a transaction that is already open (L4: the last before its commit)."""


class Phases(Protocol):
    """The writes of the owner of a phased record between its claim and its settlement."""

    def checkpointing(
        self, lease: Lease, seen: tuple[MemoEntry, ...], memo: tuple[MemoEntry, ...], span: Duration
    ) -> Body[Snapshot | None]:
        """Write a finished phase, as the last statement of its own transaction. None: not ours any more."""

    def keeping(
        self, lease: Lease, seen: tuple[MemoEntry, ...], memo: tuple[MemoEntry, ...], span: Duration
    ) -> Fold[None] | None:
        """`checkpointing` as one statement that fails if the record is not ours, to be sent with the COMMIT.

        None: this phase has to be written by `checkpointing`.
        """

    def announce(
        self, lease: Lease, seen: tuple[MemoEntry, ...], memo: tuple[MemoEntry, ...], call: Announcement
    ) -> Flow[Snapshot | None]:
        """Write the intent, before the call is made. None: not ours, or the call must not be repeated."""

    def result(
        self, lease: Lease, seen: tuple[MemoEntry, ...], memo: tuple[MemoEntry, ...], span: Duration
    ) -> Flow[Snapshot | None]:
        """Write the result of an open call, also for a record that was only swept. None: not ours any more."""

    def withdraw(self, lease: Lease) -> Flow[Snapshot | None]:
        """Remove an announcement that was provably not followed by a call."""

    def after_lost_commit(self, lease: Lease, memo: tuple[MemoEntry, ...], span: Duration) -> Flow[bool | None]:
        """Whether a phase whose COMMIT received no reply was committed. None: not ours any more."""

    def resumable(self, limit: int, after: Record | None = None) -> Flow[tuple[Snapshot, ...]]:
        """Records that the completer may resume, from the oldest, after the one that it read last."""


class ParcelWriter(Protocol):
    """Writes parcels, in stores that share the application's transactions."""

    def putting(self, parcels: tuple[Parcel, ...]) -> Body[None]:
        """Write parcels as part of an open transaction."""


class Outbox(ParcelWriter, Protocol):
    """The reads and writes of workers and operators on parcels."""

    def due(
        self,
        owner: str,
        topics: tuple[str, ...],
        limit: int,
        lease: Duration,
        *,
        careful: int | None = None,
        beginning: str = "",
    ) -> Flow[tuple[HeldParcel, ...]]:
        """Claim due parcels, those that wait longest first; at most `careful` of them deferred or tried before.

        Readable scopes must have this `beginning`, which is that of one namespace (`core.scope.beginning_of`).
        `owner` identifies this call of `due`.
        """

    def sent(self, *held: HeldParcel) -> Flow[frozenset[UUID]]:
        """Acknowledge delivered messages; the result excludes those that another worker has claimed since."""

    def again(self, held: HeldParcel, after: Duration, error: str, *, counted: bool = True) -> Flow[bool]:
        """Make a message due again later. False: not ours any more."""

    def bury(self, held: HeldParcel, error: str) -> Flow[bool]:
        """Move a message to the dead letters. False: not ours any more."""

    def hand_back(self, *held: HeldParcel) -> Flow[frozenset[UUID]]:
        """Release parcels that were claimed but not begun; the attempt does not count."""

    def take_up(
        self, held: HeldParcel, owner: str, call: Announcement, lease: Duration
    ) -> Flow[TakenUp | Parked | Orphaned | None]:
        """Own the record of a deferred call and announce it, or park both (rows 24, 25). None: the parcel is lost."""

    def result(self, lease: Lease, held: HeldParcel, entry: MemoEntry, span: Duration) -> Flow[Kept | None]:
        """Store the result of the call (row 6). None: not ours any more."""

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
        """Make the parcel due again, or park what must not be sent again (rows 26, 27). None: not ours any more."""

    def park(self, lease: Lease, held: HeldParcel, trigger: Trigger, code: str, error: str) -> Flow[Parked | None]:
        """Park the record, and make the parcel a dead letter (row 27). None: not ours any more."""

    def deliver(self, lease: Lease, held: HeldParcel, settlement: Completed) -> Flow[Settled]:
        """Write the response, and remove the parcel (row 7)."""

    def dead_letters(self, limit: int, after: DeadLetter | None = None) -> Flow[tuple[DeadLetter, ...]]:
        """The dead letters, oldest first."""

    def find_dead_letter(self, parcel_id: UUID) -> Flow[DeadLetter | None]:
        """One dead letter."""


class Locks(Protocol):
    """LOCAL in one commit, in stores with a lock that ends with its transaction (L1)."""

    @property
    def one_writer(self) -> bool:
        """Whether the lock blocks all other writers: then a reader must neither take it nor wait for it."""

    def locking(self, lock: Lock, claim: Claim) -> Body[Locked]:
        """Try the lock, then read: the transaction's first statement, which sets its time-outs (L4). It folds."""

    def completing(
        self, claim: Claim, target: WriteTarget, settlement: Completed | Deferred, begun: int | None
    ) -> Body[Stored | None]:
        """Write the finished record, as the last statement before the commit (L3). None: the key is not ours."""

    def completing_at_commit(
        self, claim: Claim, target: WriteTarget, settlement: Completed | Deferred, begun: int
    ) -> Fold[Stored] | None:
        """`completing` as one statement that fails if the key is taken, so that it can be sent with the COMMIT.

        None: this record has to be written by `completing`.
        """

    def held(self, number: int) -> Flow[bool]:
        """Whether any request holds the lock of a key; the query does not take it (L8)."""

    def holder(self, lock: Lock) -> Flow[Holder]:
        """Which request holds the lock; the query does not take it. A record read earlier is out of date (L8)."""


class Inspect(Protocol):
    """The read of one record."""

    def find(self, record_id: RecordId) -> Flow[Snapshot]:
        """The current record, and the store's clock."""


class Recalls(Protocol):
    """The short read for a repeat of a finished request, which is tried first."""

    def recall(self, record_id: RecordId) -> Flow[Glimpse | None]:
        """The response of a completed record, expired or not. None: there is none, use `find`."""

    def recall_all(self, record_ids: tuple[RecordId, ...]) -> Flow[dict[RecordId, Glimpse]]:
        """`recall` for many keys in one read. A record that cannot be read is left out, and delays no other."""


class Schema(Protocol):
    """The store's tables."""

    @property
    def migrations(self) -> tuple[Migration, ...]:
        """The migrations of this version of oncekey, in order."""

    def applied(self) -> Flow[tuple[Applied, ...]]:
        """The migrations that the store has."""

    def migrate(self, *migrations: Migration) -> Flow[tuple[Migration, ...]]:
        """Run migrations and record them, in one transaction; the result omits those that were already applied."""


class Store(Records, Inspect, Recalls, Protocol):
    """The operations of a store for requests, and its other parts."""

    def seal_with(self, content: Any) -> None:  # noqa: ANN401  (`SealedContent` of `oncekey.stores`)
        """Seal the content of rows from now on, and open what is sealed."""

    @property
    def schema(self) -> Schema:
        """Its tables."""

    @property
    def resolution(self) -> Duration:
        """The resolution of its clock."""

    @property
    def phases(self) -> Phases:
        """The steps of phased records."""

    @property
    def parcels(self) -> ParcelWriter | None:
        """The writer of parcels, if the store shares the application's transactions."""

    @property
    def outbox(self) -> Outbox | None:
        """Its parcels for workers and operators, if it has `parcels`."""

    @property
    def locks(self) -> Locks | None:
        """Its locks, if it has any; without them LOCAL claims first."""

    @property
    def audit(self) -> Audit | None:
        """Its audit, if it keeps one."""

    @property
    def upkeep(self) -> Upkeep | None:
        """The operations of the sweeper and the reaper, if it has them."""

    @property
    def operate(self) -> Operate | None:
        """The operations of operators, if it has them."""

    @property
    def survey(self) -> Survey | None:
        """The listings for operators, if it has them."""

    @property
    def reconcile(self) -> Reconcile | None:
        """The operations of resolvers and webhooks, if it has them."""

    @property
    def reseal(self) -> Reseal | None:
        """The operations of `oncekey rekey`, if it has them."""


class OpenTransaction(Protocol):
    """A business transaction in which a handler writes and which oncekey ends (blocking)."""

    @property
    def connection(self) -> Any:  # noqa: ANN401  (whatever the driver's users know: psycopg, asyncpg, sqlite3)
        """The connection for the handler; it refuses to end the transaction (L5)."""

    def run(self, body: Body[T]) -> T:
        """Run statements inside it."""

    def commit(self) -> None:
        """Commit; raises `CommitAmbiguousError` if it is not known whether it was committed."""

    def rollback(self) -> None:
        """Roll back, and return the connection; has no effect on a transaction that has ended."""


class AsyncOpenTransaction(Protocol):
    """A business transaction in which a handler writes and which oncekey ends (asyncio)."""

    @property
    def connection(self) -> Any:  # noqa: ANN401  (whatever the driver's users know: psycopg, asyncpg, sqlite3)
        """The connection for the handler; it refuses to end the transaction (L5)."""

    async def run(self, body: Body[T]) -> T:
        """Run statements inside it."""

    async def commit(self) -> None:
        """Commit; raises `CommitAmbiguousError` if it is not known whether it was committed."""

    async def rollback(self) -> None:
        """Roll back, and return the connection; has no effect on a transaction that has ended."""


class Driver(Protocol):
    """All blocking I/O with a store."""

    def run(self, transaction: Transaction[T]) -> T:
        """Run one transaction; every failure of the store is raised as a `StoreError`."""

    def close(self) -> None:
        """Close all connections."""


class AsyncDriver(Protocol):
    """All asyncio I/O with a store."""

    async def run(self, transaction: Transaction[T]) -> T:
        """Run one transaction; every failure of the store is raised as a `StoreError`."""

    async def close(self) -> None:
        """Close all connections."""


class Borrows(Driver, Shares, Protocol):
    """A blocking driver on the connections of the application's framework."""


class FoldingTransaction(AsyncOpenTransaction, Protocol):
    """A business transaction whose last statement can be sent in the message of its COMMIT."""

    async def commit_with(self, last: Statement) -> Rows | None:
        """Run `last` and commit. None: the record already exists, and everything is rolled back."""


class SessionTransaction(AsyncOpenTransaction, Protocol):
    """A business transaction with a session of an object-relational mapper."""

    @property
    def session(self) -> Any:  # noqa: ANN401  (SQLAlchemy's AsyncSession)
        """The session; its `commit()` only flushes."""

    def adopt(self, session: Any) -> None:  # noqa: ANN401  (SQLAlchemy's AsyncSession)
        """Use a session that existed before the transaction; it is closed with it."""

    async def flush(self) -> None:
        """Write the session's pending changes; the database's errors are raised as they are."""


class RequestSession(Protocol):
    """A session for the application: SQLAlchemy's `AsyncSession`, with the methods that oncekey adds."""

    async def rest(self) -> None:
        """Return the connection, unless that would lose something; objects stay as they are."""

    async def close(self) -> None:
        """Return the connection."""


class SteppingSession(RequestSession, Protocol):
    """A session that reads by itself, and writes only in the transactions that it has joined."""

    def join(self, tx: SessionTransaction, *, afresh: bool) -> None:
        """Write in a transaction; with `afresh` the session forgets all objects that it read before."""

    def done(self) -> None:
        """Accept no further writes in the transaction."""

    def part(self) -> None:
        """Leave the transaction, which has ended: the session reads by itself again."""

    def check(self) -> None:
        """Raise if the session has changes that belong to no transaction and would be lost."""


class FrontConnection(Protocol):
    """The connection to a shared front: the commands of one event loop arrive in order."""

    async def ask(self, commands: tuple[Command, ...]) -> list[bytes | None] | None:
        """The reply to each command, under asyncio; None: the front did not reply."""

    def post(self, commands: tuple[Command, ...]) -> None:
        """Send the commands without waiting for the replies."""

    def ask_blocking(self, commands: tuple[Command, ...]) -> list[bytes | None] | None:
        """The reply to each command, in a thread; None: the front did not reply."""

    async def close(self) -> None:
        """Close the connection of this event loop."""

    def close_blocking(self) -> None:
        """Close the connections of threads."""


class Pulse(Protocol):
    """A running heartbeat."""

    lost: bool
    """Whether another owner has the record now."""

    def stop(self) -> None:
        """Stop the heartbeat."""


class Asker(Protocol):
    """The parts of a request that a refusal or a replay needs."""

    @property
    def echo(self) -> bytes | None:
        """The key's header field as the client wrote it."""

    @property
    def status_url(self) -> str | None:
        """The URL of the key's status resource."""

    @property
    def trace_id(self) -> str:
        """The trace id in the client's `traceparent`; empty without one."""


class Captured(Protocol):
    """The application's response so far."""

    status: int | None
    headers: Headers
    refused: str | None
    """Why the response cannot be captured; None if it can."""

    @property
    def kept(self) -> bytes | None:
        """The body as it will be stored; None if it is over the limit."""


class Bounded(Protocol):
    """A driver that reports when business transactions use all of its connections."""

    @property
    def is_full(self) -> bool:
        """Whether the next business transaction would have to wait for another to end."""


class Interruptible(Protocol):
    """An operation that a retry or the completer can resume."""

    def interrupt(self) -> None:
        """Cancel it, unless it has an open call."""
