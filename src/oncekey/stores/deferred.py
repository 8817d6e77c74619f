"""Deferred calls in a store: the record and its parcel move together, in one transaction.

Each move locks the record, then the parcel; `oncekey.core.deferred` decides what is written. A move whose reply was
lost is made again, and recognises its own first write: records by owner and fence, parcels by their fence.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from oncekey.core import deferred as rules
from oncekey.core.flow import Body, Flow, Mode, Rows, Statement, Transaction, Value
from oncekey.core.memo import recovery_point
from oncekey.core.model import Lease, ParcelKind, Settled, Snapshot, State
from oncekey.core.transitions import Actor, Mover, Note, Trigger
from oncekey.stores.phases import MARGIN, announcement_params
from oncekey.stores.rows import memo_text, owner_proof, parcels_text, response_params, snapshot_of, version_proof
from oncekey.stores.statements import PART_STATEMENTS, Statements, execute_until_acknowledged, locked_row
from oncekey.stores.worker_rows import held_of, parcel_proof

if TYPE_CHECKING:
    from oncekey.core.model import Announcement, Completed, Duration, HeldParcel, MemoEntry, Record, RecordId
    from oncekey.ports.store import Audit

STATEMENTS = PART_STATEMENTS["deferred"]


class DeferredCalls:
    """The moves of a record with its deferred parcel, in any store that has the named statements."""

    def __init__(self, statements: Statements, audit: Audit | None = None) -> None:
        statements.require(STATEMENTS)
        self._statements = statements
        self._audit = audit

    def take_up(
        self, held: HeldParcel, owner: str, call: Announcement, lease: Duration
    ) -> Flow[rules.TakenUp | rules.Parked | rules.Orphaned | None]:
        """Become the record's next owner and announce the call, or park both (rows 24, 25). None: the parcel is lost.

        `owner` identifies this attempt: if a record in progress has it, this attempt took it up, and nothing was sent.
        """

        def body() -> Body[rules.TakenUp | rules.Parked | rules.Orphaned | None]:
            seen = yield from self._hold_record(held.parcel.record_id)
            if not (yield from self._hold_parcel(held)):
                moved = rules.ending_of_lost(seen.record, buried=(yield from self._is_buried(held)), waiting=False)
                return moved if isinstance(moved, rules.Parked) else None
            ruled = rules.rule_taking_up(seen, held, owner, call.digest)
            if ruled.making is rules.Making.BURY:
                yield from self._burying(held, rules.RECORD_GONE)
                return rules.Orphaned(ruled.why)
            record = _there(seen)
            if ruled.making is rules.Making.OURS:
                return rules.TakenUp(Lease.of(record), held, record, seen.now)
            if ruled.making is rules.Making.PARK:
                yield from self._noting(record, State.UNKNOWN, Trigger.WORKER_CLAIM, owner, rules.UNCERTAIN)
                return rules.Parked((yield from self._parking(record, held, rules.UNCERTAIN, rules.UNCERTAIN)))
            written = yield from self._write("take_up", {**version_proof(record), **_announced(record, call, owner)})
            span = max(lease, call.send_window + record.call_timeout + MARGIN)
            extended = yield self._say("extend_parcel", {**parcel_proof(held), "lease": span})
            return rules.TakenUp(
                Lease.of(written), held_of(locked_row(extended), self._statements.content), written, seen.now
            )

        return (yield from execute_until_acknowledged(Transaction("take_up", Mode.ATOMIC, body)))

    def result(self, lease: Lease, held: HeldParcel, entry: MemoEntry, span: Duration) -> Flow[rules.Kept | None]:
        """Store the result of the call (row 6); a parcel that was parked meanwhile is restored. None: not ours."""
        memo = (entry,)

        def body() -> Body[rules.Kept | None]:
            seen = yield from self._hold_record(lease.id)
            making = rules.rule_result(seen, lease, entry)
            if making is rules.Making.NOTHING:
                return None
            if making is rules.Making.OURS:
                return rules.Kept(seen, (yield from self._own_parcel(held, lease.owner)))
            params: dict[str, Value] = {
                "memo": memo_text(memo, lease, self._statements.content),
                "recovery_point": recovery_point(memo),
            }
            written = yield from self._write("deferred_result", {**owner_proof(lease), **params, "owner": lease.owner})
            retaken = making is rules.Making.RETAKE
            there = self._retaking(held, lease.owner, span) if retaken else self._own_parcel(held, "")
            return rules.Kept(Snapshot(written, seen.now), (yield from there))

        return (yield from execute_until_acknowledged(Transaction("deferred_result", Mode.ATOMIC, body)))

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
    ) -> Flow[rules.Postponed | rules.Parked | None]:
        """Wait for the next attempt (row 26), or park what must not be sent again (row 27). None: not ours."""

        def body() -> Body[rules.Postponed | rules.Parked | None]:
            seen = yield from self._hold_record(lease.id)
            if not (yield from self._hold_parcel(held)):
                return (yield from self._moved(seen, lease, held))
            making = rules.rule_trying_again(seen, lease, digest, never_sent=never_sent)
            if making is rules.Making.NOTHING:
                return None
            record = _there(seen)
            if making is rules.Making.PARK:
                yield from self._noting(record, State.UNKNOWN, Trigger.DOUBT, lease.owner, rules.UNCERTAIN)
                return rules.Parked((yield from self._parking(record, held, rules.UNCERTAIN, error)))
            params: dict[str, Value] = {"error": error, "unsent": making is rules.Making.PEND_UNSENT}
            written = yield from self._write("pend", {**owner_proof(lease), **params})
            yield from self._noting(record, State.PENDING, Trigger.TRY_AGAIN, lease.owner, error)
            waiting: dict[str, Value] = {"after": after, "error": error, "spared": 0 if counted else 1}
            locked_row((yield self._say("again", {**parcel_proof(held), **waiting})))
            return rules.Postponed(written)

        return (yield from execute_until_acknowledged(Transaction("try_again", Mode.ATOMIC, body)))

    def park(
        self, lease: Lease, held: HeldParcel, trigger: Trigger, code: str, error: str
    ) -> Flow[rules.Parked | None]:
        """Make the record UNKNOWN with the code, and the parcel a dead letter (row 27). None: not ours."""

        def body() -> Body[rules.Parked | None]:
            seen = yield from self._hold_record(lease.id)
            if not (yield from self._hold_parcel(held)):
                moved = yield from self._moved(seen, lease, held)
                return moved if isinstance(moved, rules.Parked) else None
            if rules.rule_parking(seen, lease, trigger) is rules.Making.NOTHING:
                return None
            record = _there(seen)
            yield from self._noting(record, State.UNKNOWN, trigger, lease.owner, code)
            return rules.Parked((yield from self._parking(record, held, code, error)))

        return (yield from execute_until_acknowledged(Transaction("park", Mode.ATOMIC, body)))

    def deliver(self, lease: Lease, held: HeldParcel, settlement: Completed) -> Flow[Settled]:
        """Write the response, and remove the parcel (row 7); not `ours` if another worker has either of them."""

        def body() -> Body[Settled]:
            seen = yield from self._hold_record(lease.id)
            if not (yield from self._hold_parcel(held)):
                return Settled(ours=rules.is_stored(seen.record, lease, settlement), snapshot=seen)
            if rules.rule_delivering(seen, lease) is rules.Making.NOTHING:
                return Settled(ours=False, snapshot=seen)
            answer = {
                "outcome": settlement.outcome.value,
                **response_params(settlement.response, lease, self._statements.content),
            }
            written = yield from self._write("settle_completed", {**owner_proof(lease), **answer})
            locked_row((yield self._say("drop_parcel", parcel_proof(held))))
            return Settled(ours=True, snapshot=Snapshot(written, seen.now))

        return (yield from execute_until_acknowledged(Transaction("deliver", Mode.ATOMIC, body)))

    def _noting(self, record: Record, to: State, trigger: Trigger, who: str, why: str) -> Body[None]:
        """Write the audit line about a move other than a success; successes are in the record itself (ADR 0014)."""
        if self._audit is not None:
            yield from self._audit.noting((Note.of(record, to, trigger, Mover(Actor.WORKER, who), why),))

    def _parking(self, record: Record, held: HeldParcel, code: str, error: str) -> Body[Record]:
        written = yield from self._write("park_record", {**version_proof(record), "last_error": code})
        locked_row((yield from self._burying(held, error)))
        return written

    def _burying(self, held: HeldParcel, error: str) -> Body[Rows]:
        rows = yield self._say("bury", {**parcel_proof(held), "error": error})
        if rows:
            yield self._say("drop_parcel", parcel_proof(held))
        return rows

    def _is_buried(self, held: HeldParcel) -> Body[bool]:
        """Whether the parcel became a dead letter under this claim."""
        rows = yield self._say("find_dead_letter", parcel_proof(held))
        return bool(rows) and rows[0]["fence"] == held.fence

    def _moved(self, seen: Snapshot, lease: Lease, held: HeldParcel) -> Body[rules.Postponed | rules.Parked | None]:
        """What this attempt has already done with the parcel; None if it was another attempt."""
        if seen.record is None or not rules.is_owned(seen.record, lease):
            return None
        there = yield self._say("find_parcel", parcel_proof(held))
        waiting = bool(there) and there[0]["fence"] == held.fence
        return rules.ending_of_lost(seen.record, buried=(yield from self._is_buried(held)), waiting=waiting)

    def _retaking(self, held: HeldParcel, owner: str, span: Duration) -> Body[HeldParcel]:
        """The parcel under a new fence: from the outbox, from the dead letters, or written again (ADR 0009)."""
        proof = {**parcel_proof(held), "incarnation": str(held.parcel.incarnation)}
        kept: dict[str, Value] = {"kind": ParcelKind.DEFER.value, "attempts": held.attempts, "died_at": None}
        rows = yield self._say("retake_parcel", {**proof, "owner": owner, "lease": span})
        if rows:
            return held_of(rows[0], self._statements.content)
        if (yield self._say("bring_back", {**proof, **kept})):
            yield self._say("drop_dead_letter", {**proof, **kept})
        else:
            yield self._say("put_parcels", {"parcels": parcels_text((held.parcel,), self._statements.content)})
        rows = yield self._say("retake_parcel", {**proof, "owner": owner, "lease": span})
        return held_of(locked_row(rows), self._statements.content)

    def _own_parcel(self, held: HeldParcel, owner: str) -> Body[HeldParcel | None]:
        rows = yield self._say("find_parcel", parcel_proof(held))
        if not rows or rows[0]["state"] != "held":
            return None
        ours = rows[0]["fence"] == held.fence or rows[0]["owner"] == owner
        return held_of(rows[0], self._statements.content) if ours else None

    def _hold_record(self, record_id: RecordId) -> Body[Snapshot]:
        rows = yield self._say("hold_record", {"scope": record_id.scope, "key": record_id.key})
        return snapshot_of(rows[0], self._statements.content) if rows else Snapshot(None, 0)

    def _hold_parcel(self, held: HeldParcel) -> Body[bool]:
        return bool((yield self._say("hold_parcel", parcel_proof(held))))

    def _write(self, name: str, params: dict[str, Value]) -> Body[Record]:
        """Write to a locked record: the proof fits, or the transaction is rolled back."""
        rows = yield self._say(name, params)
        record = snapshot_of(locked_row(rows), self._statements.content).record
        assert record is not None
        return record

    def _say(self, name: str, params: dict[str, Value]) -> Statement:
        return self._statements.statement(name, params)


def _there(seen: Snapshot) -> Record:
    """The record of a ruling."""
    assert seen.record is not None
    return seen.record


def _announced(record: Record, call: Announcement, owner: str) -> dict[str, Value]:
    sends = 1 if record.intent is None else record.intent.sends + 1
    return {"owner": owner, **announcement_params(replace(call, sends=sends))}
