"""A request's own call: its record and its parcel move together, in one transaction, and the table decides how.

Each move locks the record, then the parcel, asks `judge`, and writes. A move whose reply was lost is made again, and
recognises what it has written itself: records by owner and fence, parcels by their fence.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from oncekey.core.audit import Mover, Note
from oncekey.core.deferred import (
    RECORD_GONE,
    UNCERTAIN,
    Kept,
    Orphaned,
    Parked,
    Postponed,
    TakenUp,
    facts_of,
    is_unsent,
)
from oncekey.core.errors import StoreUnavailableError
from oncekey.core.memo import recovery_point
from oncekey.core.model import Lease, ParcelKind, Settled, Snapshot, State
from oncekey.core.transitions import Actor, Row, Trigger, judge
from oncekey.flow import Mode, Transaction
from oncekey.stores.parcels import held_of, parcel_proof, parcels_text
from oncekey.stores.phases import MARGIN
from oncekey.stores.rows import memo_text, owner_proof, response_params, snapshot_of, version_proof
from oncekey.stores.saying import repeated

if TYPE_CHECKING:
    from oncekey.core.model import Announcement, Completed, Duration, HeldParcel, MemoEntry, Record, RecordId
    from oncekey.flow import Flow, Rows, Statement, Steps, Value
    from oncekey.ports import Audit
    from oncekey.stores.statements import Statements

STATEMENTS: tuple[str, ...] = (
    "hold_record",
    "hold_parcel",
    "extend_parcel",
    "take_up",
    "deferred_result",
    "pend",
    "park_record",
    "retake_parcel",
    "bring_back",
    "drop_dead_letter",
)


class DeferredCalls:
    """The moves of a record that waits for its parcel, in whatever understands the named statements."""

    def __init__(self, statements: Statements, audit: Audit | None = None) -> None:
        statements.require(STATEMENTS)
        self._statements = statements
        self._audit = audit

    def take_up(
        self, held: HeldParcel, owner: str, call: Announcement, lease: Duration
    ) -> Flow[TakenUp | Parked | Orphaned | None]:
        """Become the record's next owner and announce the call, or park both (rows 24, 25). None: the parcel is lost.

        `owner` names this very attempt: a record in progress that says so was taken up by it, and nothing was sent.
        """

        def body() -> Steps[TakenUp | Parked | Orphaned | None]:
            seen = yield from self._hold_record(held.parcel.record_id)
            record = seen.record
            if not (yield from self._hold_parcel(held)):
                parked = record is not None and record.state is State.UNKNOWN and (yield from self._is_buried(held))
                return Parked(record) if record is not None and parked else None
            if record is None or record.incarnation != held.parcel.incarnation:
                yield from self._burying(held, RECORD_GONE)
                return Orphaned(RECORD_GONE)
            if record.state is State.IN_PROGRESS and record.owner == owner:
                return TakenUp(Lease.of(record), held, record, seen.now)
            row = judge(Trigger.WORKER_CLAIM, Actor.WORKER, facts_of(record, seen.now, call.digest))
            if not isinstance(row, Row):
                yield from self._burying(held, RECORD_GONE)
                return Orphaned(row.why)
            if row.to is State.UNKNOWN:
                yield from self._noting(record, State.UNKNOWN, Trigger.WORKER_CLAIM, owner, UNCERTAIN)
                return Parked((yield from self._parking(record, held, UNCERTAIN, UNCERTAIN)))
            written = yield from self._write("take_up", {**version_proof(record), **_announced(record, call, owner)})
            span = max(lease, call.send_window + record.call_timeout + MARGIN)
            extended = yield self._say("extend_parcel", {**parcel_proof(held), "lease": span})
            return TakenUp(Lease.of(written), held_of(_must(extended)), written, seen.now)

        return (yield from repeated(Transaction("take_up", Mode.ATOMIC, body)))

    def result(self, lease: Lease, held: HeldParcel, entry: MemoEntry, span: Duration) -> Flow[Kept | None]:
        """Store what the call returned (row 6); a parcel that was parked meanwhile comes back. None: not ours."""
        memo = (entry,)

        def body() -> Steps[Kept | None]:
            seen = yield from self._hold_record(lease.id)
            record = seen.record
            if record is None or not _owns(lease, record):
                return None
            if record.memo == memo:  # the reply was lost
                return Kept(seen, (yield from self._own_parcel(held, lease.owner)))
            row = judge(Trigger.DEFERRED_RESULT, Actor.OWNER, facts_of(record, seen.now, "", phase=entry.name))
            if not isinstance(row, Row):
                return None
            params: dict[str, Value] = {"memo": memo_text(memo), "recovery_point": recovery_point(memo)}
            written = yield from self._write("deferred_result", {**owner_proof(lease), **params, "owner": lease.owner})
            there = self._retaking(held, lease.owner, span) if "item" in row.sets else self._own_parcel(held, "")
            return Kept(Snapshot(written, seen.now), (yield from there))

        return (yield from repeated(Transaction("deferred_result", Mode.ATOMIC, body)))

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
        """Wait for the next attempt (row 26), or park what must not be sent again (row 27). None: not ours."""

        def body() -> Steps[Postponed | Parked | None]:
            seen = yield from self._hold_record(lease.id)
            record = seen.record
            if record is None or not _owns(lease, record):
                return None
            if not (yield from self._hold_parcel(held)):
                return (yield from self._moved(record, held))
            facts = facts_of(record, seen.now, digest, never_sent=never_sent)
            if isinstance(judge(Trigger.TRY_AGAIN, Actor.WORKER, facts), Row):
                unsent = is_unsent(record, never_sent=never_sent)
                params: dict[str, Value] = {"error": error, "unsent": unsent}
                written = yield from self._write("pend", {**owner_proof(lease), **params})
                yield from self._noting(record, State.PENDING, Trigger.TRY_AGAIN, lease.owner, error)
                waiting: dict[str, Value] = {"after": after, "error": error, "spared": 0 if counted else 1}
                _must((yield self._say("again", {**parcel_proof(held), **waiting})))
                return Postponed(written)
            if isinstance(judge(Trigger.DOUBT, Actor.WORKER, facts), Row):
                yield from self._noting(record, State.UNKNOWN, Trigger.DOUBT, lease.owner, UNCERTAIN)
                return Parked((yield from self._parking(record, held, UNCERTAIN, error)))
            return None

        return (yield from repeated(Transaction("try_again", Mode.ATOMIC, body)))

    def park(self, lease: Lease, held: HeldParcel, trigger: Trigger, code: str, error: str) -> Flow[Parked | None]:
        """Nobody tries any more: UNKNOWN with the code, and the parcel to the dead letters (row 27). None: not ours."""

        def body() -> Steps[Parked | None]:
            seen = yield from self._hold_record(lease.id)
            record = seen.record
            if record is None or not _owns(lease, record):
                return None
            if not (yield from self._hold_parcel(held)):
                moved = yield from self._moved(record, held)
                return moved if isinstance(moved, Parked) else None
            if not isinstance(judge(trigger, Actor.WORKER, facts_of(record, seen.now, "")), Row):
                return None
            yield from self._noting(record, State.UNKNOWN, trigger, lease.owner, code)
            return Parked((yield from self._parking(record, held, code, error)))

        return (yield from repeated(Transaction("park", Mode.ATOMIC, body)))

    def deliver(self, lease: Lease, held: HeldParcel, settlement: Completed) -> Flow[Settled]:
        """The answer, and the parcel's end (row 7); not `ours` if somebody else has the record or the parcel."""

        def body() -> Steps[Settled]:
            seen = yield from self._hold_record(lease.id)
            record = seen.record
            if record is None or not _owns(lease, record):
                return Settled(ours=False, snapshot=seen)
            if not (yield from self._hold_parcel(held)):
                said = record.state is State.COMPLETED and record.response == settlement.response
                return Settled(ours=said, snapshot=seen)
            if not isinstance(judge(Trigger.SETTLE, Actor.OWNER, facts_of(record, seen.now, "")), Row):
                return Settled(ours=False, snapshot=seen)
            answer = {"outcome": settlement.outcome.value, **response_params(settlement.response)}
            written = yield from self._write("settle_completed", {**owner_proof(lease), **answer})
            _must((yield self._say("drop_parcel", parcel_proof(held))))
            return Settled(ours=True, snapshot=Snapshot(written, seen.now))

        return (yield from repeated(Transaction("deliver", Mode.ATOMIC, body)))

    def _noting(self, record: Record, to: State, trigger: Trigger, who: str, why: str) -> Steps[None]:
        """The line of the audit about what did not go as it should; what does, its record tells (ADR 0014)."""
        if self._audit is not None:
            yield from self._audit.noting((Note.of(record, to, trigger, Mover(Actor.WORKER, who), why),))

    def _parking(self, record: Record, held: HeldParcel, code: str, error: str) -> Steps[Record]:
        written = yield from self._write("park_record", {**version_proof(record), "last_error": code})
        if not (yield from self._burying(held, error)):
            raise StoreUnavailableError(_MOVED)
        return written

    def _burying(self, held: HeldParcel, error: str) -> Steps[bool]:
        rows = yield self._say("bury", {**parcel_proof(held), "error": error})
        if rows:
            yield self._say("drop_parcel", parcel_proof(held))
        return bool(rows)

    def _is_buried(self, held: HeldParcel) -> Steps[bool]:
        """Whether the parcel lies with the dead letters since this very claim of it."""
        rows = yield self._say("find_dead_letter", parcel_proof(held))
        return bool(rows) and rows[0]["fence"] == held.fence

    def _moved(self, record: Record, held: HeldParcel) -> Steps[Postponed | Parked | None]:
        """What we have made of it already, if it was us."""
        if record.state is State.UNKNOWN and (yield from self._is_buried(held)):
            return Parked(record)
        there = yield self._say("find_parcel", parcel_proof(held))
        waiting = bool(there) and there[0]["fence"] == held.fence
        return Postponed(record) if record.state is State.PENDING and waiting else None

    def _retaking(self, held: HeldParcel, owner: str, span: Duration) -> Steps[HeldParcel]:
        """The parcel under a new fence: from the outbox, from the dead letters, or written once more (ADR 0009)."""
        proof = {**parcel_proof(held), "incarnation": str(held.parcel.incarnation)}
        kept: dict[str, Value] = {"kind": ParcelKind.DEFER.value, "attempts": held.attempts}
        rows = yield self._say("retake_parcel", {**proof, "owner": owner, "lease": span})
        if rows:
            return held_of(rows[0])
        if (yield self._say("bring_back", {**proof, **kept})):
            yield self._say("drop_dead_letter", {**proof, **kept})
        else:
            yield self._say("put_parcels", {"parcels": parcels_text((held.parcel,))})
        rows = yield self._say("retake_parcel", {**proof, "owner": owner, "lease": span})
        return held_of(_must(rows))

    def _own_parcel(self, held: HeldParcel, owner: str) -> Steps[HeldParcel | None]:
        rows = yield self._say("find_parcel", parcel_proof(held))
        if not rows or rows[0]["state"] != "held":
            return None
        ours = rows[0]["fence"] == held.fence or rows[0]["owner"] == owner
        return held_of(rows[0]) if ours else None

    def _hold_record(self, record_id: RecordId) -> Steps[Snapshot]:
        rows = yield self._say("hold_record", {"scope": record_id.scope, "key": record_id.key})
        return snapshot_of(rows[0]) if rows else Snapshot(None, 0)

    def _hold_parcel(self, held: HeldParcel) -> Steps[bool]:
        return bool((yield self._say("hold_parcel", parcel_proof(held))))

    def _write(self, name: str, params: dict[str, Value]) -> Steps[Record]:
        """A write to a record that is locked: it fits, or the transaction is undone."""
        rows = yield self._say(name, params)
        record = snapshot_of(_must(rows)).record
        assert record is not None
        return record

    def _say(self, name: str, params: dict[str, Value]) -> Statement:
        return self._statements.say(name, params)


_MOVED = "what was locked has moved: the transaction is undone"


def _must(rows: Rows) -> Any:  # noqa: ANN401  (a row of whatever driver there is)
    if not rows:
        raise StoreUnavailableError(_MOVED)
    return rows[0]


def _owns(lease: Lease, record: Record) -> bool:
    return (record.incarnation, record.fence) == (lease.incarnation, lease.fence)


def _announced(record: Record, call: Announcement, owner: str) -> dict[str, Value]:
    said = replace(call, sends=1 if record.intent is None else record.intent.sends + 1)
    return {
        "owner": owner,
        "phase": said.phase,
        "downstream_key": said.downstream_key,
        "digest": said.digest,
        "sends": said.sends,
        "repeatable": said.repeatable,
        "send_window": said.send_window,
    }
