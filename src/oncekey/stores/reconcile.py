"""The statements of resolvers and webhooks, as flows.

Settling is not here: it is one move for resolvers, webhooks and operators alike (`OperateStore.move`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, TypeAlias
from uuid import UUID

from oncekey.core.flow import Body, Flow, Mode, Row, Rows, Transaction, Value
from oncekey.core.model import Duration, Instant, Record, RecordId
from oncekey.core.resolution import AnnouncedCall, CallReport, Evidence, EvidenceVerdict
from oncekey.core.upkeep import Page
from oncekey.stores.rows import record_of, version_proof
from oncekey.stores.statements import PART_STATEMENTS, Statements, execute, execute_until_acknowledged
from oncekey.stores.worker_rows import records_of

if TYPE_CHECKING:
    from oncekey.core.transitions import Note
    from oncekey.ports.store import Audit
    from oncekey.stores.sealed_content import SealedContent

STATEMENTS = PART_STATEMENTS["reconcile"]

Noting: TypeAlias = "Callable[[Record], Note] | None"

_FIRST = UUID(int=0)


class ReconcileStore:
    """Unknown records, announced calls and evidence, in any store that has the named statements."""

    def __init__(self, statements: Statements, audit: Audit) -> None:
        statements.require(STATEMENTS)
        self._statements = statements
        self._audit = audit

    def due(self, limit: int, after: Record | None = None) -> Flow[Page]:
        params: dict[str, Value] = {
            "limit": limit,
            "after_at": -1 if after is None else after.reconcile_after,
            "after_scope": "" if after is None else after.id.scope,
            "after_key": "" if after is None else after.id.key,
        }

        def body() -> Body[Page]:
            rows = yield self._statements.statement("unknown_due", params)
            return Page(int(rows[0]["now"]), records_of(rows, self._statements.content))

        return (yield from execute(Transaction("unknown_due", Mode.READ, body)))

    def later(self, seen: Record, after: Duration | None, *, counted: bool = True, noting: Noting = None) -> Flow[bool]:
        params: dict[str, Value] = {**version_proof(seen), "after": after, "tries": 1 if counted else 0}

        def body() -> Body[bool]:
            rows = yield self._statements.statement("still_unknown", params)
            if rows and noting is not None:
                yield from self._audit.noting((noting(seen),))
            return bool(rows)

        mode = Mode.SINGLE if noting is None else Mode.ATOMIC
        return (yield from execute(Transaction("still_unknown", mode, body)))

    def add(self, report: CallReport) -> Flow[tuple[Evidence, bool]]:
        content = self._statements.content
        params: dict[str, Value] = {
            "source": report.source,
            "event_id": report.event_id,
            "downstream_key": report.downstream_key,
            "provider_id": report.provider_id,
            "said": report.resolution if content is None else content.closed_report(report),
        }

        def body() -> Body[tuple[Evidence, bool]]:
            rows = yield self._statements.statement("add_evidence", params)
            if rows:
                return evidence_of(rows[0], content), True
            there = yield self._statements.statement(
                "find_evidence", {key: params[key] for key in ("source", "event_id")}
            )
            return evidence_of(there[0], content), False

        return (yield from execute_until_acknowledged(Transaction("add_evidence", Mode.SINGLE, body)))

    def about(self, record: Record, downstream_key: str | None) -> Flow[tuple[Evidence, ...]]:
        params: dict[str, Value] = {
            "downstream_key": downstream_key,
            "incarnation": str(record.incarnation),
            "since": record.created_at,
        }
        return tuple(
            evidence_of(row, self._statements.content) for row in (yield from self._read("evidence_about", params))
        )

    def undecided(self, limit: int, after: int = 0) -> Flow[tuple[Evidence, ...]]:
        rows = yield from self._read("open_evidence", {"limit": limit, "after": after})
        return tuple(evidence_of(row, self._statements.content) for row in rows)

    def store_verdict(self, evidence: Evidence, verdict: EvidenceVerdict) -> Flow[bool]:
        return bool((yield from self._write("judge_evidence", {"id": evidence.id, "verdict": verdict.value})))

    def calls_of(self, downstream_key: str | None, provider_id: str | None) -> Flow[tuple[AnnouncedCall, ...]]:
        rows = yield from self._read("find_calls", {"downstream_key": downstream_key, "provider_id": provider_id})
        return tuple(call_of(row) for row in rows)

    def keys_named(self, source: str, provider_id: str) -> Flow[tuple[str, ...]]:
        rows = yield from self._read("keys_named", {"source": source, "provider_id": provider_id})
        return tuple(row["downstream_key"] for row in rows)

    def add_call(self, call: AnnouncedCall) -> Flow[bool]:
        params: dict[str, Value] = {
            "incarnation": str(call.incarnation),
            "phase": call.phase,
            "downstream_key": call.downstream_key,
            "scope": call.id.scope,
            "key": call.id.key,
            "operation": call.operation,
        }
        return bool((yield from self._write("add_call", params)))

    def name(self, call: AnnouncedCall, provider_id: str) -> Flow[bool]:
        params: dict[str, Value] = {
            "incarnation": str(call.incarnation),
            "phase": call.phase,
            "provider_id": provider_id,
        }
        return bool((yield from self._write("name_call", params)))

    def calls(
        self, since: Instant, limit: int, after: AnnouncedCall | None = None
    ) -> Flow[tuple[tuple[AnnouncedCall, Record | None], ...]]:
        params: dict[str, Value] = {
            "since": since,
            "limit": limit,
            "after_at": -1 if after is None else after.at,
            "after_incarnation": str(_FIRST if after is None else after.incarnation),
            "after_phase": "" if after is None else after.phase,
        }
        rows = yield from self._read("list_calls", params)
        return tuple(
            (call_of(row, "call_"), record_of(row, self._statements.content) if row["state"] is not None else None)
            for row in rows
        )

    def forget(self, age: Duration, limit: int) -> Flow[int]:
        params: dict[str, Value] = {"age": age, "limit": limit}
        calls = yield from self._write("forget_calls", params)
        return len(calls) + len((yield from self._write("forget_evidence", params)))

    def _read(self, name: str, params: dict[str, Value]) -> Flow[Rows]:
        return (yield from execute(self._one(name, params, Mode.READ)))

    def _write(self, name: str, params: dict[str, Value]) -> Flow[Rows]:
        return (yield from execute_until_acknowledged(self._one(name, params, Mode.SINGLE)))

    def _one(self, name: str, params: dict[str, Value], mode: Mode) -> Transaction[Rows]:
        def body() -> Body[Rows]:
            return (yield self._statements.statement(name, params))

        return Transaction(name, mode, body)


def evidence_of(row: Row, content: SealedContent | None) -> Evidence:
    """Decode evidence."""
    verdict = row["verdict"]
    report = CallReport(row["source"], row["event_id"], row["said"], row["downstream_key"], row["provider_id"])
    if content is not None:
        report = content.report(report)
    return Evidence(int(row["id"]), int(row["at"]), report, None if verdict is None else EvidenceVerdict(verdict))


def call_of(row: Row, prefix: str = "") -> AnnouncedCall:
    """Decode a call from the columns with this prefix."""
    return AnnouncedCall(
        id=RecordId(row[f"{prefix}scope"], row[f"{prefix}key"]),
        incarnation=UUID(str(row[f"{prefix}incarnation"])),
        operation=row[f"{prefix}operation"],
        phase=row[f"{prefix}phase"],
        downstream_key=row[f"{prefix}downstream_key"],
        provider_id=row[f"{prefix}provider_id"],
        at=int(row[f"{prefix}at"]),
    )
