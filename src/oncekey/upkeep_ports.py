"""What works behind the requests asks of a store: sweepers, reapers, the audit, operators, resolvers and webhooks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from uuid import UUID

    from oncekey.core.audit import AuditEntry, Mover, Note
    from oncekey.core.envelopes import InUse
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
    from oncekey.core.operate import Forbidden, Move, Moved, Search, Whereabouts
    from oncekey.core.resolution import Call, Evidence, Heard, Verdict
    from oncekey.core.transitions import Actor
    from oncekey.core.upkeep import Expired, Gone, Page, Place, Run
    from oncekey.flow import Flow, Steps
    from oncekey.ops.stats import Census, Roll, Standing
    from oncekey.ops.survey import End, Lines, ParcelView, Stretch, Tally, Walk
    from oncekey.ops.survey import Place as Spot


class Upkeep(Protocol):
    """What sweepers and reapers ask and write; what is due is the core's decision, and each write proves V.

    Only what is finished and expired goes by the core's conditions in the statement itself, without being read first.

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

    def purge(self, due: Expired, limit: int, after: Place = ..., mover: Mover | None = None) -> Flow[Gone]:
        """Delete what is finished and expired, longest ago first, from behind a place on (row 30).

        A `mover` is told to the audit; without one there are no lines.
        """

    def purge_kept(self, due: Expired, limit: int, after: Place = ..., mover: Mover | None = None) -> Flow[Gone]:
        """Delete what is marked as expired, in the same way (row 30)."""

    def mark(self, due: Expired, limit: int, after: Place = ..., mover: Mover | None = None) -> Flow[Gone]:
        """Mark what has an answer and is expired, in the same way (row 29)."""

    def abandon(
        self, seen: Record, answer: Completed, kept: Duration, noting: Callable[[Record], Note] | None = None
    ) -> Flow[bool]:
        """End a pending record whose parcel nobody ever took, and delete that parcel (row 28). False: it was taken."""

    def live_keys(self, scope: str, limit: int) -> Flow[int]:
        """How many keys of a scope are remembered now, counted up to `limit`."""

    def beat(
        self, name: str, tasks: Sequence[str], every: Duration, calls: Mapping[str, Sequence[str]] = ...
    ) -> Flow[Instant]:
        """Write down that a worker is alive, after how long it will be seen again, and what its application calls."""

    def leave(self, name: str) -> Flow[None]:
        """Take a worker off the roll: it stops on purpose."""

    def workers(self) -> Flow[Roll]:
        """Who is on the roll, the longest there first."""

    def forget_workers(self, age: Duration) -> Flow[int]:
        """Delete those who were to be seen longer than `age` ago; how many that were."""


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

    def named(self, beginning: str, scope: str | None, limit: int) -> Flow[Page]:
        """Records of this key, else unfinished ones that begin like it, else finished ones; without answers."""

    def last_result(self, operation: str, phase: str) -> Flow[MemoEntry | None]:
        """What the same call returned when it was last made, for any key; not what somebody gave by hand."""

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

    def standing(self) -> Flow[Standing]:
        """How many unfinished records there are, and what waits for somebody, by indexes alone."""

    def vitals(self, *names: str) -> Flow[Mapping[str, tuple[Mapping[str, Any], ...]]]:
        """What the database says about its own health, all or what is named; every store has its own names."""


class Survey(Protocol):
    """What a person looks through. Every list goes along an index and looks at a bounded number of its entries."""

    def walk(
        self, wanted: Walk, limit: int, before: Mapping[State, Spot] | None = None, looked: int = ...
    ) -> Flow[Stretch]:
        """Records of some states, the newest first; without their answers. `before` is where the last part ended."""

    def named(self, beginning: str, scope: str | None, limit: int) -> Flow[Page]:
        """Records of this key, else unfinished ones that begin like it; without answers."""

    def tally(self) -> Flow[Tally]:
        """What waits, counted up to a bound."""

    def ended(self, limit: int) -> Flow[tuple[End, ...]]:
        """How the requests ended that did so last: so many finished, failed and doubtful ones, in no order."""

    def calls(self, incarnation: UUID) -> Flow[tuple[Call, ...]]:
        """The calls that were announced in one life of a key."""

    def heard(self, downstream_keys: tuple[str, ...], provider_ids: tuple[str, ...]) -> Flow[tuple[Evidence, ...]]:
        """All that was heard about these calls, judged or not, in the order in which it was heard."""

    def parcels(self, incarnation: UUID) -> Flow[tuple[ParcelView, ...]]:
        """The parcels of one life of a key, in the outbox and with the dead letters."""

    def notes(
        self, limit: int, before: int | None = None, actor: Actor | None = None, looked: int = ...
    ) -> Flow[Lines]:
        """Lines of the audit about all keys, the newest first."""


class Reseal(Protocol):
    """What gives stored content another key: everything there is, as it is stored, and writes that prove what was seen.

    A store without it keeps what it has under the keys that it was sealed with, until it expires.
    """

    def records(self, limit: int, after: Record | None = None) -> Flow[tuple[Record, ...]]:
        """Records that have an answer, steps or a request, in some order, from behind one on as it was read.

        Those that cannot be read are left out, so a page that is not full need not be the last one.
        """

    def rewrite(self, seen: Record, record: Record) -> Flow[bool]:
        """Store the content of `record` in the place of what was `seen` (V). False: it has moved, or is owned."""

    def parcels(self, limit: int, after: UUID | None = None) -> Flow[tuple[Parcel, ...]]:
        """Parcels and dead letters by their ids, from behind one on."""

    def rewrite_parcel(self, seen: Parcel, payload: str) -> Flow[bool]:
        """Store another payload. False: the parcel is gone, or was rewritten."""

    def evidence(self, limit: int, after: int = 0) -> Flow[tuple[Evidence, ...]]:
        """All that was heard, in order, from behind a place on."""

    def rewrite_evidence(self, seen: Evidence, text: str) -> Flow[bool]:
        """Store it in another form. False: it is gone, or was rewritten."""

    def seals(self, limit: int) -> Flow[tuple[InUse, ...]]:
        """How much is sealed under which key, by its kind; of each kind at most `limit` are looked at."""


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

    def add_call(self, call: Call) -> Flow[bool]:
        """Remember the call of an INLINE handler, which announces none, as of now. False: it was known."""

    def name(self, call: Call, provider_id: str) -> Flow[bool]:
        """Remember the provider's own name of a call, unless it has one."""

    def calls(
        self, since: Instant, limit: int, after: Call | None = None
    ) -> Flow[tuple[tuple[Call, Record | None], ...]]:
        """Calls since an instant, the oldest first, each with its record as far as that is still there."""

    def forget(self, age: Duration, limit: int) -> Flow[int]:
        """Delete evidence, and calls whose record is gone, that are older than `age`; how many that were."""
