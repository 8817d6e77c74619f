"""Sweeping, reaping and resealing a store of cells: pages of an index, and one swap for each line that moves.

A page is a hint. Each line on it is judged by the same move as a request would be, on the very line whose version the
swap compares; a line that another writer has moved since is left to the next round. If a server removes finished lines
by itself, the reaper just finds fewer of them.

The list of workers is in cells, too. Its lines are no records: they have a scope that no request has, the state
`roll`, and only the columns that they need.

Resealing walks over one index after the other, unfinished lines first: a record that is finished during the walk moves
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
from oncekey.stores.rows import records_of
from oncekey.stores.upkeep import ResealStore

if TYPE_CHECKING:
    from oncekey.cells import Asking, Line, Place
    from oncekey.core.model import Instant, Record
    from oncekey.flow import Rows, Value


ROUNDS: Final = 40
"""How often a swap is tried. Each time it fails, another writer has moved the record."""
LOST: Final = "others moved the record each time it was looked at: nothing was written"
GRACE: Final = HOUR
"""How long after its expiry a line is kept: a look may be old, and clocks are corrected."""
LONGEST_PAGE: Final = 200
NO_COUNT: Final = "max_live_keys needs a store that counts the keys of a tenant, which this one does not"

FIRST: Final[Place] = (-1, "", "")
_ROLL: Final = "workers"
"""The scope of the list of workers. That of a request begins with a digit or with `sha256:`."""
_FORGOTTEN: Final = 24 * HOUR
_ANSWER: Final = dict.fromkeys(name for name in BLANK if name.startswith("response_"))


def keep_until(line: Line | None) -> Instant | None:
    """From when on a store may remove a line by itself; None: never, because it has to be ended first."""
    if line is None:
        return None
    plain = line["memo"] is None and line["intent"] is None
    ended = line["state"] == "completed" or (line["state"] == "failed_retryable" and plain)
    return int(line["expires_at"]) + GRACE if ended else None


def gathered(
    index: Index, after: Place, limit: int, now: Instant | None, wanted: Callable[[Line, Instant], bool]
) -> Asking[tuple[list[Line], Instant]]:
    """The lines of an index that are wanted, in order, and the clock of the last page."""
    size = min(limit, LONGEST_PAGE)
    found: list[Line] = []
    while True:
        page: Sequence[Line]
        page, clock = yield Page(index, after, size)
        at = clock if now is None else now
        found += [line for line in page if wanted(line, at)]
        if len(found) >= limit or len(page) < size:
            return found[:limit], at
        after = place_of(page[-1])


def resumable(*, now: Instant | None, after_created: int, after_scope: str, after_key: str, limit: int) -> Asking[Rows]:
    """Lines that the completer may go on with, oldest first."""
    after = (after_created, after_scope, after_key)
    lines, at = yield from gathered(
        Index.UNFINISHED, after, limit, now, lambda line, clock: is_resumable(dict(line), clock)
    )
    return [{**line, "now": at} for line in lines]


def _stale(*, now: Instant | None, limit: int, after_at: int, after_scope: str, after_key: str) -> Asking[Rows]:
    def over(line: Line, clock: Instant) -> bool:
        return bool(line["state"] == "in_progress" and line["lease_until"] <= clock)

    after = (after_at, after_scope, after_key)
    return pages(*(yield from gathered(Index.UNFINISHED, after, limit, now, over)))


def _expiring(
    *, now: Instant | None, age: int, limit: int, after_at: int, after_scope: str, after_key: str
) -> Asking[Rows]:
    """Lines of begun records are in the index of the unfinished, which has another order; there are few of them."""

    def over(line: Line, clock: Instant) -> bool:
        return bool(line["state"] != "in_progress" and line["expires_at"] <= clock - age)

    def place(line: Line) -> Place:
        return line["expires_at"], line["scope"], line["key"]

    after = (after_at, after_scope, after_key)
    begun, _ = yield from gathered(Index.UNFINISHED, FIRST, 1 << 62, now, over)
    finished, at = yield from gathered(Index.EXPIRING, after, limit, now, over)
    lines = sorted([*(line for line in begun if place(line) > after), *finished], key=place)
    return pages(lines[:limit], at)


def _kept_expired(
    *, now: Instant | None, age: int, limit: int, after_at: int, after_scope: str, after_key: str
) -> Asking[Rows]:
    after = (after_at, after_scope, after_key)
    found = gathered(Index.KEPT, after, limit, now, lambda line, clock: line["expires_at"] <= clock - age)
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
    """Move due lines, longest ago first; returns the rows as they were before."""
    after, size = (after_at, after_scope, after_key), min(limit, LONGEST_PAGE)
    gone: list[Mapping[str, Any]] = []
    while True:
        page: Sequence[Line]
        page, clock = yield Page(index, after, size)
        at = clock if now is None else now
        for line in page:
            if line["expires_at"] > min(until, at - age) or len(gone) == limit:
                return gone
            if _is_due(line, move, soft=soft, trusted_for=trusted_for) and (yield from _ended(line, move, at, now)):
                gone.append({**line, "now": at})
        if len(page) < size:
            return gone
        after = place_of(page[-1])


def _is_due(line: Line, move: str, *, soft: bool, trusted_for: int | None) -> bool:
    if trusted_for is not None and line["ttl"] > trusted_for:
        return False
    if move == "mark":
        return bool(line["state"] == "completed")
    return not (soft and line["state"] == "completed")


def _ended(line: Line, move: str, at: Instant, now: Instant | None) -> Asking[bool]:
    proof = {"seen_incarnation": line["incarnation"], "seen_version": line["version"]}
    moved = MOVES[move].apply(dict(line), at, proof)
    if moved is None:
        return False
    until = keep_until(moved.line) if now is None else None
    seen = Seen(line["incarnation"], line["version"])
    swapped: bool = yield Swap(line["scope"], line["key"], seen, moved.line, until)
    return swapped


def pages(lines: Sequence[Line], at: Instant) -> Rows:
    """Lines without their answers, with the clock; one row without a record if there are none."""
    return [{**line, **_ANSWER, "now": at} for line in lines] or [{**BLANK, "now": at}]


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
        line, clock = yield Look(_ROLL, name)
        at = clock if now is None else now
        ours = {
            **BLANK,
            "scope": _ROLL,
            "key": name,
            "incarnation": _ROLL,
            "version": 1 if line is None else line["version"] + 1,
            "state": "roll",
            "operation": tasks,
            "memo": calls,
            "ttl": every,
            "created_at": at if line is None else line["created_at"],
            "last_run_at": at,
        }
        until = at + every + _FORGOTTEN if now is None else None
        if (yield Swap(_ROLL, name, _seen(line), ours, until)):
            return [_worker(ours, at)]
    raise StoreUnavailableError(LOST)


def _leave(*, now: Instant | None, name: str) -> Asking[Rows]:  # noqa: ARG001  (every statement gets the time)
    for _ in range(ROUNDS):
        line, clock = yield Look(_ROLL, name)
        if line is None:
            return []
        if (yield Swap(_ROLL, name, _seen(line), None, None)):
            return [_worker(line, clock)]
    raise StoreUnavailableError(LOST)


def _workers(*, now: Instant | None) -> Asking[Rows]:
    lines, at = yield from gathered(Index.ROLL, FIRST, 1 << 62, now, lambda _line, _clock: True)
    return [_worker(line, at) for line in lines] or [{"name": None, "now": at}]


def _forget_workers(*, now: Instant | None, age: int) -> Asking[Rows]:
    def silent(line: Line, clock: Instant) -> bool:
        return bool(line["last_run_at"] + line["ttl"] <= clock - age)

    lines, at = yield from gathered(Index.ROLL, FIRST, 1 << 62, now, silent)
    gone: list[Mapping[str, Any]] = []
    for line in lines:
        swapped = yield Swap(_ROLL, line["key"], _seen(line), None, None)
        gone += [_worker(line, at)] if swapped else []
    return gone


def _seen(line: Line | None) -> Seen | None:
    return None if line is None else Seen(line["incarnation"], line["version"])


def _worker(line: Line, at: Instant) -> Mapping[str, Any]:
    return {
        "name": line["key"],
        "tasks": line["operation"],
        "calls": line["memo"],
        "every": line["ttl"],
        "started_at": line["created_at"],
        "seen_at": line["last_run_at"],
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
    """Sealed content in cells, where a page begins after a line of an index."""

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
        lines, at = yield from gathered(one, after, limit - len(rows), now, lambda line, _clock: _has_content(line))
        rows += [{**line, "now": at} for line in lines]
        if len(rows) == limit:
            break
        after = FIRST
    return rows


def _has_content(line: Line) -> bool:
    return any(line[name] is not None for name in ("response_status", "memo", "request"))


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
    line, _ = yield Look(scope, key)
    if line is None or line["state"] == "in_progress":
        return []
    ours = {**line, **{name: content[name] for name in _CONTENT}, "version": line["version"] + 1}
    until = keep_until(ours) if now is None else None
    # If another line is there by now, the swap is refused.
    swapped = yield Swap(scope, key, Seen(seen_incarnation, seen_version), ours, until)
    return [{"version": ours["version"]}] if swapped else []


def _seals(*, now: Instant | None, limit: int) -> Asking[Rows]:  # noqa: ARG001  (every statement gets the time)
    """Read at most so many whole lines of each index: only the content has the name of its key."""
    found: Counter[tuple[str, str | None]] = Counter()
    looked: Counter[str] = Counter()
    for index in _WALK:
        after, left = FIRST, limit
        while left:
            size = min(left, LONGEST_PAGE)
            page: Sequence[Line]
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
