"""Rewriting sealed content under another key, as flows over named statements.

`ResealStore` reads content as it is stored; `oncekey.stores.rekey` opens and seals it. Each of its writes proves that
the content it replaces has not changed: a record by its version, a payload and evidence by their text.
"""

from __future__ import annotations

from typing import TYPE_CHECKING
from uuid import UUID

from oncekey.core.enclosing import InUse
from oncekey.core.flow import Flow, Value
from oncekey.stores.reconcile import evidence_of
from oncekey.stores.rows import memo_text, response_params, version_proof
from oncekey.stores.statements import PART_STATEMENTS, Statements
from oncekey.stores.worker_rows import behind, parcel_of, records_of

if TYPE_CHECKING:
    from oncekey.core.model import Parcel, Record
    from oncekey.core.resolution import Evidence


RESEALING = PART_STATEMENTS["reseal"]

_NO_ANSWER: dict[str, Value] = dict.fromkeys(("response_headers", "response_body", "response_schema"))
_FIRST = UUID(int=0)


class ResealStore:
    """Sealed content, in any store that has the named statements."""

    def __init__(self, statements: Statements) -> None:
        statements.require(RESEALING)
        self._statements = statements

    def records(self, limit: int, after: Record | None = None) -> Flow[tuple[Record, ...]]:
        """Records that have a response, steps or a request, in the store's order, after one."""
        rows = yield from self._statements.read("content_records", {**self._behind(after), "limit": limit})
        return records_of(rows, None)

    def _behind(self, after: Record | None) -> dict[str, Value]:
        """The position where a page begins: tables are read by scope and key."""
        return behind(after)

    def rewrite(self, seen: Record, record: Record) -> Flow[bool]:
        params: dict[str, Value] = {
            **version_proof(seen),
            **(_NO_ANSWER if record.response is None else response_params(record.response, record, None)),
            "memo": memo_text(record.memo, record, None),
            "request": record.request,
        }
        return bool((yield from self._statements.write("reseal_record", params)))

    def parcels(self, limit: int, after: UUID | None = None) -> Flow[tuple[Parcel, ...]]:
        rows = yield from self._statements.read("content_parcels", {"after": str(after or _FIRST), "limit": limit})
        return tuple(parcel_of(row, None) for row in rows)

    def rewrite_parcel(self, seen: Parcel, payload: str) -> Flow[bool]:
        """Store another payload, wherever the parcel is now. False: it is gone, or was rewritten."""
        params: dict[str, Value] = {"id": str(seen.id), "seen": seen.payload, "payload": payload}
        for name in ("reseal_parcel", "reseal_letter"):
            if (yield from self._statements.write(name, params)):
                return True
        return False

    def evidence(self, limit: int, after: int = 0) -> Flow[tuple[Evidence, ...]]:
        rows = yield from self._statements.read("content_evidence", {"after": after, "limit": limit})
        return tuple(evidence_of(row, None) for row in rows)

    def rewrite_evidence(self, seen: Evidence, text: str) -> Flow[bool]:
        params: dict[str, Value] = {"id": seen.id, "seen": seen.report.resolution, "said": text}
        return bool((yield from self._statements.write("reseal_evidence", params)))

    def seals(self, limit: int) -> Flow[tuple[InUse, ...]]:
        rows = yield from self._statements.read("seals", {"limit": limit})
        return tuple(InUse(row["part"], row["name"], int(row["found"])) for row in rows)
