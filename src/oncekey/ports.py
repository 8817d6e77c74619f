"""The protocols between the engine, the stores and the drivers, split by who calls them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol, TypeVar, runtime_checkable

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from uuid import UUID

    from oncekey.core.audit import AuditEntry, Note
    from oncekey.core.census import Census
    from oncekey.core.deferred import Kept, Orphaned, Parked, Postponed, TakenUp
    from oncekey.core.migrations import Applied, Migration
    from oncekey.core.model import (
        Announcement,
        Claim,
        Completed,
        DeadLetter,
        Deferred,
        Duration,
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
        State,
    )
    from oncekey.core.onecommit import Ground, Locked, Sealed
    from oncekey.core.operate import Forbidden, Move, Moved, Search, Whereabouts
    from oncekey.core.resolution import Call, Evidence, Heard, Verdict
    from oncekey.core.transitions import Trigger
    from oncekey.core.upkeep import Page, Run
    from oncekey.flow import Flow, Steps, Transaction

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

    def due(self, owner: str, topics: tuple[str, ...], limit: int, lease: Duration) -> Flow[tuple[HeldParcel, ...]]:
        """Claim what is due, longest waiting first; `owner` names this very call."""

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

    def locking(self, number: int, record_id: RecordId, lease: Duration) -> Steps[Locked]:
        """Try the lock, then look: the first statement of the transaction, whose time-outs it sets (L4)."""

    def completing(
        self, claim: Claim, ground: Ground, settlement: Completed | Deferred, begun: Instant
    ) -> Steps[Sealed | None]:
        """The finished record, as the last statement before the commit (L3). None: the key is not ours."""

    def held(self, number: int) -> Flow[bool]:
        """Whether somebody holds the lock; asking takes none (L8)."""


class Upkeep(Protocol):
    """What sweepers and reapers ask and write; what is due is the core's decision, and each write proves V.

    `noting` makes the line of the audit about a record that was moved; it is written in the same transaction.
    """

    def stale(self, limit: int, after: Record | None = None) -> Flow[Page]:
        """Records in progress whose lease is over, from the oldest, after the one that was looked at last."""

    def sweep(
        self, seen: Record, to: State, last_error: str, noting: Callable[[Record], Note] | None = None
    ) -> Flow[bool]:
        """Move `seen` to FAILED_RETRYABLE or UNKNOWN (rows 14, 15, 18). False: somebody else moved it."""

    def runs(self, limit: int) -> Flow[tuple[Run, ...]]:
        """How long the operations took that were finished last."""

    def expiring(self, limit: int, age: Duration, after: Record | None = None) -> Flow[Page]:
        """Records that expired at least `age` ago and are not marked, longest ago first; without their answers."""

    def kept_expired(self, limit: int, age: Duration, after: Record | None = None) -> Flow[Page]:
        """Records that are marked as expired since at least `age`, longest ago first; without their answers."""

    def purge(
        self, seen: Sequence[Record], grace: Duration, noting: Callable[[Record], Note] | None = None
    ) -> Flow[int]:
        """Delete what is still as it was read, finished and expired for `grace` (row 30); how many that were."""

    def mark(
        self, seen: Sequence[Record], grace: Duration, noting: Callable[[Record], Note] | None = None
    ) -> Flow[int]:
        """Mark the same as EXPIRED (row 29); how many that were."""

    def abandon(
        self, seen: Record, answer: Completed, kept: Duration, noting: Callable[[Record], Note] | None = None
    ) -> Flow[bool]:
        """End a pending record whose parcel nobody ever took, and delete that parcel (row 28). False: it was taken."""

    def live_keys(self, scope: str, limit: int) -> Flow[int]:
        """How many keys of a scope are remembered now, counted up to `limit`."""


class Audit(Protocol):
    """The lines about moves: only added to, and forgotten after a time of their own."""

    def noting(self, notes: Sequence[Note]) -> Steps[None]:
        """Write lines as part of the transaction that makes the moves."""

    def history(self, record_id: RecordId, limit: int = ...) -> Flow[tuple[AuditEntry, ...]]:
        """What is known of a key over all its lives, oldest first."""

    def forget(self, age: Duration, limit: int) -> Flow[int]:
        """Delete the oldest lines that are older than `age`, at most `limit` of them; how many that were."""


class Operate(Protocol):
    """What a person does by hand: looks, and moves that the core decides and the audit keeps."""

    def search(self, wanted: Search, limit: int, before: tuple[Instant, str, str] | None = None) -> Flow[Page]:
        """Records, the newest first, from before a place on; without their answers."""

    def parcels(self, incarnation: UUID) -> Flow[tuple[Whereabouts, ...]]:
        """Where the parcels of a record are."""

    def move(
        self,
        record_id: RecordId,
        deciding: Callable[[Snapshot, tuple[Whereabouts, ...]], Move | Forbidden],
        noting: Callable[[Move], Note],
    ) -> Flow[Moved | Forbidden]:
        """Do what `deciding` says of the record as it is now (V), with its parcel and its line of the audit."""

    def revive(self, letter: DeadLetter, note: Note) -> Flow[bool]:
        """Let a dead message be tried again. False: it is gone."""

    def discard(self, letter: DeadLetter, note: Note) -> Flow[bool]:
        """Forget a dead letter that moves no record. False: it is gone."""

    def census(self) -> Flow[Census]:
        """How many of everything there are, and what waits for somebody."""

    def vitals(self) -> Flow[Mapping[str, tuple[Mapping[str, Any], ...]]]:
        """What the database says about its own health, by name; every store has its own names."""


class Reconcile(Protocol):
    """What settles the unknown: what is to be asked about, which calls were announced, and what was heard of them.

    The move itself is `Operate.move`, the same for resolvers, webhooks and operators: the first one wins.
    """

    def due(self, limit: int, after: Record | None = None) -> Flow[Page]:
        """Unknown records that are to be asked about, longest due first, after the one that was looked at last."""

    def later(
        self,
        seen: Record,
        after: Duration | None,
        *,
        counted: bool = True,
        noting: Callable[[Record], Note] | None = None,
    ) -> Flow[bool]:
        """Ask again after so long, or never (None), with the look counted or not (row 23). False: it has moved."""

    def add(self, heard: Heard) -> Flow[tuple[Evidence, bool]]:
        """Keep what was heard; True if it was not kept before."""

    def about(self, record: Record, downstream_key: str | None) -> Flow[tuple[Evidence, ...]]:
        """What was heard about a record's call and has no verdict yet, in the order in which it was heard."""

    def undecided(self, limit: int, after: int = 0) -> Flow[tuple[Evidence, ...]]:
        """All evidence without a verdict, in order, after a place."""

    def judge(self, evidence: Evidence, verdict: Verdict) -> Flow[bool]:
        """Write what became of evidence, once. False: it has a verdict."""

    def calls_of(self, downstream_key: str | None, provider_id: str | None) -> Flow[tuple[Call, ...]]:
        """Announced calls by the names that a provider knows, the newest first."""

    def name(self, call: Call, provider_id: str) -> Flow[bool]:
        """Remember the provider's own name of a call, unless it has one."""

    def calls(
        self, since: Instant, limit: int, after: Call | None = None
    ) -> Flow[tuple[tuple[Call, Record | None], ...]]:
        """Calls since an instant, the oldest first, each with its record as far as that is still there."""

    def forget(self, age: Duration, limit: int) -> Flow[int]:
        """Delete evidence, and calls whose record is gone, that are older than `age`; how many that were."""


class Inspect(Protocol):
    """Read only."""

    def find(self, record_id: RecordId) -> Flow[Snapshot]:
        """The record as it stands, and the store's clock."""


class Schema(Protocol):
    """The store's tables."""

    @property
    def migrations(self) -> tuple[Migration, ...]:
        """What this version of oncekey knows, in order."""

    def applied(self) -> Flow[tuple[Applied, ...]]:
        """What the store has."""

    def migrate(self, migration: Migration) -> Flow[bool]:
        """Run one migration and remember it, together or not at all; False if it was there already."""


class Store(Records, Inspect, Protocol):
    """What a store for requests can do."""

    @property
    def schema(self) -> Schema:
        """Its tables."""

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
    def reconcile(self) -> Reconcile | None:
        """What resolvers and webhooks need of it, if it has that."""


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


class SessionTransaction(AsyncOpenTransaction, Protocol):
    """A business transaction that can be written through a session of an object-relational mapper."""

    @property
    def session(self) -> Any:  # noqa: ANN401  (SQLAlchemy's AsyncSession)
        """The session; its `commit()` only flushes."""

    async def flush(self) -> None:
        """Write what the session holds back; the database's errors are raised as they are."""


@runtime_checkable
class AsyncFlushes(Protocol):
    """A business transaction that may hold rows back until it is told to write them."""

    async def flush(self) -> None:
        """Write what is held back; the database's errors are raised as they are."""


@runtime_checkable
class AsyncSessions(Protocol):
    """An asyncio driver whose transactions are `SessionTransaction`s."""

    def session(self) -> Any:  # noqa: ANN401  (SQLAlchemy's AsyncSession)
        """An ordinary session, which the application commits and the caller closes."""
