"""The operations of a store as flows over named statements, for SQL and for memory alike.

Stores differ only in their command for each name of `STATEMENTS`. All of them are single statements that commit by
themselves, so a claim costs one round trip; `settling` is the same settlement inside a business transaction that the
caller commits.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import cached_property, partial
from typing import TYPE_CHECKING, Final, assert_never

from oncekey.core.errors import ConfigurationError, RecordUnreadableError
from oncekey.core.flow import Body, Command, Flow, Mode, Rows, Statement, Transaction, Value
from oncekey.core.lazy import Lazy
from oncekey.core.model import (
    Completed,
    Deferred,
    Discarded,
    Doubtful,
    HandedBack,
    RecordId,
    Retryable,
    Settled,
    Snapshot,
    State,
)
from oncekey.stores.rows import (
    claim_params,
    glimpse_of,
    owned,
    owner_proof,
    parcels_text,
    response_params,
    snapshot_of,
    version_proof,
)
from oncekey.stores.statements import PART_STATEMENTS, Statements, execute, execute_until_acknowledged

if TYPE_CHECKING:
    from oncekey.core.model import Claim, Duration, Glimpse, Instant, Lease, Parcel, Record, Settlement
    from oncekey.core.transitions import Note
    from oncekey.ports.store import (
        Audit,
        Locks,
        Operate,
        Outbox,
        ParcelWriter,
        Phases,
        Reconcile,
        Reseal,
        Schema,
        Survey,
        Upkeep,
    )
    from oncekey.stores import moves
    from oncekey.stores import phases as steps
    from oncekey.stores.sealed_content import SealedContent
else:
    moves = Lazy("oncekey.stores.moves")
    steps = Lazy("oncekey.stores.phases")

NO_OUTBOX: Final = "effects=OUTBOX needs a store with an outbox: `oncekey stores` lists those that have one"
STATEMENTS: tuple[str, ...] = (
    "find",
    "recall",
    "recall_all",
    "claim",
    "take_over",
    "supersede",
    "mark_unknown",
    "renew",
    "settle_completed",
    "settle_retryable",
    "settle_unknown",
    "settle_handed_back",
    "settle_deferred",
    "discard",
)


def _none(_: object) -> None:
    """The constructor of a part that the store does not have."""


class KeyStore:
    """Records in any store that has the named statements.

    A part is created at its first use, so that a process imports only the parts that it uses; None means that the store
    does not have it. `clock` returns every instant in tests that control time; without it the store's clock is used.
    """

    phases: cached_property[Phases] = cached_property(lambda self: steps.PhaseStore(self._statements))
    parcels: cached_property[ParcelWriter | None] = cached_property(lambda self: self.outbox)
    outbox: cached_property[Outbox | None] = cached_property(_none)
    locks: cached_property[Locks | None] = cached_property(_none)
    notes: cached_property[NoteWriter | Audit | None] = cached_property(lambda self: self.audit)
    audit: cached_property[Audit | None] = cached_property(_none)
    upkeep: cached_property[Upkeep | None] = cached_property(_none)
    operate: cached_property[Operate | None] = cached_property(_none)
    survey: cached_property[Survey | None] = cached_property(_none)
    reconcile: cached_property[Reconcile | None] = cached_property(_none)
    reseal: cached_property[Reseal | None] = cached_property(_none)

    resolution: Duration = 1
    """The resolution of the store's clock; a coarser one than microseconds needs longer leases."""

    of_cells = False
    """Whether it is a store of three verbs (`oncekey.cells`)."""
    of_one_process = False
    """Whether its records are lost with the process."""

    def __init__(
        self,
        commands: Mapping[str, Command],
        *,
        schema: Schema | None = None,
        clock: Callable[[], Instant] | None = None,
    ) -> None:
        self.schema: Schema = schema or moves.NoSchema()
        self._statements = Statements(commands, clock)
        self._statements.require((*STATEMENTS, *PART_STATEMENTS["phases"]))

    def seal_with(self, content: SealedContent) -> None:
        self._statements.content = content

    def find(self, record_id: RecordId) -> Flow[Snapshot]:
        return (yield from execute(Transaction("find", Mode.READ, lambda: self._find(record_id))))

    def recall(self, record_id: RecordId) -> Flow[Glimpse | None]:
        """The part of a finished record that a repeat reads."""
        found: Glimpse | None = yield Transaction("recall", Mode.READ, partial(self._recall, record_id))
        return found

    def recall_all(self, record_ids: tuple[RecordId, ...]) -> Flow[dict[RecordId, Glimpse]]:
        """`recall` for many repeats at once."""
        body = partial(self._recall_all, record_ids)
        found: dict[RecordId, Glimpse] = yield Transaction("recall_all", Mode.READ, body)
        return found

    def claim(self, claim: Claim) -> Flow[Snapshot]:
        """Insert the claim if there is no row; after a lost reply the request reads again, and recognises its owner."""
        return (yield from execute(Transaction("claim", Mode.SINGLE, lambda: self._claim(claim))))

    def take_over(self, claim: Claim, seen: Record, note: Note | None = None) -> Flow[Snapshot | None]:
        """Become the next owner of `seen`."""
        return (yield from execute(self._swap("take_over", seen, claim_params(claim, self._statements.content), note)))

    def supersede(self, claim: Claim, seen: Record, note: Note | None = None) -> Flow[Snapshot | None]:
        """Begin a new incarnation for the claim in the row of the expired `seen`."""
        return (yield from execute(self._swap("supersede", seen, claim_params(claim, self._statements.content), note)))

    def mark_unknown(self, seen: Record, last_error: str, note: Note | None = None) -> Flow[Snapshot | None]:
        """Make the stale `seen` UNKNOWN."""
        return (yield from execute(self._swap("mark_unknown", seen, {"last_error": last_error}, note)))

    def renew(self, lease: Lease, span: Duration) -> Flow[Instant | None]:
        """Extend the lease, never past the deadline."""

        def body() -> Body[Instant | None]:
            rows = yield self._say("renew", {**owner_proof(lease), "lease": span})
            return int(rows[0]["lease_until"]) if rows else None

        return (yield from execute_until_acknowledged(Transaction("renew", Mode.SINGLE, body)))

    def settle(self, lease: Lease, settlement: Settlement) -> Flow[Settled]:
        """Write the outcome of the operation; repeating it is harmless, so it is repeated after a lost reply."""
        # A pending record without its parcel would wait forever, so both are in one commit.
        mode = Mode.ATOMIC if isinstance(settlement, Deferred) else Mode.SINGLE
        transaction = Transaction("settle", mode, lambda: self.settling(lease, settlement))
        return (yield from execute_until_acknowledged(transaction))

    def settling(self, lease: Lease, settlement: Settlement) -> Body[Settled]:
        """The settlement as statements; if none writes, the record has another outcome.

        If a record is two rows, a statement that waited for another write is refused if that one wrote both. So an
        owner that still owns the record writes again, and is compared with the current rows.
        """
        content = self._statements.content
        name, params = _settlement(settlement, lease, content)
        parcels = self._writer if isinstance(settlement, Deferred) else None
        for form in ("settle_alone" if lease.alone and name == "settle_completed" else None, None):
            rows = yield self._statements.statement(name, {**owner_proof(lease), **params}, form=form)
            if rows and parcels is not None and isinstance(settlement, Deferred):
                yield from parcels.putting((settlement.parcel,))
            if rows:
                known = settlement.response if isinstance(settlement, Completed) else None
                return Settled(ours=True, snapshot=snapshot_of(rows[0], content, response=known))
            snapshot = yield from self._find(lease.id)
            if _has_outcome(snapshot, lease, settlement) or not owned(snapshot.record, lease):
                break
        return Settled(ours=_has_outcome(snapshot, lease, settlement), snapshot=snapshot)

    @property
    def _writer(self) -> ParcelWriter:
        if self.parcels is None:
            raise ConfigurationError(NO_OUTBOX)
        return self.parcels

    def _find(self, record_id: RecordId) -> Body[Snapshot]:
        rows = yield self._say("find", {"scope": record_id.scope, "key": record_id.key})
        return snapshot_of(rows[0], self._statements.content)

    def _recall(self, record_id: RecordId) -> Body[Glimpse | None]:
        rows = yield self._say("recall", {"scope": record_id.scope, "key": record_id.key})
        return glimpse_of(rows[0], record_id, self._statements.content) if rows else None

    def _recall_all(self, record_ids: tuple[RecordId, ...]) -> Body[dict[RecordId, Glimpse]]:
        asked = json.dumps([{"scope": one.scope, "key": one.key} for one in record_ids])
        found: dict[RecordId, Glimpse] = {}
        for row in (yield self._say("recall_all", {"asked": asked})):
            record_id = RecordId(row["scope"], row["key"])
            with suppress(RecordUnreadableError):  # the error is raised when the caller reads the record in full
                found[record_id] = glimpse_of(row, record_id, self._statements.content)
        return found

    def _claim(self, claim: Claim) -> Body[Snapshot]:
        form = None if claim.request is None else "claim_kept"
        rows = yield self._statements.statement("claim", claim_params(claim, self._statements.content), form=form)
        if rows:
            return _ours_first(rows, claim, self._statements.content)
        # Another request committed the row after our snapshot was taken, or the row is only a part of the record: read
        # again.
        return (yield from self._find(claim.id))

    def _swap(
        self, name: str, seen: Record, params: dict[str, Value], note: Note | None = None
    ) -> Transaction[Snapshot | None]:
        notes = None if note is None else self.notes

        def body() -> Body[Snapshot | None]:
            rows = yield self._say(name, {**params, **version_proof(seen)})
            if rows and notes is not None and note is not None:
                yield from notes.noting((note,))
            return snapshot_of(rows[0], self._statements.content) if rows else None

        # A move and its audit line are in one commit.
        return Transaction(name, Mode.SINGLE if notes is None else Mode.ATOMIC, body)

    def _say(self, name: str, params: dict[str, Value]) -> Statement:
        return self._statements.statement(name, params)


def _ours_first(rows: Rows, claim: Claim, content: SealedContent | None) -> Snapshot:
    """The snapshot from our own row, rather than from an old one that was reaped while the statement ran."""
    ours = [row for row in rows if str(row["incarnation"]) == str(claim.incarnation)]
    return snapshot_of((ours or rows)[0], content)


def _settlement(settlement: Settlement, lease: Lease, content: SealedContent | None) -> tuple[str, dict[str, Value]]:
    match settlement:
        case Completed(response, outcome):
            return "settle_completed", {"outcome": outcome.value, **response_params(response, lease, content)}
        case Retryable(last_error):
            return "settle_retryable", {"last_error": last_error}
        case Doubtful(last_error):
            return "settle_unknown", {"last_error": last_error}
        case HandedBack(last_error, resume_after, counted):
            spared = 0 if counted else 1
            return "settle_handed_back", {"last_error": last_error, "resume_after": resume_after, "spared": spared}
        case Deferred(accepted=accepted):
            return "settle_deferred", {
                "request": accepted if content is None else content.closed_accepted(accepted, lease)
            }
        case Discarded():
            return "discard", {}
        case _:
            assert_never(settlement)


def _has_outcome(snapshot: Snapshot, lease: Lease, settlement: Settlement) -> bool:
    """Whether the record already has this outcome, because an earlier attempt wrote it."""
    record = snapshot.record
    if record is None or record.incarnation != lease.incarnation:
        return isinstance(settlement, Discarded)
    if record.fence != lease.fence:
        return False
    match settlement:
        case Completed(response):
            return record.state is State.COMPLETED and record.response == response
        case Retryable(last_error):
            return record.state is State.FAILED_RETRYABLE and record.last_error == last_error
        case Doubtful(last_error):
            return record.state is State.UNKNOWN and record.last_error == last_error
        case HandedBack(last_error):
            return record.state is State.FAILED_RETRYABLE and record.last_error == last_error
        case Deferred():
            return record.state is State.PENDING
        case Discarded():
            return False
        case _:
            assert_never(settlement)


class NoteWriter:
    """Writes lines of the audit with the moves that they describe; `stores.audit` reads them."""

    def __init__(self, statements: Statements) -> None:
        self._statements = statements

    def noting(self, notes: Sequence[Note]) -> Body[None]:
        if notes:
            yield self._statements.statement("note", {"notes": json.dumps([_line(note) for note in notes])})


def _line(note: Note) -> dict[str, object]:
    return {
        "scope": note.scope,
        "key_digest": note.key_digest,
        "incarnation": str(note.incarnation),
        "operation": note.operation,
        "fence": note.fence,
        "source": note.source,
        "target": note.to,
        "trigger": note.trigger,
        "actor": note.actor,
        "who": note.who,
        "why": note.why,
    }


class ParcelStore:
    """Writes parcels with the business rows; `stores.outbox` has the operations of workers."""

    def __init__(self, statements: Statements) -> None:
        self._statements = statements

    def putting(self, parcels: tuple[Parcel, ...]) -> Body[None]:
        if parcels:
            yield self._statements.statement(
                "put_parcels", {"parcels": parcels_text(parcels, self._statements.content)}
            )
