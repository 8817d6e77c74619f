"""The moves of a record as pure functions: for memory, the simulator, and every store that can compare and swap.

A move gets the line of a record as it stands, the store's clock and the parameters of its statement. It returns the
line as it is afterwards, or that nothing may be written. It does no I/O and changes nothing in place. It checks the
proof (the owner's fence, or the version that was read) and the store's guards of its rows of TRANSITIONS. The guards
are looked up there, so a store made of these moves accepts what the table allows, and nothing else. The SQL for each
name must do the same; the contract suite tests all of it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from oncekey.core.guards import Facts
from oncekey.core.transitions import ROWS, Proof, Row, Trigger, upheld
from oncekey.stores.rows import COLUMNS, record_of

if TYPE_CHECKING:
    from oncekey.core.model import Instant

Line: TypeAlias = dict[str, Any]
"""A record by the names of its columns."""
Writes: TypeAlias = Callable[[Line, "Instant", Line], "Line | None"]
"""The columns that change, from the line, the clock and the parameters; None: the line is removed."""

BLANK: Final[Mapping[str, None]] = MappingProxyType(dict.fromkeys(COLUMNS))
_FREE: Final[Mapping[str, None]] = MappingProxyType({"owner": None, "lease_until": None})


@dataclass(frozen=True, slots=True)
class MovedRow:
    """The result of a move: the whole line, or None if the record is removed."""

    line: Line | None


@dataclass(frozen=True, slots=True)
class RowMove:
    """One move, which is one or more rows of the table."""

    rows: tuple[Row, ...]
    writes: Writes
    fits: Callable[[Line, Line], bool] = lambda _line, _given: True
    """What else of the line the parameters have to match, such as the memo that the owner has read."""
    proof: Proof | None = None
    """What is compared if its rows also need a parcel; None: the proof of its rows."""

    def apply(self, line: Line | None, now: Instant, given: Line) -> MovedRow | None:
        """The line after the move, its version raised by one; None: refused, and nothing may be written."""
        if line is None or not self._proven(line, given) or not self.fits(line, given):
            return None
        if all(row.source != line["state"] for row in self.rows):
            return None
        facts = Facts(record_of(line), now, phase=given.get("phase", ""))
        if not any(upheld(row, facts) for row in self.rows):
            return None
        changed = self.writes(line, now, given)
        return MovedRow(None if changed is None else {**line, **changed, "version": line["version"] + 1})

    def _proven(self, line: Line, given: Line) -> bool:
        if (self.proof or self.rows[0].proof) is Proof.OWNER:
            return bool((line["incarnation"], line["fence"]) == (given["incarnation"], given["fence"]))
        return bool((line["incarnation"], line["version"]) == (given["seen_incarnation"], given["seen_version"]))


def found(line: Line | None, now: Instant) -> Line:
    """A record with the clock; its columns are empty if there is none."""
    return {**BLANK, **(line or {}), "now": now}


def recalled(line: Line | None, now: Instant) -> list[Line]:
    """A completed record with the clock, as a repeat reads it; no row for any other."""
    return [] if line is None or line["state"] != "completed" else [{**line, "now": now}]


def claimed(line: Line | None, now: Instant, given: Line) -> Line:
    """The line that is there, or the claim's own (row 1)."""
    return line or {**_started(now, given), "fence": 1, "version": 1}


def is_resumable(line: Line, now: Instant) -> bool:
    """Whether the completer may look at it: it has its request, and no owner now."""
    if line["effects"] != "phased" or line["request"] is None:
        return False
    if line["state"] == "in_progress":
        return bool(line["lease_until"] <= now)
    begun = line["memo"] is not None or line["intent"] is not None
    return line["state"] == "failed_retryable" and begun and (line["reconcile_after"] or 0) <= now


def _started(now: Instant, given: Line) -> Line:
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


def _take_over(line: Line, now: Instant, given: Line) -> Line:
    taken: Line = {
        "state": "in_progress",
        "entered": given["entered"],
        "fence": line["fence"] + 1,
        "owner": given["owner"],
        "lease_until": now + given["lease"],
        "deadline": now + given["deadline"],
        "attempts": line["attempts"] + 1,
        "last_run_at": now,
        "last_error": None,
        "reconcile_after": None,
    }
    if line["memo"] is None and line["intent"] is None:
        # Nothing was done yet, so what a crash means is set by the handler that runs now; a deploy may have changed it.
        taken |= {name: given[name] for name in ("effects", "recovery", "call_timeout")}
        taken["request"] = given["request"] if line["request"] is None else line["request"]
    return taken


def _supersede(line: Line, now: Instant, given: Line) -> Line:
    return {**_started(now, given), "fence": line["fence"] + 1}


def _doubt(_: Line, now: Instant, given: Line) -> Line:
    return {**_FREE, "state": "unknown", "last_error": given["last_error"], "reconcile_after": now}


def _fail(_: Line, __: Instant, given: Line) -> Line:
    return {**_FREE, "state": "failed_retryable", "last_error": given["last_error"]}


def _renew(line: Line, now: Instant, given: Line) -> Line:
    # The lease of an announced call is longer, and is not shortened.
    return {"lease_until": max(line["lease_until"] or 0, min(now + given["lease"], line["deadline"]))}


def _complete(line: Line, now: Instant, given: Line) -> Line:
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
        "expires_at": max(line["expires_at"], now + line["ttl"]),
        **{name: value for name, value in given.items() if name.startswith("response_")},
    }


def _hand_back(line: Line, now: Instant, given: Line) -> Line:
    return {
        **_FREE,
        "state": "failed_retryable",
        "last_error": given["last_error"],
        "attempts": line["attempts"] - given["spared"],
        "reconcile_after": now + given["resume_after"],
    }


def _defer(_: Line, __: Instant, ___: Line) -> Line:
    return {**_FREE, "state": "pending", "last_error": None}


def _gone(_: Line, __: Instant, ___: Line) -> None:
    return None


def _checkpoint(line: Line, now: Instant, given: Line) -> Line:
    return {
        "memo": given["memo"],
        "recovery_point": given["recovery_point"],
        "lease_until": max(line["lease_until"] or 0, min(now + given["lease"], line["deadline"])),
    }


def _announce(line: Line, now: Instant, given: Line) -> Line:
    first = now if line["intent"] is None else json.loads(line["intent"])["first_sent_at"]
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
        "lease_until": max(line["lease_until"] or 0, now + given["busy"]),
    }


def _result(line: Line, now: Instant, given: Line) -> Line:
    return {
        "state": "in_progress",
        "memo": given["memo"],
        "recovery_point": given["recovery_point"],
        "intent": None,
        "owner": given["owner"],
        "lease_until": min(now + given["lease"], max(line["deadline"], now)),
        "last_error": None,
        "reconcile_after": None,
    }


def _withdraw(_: Line, __: Instant, ___: Line) -> Line:
    return {"intent": None}


def _mark(_: Line, __: Instant, ___: Line) -> Line:
    return {"state": "expired"}


def _longer(line: Line, now: Instant) -> Line:
    """Extend the time of a resumable record, so that it is not parked again before a worker could resume it."""
    return {"expires_at": max(line["expires_at"], now + line["ttl"])}


def _result_by_hand(line: Line, now: Instant, given: Line) -> Line:
    changed = {"memo": given["memo"], "recovery_point": given["recovery_point"], "intent": None}
    return {**changed, **_longer(line, now), "state": "failed_retryable", "reconcile_after": None}


def _replace(line: Line, now: Instant, given: Line) -> Line:
    return {**_result_by_hand(line, now, given), "fence": line["fence"] + 1}


def _unexecuted(line: Line, now: Instant, _: Line) -> Line:
    kept = {} if line["memo"] is None else _longer(line, now)
    return {**kept, "state": "failed_retryable", "intent": None, "reconcile_after": None}


def _requeue(line: Line, _: Instant, given: Line) -> Line:
    return {"state": "pending", "reconcile_after": None, "intent": None if given["forget"] else line["intent"]}


def _take_up(line: Line, now: Instant, given: Line) -> Line:
    there = None if line["intent"] is None else json.loads(line["intent"])
    repeatable = None if given["repeatable"] is None else now + given["repeatable"]
    intent = {
        **{name: given[name] for name in ("phase", "downstream_key", "digest", "sends")},
        "first_sent_at": now if there is None else there["first_sent_at"],
        "send_by": now + given["send_window"],
        "repeatable_until": repeatable if there is None else there["repeatable_until"],
    }
    return {
        "state": "in_progress",
        "fence": line["fence"] + 1,
        "owner": given["owner"],
        "lease_until": None,
        "last_error": None,
        "intent": json.dumps(intent) if line["memo"] is None else None,
    }


def _pend(line: Line, _: Instant, given: Line) -> Line:
    intent = None if given["unsent"] else line["intent"]
    return {**_FREE, "state": "pending", "last_error": given["error"], "intent": intent}


def _abandon(line: Line, now: Instant, given: Line) -> Line:
    return {**_complete(line, now, given), "expires_at": now + given["kept"]}


def _bust(line: Line, now: Instant, given: Line) -> Line:
    answer = dict.fromkeys(name for name in BLANK if name.startswith("response_"))
    return {
        **answer,
        **({} if line["memo"] is None else _longer(line, now)),
        "state": "failed_retryable",
        "outcome": None,
        "fence": line["fence"] + 1,
        "finished_at": None,
        "recovery_point": given["recovery_point"],
        "last_error": given["last_error"],
    }


def _same_memo(line: Line, given: Line) -> bool:
    """The memo is compared as a whole: a resolver may have added a result without raising the fence (row 20)."""
    return bool(line["memo"] == given["seen_memo"])


def _next_send(line: Line, given: Line) -> bool:
    """Whether it is a first call, or the next send of the very call that is open."""
    if not _same_memo(line, given):
        return False
    if line["intent"] is None:
        return bool(given["sends"] == 1)
    there = json.loads(line["intent"])
    return bool((there["digest"], there["sends"]) == (given["digest"], given["sends"] - 1))


def _rows(*numbers: int, trigger: Trigger | None = None) -> tuple[Row, ...]:
    rows = (row for row in ROWS if row.number in numbers and row.proof is not Proof.NO_ROW)
    return tuple(row for row in rows if trigger in (None, row.trigger))


# The numbers are those of the table in docs/explanation/states.md.
MOVES: Mapping[str, RowMove] = MappingProxyType(
    {
        "take_over": RowMove(_rows(13, 16), _take_over),
        "supersede": RowMove(_rows(31, trigger=Trigger.SUPERSEDE), _supersede),
        "doubt": RowMove(_rows(15), _doubt),
        "renew": RowMove(_rows(4), _renew),
        "settle_completed": RowMove(_rows(7, 8), _complete),
        "settle_retryable": RowMove(_rows(10), _fail),
        "settle_unknown": RowMove(_rows(12), _doubt),
        "settle_handed_back": RowMove(_rows(11), _hand_back),
        "settle_deferred": RowMove(_rows(3), _defer),
        "discard": RowMove(_rows(9), _gone),
        "checkpoint": RowMove(_rows(5, trigger=Trigger.CHECKPOINT), _checkpoint, _same_memo),
        "announce": RowMove(_rows(5, trigger=Trigger.ANNOUNCE), _announce, _next_send),
        "result": RowMove(_rows(6, trigger=Trigger.RESULT), _result, _same_memo),
        "withdraw": RowMove(_rows(33), _withdraw),
        "sweep_retryable": RowMove(_rows(14), _fail),
        "expire_begun": RowMove(_rows(18), _doubt),
        "mark": RowMove(_rows(29), _mark),
        "purge": RowMove(_rows(30), _gone),
        "take_up": RowMove(_rows(24), _take_up, proof=Proof.VERSION),
        "park_record": RowMove(_rows(25, 27), _doubt, proof=Proof.VERSION),
        "pend": RowMove(_rows(26), _pend, proof=Proof.OWNER),
        "abandon": RowMove(_rows(28), _abandon),
        "operator_answer": RowMove(_rows(19), _complete),
        "operator_result": RowMove(_rows(20), _result_by_hand),
        "operator_replace": RowMove(_rows(34), _replace),
        "operator_unexecuted": RowMove(_rows(21), _unexecuted),
        "operator_pend": RowMove(_rows(22), _requeue),
        "operator_bust": RowMove(_rows(32), _bust),
    }
)
"""Every move of a store of requests, by the name of its statement."""
