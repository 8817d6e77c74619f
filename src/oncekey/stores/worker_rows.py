"""Decodes the rows that workers and operators read: pages of records, parcels and dead letters."""

from __future__ import annotations

import logging
from functools import lru_cache
from typing import TYPE_CHECKING, Final
from uuid import UUID

from oncekey.core.errors import RecordUnreadableError
from oncekey.core.model import DeadLetter, HeldParcel, Parcel, ParcelKind, Record, RecordId
from oncekey.core.upkeep import Page
from oncekey.stores.rows import record_of, uuid_of

if TYPE_CHECKING:
    from oncekey.core.flow import Row, Rows, Value
    from oncekey.stores.sealed_content import SealedContent

log = logging.getLogger("oncekey")

_PARCEL_KINDS: Final = {kind.value: kind for kind in ParcelKind}


def held_text(held: tuple[HeldParcel, ...]) -> str:
    """The proofs of a batch; sorted, so that two batches lock in the same order."""
    # Joined without an encoder: a UUID and a number need no quoting, and there may be a thousand of them.
    proofs = sorted([(str(one.parcel.id), one.fence) for one in held])
    return "[" + ",".join([f'{{"id":"{name}","fence":{fence:d}}}' for name, fence in proofs]) + "]"


def parcel_proof(held: HeldParcel) -> dict[str, Value]:
    """The proof of a claim on a parcel: its id, and the fence of the claim."""
    return {"id": str(held.parcel.id), "parcel_fence": held.fence}


def held_of(row: Row, content: SealedContent | None) -> HeldParcel:
    """Decode a parcel that a worker holds."""
    return HeldParcel(
        parcel=parcel_of(row, content),
        fence=row["fence"],
        attempts=row["attempts"],
        lease_until=row["lease_until"] or 0,
        created_at=row["created_at"],
        first_error=row["first_error"],
        last_error=row["last_error"],
    )


def dead_letter_of(row: Row, content: SealedContent | None) -> DeadLetter:
    """Decode a dead letter."""
    return DeadLetter(
        parcel=parcel_of(row, content),
        attempts=row["attempts"],
        created_at=row["created_at"],
        died_at=row["died_at"],
        first_error=row["first_error"],
        last_error=row["last_error"],
    )


def parcel_of(row: Row, content: SealedContent | None) -> Parcel:
    """Decode the parcel itself."""
    parcel = Parcel(
        id=_any_uuid(row["id"]),
        kind=_PARCEL_KINDS[row["kind"]],
        record_id=RecordId(row["scope"], row["key"]),
        incarnation=uuid_of(row["incarnation"]),
        topic=row["aggregatetype"],
        payload=row["payload"],
        downstream_key=row["downstream_key"],
        position=row["position"],
        order_by=row["order_by"],
    )
    return parcel if content is None else content.parcel(parcel)


def ids_of(rows: Rows) -> frozenset[UUID]:
    """The ids in the rows of a statement."""
    return frozenset(_any_uuid(row["id"]) for row in rows)


def _any_uuid(value: object) -> UUID:
    """A UUID, possibly of a driver's own class that equals Python's: this id does not leave oncekey."""
    return value if isinstance(value, UUID) else UUID(str(value))


def behind(after: Record | None) -> dict[str, Value]:
    """The position where a page begins: after the last record of the page before."""
    scope, key = ("", "") if after is None else (after.id.scope, after.id.key)
    return {"after_scope": scope, "after_key": key}


def page_of(rows: Rows, content: SealedContent | None) -> Page:
    """The page in the rows of a statement that always returns the store's clock."""
    return Page(int(rows[0]["now"]), records_of(rows, content))


def records_of(rows: Rows, content: SealedContent | None) -> tuple[Record, ...]:
    """The records of a page. A record that cannot be read is logged, and does not hide the others."""
    found = []
    for row in rows:
        if row["scope"] is None:
            continue
        try:
            found.append(record_of(row, content))
        except RecordUnreadableError as error:
            _notify(str(error))
    return tuple(found)


@lru_cache(maxsize=1024)
def _notify(text: str) -> None:
    """Log a text once: the same page is read again every few seconds."""
    log.error("oncekey: %s", text)
