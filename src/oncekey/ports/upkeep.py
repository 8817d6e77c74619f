"""The protocols of a store for the sweeper, the reaper, the audit, operators, resolvers and webhooks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from uuid import UUID

    from oncekey.core.enclosing import InUse
    from oncekey.core.flow import Body, Flow
    from oncekey.core.model import (
        Completed,
        DeadLetter,
        Duration,
        Instant,
        MemoEntry,
        Parcel,
        Record,
        RecordId,
        Snapshot,
        State,
    )
    from oncekey.core.operate import Forbidden, Move, Moved, ParcelLocation, Search
    from oncekey.core.resolution import AnnouncedCall, CallReport, Evidence, EvidenceVerdict
    from oncekey.core.transitions import Actor, AuditEntry, Mover, Note
    from oncekey.core.upkeep import Expired, Gone, Page, ReapPosition, Run
    from oncekey.ops.stats import (
        Backlog,
        End,
        LetterPosition,
        LetterStretch,
        LetterWalk,
        Lines,
        ParcelView,
        Roll,
        StoreStats,
        Stretch,
        Tally,
        Walk,
    )
    from oncekey.ops.stats import WalkPosition as Spot


class Upkeep(Protocol):
    """The reads and writes of the sweeper and the reaper; the core decides what is due, each write proves the version.

    Only finished and expired records are moved by conditions in the statement itself, without being read first.

    `noting` creates the audit line about a record that was moved; it is written in the same transaction.
    """

    def stale(self, limit: int, after: Record | None = None) -> Flow[Page]:
        """Records in progress whose lease has expired, from the oldest, after the one that was read last."""

    def sweep(
        self, seen: Record, to: State, last_error: str, noting: Callable[[Record], Note] | None = None
    ) -> Flow[bool]:
        """Move `seen` to FAILED_RETRYABLE or UNKNOWN (rows 14, 15, 18). False: another actor moved it first."""

    def runs(self, limit: int) -> Flow[tuple[Run, ...]]:
        """How long the operations that finished last took."""

    def expiring(self, limit: int, age: Duration, after: Record | None = None) -> Flow[Page]:
        """Records that expired at least `age` ago and are not marked, the oldest first; without their responses."""

    def kept_expired(self, limit: int, age: Duration, after: Record | None = None) -> Flow[Page]:
        """Records that have been marked as expired for at least `age`, the oldest first; without their responses."""

    def purge(
        self, due: Expired, limit: int, after: ReapPosition = ..., mover: Mover | None = None, *, each: bool = False
    ) -> Flow[Gone]:
        """Delete finished and expired records, the oldest first, after a position (row 30).

        With a `mover` the audit has a line per scope and state, or with `each` a line per record; without one it has
        none. A line about one record names it.
        """

    def purge_kept(
        self, due: Expired, limit: int, after: ReapPosition = ..., mover: Mover | None = None, *, each: bool = False
    ) -> Flow[Gone]:
        """Delete records that are marked as expired, in the same way (row 30)."""

    def mark(
        self, due: Expired, limit: int, after: ReapPosition = ..., mover: Mover | None = None, *, each: bool = False
    ) -> Flow[Gone]:
        """Mark expired records that have a response, in the same way (row 29)."""

    def abandon(
        self, seen: Record, answer: Completed, kept: Duration, noting: Callable[[Record], Note] | None = None
    ) -> Flow[bool]:
        """End a pending record whose parcel no worker claimed, and delete that (row 28). False: it was claimed."""

    def live_keys(self, scope: str, limit: int) -> Flow[int]:
        """How many keys of a scope have a record now, counted up to `limit`."""

    def beat(
        self, name: str, tasks: Sequence[str], every: Duration, calls: Mapping[str, Sequence[str]] = ...
    ) -> Flow[Instant]:
        """Write a worker's heartbeat, with the interval to the next one and the calls that its application makes."""

    def leave(self, name: str) -> Flow[None]:
        """Remove the row of a worker that shuts down."""

    def workers(self) -> Flow[Roll]:
        """The workers that have a row, the oldest first."""

    def forget_workers(self, age: Duration) -> Flow[int]:
        """Delete the rows of workers whose next heartbeat was due longer than `age` ago; returns their number."""


class Audit(Protocol):
    """The lines about moves: only added, and deleted after their own retention time."""

    def noting(self, notes: Sequence[Note]) -> Body[None]:
        """Write lines as part of the transaction that makes the moves."""

    def history(self, record_id: RecordId, limit: int = ...) -> Flow[tuple[AuditEntry, ...]]:
        """The lines about all incarnations of a key, the oldest first."""

    def deletions(self, scope: str, limit: int) -> Flow[tuple[AuditEntry, ...]]:
        """The latest lines about several keys of a scope, the newest first: they may include a key that is gone."""

    def forget(self, age: Duration, limit: int) -> Flow[int]:
        """Delete the oldest lines that are older than `age`, at most `limit` of them; returns their number."""


class Operate(Protocol):
    """The reads and moves of operators; the core decides the moves, and the audit records them."""

    def search(self, wanted: Search, limit: int, before: tuple[Instant, str, str] | None = None) -> Flow[Page]:
        """Records, the newest first, before a position; without their responses."""

    def named(self, beginning: str, scope: str | None, limit: int) -> Flow[Page]:
        """Records of this key, else unfinished ones that begin with it, else finished ones; without responses.

        The key of the scope itself is preferred to the keys of the scopes in it, those of a tenant's principals.
        """

    def last_result(self, operation: str, phase: str) -> Flow[MemoEntry | None]:
        """The last result of the same call, for any key; results that an operator entered do not count."""

    def parcels(self, incarnation: UUID) -> Flow[tuple[ParcelLocation, ...]]:
        """Where the parcels of a record are."""

    def move(
        self,
        record_id: RecordId,
        deciding: Callable[[Snapshot, tuple[ParcelLocation, ...]], Move | Forbidden],
        noting: Callable[[Move], Note],
    ) -> Flow[Moved | Forbidden]:
        """Make the move that `deciding` returns for the current record, with its parcel and its audit line."""

    def revive(self, letter: DeadLetter, note: Note) -> Flow[bool]:
        """Make a dead message due again. False: it is gone."""

    def discard(self, letter: DeadLetter, note: Note) -> Flow[bool]:
        """Delete a dead letter that moves no record. False: it is gone."""

    def stats(self) -> Flow[StoreStats]:
        """The numbers of everything stored, and what waits for a worker or an operator."""

    def backlog(self) -> Flow[Backlog]:
        """The number of unfinished records, and what waits, read only from indexes."""

    def diagnostics(self, *names: str) -> Flow[Mapping[str, tuple[Mapping[str, Any], ...]]]:
        """The database's reports about its health, all or the named ones; each store has its own names."""


class Survey(Protocol):
    """The listings for operators. Each follows an index and reads a bounded number of its entries."""

    def walk(
        self, wanted: Walk, limit: int, before: Mapping[State, Spot] | None = None, looked: int = ...
    ) -> Flow[Stretch]:
        """Records of some states, the newest first; without their responses. `before` is where the last page ended."""

    def unknown(self, limit: int, after: Spot = ...) -> Flow[Stretch]:
        """Records of unknown outcome, the oldest first; without responses. `after` is where the last page ended."""

    def letters(
        self, wanted: LetterWalk, limit: int, after: LetterPosition = ..., looked: int = ...
    ) -> Flow[LetterStretch]:
        """Dead letters, the oldest first. `after` is where the last page ended."""

    def named(self, beginning: str, scope: str | None, limit: int) -> Flow[Page]:
        """Records of this key, else unfinished ones that begin with it; without responses, otherwise as `Operate`."""

    def tally(self) -> Flow[Tally]:
        """The numbers of what waits, counted up to a bound."""

    def ended(self, limit: int) -> Flow[tuple[End, ...]]:
        """How the last requests ended: at most `limit` finished, failed and doubtful ones each, in no order."""

    def calls(self, incarnation: UUID) -> Flow[tuple[AnnouncedCall, ...]]:
        """The calls that were announced in one incarnation of a key."""

    def reports_about(
        self, downstream_keys: tuple[str, ...], provider_ids: tuple[str, ...]
    ) -> Flow[tuple[Evidence, ...]]:
        """All evidence about these calls, with or without a verdict, in the order in which it arrived."""

    def parcels(self, incarnation: UUID) -> Flow[tuple[ParcelView, ...]]:
        """The parcels of one incarnation of a key, in the outbox and among the dead letters."""

    def notes(
        self, limit: int, before: int | None = None, actor: Actor | None = None, looked: int = ...
    ) -> Flow[Lines]:
        """Lines of the audit about all keys, the newest first."""


class Reseal(Protocol):
    """Resealing content under another key: reads of all content as it is stored, and writes that prove what was read.

    A store without it keeps its content under the keys that it was sealed with, until it expires.
    """

    def records(self, limit: int, after: Record | None = None) -> Flow[tuple[Record, ...]]:
        """Records that have a response, steps or a request, in some order, after one as it was read.

        Records that cannot be read are left out, so a page that is not full need not be the last one.
        """

    def rewrite(self, seen: Record, record: Record) -> Flow[bool]:
        """Store the content of `record` instead of what was `seen`. False: it has moved, or has an owner."""

    def parcels(self, limit: int, after: UUID | None = None) -> Flow[tuple[Parcel, ...]]:
        """Parcels and dead letters in the order of their ids, after one."""

    def rewrite_parcel(self, seen: Parcel, payload: str) -> Flow[bool]:
        """Store another payload. False: the parcel is gone, or was rewritten."""

    def evidence(self, limit: int, after: int = 0) -> Flow[tuple[Evidence, ...]]:
        """All evidence, in order, after a position."""

    def rewrite_evidence(self, seen: Evidence, text: str) -> Flow[bool]:
        """Store evidence in another form. False: it is gone, or was rewritten."""

    def seals(self, limit: int) -> Flow[tuple[InUse, ...]]:
        """How much content is sealed under which key, by kind; at most `limit` of each kind are read."""


class Reconcile(Protocol):
    """Settling unknown records: which of them are due, which calls were announced, and the evidence about them.

    The move itself is `Operate.move`, the same for resolvers, webhooks and operators: the first one wins.
    """

    def due(self, limit: int, after: Record | None = None) -> Flow[Page]:
        """Unknown records whose provider should be queried, longest due first, after the one that was read last."""

    def later(
        self,
        seen: Record,
        after: Duration | None,
        *,
        counted: bool = True,
        noting: Callable[[Record], Note] | None = None,
    ) -> Flow[bool]:
        """Query again after this time, or never (None), with the query counted or not (row 23). False: it has moved."""

    def add(self, report: CallReport) -> Flow[tuple[Evidence, bool]]:
        """Store evidence; True if it was not stored before."""

    def about(self, record: Record, downstream_key: str | None) -> Flow[tuple[Evidence, ...]]:
        """The evidence about a record's call that has no verdict yet, in the order in which it arrived."""

    def undecided(self, limit: int, after: int = 0) -> Flow[tuple[Evidence, ...]]:
        """All evidence without a verdict, in order, after a position."""

    def store_verdict(self, evidence: Evidence, verdict: EvidenceVerdict) -> Flow[bool]:
        """Write the verdict on evidence, once. False: it already has one."""

    def calls_of(self, downstream_key: str | None, provider_id: str | None) -> Flow[tuple[AnnouncedCall, ...]]:
        """Announced calls with one of these names, the newest first. For people only: two accounts may use one id."""

    def keys_named(self, source: str, provider_id: str) -> Flow[tuple[str, ...]]:
        """The downstream keys of the calls to which this source assigned this id; at most two."""

    def add_call(self, call: AnnouncedCall) -> Flow[bool]:
        """Store the call of an INLINE handler, which announces none, as of now. False: it was stored before."""

    def name(self, call: AnnouncedCall, provider_id: str) -> Flow[bool]:
        """Store the provider's own id of a call, unless it has one."""

    def calls(
        self, since: Instant, limit: int, after: AnnouncedCall | None = None
    ) -> Flow[tuple[tuple[AnnouncedCall, Record | None], ...]]:
        """Calls since an instant, the oldest first, each with its record if that still exists."""

    def forget(self, age: Duration, limit: int) -> Flow[int]:
        """Delete evidence, and calls whose record is gone, that are older than `age`; returns their number."""
