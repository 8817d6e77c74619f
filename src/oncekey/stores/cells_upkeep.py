"""Sweeping and reaping a store of cells: pages of an index, and one swap for each cell that moves.

A page is a hint. Each move is decided on the cell whose version the swap compares; a cell that another writer has
moved since is left to the next round. If a server removes finished cells
by itself, the reaper just finds fewer of them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from oncekey.cells import Asking, Cell, Index, Page, Place, Seen, Swap, place_of
from oncekey.core.errors import ConfigurationError
from oncekey.core.model import HOUR, Instant
from oncekey.stores.moves import BLANK, MOVES, is_resumable

if TYPE_CHECKING:
    from oncekey.core.flow import Rows


ROUNDS: Final = 40
"""How often a swap is tried. Each time it fails, another writer has moved the record."""
LOST: Final = "the record changed each time before it could be written: nothing was written"
GRACE: Final = HOUR
"""How long after its expiry a cell is kept: a read may be out of date, and clocks are corrected."""
LONGEST_PAGE: Final = 200
NO_COUNT: Final = "max_live_keys needs a store that counts the keys of a tenant, which this one does not"

FIRST: Final[Place] = (-1, "", "")
_ANSWER: Final = dict.fromkeys(name for name in BLANK if name.startswith("response_"))


def keep_until(cell: Cell | None) -> Instant | None:
    """The instant after which a store may remove a cell by itself; None: never, because the record is unfinished."""
    if cell is None:
        return None
    plain = cell["memo"] is None and cell["intent"] is None
    ended = cell["state"] == "completed" or (cell["state"] == "failed_retryable" and plain)
    return int(cell["expires_at"]) + GRACE if ended else None


def gathered(
    index: Index, after: Place, limit: int, now: Instant | None, wanted: Callable[[Cell, Instant], bool]
) -> Asking[tuple[list[Cell], Instant]]:
    """The `wanted` cells of an index in order, and the clock of the last page."""
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
    """Rows that the completer may resume, the oldest first."""
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
    """Records that were begun are in the index of unfinished ones, which has another order; they are few."""

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
    """Move due cells, the oldest expiry first; returns the rows as they were before."""
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
    """Rows without their responses, with the clock; one row without a record if there are none."""
    return [{**cell, **_ANSWER, "now": at} for cell in cells] or [{**BLANK, "now": at}]


def nothing(**_: object) -> Asking[Rows]:
    """No rows: there are no parcels, and durations of operations are not stored."""
    yield from ()
    return []


def _uncounted(**_: object) -> Asking[Rows]:
    yield from ()
    raise ConfigurationError(NO_COUNT)


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
}
"""The statements of the sweeper and the reaper in a store of cells."""
