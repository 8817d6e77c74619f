"""The list of workers in a store of cells.

Its cells are not records: they have a scope that no request has, the state `roll`, and only the columns they need.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Final

from oncekey.cells import Asking, Cell, Index, Look, Seen, Swap
from oncekey.core.errors import StoreUnavailableError
from oncekey.core.model import HOUR, Instant
from oncekey.stores.cells_upkeep import FIRST, LOST, ROUNDS, gathered
from oncekey.stores.moves import BLANK

if TYPE_CHECKING:
    from oncekey.core.flow import Rows

_ROLL: Final = "workers"
"""The scope of the list of workers. The scope of a request begins with a digit or with `sha256:`."""
_FORGOTTEN: Final = 24 * HOUR


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


WORKERS: Final[Mapping[str, Callable[..., Asking[Rows]]]] = {
    "beat": _beat,
    "leave": _leave,
    "workers": _workers,
    "forget_workers": _forget_workers,
}
"""The statements of the list of workers in a store of cells."""
