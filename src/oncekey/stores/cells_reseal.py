"""Resealing a store of cells.

The walk reads one index after the other, unfinished cells first: a record that is finished during the walk moves
into an index that is still to be read, or was counted as owned. Only a record that moves back, because its request is
repeated or an operator busts it, can escape the walk. `oncekey doctor` reports its key as long as it is needed, and the
next walk finds it. There are no parcels, and no evidence is kept.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from oncekey.cells import Asking, Cell, Index, Look, Page, Place, Seen, Swap, indexed, place_of
from oncekey.core.envelopes import disclose, key_of_answer, key_of_text
from oncekey.core.memo import was_not_sent
from oncekey.stores.cells_upkeep import FIRST, LONGEST_PAGE, gathered, keep_until, nothing
from oncekey.stores.reseal import ResealStore
from oncekey.stores.worker_rows import records_of

if TYPE_CHECKING:
    from oncekey.core.flow import Rows, Value
    from oncekey.core.model import Instant, Record

_WALK: Final = (Index.UNFINISHED, Index.UNKNOWN, Index.EXPIRING, Index.KEPT)
_CONTENT: Final = ("response_headers", "response_body", "response_schema", "memo", "request")


class CellReseal(ResealStore):
    """Sealed content in cells, where a page begins after a cell of an index."""

    def _behind(self, after: Record | None) -> dict[str, Value]:
        if after is None:
            return {"index": _WALK[0].value, "after_at": FIRST[0], "after_scope": FIRST[1], "after_key": FIRST[2]}
        where = indexed(
            {
                "state": after.state.value,
                "memo": after.memo or None,
                "intent": after.intent,
                "created_at": after.created_at,
                "expires_at": after.expires_at,
            }
        )
        assert where is not None  # it came from a page
        return {"index": where[0].value, "after_at": where[1], "after_scope": after.id.scope, "after_key": after.id.key}


def _content_records(
    *, now: Instant | None, index: str, after_at: int, after_scope: str, after_key: str, limit: int
) -> Asking[Rows]:
    rows: list[Mapping[str, Any]] = []
    after: Place = (after_at, after_scope, after_key)
    for one in _WALK[_WALK.index(Index(index)) :]:
        cells, at = yield from gathered(one, after, limit - len(rows), now, lambda cell, _clock: _has_content(cell))
        rows += [{**cell, "now": at} for cell in cells]
        if len(rows) == limit:
            break
        after = FIRST
    return rows


def _has_content(cell: Cell) -> bool:
    return any(cell[name] is not None for name in ("response_status", "memo", "request"))


def _reseal_record(
    *,
    now: Instant | None,
    scope: str,
    key: str,
    seen_incarnation: str,
    seen_version: int,
    **content: Any,  # noqa: ANN401  (columns of any kind)
) -> Asking[Rows]:
    """Rewrite a record unless it has an owner, which compares the memo that it has read byte by byte."""
    cell, _ = yield Look(scope, key)
    if cell is None or cell["state"] == "in_progress":
        return []
    ours = {**cell, **{name: content[name] for name in _CONTENT}, "version": cell["version"] + 1}
    until = keep_until(ours) if now is None else None
    # If the cell has changed since, the swap is refused.
    swapped = yield Swap(scope, key, Seen(seen_incarnation, seen_version), ours, until)
    return [{"version": ours["version"]}] if swapped else []


def _seals(*, now: Instant | None, limit: int) -> Asking[Rows]:  # noqa: ARG001  (every statement gets the time)
    """Read at most `limit` whole cells of each index: only the content contains the name of its key."""
    found: Counter[tuple[str, str | None]] = Counter()
    looked: Counter[str] = Counter()
    for index in _WALK:
        after, left = FIRST, limit
        while left:
            size = min(left, LONGEST_PAGE)
            page: Sequence[Cell]
            page, _ = yield Page(index, after, size)
            for part, name in (one for record in records_of(page, None) for one in _names(record)):
                looked[part] += 1
                if looked[part] <= limit:
                    found[part, name] += 1
            left -= size
            if len(page) < size:
                break
            after = place_of(page[-1])
    return [{"part": part, "name": name, "found": count} for (part, name), count in found.items()]


def _names(record: Record) -> Iterator[tuple[str, str | None]]:
    """The kind of each part of a record's content, and the key that it is sealed under."""
    if record.response is not None:
        yield "answers", key_of_answer(record.response)
    for entry in record.memo:
        if not was_not_sent(entry):
            yield "results", key_of_text(entry.result)
    if record.request is not None:
        closed = disclose(record.request)
        yield "requests", None if closed is None else closed[0]


RESEAL: Final[Mapping[str, Callable[..., Asking[Rows]]]] = {
    "content_records": _content_records,
    "reseal_record": _reseal_record,
    "content_parcels": nothing,
    "reseal_parcel": nothing,
    "reseal_letter": nothing,
    "content_evidence": nothing,
    "reseal_evidence": nothing,
    "seals": _seals,
}
"""The statements of `oncekey rekey` in a store of cells, and of `oncekey doctor` about keys."""
