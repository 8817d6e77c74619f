"""The statements of resolvers and webhooks, as flows.

Settling is in `OperateStore.move`, the same for resolvers, webhooks and operators.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, TypeAlias
from uuid import UUID

from oncekey.core.flow import Body, Flow, Mode, Row, Transaction, Value
from oncekey.core.model import Duration, Instant, Record, RecordId
from oncekey.core.resolution import AnnouncedCall, CallReport, Evidence, EvidenceVerdict
from oncekey.core.upkeep import Page
from oncekey.stores.rows import record_of, version_proof
from oncekey.stores.statements import PART_STATEMENTS, Statements, execute, execute_until_acknowledged
from oncekey.stores.worker_rows import behind, page_of

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
            **behind(after),
        }
        rows = yield from self._statements.read("unknown_due", params)
        return page_of(rows, self._statements.content)

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
        rows = yield from self._statements.read("evidence_about", params)
        return tuple(evidence_of(row, self._statements.content) for row in rows)

    def undecided(self, limit: int, after: int = 0) -> Flow[tuple[Evidence, ...]]:
        rows = yield from self._statements.read("open_evidence", {"limit": limit, "after": after})
        return tuple(evidence_of(row, self._statements.content) for row in rows)

    def store_verdict(self, evidence: Evidence, verdict: EvidenceVerdict) -> Flow[bool]:
        return bool(
            (yield from self._statements.write("judge_evidence", {"id": evidence.id, "verdict": verdict.value}))
        )

    def calls_of(self, downstream_key: str | None, provider_id: str | None) -> Flow[tuple[AnnouncedCall, ...]]:
        rows = yield from self._statements.read(
            "find_calls", {"downstream_key": downstream_key, "provider_id": provider_id}
        )
        return tuple(call_of(row) for row in rows)

    def keys_named(self, source: str, provider_id: str) -> Flow[tuple[str, ...]]:
        rows = yield from self._statements.read("keys_named", {"source": source, "provider_id": provider_id})
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
        return bool((yield from self._statements.write("add_call", params)))

    def name(self, call: AnnouncedCall, provider_id: str) -> Flow[bool]:
        params: dict[str, Value] = {
            "incarnation": str(call.incarnation),
            "phase": call.phase,
            "provider_id": provider_id,
        }
        return bool((yield from self._statements.write("name_call", params)))

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
        rows = yield from self._statements.read("list_calls", params)
        return tuple(
            (call_of(row, "call_"), record_of(row, self._statements.content) if row["state"] is not None else None)
            for row in rows
        )

    def forget(self, age: Duration, limit: int) -> Flow[int]:
        params: dict[str, Value] = {"age": age, "limit": limit}
        calls = yield from self._statements.write("forget_calls", params)
        return len(calls) + len((yield from self._statements.write("forget_evidence", params)))


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
