"""Sweeping, reaping and resealing a store of cells: pages of an index, and one swap for each cell that moves.

A page is a hint. Each cell on it is judged by the same move as a request would be, on the very cell whose version the
swap compares; a cell that another writer has moved since is left to the next round. If a server removes finished cells
by itself, the reaper just finds fewer of them.

The list of workers is in cells, too. Its cells are no records: they have a scope that no request has, the state
`roll`, and only the columns that they need.

Resealing walks over one index after the other, unfinished cells first: a record that is finished during the walk moves
into an index that is still to be read, or was counted as owned. Only a record that moves back, because its request is
repeated or an operator busts it, can escape the walk. `oncekey doctor` names its key as long as it is needed, and the
next walk finds it. There are no parcels, and no evidence is kept.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from oncekey.cells import Index, Look, Page, Seen, Swap, indexed, place_of
from oncekey.core.envelopes import disclose, key_of_answer, key_of_text
from oncekey.core.errors import ConfigurationError, StoreUnavailableError
from oncekey.core.memo import was_not_sent
from oncekey.core.model import HOUR
from oncekey.stores.moves import BLANK, MOVES, is_resumable
from oncekey.stores.upkeep import ResealStore
from oncekey.stores.worker_rows import records_of

if TYPE_CHECKING:
    from oncekey.cells import Asking, Cell, Place
    from oncekey.core.model import Instant, Record
    from oncekey.flow import Rows, Value


ROUNDS: Final = 40
"""How often a swap is tried. Each time it fails, another writer has moved the record."""
LOST: Final = "others moved the record each time it was looked at: nothing was written"
GRACE: Final = HOUR
"""How long after its expiry a cell is kept: a look may be old, and clocks are corrected."""
LONGEST_PAGE: Final = 200
NO_COUNT: Final = "max_live_keys needs a store that counts the keys of a tenant, which this one does not"

FIRST: Final[Place] = (-1, "", "")
_ROLL: Final = "workers"
"""The scope of the list of workers. That of a request begins with a digit or with `sha256:`."""
_FORGOTTEN: Final = 24 * HOUR
_ANSWER: Final = dict.fromkeys(name for name in BLANK if name.startswith("response_"))


def keep_until(cell: Cell | None) -> Instant | None:
    """From when on a store may remove a cell by itself; None: never, because it has to be ended first."""
    if cell is None:
        return None
    plain = cell["memo"] is None and cell["intent"] is None
    ended = cell["state"] == "completed" or (cell["state"] == "failed_retryable" and plain)
    return int(cell["expires_at"]) + GRACE if ended else None


def gathered(
    index: Index, after: Place, limit: int, now: Instant | None, wanted: Callable[[Cell, Instant], bool]
) -> Asking[tuple[list[Cell], Instant]]:
    """The cells of an index that are wanted, in order, and the clock of the last page."""
    size = min(limit, LONGEST_PAGE)
    found: list[Cell] = []
    while True:
        page: Sequence[Cell]
        page, clock = yield Page(index, after, size)
        at = clock if now is None else now
        found += [cell for cell in page if wanted(cell, at)]
        if len(found) >= limit or len(page) < size:
            return found[:limit], at
        after = place_of(page[-1])


def resumable(*, now: Instant | None, after_created: int, after_scope: str, after_key: str, limit: int) -> Asking[Rows]:
    """Lines that the completer may go on with, oldest first."""
    after = (after_created, after_scope, after_key)
    cells, at = yield from gathered(
        Index.UNFINISHED, after, limit, now, lambda cell, clock: is_resumable(dict(cell), clock)
    )
    return [{**cell, "now": at} for cell in cells]


def _stale(*, now: Instant | None, limit: int, after_at: int, after_scope: str, after_key: str) -> Asking[Rows]:
    def over(cell: Cell, clock: Instant) -> bool:
        return bool(cell["state"] == "in_progress" and cell["lease_until"] <= clock)

    after = (after_at, after_scope, after_key)
    return pages(*(yield from gathered(Index.UNFINISHED, after, limit, now, over)))


def _expiring(
    *, now: Instant | None, age: int, limit: int, after_at: int, after_scope: str, after_key: str
) -> Asking[Rows]:
    """Lines of begun records are in the index of the unfinished, which has another order; there are few of them."""

    def over(cell: Cell, clock: Instant) -> bool:
        return bool(cell["state"] != "in_progress" and cell["expires_at"] <= clock - age)

    def place(cell: Cell) -> Place:
        return cell["expires_at"], cell["scope"], cell["key"]

    after = (after_at, after_scope, after_key)
    begun, _ = yield from gathered(Index.UNFINISHED, FIRST, 1 << 62, now, over)
    finished, at = yield from gathered(Index.EXPIRING, after, limit, now, over)
    cells = sorted([*(cell for cell in begun if place(cell) > after), *finished], key=place)
    return pages(cells[:limit], at)


def _kept_expired(
    *, now: Instant | None, age: int, limit: int, after_at: int, after_scope: str, after_key: str
) -> Asking[Rows]:
    after = (after_at, after_scope, after_key)
    found = gathered(Index.KEPT, after, limit, now, lambda cell, clock: cell["expires_at"] <= clock - age)
    return pages(*(yield from found))


def _ending(
    move: str,
    index: Index,
    *,
    now: Instant | None,
    age: int,
    until: Instant,
    limit: int,
    soft: bool,
    trusted_for: int | None,
    after_at: int,
    after_scope: str,
    after_key: str,
) -> Asking[Rows]:
    """Move due cells, longest ago first; returns the rows as they were before."""
    after, size = (after_at, after_scope, after_key), min(limit, LONGEST_PAGE)
    gone: list[Mapping[str, Any]] = []
    while True:
        page: Sequence[Cell]
        page, clock = yield Page(index, after, size)
        at = clock if now is None else now
        for cell in page:
            if cell["expires_at"] > min(until, at - age) or len(gone) == limit:
                return gone
            if _is_due(cell, move, soft=soft, trusted_for=trusted_for) and (yield from _ended(cell, move, at, now)):
                gone.append({**cell, "now": at})
        if len(page) < size:
            return gone
        after = place_of(page[-1])


def _is_due(cell: Cell, move: str, *, soft: bool, trusted_for: int | None) -> bool:
    if trusted_for is not None and cell["ttl"] > trusted_for:
        return False
    if move == "mark":
        return bool(cell["state"] == "completed")
    return not (soft and cell["state"] == "completed")


def _ended(cell: Cell, move: str, at: Instant, now: Instant | None) -> Asking[bool]:
    proof = {"seen_incarnation": cell["incarnation"], "seen_version": cell["version"]}
    moved = MOVES[move].apply(dict(cell), at, proof)
    if moved is None:
        return False
    until = keep_until(moved.cell) if now is None else None
    seen = Seen(cell["incarnation"], cell["version"])
    swapped: bool = yield Swap(cell["scope"], cell["key"], seen, moved.cell, until)
    return swapped


def pages(cells: Sequence[Cell], at: Instant) -> Rows:
    """Lines without their answers, with the clock; one row without a record if there are none."""
    return [{**cell, **_ANSWER, "now": at} for cell in cells] or [{**BLANK, "now": at}]


def nothing(**_: object) -> Asking[Rows]:
    """No rows: there are no parcels, and how long operations took is not kept."""
    yield from ()
    return []


def _uncounted(**_: object) -> Asking[Rows]:
    yield from ()
    raise ConfigurationError(NO_COUNT)


# The list of workers


def _beat(*, now: Instant | None, name: str, tasks: str, every: int, calls: str) -> Asking[Rows]:
    for _ in range(ROUNDS):
        cell, clock = yield Look(_ROLL, name)
        at = clock if now is None else now
        ours = {
            **BLANK,
            "scope": _ROLL,
            "key": name,
            "incarnation": _ROLL,
            "version": 1 if cell is None else cell["version"] + 1,
            "state": "roll",
            "operation": tasks,
            "memo": calls,
            "ttl": every,
            "created_at": at if cell is None else cell["created_at"],
            "last_run_at": at,
        }
        until = at + every + _FORGOTTEN if now is None else None
        if (yield Swap(_ROLL, name, _seen(cell), ours, until)):
            return [_worker(ours, at)]
    raise StoreUnavailableError(LOST)


def _leave(*, now: Instant | None, name: str) -> Asking[Rows]:  # noqa: ARG001  (every statement gets the time)
    for _ in range(ROUNDS):
        cell, clock = yield Look(_ROLL, name)
        if cell is None:
            return []
        if (yield Swap(_ROLL, name, _seen(cell), None, None)):
            return [_worker(cell, clock)]
    raise StoreUnavailableError(LOST)


def _workers(*, now: Instant | None) -> Asking[Rows]:
    cells, at = yield from gathered(Index.ROLL, FIRST, 1 << 62, now, lambda _cell, _clock: True)
    return [_worker(cell, at) for cell in cells] or [{"name": None, "now": at}]


def _forget_workers(*, now: Instant | None, age: int) -> Asking[Rows]:
    def silent(cell: Cell, clock: Instant) -> bool:
        return bool(cell["last_run_at"] + cell["ttl"] <= clock - age)

    cells, at = yield from gathered(Index.ROLL, FIRST, 1 << 62, now, silent)
    gone: list[Mapping[str, Any]] = []
    for cell in cells:
        swapped = yield Swap(_ROLL, cell["key"], _seen(cell), None, None)
        gone += [_worker(cell, at)] if swapped else []
    return gone


def _seen(cell: Cell | None) -> Seen | None:
    return None if cell is None else Seen(cell["incarnation"], cell["version"])


def _worker(cell: Cell, at: Instant) -> Mapping[str, Any]:
    return {
        "name": cell["key"],
        "tasks": cell["operation"],
        "calls": cell["memo"],
        "every": cell["ttl"],
        "started_at": cell["created_at"],
        "seen_at": cell["last_run_at"],
        "now": at,
    }


UPKEEP: Final[Mapping[str, Callable[..., Asking[Rows]]]] = {
    "stale": _stale,
    "runs": nothing,
    "expiring": _expiring,
    "kept_expired": _kept_expired,
    "purge_expired": partial(_ending, "purge", Index.EXPIRING),
    "purge_kept": partial(_ending, "purge", Index.KEPT),
    "mark_expired": partial(_ending, "mark", Index.EXPIRING),
    "drop_unclaimed": nothing,
    "live_keys": _uncounted,
    "beat": _beat,
    "leave": _leave,
    "workers": _workers,
    "forget_workers": _forget_workers,
}
"""The statements of the sweeper, the reaper and the list of workers in a store of cells."""


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
    """Rewrite a record without an owner: an owner compares the memo that it has read byte by byte."""
    cell, _ = yield Look(scope, key)
    if cell is None or cell["state"] == "in_progress":
        return []
    ours = {**cell, **{name: content[name] for name in _CONTENT}, "version": cell["version"] + 1}
    until = keep_until(ours) if now is None else None
    # If another cell is there by now, the swap is refused.
    swapped = yield Swap(scope, key, Seen(seen_incarnation, seen_version), ours, until)
    return [{"version": ours["version"]}] if swapped else []


def _seals(*, now: Instant | None, limit: int) -> Asking[Rows]:  # noqa: ARG001  (every statement gets the time)
    """Read at most so many whole cells of each index: only the content has the name of its key."""
    found: Counter[tuple[str, str | None]] = Counter()
    looked: Counter[str] = Counter()
    for index in _WALK:
        after, left = FIRST, limit
        while left:
            size = min(left, LONGEST_PAGE)
            page: Sequence[Cell]
            page, _ = yield Page(index, after, size)
            for part, name in (one for record in records_of(page) for one in _names(record)):
                looked[part] += 1
                if looked[part] <= limit:
                    found[part, name] += 1
            left -= size
            if len(page) < size:
                break
            after = place_of(page[-1])
    return [{"part": part, "name": name, "found": count} for (part, name), count in found.items()]


def _names(record: Record) -> Iterator[tuple[str, str | None]]:
    """Each part of a record's content, and the key that it is sealed under."""
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
