"""The moves of a record as pure functions: for memory, the simulator, and every store that can compare and swap.

A move receives the current cell of a record, the store's clock and the parameters of its statement. It returns the
cell after the move, or that nothing may be written. It does no I/O and changes nothing in place. It checks the
proof (the owner's fence, or the version that was read) and the store's guards of its rows of TRANSITIONS. The guards
are looked up there, so a store made of these moves accepts what the table allows, and nothing else. The SQL for each
name must do the same; the contract suite tests that.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from oncekey.core.errors import SchemaError
from oncekey.core.guards import Facts
from oncekey.core.rulings import FAILED_BY_LEASE
from oncekey.core.transitions import ROWS, Proof, Transition, Trigger, upheld
from oncekey.stores.rows import COLUMNS, TABLE, record_of

if TYPE_CHECKING:
    from oncekey.core.flow import Flow
    from oncekey.core.migrations import Applied, Migration
    from oncekey.core.model import Instant

Cell: TypeAlias = dict[str, Any]
"""A record by the names of its columns."""
Writes: TypeAlias = Callable[[Cell, "Instant", Cell], "Cell | None"]
"""The columns that change, from the cell, the clock and the parameters; None: the cell is removed."""

BLANK: Final[Mapping[str, None]] = MappingProxyType(dict.fromkeys(COLUMNS))
_RENEWED: Final = tuple(column.name for column in TABLE if "renewed" in column.words)
_FREE: Final[Mapping[str, None]] = MappingProxyType({"owner": None, "lease_until": None})


@dataclass(frozen=True, slots=True)
class Moved:
    """The result of a move: the whole cell, or None if the record is removed."""

    cell: Cell | None


@dataclass(frozen=True, slots=True)
class CellMove:
    """One move, which is one or more rows of the table."""

    rows: tuple[Transition, ...]
    writes: Writes
    fits: Callable[[Cell, Cell], bool] = lambda _cell, _given: True
    """A further comparison of cell and parameters, such as the memo that the owner has read."""
    proof: Proof | None = None
    """The proof that is compared if its rows also need a parcel; None: the proof of its rows."""

    def apply(self, cell: Cell | None, now: Instant, given: Cell) -> Moved | None:
        """The cell after the move, its version raised by one; None: refused, and nothing may be written."""
        if cell is None or not self._proven(cell, given) or not self.fits(cell, given):
            return None
        if all(row.source != cell["state"] for row in self.rows):
            return None
        facts = Facts(record_of(cell, None), now, phase=given.get("phase", ""))
        if not any(upheld(row, facts) for row in self.rows):
            return None
        changed = self.writes(cell, now, given)
        return Moved(None if changed is None else {**cell, **changed, "version": cell["version"] + 1})

    def _proven(self, cell: Cell, given: Cell) -> bool:
        if (self.proof or self.rows[0].proof) is Proof.OWNER:
            return bool((cell["incarnation"], cell["fence"]) == (given["incarnation"], given["fence"]))
        return bool((cell["incarnation"], cell["version"]) == (given["seen_incarnation"], given["seen_version"]))


class NoSchema:
    """The schema of a store without tables."""

    migrations: tuple[Migration, ...] = ()

    def applied(self) -> Flow[tuple[Applied, ...]]:
        """No migrations."""
        yield from ()
        return ()

    def migrate(self, *migrations: Migration) -> Flow[tuple[Migration, ...]]:
        """Raise: the store has no tables."""
        yield from ()
        raise SchemaError(f"this store has no tables to run {migrations[0].label} on")


def found(cell: Cell | None, now: Instant) -> Cell:
    """A record with the clock; its columns are empty if there is none."""
    return {**BLANK, **(cell or {}), "now": now}


def recalled(cell: Cell | None, now: Instant) -> list[Cell]:
    """A completed record with the clock, as a repeat reads it; no row for any other."""
    return [] if cell is None or cell["state"] != "completed" else [{**cell, "now": now}]


def claimed(cell: Cell | None, now: Instant, given: Cell) -> Cell:
    """The existing cell, or the claim's own (row 1)."""
    return cell or {**_started(now, given), "fence": 1, "version": 1}


def is_resumable(cell: Cell, now: Instant) -> bool:
    """Whether the completer may resume it: it has its request, and no owner now."""
    if cell["effects"] != "phased" or cell["request"] is None:
        return False
    if cell["state"] == "in_progress":
        return bool(cell["lease_until"] <= now)
    begun = cell["memo"] is not None or cell["intent"] is not None
    return cell["state"] == "failed_retryable" and begun and (cell["reconcile_after"] or 0) <= now


def _started(now: Instant, given: Cell) -> Cell:
    return {
        **BLANK,
        **{name: value for name, value in given.items() if name in BLANK},
        "state": "in_progress",
        "lease_until": now + given["lease"],
        "deadline": now + given["deadline"],
        "attempts": 1,
        "recovery_point": "started",
        "reconcile_tries": 0,
        "created_at": now,
        "last_run_at": now,
        "expires_at": now + given["ttl"],
    }


def _take_over(cell: Cell, now: Instant, given: Cell) -> Cell:
    taken: Cell = {
        "state": "in_progress",
        "entered": given["entered"],
        "fence": cell["fence"] + 1,
        "owner": given["owner"],
        "lease_until": now + given["lease"],
        "deadline": now + given["deadline"],
        "attempts": cell["attempts"] + 1,
        "last_run_at": now,
        "last_error": None,
        "reconcile_after": None,
    }
    if cell["memo"] is None and cell["intent"] is None:
        # Nothing was done yet, so the handler that runs now sets what a crash means; a deploy may have changed it.
        taken |= {name: given[name] for name in _RENEWED}
        taken["request"] = given["request"] if cell["request"] is None else cell["request"]
    return taken


def _supersede(cell: Cell, now: Instant, given: Cell) -> Cell:
    return {**_started(now, given), "fence": cell["fence"] + 1}


def _mark_unknown(_: Cell, now: Instant, given: Cell) -> Cell:
    asked = None if given["last_error"] == FAILED_BY_LEASE else now
    return {**_FREE, "state": "unknown", "last_error": given["last_error"], "reconcile_after": asked}


def _fail(_: Cell, __: Instant, given: Cell) -> Cell:
    return {**_FREE, "state": "failed_retryable", "last_error": given["last_error"]}


def _renew(cell: Cell, now: Instant, given: Cell) -> Cell:
    # The lease of an announced call is longer, and is not shortened.
    return {"lease_until": max(cell["lease_until"] or 0, min(now + given["lease"], cell["deadline"]))}


def _complete(cell: Cell, now: Instant, given: Cell) -> Cell:
    return {
        **_FREE,
        "state": "completed",
        "outcome": given["outcome"],
        "intent": None,
        "last_error": None,
        "reconcile_after": None,
        "finished_at": now,
        "recovery_point": "finished",
        "request": None,
        "expires_at": max(cell["expires_at"], now + cell["ttl"]),
        **{name: value for name, value in given.items() if name.startswith("response_")},
    }


def _hand_back(cell: Cell, now: Instant, given: Cell) -> Cell:
    return {
        **_FREE,
        "state": "failed_retryable",
        "last_error": given["last_error"],
        "attempts": cell["attempts"] - given["spared"],
        "reconcile_after": now + given["resume_after"],
    }


def _defer(_: Cell, __: Instant, given: Cell) -> Cell:
    return {**_FREE, "state": "pending", "last_error": None, "request": given["request"]}


def _gone(_: Cell, __: Instant, ___: Cell) -> None:
    return None


def _checkpoint(cell: Cell, now: Instant, given: Cell) -> Cell:
    return {
        "memo": given["memo"],
        "recovery_point": given["recovery_point"],
        "lease_until": max(cell["lease_until"] or 0, min(now + given["lease"], cell["deadline"])),
    }


def _announce(cell: Cell, now: Instant, given: Cell) -> Cell:
    first = now if cell["intent"] is None else json.loads(cell["intent"])["first_sent_at"]
    intent = {
        **{name: given[name] for name in ("phase", "downstream_key", "digest", "sends")},
        "first_sent_at": first,
        "send_by": now + given["send_window"],
        "repeatable_until": None if given["repeatable"] is None else first + given["repeatable"],
    }
    return {
        "memo": given["memo"],
        "recovery_point": given["recovery_point"],
        "intent": json.dumps(intent),
        "lease_until": max(cell["lease_until"] or 0, now + given["busy"]),
    }


def _result(cell: Cell, now: Instant, given: Cell) -> Cell:
    return {
        "state": "in_progress",
        "memo": given["memo"],
        "recovery_point": given["recovery_point"],
        "intent": None,
        "owner": given["owner"],
        "lease_until": min(now + given["lease"], max(cell["deadline"], now)),
        "last_error": None,
        "reconcile_after": None,
    }


def _longer(cell: Cell, now: Instant) -> Cell:
    """Extend the expiry of a resumable record, so that it is not parked again before a worker could resume it."""
    return {"expires_at": max(cell["expires_at"], now + cell["ttl"])}


def _result_by_hand(cell: Cell, now: Instant, given: Cell) -> Cell:
    changed = {"memo": given["memo"], "recovery_point": given["recovery_point"], "intent": None}
    return {**changed, **_longer(cell, now), "state": "failed_retryable", "reconcile_after": None}


def _replace(cell: Cell, now: Instant, given: Cell) -> Cell:
    return {**_result_by_hand(cell, now, given), "fence": cell["fence"] + 1}


def _unexecuted(cell: Cell, now: Instant, _: Cell) -> Cell:
    kept = {} if cell["memo"] is None else _longer(cell, now)
    return {**kept, "state": "failed_retryable", "intent": None, "reconcile_after": None}


def _requeue(cell: Cell, _: Instant, given: Cell) -> Cell:
    return {"state": "pending", "reconcile_after": None, "intent": None if given["forget"] else cell["intent"]}


def _take_up(cell: Cell, now: Instant, given: Cell) -> Cell:
    there = None if cell["intent"] is None else json.loads(cell["intent"])
    repeatable = None if given["repeatable"] is None else now + given["repeatable"]
    intent = {
        **{name: given[name] for name in ("phase", "downstream_key", "digest", "sends")},
        "first_sent_at": now if there is None else there["first_sent_at"],
        "send_by": now + given["send_window"],
        "repeatable_until": repeatable if there is None else there["repeatable_until"],
    }
    return {
        "state": "in_progress",
        "fence": cell["fence"] + 1,
        "owner": given["owner"],
        "lease_until": None,
        "last_error": None,
        "intent": json.dumps(intent) if cell["memo"] is None else None,
    }


def _pend(cell: Cell, _: Instant, given: Cell) -> Cell:
    intent = None if given["unsent"] else cell["intent"]
    return {**_FREE, "state": "pending", "last_error": given["error"], "intent": intent}


def _abandon(cell: Cell, now: Instant, given: Cell) -> Cell:
    return {**_complete(cell, now, given), "expires_at": now + given["kept"]}


def _bust(cell: Cell, now: Instant, given: Cell) -> Cell:
    answer = dict.fromkeys(name for name in BLANK if name.startswith("response_"))
    return {
        **answer,
        **({} if cell["memo"] is None else _longer(cell, now)),
        "state": "failed_retryable",
        "outcome": None,
        "fence": cell["fence"] + 1,
        "finished_at": None,
        "recovery_point": given["recovery_point"],
        "last_error": given["last_error"],
    }


def _extend(cell: Cell, now: Instant, given: Cell) -> Cell:  # noqa: ARG001  (as every move)
    return {"expires_at": max(cell["expires_at"], given["expires_at"])}


def _same_memo(cell: Cell, given: Cell) -> bool:
    """The memo is compared as a whole: a resolver may have added a result without raising the fence (row 20)."""
    return bool(cell["memo"] == given["seen_memo"])


def _next_send(cell: Cell, given: Cell) -> bool:
    """Whether it is a first call, or the next send of the open call."""
    if not _same_memo(cell, given):
        return False
    if cell["intent"] is None:
        return bool(given["sends"] == 1)
    there = json.loads(cell["intent"])
    return bool((there["digest"], there["sends"]) == (given["digest"], given["sends"] - 1))


def _rows(*numbers: int, trigger: Trigger | None = None) -> tuple[Transition, ...]:
    rows = (row for row in ROWS if row.number in numbers and row.proof is not Proof.NO_ROW)
    return tuple(row for row in rows if trigger in (None, row.trigger))


# The numbers are those of the table in docs/explanation/states.md.
MOVES: Mapping[str, CellMove] = MappingProxyType(
    {
        "take_over": CellMove(_rows(13, 16), _take_over),
        "supersede": CellMove(_rows(31, trigger=Trigger.SUPERSEDE), _supersede),
        "mark_unknown": CellMove(_rows(15), _mark_unknown),
        "renew": CellMove(_rows(4), _renew),
        "settle_completed": CellMove(_rows(7, 8), _complete),
        "settle_retryable": CellMove(_rows(10), _fail),
        "settle_unknown": CellMove(_rows(12), _mark_unknown),
        "settle_handed_back": CellMove(_rows(11), _hand_back),
        "settle_deferred": CellMove(_rows(3), _defer),
        "discard": CellMove(_rows(9), _gone),
        "checkpoint": CellMove(_rows(5, trigger=Trigger.CHECKPOINT), _checkpoint, _same_memo),
        "announce": CellMove(_rows(5, trigger=Trigger.ANNOUNCE), _announce, _next_send),
        "result": CellMove(_rows(6, trigger=Trigger.RESULT), _result, _same_memo),
        "withdraw": CellMove(_rows(33), lambda *_: {"intent": None}),
        "sweep_retryable": CellMove(_rows(14), _fail),
        "expire_begun": CellMove(_rows(18), _mark_unknown),
        "mark": CellMove(_rows(29), lambda *_: {"state": "expired"}),
        "purge": CellMove(_rows(30), _gone),
        "take_up": CellMove(_rows(24), _take_up, proof=Proof.VERSION),
        "park_record": CellMove(_rows(25, 27), _mark_unknown, proof=Proof.VERSION),
        "pend": CellMove(_rows(26), _pend, proof=Proof.OWNER),
        "abandon": CellMove(_rows(28), _abandon),
        "operator_answer": CellMove(_rows(19), _complete),
        "operator_result": CellMove(_rows(20), _result_by_hand),
        "operator_replace": CellMove(_rows(34), _replace),
        "operator_unexecuted": CellMove(_rows(21), _unexecuted),
        "operator_pend": CellMove(_rows(22), _requeue),
        "operator_bust": CellMove(_rows(32), _bust),
        "operator_extend": CellMove(_rows(35), _extend),
    }
)
"""Every move of a store, by the name of its statement."""
